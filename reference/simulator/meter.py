"""What a virtual run did between two moments: rates, shares, stalls, lags (SIM-10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reference.simulator.loop import VirtualLoop
from reference.vocab.actions import Action, Compute, Load
from reference.vocab.events import Event, Routed, Sampled

STALLS = (
    "compute waits for experts", "compute waits for requests", "compute held back",
    "channel: nothing is missing", "channel held back",
)  # fmt: skip
"""Why a unit stands still: the channel is bringing experts; nobody is there; neither, and still no
step was started. Everything named is there or on its way; something named is missing, and still no
transfer was started (a barrier, no slot that may go, the transfers' depth, or their latency)."""


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values` that at least `share` of them do not exceed; 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None


@dataclass
class Meter:
    """An observer of a VirtualLoop. Counts from `begin` on; all times in virtual seconds."""

    began: float = 0.0
    ended: float = 0.0
    on: bool = False
    compute_s: float = 0.0
    channel_s: float = 0.0
    both_s: float = 0.0
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALLS, 0.0))
    tokens: int = 0
    loads: int = 0
    guesses: int = 0
    named: int = 0
    hits: int = 0
    visits: int = 0
    full_hits: int = 0
    steps: int = 0
    distinct: int = 0
    events: int = 0
    actions: int = 0
    moments: list[float] = field(default_factory=list)
    """When a router spoke to a decoding visit."""
    batches: Counter[int] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    places: dict[int, int] = field(default_factory=dict)

    def place_of(self, loop: VirtualLoop) -> dict[int, int]:
        """Layer with experts -> its ordinal."""
        if not self.places:
            self.places = {layer: i for i, layer in enumerate(loop.scheduler.options.layers)}
        return self.places

    def begin(self, loop: VirtualLoop) -> None:
        """Count from now on."""
        self.on, self.began = True, loop.now

    def end(self, loop: VirtualLoop) -> None:
        """Count no more."""
        self.on, self.ended = False, loop.now

    # -- the loop's observer

    def passed(self, loop: VirtualLoop, until: float) -> None:
        """Add up who worked between loop.now and `until`, and why the other did not."""
        dt = until - loop.now
        if not self.on or dt <= 0.0:
            return
        moving = min(dt, max(0.0, loop.channel_free - loop.now))
        self.channel_s += moving
        if loop.computing:
            self.compute_s += dt
            self.both_s += moving
        else:
            s = loop.scheduler
            if loop.outstanding:
                self.stalls["compute waits for experts"] += dt
            elif s.running or s.queue:
                self.stalls["compute held back"] += dt
            else:
                self.stalls["compute waits for requests"] += dt
        if moving < dt:
            s = loop.scheduler
            missing = any(map(s.absent, s.cache.wanted)) or s.pending
            name = "channel held back" if missing else "channel: nothing is missing"
            self.stalls[name] += dt - moving

    def event(self, loop: VirtualLoop, event: Event) -> None:
        """Before the scheduler hears it: what a router named, was it there?"""
        self.events += 1
        if not self.on:
            return
        if isinstance(event, Routed):
            if len(event.experts) == 1:
                s = loop.scheduler
                base = self.place_of(loop)[event.visit.layer] * s.experts
                present = s.cache.present
                there = sum([present(base + e) for e in event.experts[0]])
                self.named += len(event.experts[0])
                self.hits += there
                self.visits += 1
                self.moments.append(loop.now)
                self.full_hits += there == len(event.experts[0])
        elif isinstance(event, Sampled) and event.token is not None:
            self.tokens += 1

    def action(self, loop: VirtualLoop, action: Action) -> None:
        """Before it is obeyed."""
        self.actions += 1
        if not self.on:
            return
        if isinstance(action, Compute):
            self.steps += 1
            self.distinct += len(action.slots)
            if action.slots:
                self.batches[len(action.parts)] += 1
            progress = [r.progress for r in loop.scheduler.running.values() if not r.bulk]
            if progress:
                self.lags[max(progress) - min(progress)] += 1
        elif isinstance(action, Load):
            self.loads += 1
            self.guesses += action.guess

    # -- what came of it

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.ended - self.began

    def steady(self) -> float:
        """Visits in the window's second half over those in its first; 1.0 of none."""
        middle = (self.began + self.ended) / 2
        first = sum(t <= middle for t in self.moments)
        return (len(self.moments) - first) / first if first else 1.0

    def figures(self, expert_bytes: int, layers: int) -> dict[str, Any]:
        """Everything by name; rates a second, bytes, shares of the window; None for the mean of
        nothing (SIM-10)."""
        seconds, tokens = self.seconds or 1e-12, max(1, self.tokens)
        lags = [lag for lag, n in self.lags.items() for _ in range(n)]
        sizes = sum(self.batches.values())
        return {
            "seconds": self.seconds, "tokens": self.tokens,
            "tokens_per_s": self.tokens / seconds,
            "fetches_per_token": self.loads / tokens,
            "bytes_per_token": self.loads * expert_bytes / tokens,
            "visits_per_s": self.visits / max(1, layers) / seconds,
            "steady": self.steady(),
            "guesses": self.guesses,
            "channel_busy": self.channel_s / seconds, "compute_busy": self.compute_s / seconds,
            "both_busy": self.both_s / seconds,
            "bound_share": max(self.channel_s, self.compute_s) / seconds,
            "batch_mean": _mean(sum(b * n for b, n in self.batches.items()), sizes),
            "batches": dict(sorted(self.batches.items())),
            "distinct_mean": _mean(self.distinct, sizes),
            "lag_max": max(lags, default=0), "lag_p95": percentile(lags, 0.95),
            "lag_max_tokens": max(lags, default=0) / (layers + 1),
            "hit_rate": _mean(self.hits, self.named),
            "full_hit": _mean(self.full_hits, self.visits),
            "stalls": {name: t / seconds for name, t in self.stalls.items()},
        }  # fmt: skip
