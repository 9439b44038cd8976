"""CACHE-14, `frequency`: how many visits name an expert decides, over all layers.

Visits count, not steps: what eight requests name in one step is worth more than what one does. A
request goes on as it began, so its visits count more while it runs, and its last one most of all.
The layers share one pool, so one whose choices scatter gets the slots that another has no use for;
but another layer's expert goes only when it is clearly rarer, since counts are few and chance is
not. What is compared is an expert's share of its layer's count, since layers are not counted at the
same time, for each slot that the layer has: where all experts are alike, the layers stay alike too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from reference.control.eviction import FADED, Counted, Naming

OWN, OTHER = 2, 3
"""A share weighs more in another layer than in the newcomer's own."""
ONCE, RUNS, LAST = 1, 3, 8
"""What a visit counts; what it counts beside that while its request runs; and until its request's
next visit of the layer. Found by trying on made-up routes (perf/counting.py); a third or twice of
each costs about one read in a hundred."""


class Named(Counted):
    """Visits that have named an expert are counted: `count` is ONCE for each of them, RUNS more for
    each of a running request's, LAST more for each running request's last of the layer.

    total    of each layer, the sum of its counts
    low      each layer's least class, or None where it has to be looked for
    once     of every expert, what it has been counted ONCE for
    runs     running request -> expert -> what it counts RUNS more for
    last     running request -> layer -> the experts that it has named last
    ready    expert -> its READY slot
    passes   since all that is counted was halved (LAST is not), which it is at every PASSES; one
             ends when as many visits have gone through ENTRY (`entries`) as requests run
    """

    __slots__ = ("entries", "last", "low", "once", "passes", "ready", "runs", "total")
    PASSES = 32

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self.total = [0] * len(self.in_layer)
        self.low: list[int | None] = [None] * len(self.in_layer)
        self.once = self.count[:]
        self.runs: dict[int, dict[int, int]] = {}
        self.last: dict[int, dict[int, tuple[int, ...]]] = {}
        self.ready: dict[int, int] = {}
        self.entries = self.passes = 0

    def copy(self) -> Named:
        """An independent copy."""
        new = super().copy()
        assert isinstance(new, Named)
        new.total = self.total[:]
        new.low = self.low[:]
        new.once = self.once[:]
        new.runs = {n: counts.copy() for n, counts in self.runs.items()}
        new.last = {n: layers.copy() for n, layers in self.last.items()}
        new.ready = self.ready.copy()
        new.entries = self.entries
        new.passes = self.passes
        return new

    def _put(self, slot: int, code: int, n: int) -> None:
        super()._put(slot, code, n)
        self.ready[code] = slot
        layer = code // self.experts
        low = self.low[layer]
        if low is not None and n < low:
            self.low[layer] = n

    def named(self, request: int, experts: Sequence[Naming]) -> None:
        """One more visit, and what the one before named no longer is the last."""
        codes = tuple([code for code, _, _ in experts])
        layer = codes[0] // self.experts
        last = self.last.setdefault(request, {})
        before, last[layer] = last.get(layer, ()), codes
        for code in before:
            self._less(code, LAST)
        runs = self.runs.setdefault(request, {})
        self.total[layer] += (ONCE + RUNS + LAST) * len(codes)
        for code, slot, _ in experts:
            self.once[code] += ONCE
            runs[code] = runs.get(code, 0) + RUNS
            self.count[code] += ONCE + RUNS + LAST
            if slot >= 0:
                self.use(slot, code)

    def ended(self, request: int) -> None:
        """Its visits count as those of anybody who is gone."""
        less = self.runs.pop(request, {})
        for codes in self.last.pop(request, {}).values():
            for code in codes:
                less[code] = less.get(code, 0) + LAST
        for code in sorted(less):
            self._less(code, less[code])

    def _less(self, code: int, n: int) -> None:
        """It counts less: the latest among those that are now its equals."""
        self.count[code] -= n
        self.total[code // self.experts] -= n
        slot = self.ready.get(code, -1)
        if slot >= 0 and self.at[slot] != FADED:
            self.use(slot, code)

    def entered(self, visits: int, running: int) -> None:
        """What was named PASSES passes ago counts half."""
        self.entries += visits
        if self.entries < running:
            return
        self.entries = 0
        self.passes += 1
        if self.passes == self.PASSES:
            self.passes = 0
            self._fade()

    def _fade(self) -> None:
        """Halve, rounded down; what is equal then stays in the order in which it was."""
        self.once = [n // 2 for n in self.once]
        self.count = self.once[:]
        for number, counts in self.runs.items():
            half = {code: n // 2 for code, n in counts.items() if n > 1}
            self.runs[number] = half
            for code, n in half.items():
                self.count[code] += n
        for layers in self.last.values():
            for codes in layers.values():
                for code in codes:
                    self.count[code] += LAST
        for layer, old in enumerate(self.classes):
            self.total[layer] = sum(self.count[layer * self.experts : (layer + 1) * self.experts])
            self.classes[layer], self.low[layer] = {}, None
            for n in sorted(old):
                for slot, code in old[n].items():
                    self._put(slot, code, n if n == FADED else self.count[code])

    def drop(self, slot: int, code: int) -> None:
        """Out of its class."""
        layer, n = code // self.experts, self.at[slot]
        super().drop(slot, code)
        del self.ready[code]
        if self.low[layer] == n and n not in self.classes[layer]:
            self.low[layer] = None

    def victims(self, code: int) -> Iterator[Iterable[int]]:
        """Class by class, by weight; equal ones: the own layer's first, then the lower layer's."""
        own = code // self.experts
        heads: list[tuple[float, bool, int, int]] = []
        for layer, classes in enumerate(self.classes):
            if classes:
                low = self.low[layer]
                if low is None:
                    low = self.low[layer] = min(classes)
                heads.append((self._weight(low, layer, own), layer != own, layer, low))
        heapq.heapify(heads)
        rest: dict[int, Iterator[int]] = {}
        while heads:
            _, other, layer, n = heads[0]
            yield self.classes[layer][n]
            if layer not in rest:
                rest[layer] = iter(sorted(self.classes[layer])[1:])
            later = next(rest[layer], None)
            if later is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self._weight(later, layer, own), other, layer, later))

    def _weight(self, n: int, layer: int, own: int) -> float:
        """What a class is compared by; FADED is less than any count, in whatever layer."""
        if n <= 0:
            return n
        return n * (OWN if layer == own else OTHER) / (self.total[layer] * self.in_layer[layer])

    def extra(self, running: Iterable[int]) -> tuple:
        """Counts, which class is whose, what of it is whose, and when all is halved next."""
        whose = [
            tuple(sorted(of.get(n, {}).items())) for n in running
            for of in (self.runs, self.last)
        ]  # fmt: skip
        return *super().extra(running), tuple(self.once), tuple(whose), self.entries, self.passes
