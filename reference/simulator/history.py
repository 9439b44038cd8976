"""What was there before a measured window: tokens already generated, a cache that they filled,
predictors that learned from them (GRID-2).

A window of few tokens then begins where a long run would be, whatever the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reference.control.cache import ExpertCache
from reference.prediction.activation import ActivationMatrices
from reference.prediction.base import Predictor
from reference.prediction.layer_table import LayerTable
from reference.simulator.hits import serve, units
from reference.simulator.routes import RouteSource
from reference.vocab.options import ControlOptions

EARLIER = 1 << 20
"""Numbers of requests that ended before the window: from here on."""


class Lately:
    """A RouteSource whose first `requests` requests have generated `past` tokens already: they go
    on from there. Whole requests are kept in `made`, for other runs over the same source."""

    def __init__(
        self, source: RouteSource, requests: int, past: int,
        made: dict[int, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self.source, self.requests, self.past = source, requests, past
        self.made = {} if made is None else made

    def _whole(self, request: int, tokens: int) -> np.ndarray:
        found = self.made.get(request)
        if found is None or len(found) < tokens:
            found = self.made[request] = self.source.request(request, tokens)
        return found[:tokens]

    def request(self, request: int, tokens: int) -> np.ndarray:
        """uint16 [tokens, layers, K] of what is still to come."""
        if request >= self.requests:
            return self._whole(request, tokens)
        return self._whole(request, self.past + tokens)[self.past :]

    def before(self) -> list[np.ndarray]:
        """uint16 [past, layers, K] of each of the first requests."""
        return [self._whole(r, self.past) for r in range(self.requests)]

    def earlier(self, count: int, tokens: int) -> list[np.ndarray]:
        """uint16 [tokens, layers, K] of each of `count` requests that have ended."""
        return [self._whole(EARLIER + i, tokens) for i in range(count)]


def filled(
    groups: Iterable[Sequence[np.ndarray]], options: ControlOptions
) -> ExpertCache:
    """The slots as lock-step leaves them that serves one group of requests after another, each
    request uint [T, layers, K], by the eviction policy of `options`, with all that this remembers.
    The last group's are the requests 0 on and still run: they have to be the first to come. Slots
    that are still free then hold experts that nobody has used yet, by number."""
    layers, experts = len(options.layers), options.experts
    cache = ExpertCache(options.slots, layers, experts, options.eviction)
    served = list(groups)
    for after, routes in enumerate(served, 1):
        running = after == len(served)
        for i, visits in enumerate(units(routes, experts)):
            if i % layers == 0:
                cache.policy.entered(len(visits), len(visits))
            cache.policy.look([i % layers])
            serve(cache, visits, 0 if running else EARLIER)
        for request in range(0 if running else len(routes)):
            cache.policy.ended(EARLIER + request)
    unused = (p * experts + e for e in range(experts) for p in range(layers))
    for code in [c for c in unused if c not in cache.where][: len(cache.free)]:
        cache.loaded(cache.begin(cache.free[-1], code, False, False))
    return cache


def teach(predictor: Predictor, running: list[np.ndarray], ended: Iterable[np.ndarray]) -> None:
    """Let a predictor that learns know requests that ran before, each uint [T, layers, K], and what
    the running ones, 0 on, have done so far."""
    if isinstance(predictor, ActivationMatrices):
        for i, topk in enumerate(ended):
            _count(predictor, EARLIER + i, topk)
            predictor.ended(EARLIER + i)
        for r, topk in enumerate(running):
            _count(predictor, r, topk)
    elif isinstance(predictor, LayerTable):
        for topk in (*ended, *running):
            _tabulate(predictor, topk)
        for r, topk in enumerate(running):
            predictor.last[r] = {i: tuple(row) for i, row in enumerate(topk[-1].tolist())}


def _count(p: ActivationMatrices, request: int, topk: np.ndarray) -> None:
    """A request's matrix of uses, as `routed` would have made it."""
    tokens, layers, k = topk.shape
    counts = np.zeros((layers, p.experts), np.float32)
    np.add.at(counts, (np.tile(np.repeat(np.arange(layers), k), tokens), topk.reshape(-1)), 1.0)
    p.running[request] = counts
    length = np.maximum(np.linalg.norm(counts, axis=-1, keepdims=True), 1e-12)
    cosines = np.einsum("sle,le->ls", p.units, counts / length)
    p.cosines[request] = cosines.astype(np.float32)


def _tabulate(p: LayerTable, topk: np.ndarray) -> None:
    """A request's tokens, as `routed` would have learned them."""
    tokens, layers, k = topk.shape
    for i in range(layers):
        np.add.at(p.used[i], topk[:, i].reshape(-1), 1.0)
        if i + 1 < layers:
            pairs = np.broadcast_arrays(topk[:, i, :, None], topk[:, i + 1, None, :])
            np.add.at(p.pairs[i], tuple(x.reshape(-1) for x in pairs), 1.0)
    p.tokens += tokens
    p.kept += (topk[1:, :, :, None] == topk[:-1, :, None, :]).sum(axis=(0, 2, 3))
    p.compared += (tokens - 1) * k
