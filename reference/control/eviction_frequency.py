"""CACHE-14, `frequency`: how many visits name an expert decides, over all layers.

Visits count, not steps: what eight requests name in one step is worth more than what one does. The
layers share one pool, so one whose choices scatter gets the slots that another has no use for; but
another layer's expert goes only when it is clearly rarer, since counts are few and chance is not.
What is compared is an expert's share of its layer's count, since layers are not counted at the same
time, for each slot that the layer has: where all experts are alike, the layers stay alike too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from reference.control.eviction import Counted

OWN, OTHER = 2, 3
"""A share weighs more in another layer than in the newcomer's own."""


class Named(Counted):
    """Visits that have named an expert are counted.

    total    of each layer, the sum of its counts
    low      each layer's least class, or None where it has to be looked for
    passes   since all counts were halved, which they are at every PASSES; one ends when as many
             visits have gone through ENTRY (`entries`) as requests run
    """

    __slots__ = ("entries", "low", "passes", "total")
    PASSES = 12

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self.total = [0] * len(self.in_layer)
        self.low: list[int | None] = [None] * len(self.in_layer)
        self.entries = self.passes = 0

    def copy(self) -> Named:
        """An independent copy."""
        new = super().copy()
        assert isinstance(new, Named)
        new.total = self.total[:]
        new.low = self.low[:]
        new.entries = self.entries
        new.passes = self.passes
        return new

    def _put(self, slot: int, code: int, n: int) -> None:
        super()._put(slot, code, n)
        layer = code // self.experts
        low = self.low[layer]
        if low is not None and n < low:
            self.low[layer] = n

    def named(self, code: int, slot: int, first: bool) -> None:
        """One more visit."""
        layer = code // self.experts
        self.count[code] += 1
        self.total[layer] += 1
        if slot >= 0:
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
            for layer in range(len(self.in_layer)):
                self._halve(layer)

    def _halve(self, layer: int) -> None:
        super()._halve(layer)
        codes = slice(layer * self.experts, (layer + 1) * self.experts)
        self.total[layer] = sum(self.count[codes])

    def drop(self, slot: int, code: int) -> None:
        """Out of its class."""
        layer, n = code // self.experts, self.at[slot]
        super().drop(slot, code)
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
        while heads:
            _, other, layer, n = heads[0]
            classes = self.classes[layer]
            yield classes[n]
            later = min((m for m in classes if m > n), default=None)
            if later is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self._weight(later, layer, own), other, layer, later))

    def _weight(self, n: int, layer: int, own: int) -> float:
        """What a class is compared by; FADED is less than any count, in whatever layer."""
        if n <= 0:
            return n
        return n * (OWN if layer == own else OTHER) / (self.total[layer] * self.in_layer[layer])

    def extra(self) -> tuple:
        """Counts, which class is whose, and when all are halved next."""
        return *super().extra(), self.entries, self.passes
