"""What a cache is worth to lock-step: hit rates of the shipped policies (BOUND-7), and Belady's.

The unit is what one layer's barrier needs: all experts of one (step, layer), which have to be
resident together. Replaying a unit's experts one by one, as if each could go as soon as it was
used, gives other numbers. Time plays no part here; loop.py has that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import TypeVar

import numpy as np

from reference.control.cache import ExpertCache
from reference.vocab.options import Eviction

X = TypeVar("X", bound=Hashable)


@dataclass
class Hits:
    """Of a replay. asked: (visit, expert) pairs; missed: those whose expert was not there when the
    barrier came to the layer; visits, whole: visits, and those that lacked nothing; loads: experts
    read; named: distinct experts over all units."""

    asked: int = 0
    missed: int = 0
    visits: int = 0
    whole: int = 0
    loads: int = 0
    named: int = 0

    @property
    def hit(self) -> float:
        """Share of the asked that was there."""
        return 1.0 - self.missed / self.asked

    @property
    def full_hit(self) -> float:
        """Share of the visits that lacked nothing."""
        return self.whole / self.visits

    @property
    def load_share(self) -> float:
        """Loads over the asked: what the notation of some papers calls misses."""
        return self.loads / self.asked

    def count(self, visits: Sequence[Sequence[int]], here: Iterable[int]) -> None:
        """One unit: the experts of each visit, and what is resident."""
        there = set(here)
        for codes in visits:
            lacks = sum(1 for c in codes if c not in there)
            self.asked += len(codes)
            self.missed += lacks
            self.visits += 1
            self.whole += not lacks
        needed = {c for codes in visits for c in codes}
        self.named += len(needed)
        self.loads += len(needed - there)


def units(routes: Sequence[np.ndarray], experts: int) -> Iterator[list[list[int]]]:
    """(step, layer) by (step, layer): the expert codes of each request's visit there.

    routes: uint [tokens, layers, K] a request, all equally long. Codes: layer * experts + expert.
    """
    tokens, layers, _ = routes[0].shape
    base = np.arange(layers)[:, None] * experts
    coded = [(np.asarray(r, np.int64) + base).tolist() for r in routes]
    for t in range(tokens):
        for layer in range(layers):
            yield [r[t][layer] for r in coded]


def lockstep_hits(
    routes: Sequence[np.ndarray], experts: int, slots: int, eviction: Eviction, skip: int = 0,
    each: int = 0,
) -> Hits:  # fmt: skip
    """Requests that decode together, under a shipped policy; the first `skip` steps warm up.

    each: steps after which all of them end and others take their places; 0: never. slots: of all
    layers together. A unit that needs more than can be there at once is served in waves, and
    everything that it lacked at first counts as missed.
    """
    layers = routes[0].shape[1]
    cache = ExpertCache(slots, layers, experts, eviction)
    hits = Hits()
    for i, visits in enumerate(units(routes, experts)):
        step, layer = divmod(i, layers)
        first = step // each * len(visits) if each else 0
        if layer == 0:
            over = len(visits) if first and step % each == 0 else 0
            for request in range(first - over, first):
                cache.policy.ended(request)
            cache.policy.entered(len(visits), len(visits))
        cache.policy.look([layer])
        if step >= skip:
            hits.count(visits, cache.where)
        serve(cache, visits, first)
    return hits


def serve(cache: ExpertCache, visits: Sequence[Sequence[int]], first: int = 0) -> None:
    """One unit in lock-step: what its visits lack is read, then all is used. They are of the
    requests `first` on."""
    wanted: dict[int, int] = {}
    for request, codes in enumerate(visits, first):
        for c in codes:
            wanted[c] = wanted.get(c, 0) + 1
        cache.name(request, tuple(sorted(codes)))
        cache.want(tuple(codes), 1, False)
    # As the scheduler reads: most wanted first, then the lowest.
    left = sorted((c for c in wanted if c not in cache.where), key=lambda c: (-wanted[c], c))
    unread = list(dict.fromkeys(c for codes in visits for c in sorted(codes)))
    while unread:
        while left:
            slot = cache.victim(left[0], True)
            if slot is None:
                break
            cache.loaded(cache.begin(slot, left.pop(0), False, False))
        for c in [c for c in unread if c in cache.where]:
            cache.want((c,) * wanted[c], -1, False)
            cache.release(cache.read(c, False, True))
        unread = [c for c in unread if c not in cache.where]


def belady_hits(
    routes: Sequence[np.ndarray],
    experts: int,
    slots: int,
    per_layer: bool = True,
    skip: int = 0,
    together: bool = True,
) -> Hits:
    """The same by Belady's rule, which knows the future: least loads for this order of units.

    per_layer: each layer has slots // layers of its own, as in most published tables; else the
    layers share all. together: see `belady`.
    """
    layers = routes[0].shape[1]
    order = list(units(routes, experts))
    parts = [order[i::layers] for i in range(layers)] if per_layer else [order]
    own = slots // layers if per_layer else slots
    first = skip if per_layer else skip * layers
    hits = Hits()
    for mine in parts:
        needs = [{c for codes in visits for c in codes} for visits in mine]
        replay = zip(mine, belady(needs, own, together), strict=True)
        for visits, here in islice(replay, first, None):
            hits.count(visits, here)
    return hits


def belady(
    needs: Sequence[Set[X]], slots: int, together: bool = True, resident: Iterable[X] = ()
) -> Iterator[set[X]]:
    """BOUND-6: what is resident when each unit begins, when what is needed furthest ahead goes.

    together: a unit's experts have to be there at once, so none of them goes for another. With
    this, the rule is optimal as it is for single pages: of two experts that the unit does not need,
    the one needed sooner can be kept in place of the other at no loss. Not `together`, they are
    used one after another, in whatever order is best, and after the unit any of all that was there
    may be: never more loads, and a bound where visits run in parts. So is a unit served that needs
    more than the slots.
    """
    never = len(needs)
    after: dict[X, int] = {}
    following: list[dict[X, int]] = []
    for i in range(len(needs) - 1, -1, -1):
        following.append({c: after.get(c, never) for c in needs[i]})
        after.update(dict.fromkeys(needs[i], i))
    following.reverse()
    here = {c: after.get(c, never) for c in resident}
    """Resident experts and the unit that needs each next."""
    for need, again in zip(needs, following, strict=True):
        yield set(here)
        here.update(again)
        over = len(here) - slots
        if over > 0:
            bound = together and len(need) <= slots
            may_go = here.keys() - need if bound else here.keys()
            for c in nlargest(over, may_go, key=here.__getitem__):
                del here[c]


def belady_loads(
    needs: Sequence[Set[X]], slots: int, together: bool = True, resident: Iterable[X] = ()
) -> list[int]:
    """How many experts each unit has to load by that rule. The sum up to any unit is the least that
    there can be up to there, too."""
    start = list(resident)[:slots]
    return [len(n - h) for n, h in zip(needs, belady(needs, slots, together, start), strict=True)]
