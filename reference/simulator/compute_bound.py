"""How little compute a decoding window can cost, whatever the schedule of its experts (GRID-3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from reference.simulator.bounds import Bounds, visits_of
from reference.simulator.costs import Costs, Work
from reference.simulator.hits import belady_loads
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
    """Seconds of compute a token below which no schedule goes (BOUND-1): of requests that decode
    `routes`, uint [T, layers, K] each, from their first token on. Loose where requests are many and
    alike in what they use."""
    lists = [r.tolist() for r in routes]
    tokens = len(lists[0])

    def said(request: int, position: int, layer: int) -> tuple[int, ...]:
        return tuple(lists[request][position][place[layer]])

    place = {layer: i for i, layer in enumerate(layers)}
    work = [visits_of(said, layers, 1, 1, tokens, r) for r in range(len(lists))]
    bounds = Bounds(work, 0, costs, 0, max_rows=len(lists))
    return bounds.compute_s / (tokens * len(lists))


def belady_rate(
    costs: Costs, expert_bytes: int, needs: Sequence[Collection[int]], slots: int, counted: int,
    tokens: int, together_s: float,
) -> tuple[float, float]:  # fmt: skip
    """(tokens/s, experts read a token) of lock-step with a cache that has known the future since it
    was empty: in its last `counted` units, which generate `tokens`, the loads of Belady's rule, an
    expert being free to go once it was used (BOUND-6), one after another, or its compute, whichever
    takes longer. needs: distinct expert codes of each unit, (step, layer) by (step, layer)."""
    units = [set(need) for need in needs]
    loads = sum(belady_loads(units, slots, together=False)[-counted:]) / tokens
    return paced(costs, expert_bytes, loads, together_s), loads


def paced(costs: Costs, expert_bytes: int, loads: float, together_s: float) -> float:
    """Tokens a second when only the longer of compute and `loads` reads a token takes time."""
    return 1.0 / max(together_s, loads * costs.transfer(expert_bytes))


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
