"""Which expert goes when a slot is needed: one class a policy, by name in `POLICIES`.

A policy keeps the READY slots in orders, what goes first in front, and says in which of them the
cache has to look, one after another (CACHE-5). Whether a slot may go at all is not its business:
cache.py passes over what is kept or read, and takes what a waiting visit has named only when
nothing else may go (CACHE-6). An expert's code is `layer ordinal * experts + expert`.

This module has recency, what goes by passes, and what all that count have in common;
eviction_counts.py and eviction_frequency.py have the policies that count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

Order = OrderedDict[int, None]
"""Slots; the first is the first to go."""
Naming = tuple[int, int, bool]
"""An expert that a visit names: its code, its slot if it is READY or -1, whether no other waiting
visit has named it."""


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

    def named(self, request: int, experts: Sequence[Naming]) -> None:
        """A visit of a request has named these, all of one layer."""

    def drop(self, slot: int, code: int) -> None:
        """A READY expert is given up for another."""
        del self.orders[code // self.experts][slot]

    def gone(self, code: int) -> None:
        """The expert has no slot any more: given up, or its transfer failed."""
        self.in_layer[code // self.experts] -= 1

    # -- what the scheduler tells ------------------------------------------------------------

    def ended(self, request: int) -> None:
        """A request that ran is over."""

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

    def extra(self, running: Iterable[int]) -> tuple:
        """What the future depends on beside the orders; requests unnumbered, in this order."""
        return ()


class Global(PerLayer):
    """CACHE-5: least recently used of all. It keeps one order."""

    __slots__ = ()

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, 1, layers * experts)


FADED = -1
"""The class of what goes before all that is counted."""


class Counted(PerLayer):
    """READY slots by what is counted of their experts. What counts, and when, subclasses say.

    count    of every expert, resident or not
    classes  of each layer: count -> its READY slots, the least recently used first
    at       the class that a READY slot is in
    """

    __slots__ = ("at", "classes", "count")

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self.count = [0] * (len(self.in_layer) * self.experts)
        self.classes: list[dict[int, OrderedDict[int, int]]] = [{} for _ in self.in_layer]
        self.at: dict[int, int] = {}

    def copy(self) -> Counted:
        """An independent copy."""
        new = super().copy()
        assert isinstance(new, Counted)
        new.count = self.count[:]
        new.classes = [{n: c.copy() for n, c in classes.items()} for classes in self.classes]
        new.at = self.at.copy()
        return new

    def _put(self, slot: int, code: int, n: int) -> None:
        self.classes[code // self.experts].setdefault(n, OrderedDict())[slot] = code
        self.at[slot] = n

    def arrive(self, slot: int, code: int) -> None:
        """It comes with the count that it has."""
        self._put(slot, code, self.count[code])

    def use(self, slot: int, code: int) -> None:
        """The latest among equals."""
        self.drop(slot, code)
        self._put(slot, code, self.count[code])

    def _halve(self, layer: int) -> None:
        """All of a layer, rounded down; no order changes."""
        codes = slice(layer * self.experts, (layer + 1) * self.experts)
        self.count[codes] = [n // 2 for n in self.count[codes]]
        old, self.classes[layer] = self.classes[layer], {}
        for n in sorted(old):
            for slot, code in old[n].items():
                self._put(slot, code, n // 2)  # FADED stays what it is

    def demote(self, slot: int, code: int) -> None:
        """Before all that is counted; its count stays."""
        self.drop(slot, code)
        self._put(slot, code, FADED)
        self.classes[code // self.experts][FADED].move_to_end(slot, last=False)

    def drop(self, slot: int, code: int) -> None:
        """Out of its class."""
        classes, n = self.classes[code // self.experts], self.at.pop(slot)
        del classes[n][slot]
        if not classes[n]:
            del classes[n]

    def ranks(self) -> list[Iterable[int]]:
        """Class by class."""
        return [classes[n] for classes in self.classes for n in sorted(classes)]

    def extra(self, running: Iterable[int]) -> tuple:
        """Counts, and which class is whose."""
        return tuple(self.count), tuple([tuple(sorted(classes)) for classes in self.classes])


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

    def extra(self, running: Iterable[int]) -> tuple:
        """How far the pass is."""
        return (self.entries,)
