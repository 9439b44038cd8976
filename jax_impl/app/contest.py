"""Schedulers side by side on one model: rounds in turn, figures, and whether results are the same.

Every result of every run is compared with the first of its request, tokens and (unless they are
not asked for) logits bit by bit: no figure counts that was got by computing something else
(DEMO-3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from jax_impl.engine import JaxEngine
from jax_impl.readers import ThrottledReader
from reference.files.requests import Request
from reference.handle import RequestHandle, Result
from reference.vocab.errors import RequestFailed

SUMMED = (
    "wall_s", "compute_s", "waiting_s", "channel_s", "bytes", "loads", "tokens", "experts_named",
    "hits", "routings", "full_hits", "steps", "visits",
)  # fmt: skip
"""Totals that grow while an engine runs; a round is the difference of two snapshots."""


@dataclass(frozen=True)
class Contender:
    """A way to schedule, and the options that make it."""

    name: str
    cache: str
    options: dict[str, str]


CONTENDERS = (
    Contender("on-demand lock-step", "global LRU, blocking",
              {"scheduler": "lockstep-blocking", "cache": "global"}),
    Contender("overlapped lock-step", "per-layer LRU",
              {"scheduler": "lockstep", "cache": "per-layer"}),
    Contender("interleaved", "per-layer LRU",
              {"scheduler": "interleaved", "cache": "per-layer"}),
    Contender("balanced", "by frequency",
              {"scheduler": "balanced", "cache": "frequency"}),
)  # fmt: skip


@dataclass
class Figures:
    """Sums over rounds. `rates`: tokens/s of each round; `rate`: bytes/s of a paced channel;
    `results`: of all requests."""

    rate: float | None
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0.0))
    rates: list[float] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def add(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """One round, from snapshots around it."""
        part = {name: after[name] - before[name] for name in SUMMED}
        for name, value in part.items():
            self.sums[name] += value
        self.rates.append(part["tokens"] / part["wall_s"] if part["wall_s"] else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """What is reported; shares are of the time with a request open, sizes bytes."""
        s = self.sums
        wall, tokens = s["wall_s"], s["tokens"]
        fetch = s["bytes"] / self.rate if self.rate else s["channel_s"]
        bound = max(s["compute_s"], fetch)
        return {
            "tokens_per_s": median(self.rates),
            "rounds_tokens_per_s": self.rates,
            "bytes_per_token": ratio(s["bytes"], tokens),
            "hit_rate": ratio(s["hits"], s["experts_named"]),
            "full_hit_rate": ratio(s["full_hits"], s["routings"]),
            "channel_busy": ratio(s["channel_s"], wall),
            "compute_busy": ratio(s["compute_s"], wall),
            "over_bound": ratio(wall, bound) - 1 if bound else 0.0,
            "sums": dict(s),
        }


def gain(ours: Figures, theirs: Figures) -> float:
    """How many times as fast `ours` was: the median over rounds, each with what ran next to it."""
    return median(ratio(a, b) for a, b in zip(ours.rates, theirs.rates, strict=True))


def ratio(a: float, b: float) -> float:
    """a / b; 0 where there is nothing to divide by."""
    return a / b if b else 0.0


class Sameness:
    """The first result of each request, and whether all later ones agree with it.

    logits: results must have logits to be compared; without it tokens are.
    """

    def __init__(self, logits: bool = True) -> None:
        self.logits = logits
        self.comparisons = 0
        self.different: list[str] = []
        self._first: dict[str, tuple[tuple[int, ...], list[bytes]]] = {}

    def see(self, result: Result, where: str) -> None:
        """Compares one result; one that is shorter or longer is compared as far as both go.

        Raises RequestFailed for a request that did not end well.
        """
        if result.error or (result.logits is None and self.logits):
            raise RequestFailed(f"{where}: request '{result.id}': {result.error or 'no logits'}")
        rows = [hashlib.blake2b(row.tobytes(), digest_size=16).digest()
                for row in (result.logits if result.logits is not None else ())]
        first = self._first.get(result.id)
        if first is None:
            self._first[result.id] = result.tokens, rows
            return
        self.comparisons += 1
        tokens = zip(first[0], result.tokens, strict=False)
        logits = zip(first[1], rows, strict=False)
        if any(a != b for a, b in tokens) or any(a != b for a, b in logits):
            self.different.append(f"request '{result.id}', {where}")
        if (len(rows), len(result.tokens)) > (len(first[1]), len(first[0])):
            self._first[result.id] = result.tokens, rows


@dataclass
class Entry:
    """A contender's engine, open, and what to call its runs."""

    contender: Contender
    engine: JaxEngine
    where: str


class Contest:
    """Opens engines on one model and runs rounds on them. Use as a context manager.

    options: of every engine, whose reads are buffered unless `io` says something else; rate:
    bytes/s to which each engine's reads are paced, or None; logits: ask for them and compare them.
    """

    def __init__(
        self, model: Path, options: dict[str, Any], rate: float | None, logits: bool = True
    ) -> None:
        self.model, self.options, self.rate = model, {"io": "buffered", **options}, rate
        self.same = Sameness(logits)
        self._open: list[JaxEngine] = []

    def enter(
        self, contenders: Sequence[Contender], memory: str, **more: Callable[[Contender], Any]
    ) -> list[Entry]:
        """An engine for each contender; `more` maps further options to functions of it."""
        entries = []
        for contender in contenders:
            engine = JaxEngine.open(
                self.model, memory=memory, **self.options, **contender.options,
                reader=ThrottledReader(self.rate) if self.rate else None,
                **{name: of(contender) for name, of in more.items()},
            )  # fmt: skip
            self._open.append(engine)
            entries.append(Entry(contender, engine, f"{contender.name} with {memory}"))
        return entries

    def leave(self, entries: Sequence[Entry]) -> None:
        """Closes these engines."""
        for entry in entries:
            entry.engine.close()
            self._open.remove(entry.engine)

    def rounds(
        self, entries: Sequence[Entry], requests: Sequence[Request], count: int
    ) -> list[Figures]:
        """`count` rounds; in each every contender runs once, in turn, so that what else goes on
        on the machine meets all alike. Figures in the order of `entries`."""
        figures = [Figures(self.rate) for _ in entries]
        for _ in range(count):
            for entry, theirs in zip(entries, figures, strict=True):
                self.measure(entry, requests, theirs)
        return figures

    def measure(self, entry: Entry, requests: Sequence[Request], figures: Figures) -> None:
        """One run, added to `figures`."""
        before = entry.engine.totals()
        figures.results += self.run(entry, requests)
        figures.add(before, entry.engine.totals())

    def run(
        self,
        entry: Entry,
        requests: Sequence[Request],
        watch: Callable[[list[RequestHandle]], None] = lambda handles: None,
    ) -> list[Result]:
        """All requests at once, to their ends; `watch` sees the handles meanwhile."""
        handles = entry.engine.submit_all(requests, logits=self.same.logits)
        watch(handles)
        results = [handle.result() for handle in handles]
        for result in results:
            self.same.see(result, entry.where)
        return [replace(result, logits=None) for result in results]

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *failure: object) -> None:
        while self._open:
            self._open.pop().close()


def step_seconds(contest: Contest, request: Request) -> float:
    """How long one layer of one decoding request takes here: the median step of a run alone with
    all experts in memory. The run takes part in the comparison."""
    [entry] = contest.enter(CONTENDERS[-1:], "100%", keep_log=lambda _: True)
    for _ in range(2):
        contest.run(entry, [request])
    contest.leave([entry])
    begun: dict[int, float] = {}
    took = []
    for record in entry.engine.records[1:]:
        if record.get("action") == "Compute" and record["layer"] >= 0:
            begun[record["step"]] = record["t"]
        elif record.get("event") == "Computed" and record["step"] in begun:
            took.append(record["t"] - begun[record["step"]])
    return median(took)
