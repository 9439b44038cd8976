"""Eviction policies that count: how often an expert was used, what a slot more would have saved.

Nothing counts for ever: when a count reaches its limit, all that are compared with it are halved.
So old use fades, and the states of a finite world are finite.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from reference.control.eviction import Counted, Global, LeastStale, Naming, Order, PerLayer
from reference.control.eviction_frequency import Named


class Frequency(Counted):
    """CACHE-10, `lfru`: least often used; among equals, least recently. Steps that read an expert
    are counted; a layer is halved when a count reaches `LIMIT`."""

    __slots__ = ()
    LIMIT = 16

    def use(self, slot: int, code: int) -> None:
        """One more."""
        self.count[code] += 1
        super().use(slot, code)
        if self.count[code] >= self.LIMIT:
            self._halve(code // self.experts)

    def victims(self, code: int) -> Iterator[Iterable[int]]:
        """The layers of CACHE-5; in each, the rarest first."""
        for layer in self._layers(code // self.experts):
            classes = self.classes[layer]
            for n in sorted(classes):
                yield self._among(classes[n])

    def _among(self, equals: OrderedDict[int, int]) -> Iterable[int]:
        return equals


class LeastFrequent(Frequency):
    """CACHE-10, `lfu`: least often used; among equals, the lowest expert."""

    __slots__ = ()

    def _among(self, equals: OrderedDict[int, int]) -> Iterable[int]:
        return sorted(equals, key=equals.__getitem__)


class KnownDemand(Frequency):
    """CACHE-11: first the layer that every request is furthest from; in a layer as `lfru`.

    A request that stands at layer s has named what it needs there; its next visit of layer l is
    (l - s - 1) mod L layers on. A layer is as near as it is to the request that comes first.

    fronts  layers that are the next of some request
    turn    all layers, the furthest first
    """

    __slots__ = ("fronts", "turn")

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self.fronts: set[int] = set()
        self.turn = list(range(len(self.in_layer)))

    def copy(self) -> KnownDemand:
        """An independent copy; where requests stand is told anew before it matters."""
        new = super().copy()
        assert isinstance(new, KnownDemand)
        new.fronts, new.turn = self.fronts, self.turn
        return new

    def look(self, stages: Iterable[int]) -> None:
        """Note which layers have a request right before them, and how far that leaves the rest."""
        layers = len(self.in_layer)
        fronts = {(stage + 1) % layers for stage in stages}
        if fronts == self.fronts:
            return
        self.fronts = fronts
        away, distance = [0] * layers, 0
        for layer in [*range(layers), *range(layers)] if fronts else ():  # right the second time
            distance = 0 if layer in fronts else distance + 1
            away[layer] = distance
        self.turn = sorted(range(layers), key=lambda i: -away[i])

    def _layers(self, own: int) -> Iterator[int]:
        """By distance; equally far: the lower."""
        return iter(self.turn)


class Adaptive(PerLayer):
    """CACHE-13: as per-layer LRU, but the layers trade slots.

    Two counts a layer, over the same time: `gain`, visits that named one of the `reach` experts
    last given up, which so many more slots would have kept; `loss`, visits that named one of the
    `reach` next to go, which so many fewer would have lost. A layer whose gain exceeds another's
    loss by `STEP` gets a slot of its share, and pays with the gain. All counts are halved when one
    reaches twice that.

    shares  slots that a layer should have
    past    the experts last given up, oldest first
    """

    __slots__ = ("gain", "loss", "past", "reach", "shares")
    STEP = 16

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self.reach = max(1, self.share // 8)
        self.shares = [self.share] * len(self.in_layer)
        self.gain = [0] * len(self.in_layer)
        self.loss = [0] * len(self.in_layer)
        self.past = [Order() for _ in self.in_layer]

    def copy(self) -> Adaptive:
        """An independent copy."""
        new = super().copy()
        assert isinstance(new, Adaptive)
        new.reach = self.reach
        new.shares = self.shares[:]
        new.gain = self.gain[:]
        new.loss = self.loss[:]
        new.past = [order.copy() for order in self.past]
        return new

    def begin(self, code: int) -> None:
        """It is back."""
        super().begin(code)
        self.past[code // self.experts].pop(code, None)

    def named(self, request: int, experts: Sequence[Naming]) -> None:
        """What has just gone is a reason to have more slots, what was about to go to keep them."""
        for code, slot, first in experts:
            layer = code // self.experts
            if not first:
                continue
            if code in self.past[layer]:
                self._count(self.gain, layer)
                self._trade(layer)
            elif slot in islice(self.orders[layer], self.reach):
                self._count(self.loss, layer)

    def drop(self, slot: int, code: int) -> None:
        """Remember it for a while."""
        super().drop(slot, code)
        past = self.past[code // self.experts]
        past[code] = None
        if len(past) > self.reach:
            past.popitem(last=False)

    def _count(self, counts: list[int], layer: int) -> None:
        counts[layer] += 1
        if counts[layer] >= 2 * self.STEP:
            self.gain = [n // 2 for n in self.gain]
            self.loss = [n // 2 for n in self.loss]

    def _trade(self, layer: int) -> None:
        givers = [i for i, n in enumerate(self.shares) if i != layer and n > 1]
        if not givers:
            return
        giver = min(givers, key=lambda i: (self.loss[i], self.gain[i], i))
        if self.gain[layer] - self.loss[giver] >= self.STEP:
            self.gain[layer] -= self.STEP
            self.shares[layer] += 1
            self.shares[giver] -= 1

    def _layers(self, own: int) -> Iterator[int]:
        """Its own layer once that has its share, else the layer furthest above its own share."""
        first = self.in_layer[own] >= self.shares[own]
        if first:
            yield own
        over = [n - share for n, share in zip(self.in_layer, self.shares, strict=True)]
        for layer in sorted(range(len(over)), key=lambda i: -over[i]):
            if layer != own or not first:
                yield layer

    def extra(self, running: Iterable[int]) -> tuple:
        """Shares, counts and the remembered."""
        return (
            tuple(self.shares), tuple(self.gain), tuple(self.loss),
            tuple([tuple(past) for past in self.past]),
        )  # fmt: skip


POLICIES: dict[str, type[PerLayer]] = {
    "per-layer": PerLayer,
    "global": Global,
    "lfu": LeastFrequent,
    "lfru": Frequency,
    "least-stale": LeastStale,
    "known-demand": KnownDemand,
    "adaptive": Adaptive,
    "frequency": Named,
}
"""By the option's value (CACHE-5 and CACHE-10 to CACHE-14)."""
