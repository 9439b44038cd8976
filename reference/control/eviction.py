"""Which expert goes when a slot is needed: one class a policy, by name in `POLICIES`.

A policy keeps the READY slots in orders, what goes first in front, and says in which of them the
cache has to look, one after another (CACHE-5). Whether a slot may go at all is not its business:
cache.py passes over what is kept or read, and takes what a waiting visit has named only when
nothing else may go (CACHE-6). An expert's code is `layer ordinal * experts + expert`.

This module has recency and what goes by layers; eviction_counts.py has the policies that count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

Order = OrderedDict[int, None]
"""Slots; the first is the first to go."""


class PerLayer:
    """CACHE-5: least recently used, within the newcomer's layer once that has its even share.

    orders    the READY slots of each layer, least recently used first
    in_layer  slots of each layer, those being written too
    """

    __slots__ = ("experts", "in_layer", "orders", "share")

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        layers = max(1, layers)
        self.experts = max(1, experts)
        self.share = max(1, slots // layers)
        self.in_layer = [0] * layers
        self.orders = [Order() for _ in range(layers)]

    def copy(self) -> PerLayer:
        """An independent copy."""
        new = self.__class__.__new__(self.__class__)
        new.experts = self.experts
        new.share = self.share
        new.in_layer = self.in_layer[:]
        new.orders = [order.copy() for order in self.orders]
        return new

    # -- what the cache tells --------------------------------------------------------------

    def begin(self, code: int) -> None:
        """A transfer of the expert begins."""
        self.in_layer[code // self.experts] += 1

    def arrive(self, slot: int, code: int) -> None:
        """It has ended: the slot is READY, and counts as used now."""
        self.orders[code // self.experts][slot] = None

    def use(self, slot: int, code: int) -> None:
        """A step reads the expert."""
        self.orders[code // self.experts].move_to_end(slot)

    def demote(self, slot: int, code: int) -> None:
        """What came for a prompt has been used: it goes first (FETCH-4)."""
        self.orders[code // self.experts].move_to_end(slot, last=False)

    def named(self, code: int, slot: int, first: bool) -> None:
        """A visit has named the expert; its slot if it is READY, or -1. first: no other waits for
        it."""

    def drop(self, slot: int, code: int) -> None:
        """A READY expert is given up for another."""
        del self.orders[code // self.experts][slot]

    def gone(self, code: int) -> None:
        """The expert has no slot any more: given up, or its transfer failed."""
        self.in_layer[code // self.experts] -= 1

    # -- what the scheduler tells ------------------------------------------------------------

    def entered(self, visits: int, running: int) -> None:
        """A step runs so many visits at ENTRY while so many requests run."""

    def look(self, stages: Iterable[int]) -> None:
        """Where the running requests stand, before each ask."""

    # -- questions -------------------------------------------------------------------------

    def victims(self, code: int) -> Iterator[Iterable[int]]:
        """Where to look for a victim for the newcomer `code`, best first; each READY slot once."""
        for layer in self._layers(code // self.experts):
            yield self.orders[layer]

    def _layers(self, own: int) -> Iterator[int]:
        """The layers in which to look: own first when it has its share, then who has most."""
        first = self.in_layer[own] >= self.share
        if first:
            yield own
        for layer in sorted(range(len(self.in_layer)), key=lambda i: -self.in_layer[i]):
            if layer != own or not first:
                yield layer

    def ranks(self) -> list[Iterable[int]]:
        """All READY slots, order by order, for the key."""
        return list(self.orders)

    def extra(self) -> tuple:
        """What the future depends on beside the orders."""
        return ()


class Global(PerLayer):
    """CACHE-5: least recently used of all. It keeps one order."""

    __slots__ = ()

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, 1, max(1, layers) * max(1, experts))


class LeastStale(PerLayer):
    """CACHE-12: first what the current pass has not touched, by layer backwards from the
    newcomer's; then what it has. After SpecMD's Least-Stale, for several requests: a pass ends when
    as many visits have gone through ENTRY as requests run.

    orders   what the current pass has not touched
    touched  what it has read or used, a layer each
    entries  visits through ENTRY since the pass began
    """

    __slots__ = ("entries", "touched")

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self.touched = [Order() for _ in self.orders]
        self.entries = 0

    def copy(self) -> LeastStale:
        """An independent copy."""
        new = super().copy()
        assert isinstance(new, LeastStale)
        new.touched = [order.copy() for order in self.touched]
        new.entries = self.entries
        return new

    def arrive(self, slot: int, code: int) -> None:
        """What has just been read is of this pass."""
        self.touched[code // self.experts][slot] = None

    def use(self, slot: int, code: int) -> None:
        """Used now: of this pass."""
        self.drop(slot, code)
        self.touched[code // self.experts][slot] = None

    def demote(self, slot: int, code: int) -> None:
        """It counts as not touched, and goes first."""
        self.drop(slot, code)
        order = self.orders[code // self.experts]
        order[slot] = None
        order.move_to_end(slot, last=False)

    def drop(self, slot: int, code: int) -> None:
        """Out of whichever order it is in."""
        layer = code // self.experts
        if slot in self.touched[layer]:
            del self.touched[layer][slot]
        else:
            del self.orders[layer][slot]

    def entered(self, visits: int, running: int) -> None:
        """Everybody has begun another pass: what this one touched is as the rest."""
        self.entries += visits
        if self.entries >= running:
            self.entries = 0
            for order, touched in zip(self.orders, self.touched, strict=True):
                order.update(touched)
                touched.clear()

    def victims(self, code: int) -> Iterator[Iterable[int]]:
        """Layers that were visited last come last again: the newcomer's own, then backwards."""
        own, layers = code // self.experts, len(self.orders)
        for orders in (self.orders, self.touched):
            for back in range(layers):
                yield orders[(own - back) % layers]

    def ranks(self) -> list[Iterable[int]]:
        """Both kinds."""
        return [*self.orders, *self.touched]

    def extra(self) -> tuple:
        """How far the pass is."""
        return (self.entries,)
