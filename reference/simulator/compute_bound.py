"""How little compute a decoding window can cost, whatever the schedule of its experts (GRID-3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.simulator.costs import Costs, Work
from reference.vocab.actions import Compute
from reference.vocab.ids import ENTRY


def together_seconds(costs: Costs, layers: tuple[int, ...], routes: Sequence[np.ndarray]) -> float:
    """Seconds of compute a token when every layer is visited once a round by all requests together
    and nothing is ever missing: least steps, each weight read once a round. routes: uint
    [T, layers, K] a request. No schedule that keeps requests at one token has fewer steps; that
    one with other tokens side by side reads fewer distinct experts is not excluded."""
    tokens = routes[0].shape[0]
    k = routes[0].shape[2]
    stacked = np.sort(np.concatenate(list(routes), axis=-1), axis=-1)
    distinct = 1 + (stacked[..., 1:] != stacked[..., :-1]).sum(-1)
    pairs = k * len(routes)
    seconds = 0.0
    for t in range(tokens):
        spans = [(t, t + 1)] * len(routes)
        seconds += costs.step(_reads(ENTRY, 0), Work(spans, 0))
        for i, layer in enumerate(layers):
            seconds += costs.step(_reads(layer, int(distinct[t, i])), Work(spans, pairs))
    return seconds / (tokens * len(routes))


def least_seconds(costs: Costs, layers: tuple[int, ...], routes: Sequence[np.ndarray]) -> float:
    """Seconds of compute a token below which no schedule goes: a request's tokens come one after
    another, so each layer takes as many steps as a request has tokens, and each expert is read as
    often as the request that uses it most does; rows and pairs as they are. Loose where requests
    are many and alike in what they use."""
    tokens, _, k = routes[0].shape
    pairs = k * len(routes)
    total = 0.0
    for t in range(tokens):
        spans = [(t, t + 1)] * len(routes)
        total += costs.step(_reads(ENTRY, 0), Work(spans, 0))
    for i, layer in enumerate(layers):
        most: dict[int, int] = {}
        for r in routes:
            for e, n in zip(*np.unique(r[:, i], return_counts=True), strict=True):
                most[int(e)] = max(most.get(int(e), 0), int(n))
        reads = sum(most.values()) // tokens
        for t in range(tokens):
            spans = [(t, t + 1)] * len(routes)
            total += costs.step(_reads(layer, reads), Work(spans, pairs))
    return total / (tokens * len(routes))


def queueing_limit(compute_s: float, fetch_s: float, requests: int) -> float:
    """Busy share of the busier of two servers in turn, each with exponential service of these means
    and queues of any length, with so many customers: N / (N + 1) where the means are equal."""
    low, high = sorted((compute_s, fetch_s))
    if low <= 0.0:
        return 1.0
    ratio = low / high
    if abs(1.0 - ratio) < 1e-9:
        return requests / (requests + 1)
    return (1.0 - ratio**requests) / (1.0 - ratio ** (requests + 1))


def _reads(layer: int, distinct: int) -> Compute:
    """A step as costs see it: a layer, and so many experts."""
    return Compute(0, layer, (), tuple([(0, 0)] * distinct))
