"""The options of the control plane: everything that decides, beside the events themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from reference.vocab.errors import BadInput, Unsupported

Grouping = Literal["interleaved", "balanced", "micro-queues", "lockstep", "lockstep-blocking"]
Readiness = Literal["visit", "expert"]
FetchOrder = Literal["least-progress", "first-come", "fewest-missing"]
Eviction = Literal[
    "per-layer", "global", "lfu", "lfru", "least-stale", "known-demand", "adaptive",
    "frequency",
]  # fmt: skip

SCHEDULERS: tuple[Grouping, ...] = (
    "interleaved", "balanced", "micro-queues", "lockstep", "lockstep-blocking",
)  # fmt: skip
READINESS: tuple[Readiness, ...] = ("visit", "expert")
FETCH_ORDERS: tuple[FetchOrder, ...] = ("least-progress", "first-come", "fewest-missing")
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
PREFETCHERS: tuple[str, ...] = ("none", "next-gate", "activation", "layer", "token")
READING_AHEAD = ", ".join(s for s in SCHEDULERS if s != "lockstep-blocking")
"""The schedulers that take guesses, for messages (PREFETCH-1)."""
LEAST: dict[str, int] = {
    "chunk": 1, "bulk_every": 1, "max_running": 1, "max_rows": 1, "kv_block": 1,
    "bulk_slots": 0, "max_lag": 0, "kv_tokens": 0, "retries": 0, "prefetch_loads": 0,
}  # fmt: skip
"""The least that the options may be that control and engines have by one name (OPTIONS-1)."""


@dataclass(frozen=True)
class ControlOptions:
    """Written whole into the head of every event log, so that control can be replayed (LOG-1).

    layers:       model layers with routed experts, ascending; empty for a dense model
    experts:      routed experts a layer
    top_k:        experts a token
    slots:        expert slots; at least top_k (CACHE-1)
    chunk:        prompt tokens a visit
    grouping:     which ready visits run together (SCHED-4)
    readiness:    'visit': a visit runs when all its experts are resident;
                  'expert': each (expert, tokens) task runs as soon as its expert is (SCHED-3)
    fetch_order:  which waiting visit is served first (FETCH-1)
    eviction:     which expert goes when a slot is needed (CACHE-5, CACHE-10 to CACHE-14)
    bulk_slots:   slots that visits needing more than top_k experts (prompt chunks) may hold
                  together; 0 chooses max(1, slots // 4) (FETCH-4)
    bulk_every:   at most one bulk load in this many loads while decoding visits want the channel
    max_lag:      visits that a decoding request may be ahead of the least advanced one;
                  0 chooses 4 tokens' worth (SCHED-7)
    max_running:  requests admitted at a time
    max_rows:     token rows of one step
    kv_tokens:    KV capacity in tokens over all running requests
    kv_block:     tokens a KV block; reservations are whole blocks
    retries:      further attempts after a failed load (FETCH-6)
    prefetch:     how many experts of one prediction may be guessed; 0: none (PREFETCH-1)
    prefetch_loads: guesses in flight at a time, so that what is named waits for no more; 0: as
                  many as there are channels (PREFETCH-2)
    warm:         experts to read into free slots before the first request is admitted, as
                  (layer, expert), in this order (FETCH-8)
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    slots: int
    chunk: int = 64
    grouping: Grouping = "interleaved"
    readiness: Readiness = "visit"
    fetch_order: FetchOrder = "least-progress"
    eviction: Eviction = "per-layer"
    bulk_slots: int = 0
    bulk_every: int = 2
    max_lag: int = 0
    max_running: int = 32
    max_rows: int = 64
    kv_tokens: int = 1 << 20
    kv_block: int = 64
    retries: int = 2
    prefetch: int = 0
    prefetch_loads: int = 1
    warm: tuple[tuple[int, int], ...] = ()

    def with_(self, **changes: object) -> ControlOptions:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


MOST = 1 << 24
"""No option is greater: a log cannot make its reader allocate without bound."""


def check_counts(given: Mapping[str, object], least: Mapping[str, int]) -> None:
    """OPTIONS-1: those of `given` that `least` names are integers of at least so much, and at most
    MOST.

    Raises BadInput naming the option, its value and what would be right.
    """
    for name, low in least.items():
        value = given[name]
        if type(value) is not int or value < low:
            raise BadInput(f"{name}: {value!r}; an integer of at least {low} expected")
        if value > MOST:
            raise BadInput(f"{name}: {value}; at most {MOST} expected")


def check_prefetch(prefetch: str, experts: int, scheduler: str) -> None:
    """What an engine may be told of guesses: who makes them, how many of a visit (0: not said),
    and a scheduler that takes them (PREDICT-3, PREFETCH-1, OPTIONS-1).

    Raises Unsupported for another predictor, BadInput for what would be without effect.
    """
    if prefetch not in PREFETCHERS:
        raise Unsupported("prefetch", repr(prefetch), ", ".join(PREFETCHERS))
    check_counts({"prefetch_experts": experts}, {"prefetch_experts": 0})
    if prefetch == "none" and experts:
        raise BadInput(
            f"prefetch_experts: {experts}; without prefetch nothing is guessed: 0, or prefetch "
            f"{', '.join(PREFETCHERS[1:])}, expected"
        )
    if prefetch != "none" and scheduler == "lockstep-blocking":
        raise BadInput(
            f"prefetch: {prefetch}; lockstep-blocking reads nothing ahead: none, or scheduler "
            f"{READING_AHEAD}, expected"
        )
