"""Times that no schedule can beat, for given requests, slots and costs; and one that none exceeds.

The routes are fixed: whatever the schedule, a request makes the same visits in the same order, one
after another, and each visit reads the same experts. Everything else is free here: who goes when,
with whom, what is read when (before it is named, too), into which slot, and whether a visit runs as
a whole or in parts. So these bounds hold for schedulers that know the future as well.

    work = [visits_of(routes, layers, chunk, prompt_len, max_new, r) for r in requests]
    Bounds(work, slots, costs, expert_bytes, max_rows).makespan

The costs of a step are taken to be at least those of its parts' sums: two steps never cost less
than one that does the work of both. Both cost models of costs.py are so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from reference.simulator.costs import Costs, Work
from reference.simulator.hits import belady_loads
from reference.simulator.loop import Totals
from reference.simulator.routes import Routes
from reference.vocab.actions import Compute
from reference.vocab.ids import ENTRY


class VisitWork(NamedTuple):
    """A visit: its model layer (ENTRY: -1), the positions [start, end) of its rows, its distinct
    experts ascending, and its (row, expert) products."""

    layer: int
    span: tuple[int, int]
    experts: tuple[int, ...]
    pairs: int


def visits_of(
    routes: Routes, layers: Sequence[int], chunk: int, prompt_len: int, max_new: int, request: int
) -> list[VisitWork]:
    """All visits of a request that nothing ends early: the chunks of its prompt, then one token
    each; the last token is sampled and not computed."""
    starts = list(range(0, prompt_len, chunk))
    spans = [(s, min(s + chunk, prompt_len)) for s in starts]
    spans += [(p, p + 1) for p in range(prompt_len, prompt_len + max_new - 1)]
    out = []
    for span in spans:
        out.append(VisitWork(ENTRY, span, (), 0))
        for layer in layers:
            tokens = [routes(request, p, layer) for p in range(*span)]
            experts = tuple(sorted({e for token in tokens for e in token}))
            out.append(VisitWork(layer, span, experts, sum(map(len, tokens))))
    return out


@dataclass(frozen=True)
class Bounds:
    """Bounds in seconds from time 0, at which the channel and the compute unit are idle.

    work        the visits of each request, in order
    slots       expert slots, `resident` the (layer, expert) that lie in them at first
    max_rows    token rows that a step may have (a visit of more goes alone)
    arrivals    when each request may begin to compute; all at 0 when empty
    """

    work: Sequence[Sequence[VisitWork]]
    slots: int
    costs: Costs
    expert_bytes: int
    max_rows: int
    resident: Collection[tuple[int, int]] = ()
    arrivals: Sequence[float] = field(default=())

    @cached_property
    def compute_s(self) -> float:
        """BOUND-1: each layer takes at least so many steps, reads and rows."""
        return sum(self._layer(layer) for layer in {v.layer for r in self.work for v in r})

    def _layer(self, layer: int) -> float:
        mine = [[v for v in r if v.layer == layer] for r in self.work]
        spans = [v.span for r in mine for v in r]
        rows = sum(end - start for start, end in spans)
        steps = max(max(map(len, mine)), -(-rows // self.max_rows))
        # A request makes one visit at a time, so what it reads in two visits is read in two steps.
        often = [Counter(e for v in r for e in v.experts) for r in mine]
        reads = sum(max(c[e] for c in often) for e in set().union(*often))
        pairs = sum(v.pairs for r in mine for v in r)
        nothing = self._step(layer, 0, Work((), 0))
        together = self._step(layer, reads, Work(spans, pairs))
        ends = steps * self._step(layer, 0, Work(((0, 0),), 0))
        return max(
            together + (steps - 1) * nothing,
            ends + self._step(layer, reads, Work((), pairs)) - nothing,
        )

    def _step(self, layer: int, distinct: int, work: Work) -> float:
        return self.costs.step(Compute(0, layer, (), ((0, 0),) * distinct), work)

    @cached_property
    def loads(self) -> int:
        """BOUND-2: experts that have to be read."""
        used = {(v.layer, e) for r in self.work for v in r for e in v.experts}
        alone = [sum(self._loads(r)) for r in self.work]
        return max(len(used - set(self.resident)), *alone)

    def _loads(self, request: Sequence[VisitWork]) -> list[int]:
        needs = [{(v.layer, e) for e in v.experts} for v in request]
        return belady_loads(needs, self.slots, together=False, resident=self.resident)

    @cached_property
    def fetch_s(self) -> float:
        """BOUND-2: the time of that many transfers, one after another."""
        return self._fetched(self.loads)

    def _fetched(self, loads: int) -> float:
        """When so many loads can have been told at the earliest."""
        if not loads:
            return 0.0
        return (loads - 1) * self.costs.transfer(self.expert_bytes) + self.costs.delay(
            self.expert_bytes
        )

    @cached_property
    def path_s(self) -> float:
        """BOUND-3: the longest way of one request."""
        arrivals = self.arrivals or [0.0] * len(self.work)
        return max(map(self._path, self.work, arrivals), default=0.0)

    def _path(self, request: Sequence[VisitWork], arrival: float) -> float:
        alone = [self._step(v.layer, len(v.experts), Work((v.span,), v.pairs)) for v in request]
        best = arrival + sum(alone)
        rest, loads = sum(alone), 0
        for visit, seconds, more in zip(request, alone, self._loads(request), strict=True):
            rest -= seconds
            loads += more
            if more:
                # Whoever reads the last of these experts is this visit or an earlier one.
                last = self._step(visit.layer, 1, Work((), 1))
                best = max(best, self._fetched(loads) + last + rest)
        return best

    @property
    def makespan(self) -> float:
        """BOUND-4: no schedule ends earlier."""
        return max(self.compute_s, self.fetch_s, self.path_s)


def serial_s(totals: Totals, costs: Costs, expert_bytes: int, last_arrival: float = 0) -> float:
    """BOUND-5: a run that never lets both sides idle ends by then. Beside `Totals.bound_s` of the
    same run, from below, it shows that overlapping alone is worth at most a factor of two."""
    return last_arrival + totals.compute_s + totals.loads * costs.delay(expert_bytes)
