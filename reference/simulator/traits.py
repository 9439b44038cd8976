"""Traits of routes: how much tokens and requests share, and what a cache of them would hit.

Caches are replayed a step at a time: all that the requests of a step ask of a layer counts as asked
together, since it must be there together (one at a time would count too many misses).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

Policy = Literal["lru", "lfu", "belady"]


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """The mean share of the experts of a [.., K] that are among those of b [.., K] too."""
    return float((a[..., :, None] == b[..., None, :]).any(-1).mean())


def kept(topk: np.ndarray, lag: int) -> float:
    """The mean share of a token's experts [T, L, K] that the token `lag` before had."""
    return overlap(topk[lag:], topk[:-lag])


def distinct(requests: Sequence[np.ndarray]) -> float:
    """Mean distinct experts that requests, each [T, L, K], ask of a layer in one step together."""
    together = np.sort(np.concatenate(list(requests), axis=-1), axis=-1)
    return float(1.0 + (together[..., 1:] != together[..., :-1]).sum(-1).mean())


def top_share(topk: np.ndarray, experts: int, share: float) -> float:
    """The part of all choices [.., L, K] that a layer's most frequent `share` of experts takes."""
    taken = []
    for layer in range(topk.shape[-2]):
        counts = np.sort(np.bincount(topk[..., layer, :].ravel(), minlength=experts))[::-1]
        taken.append(counts[: round(share * experts)].sum() / counts.sum())
    return float(np.mean(taken))


def cache_hits(
    requests: Sequence[np.ndarray], slots: int, policy: Policy = "lru"
) -> tuple[float, float, float]:
    """(share of choices that hit, share of visits that lack nothing, misses a choice) of a cache of
    `slots` a layer; requests [T, L, K] go in lock-step. A shared miss counts once among misses, for
    each request among hits."""
    tokens, layers, k = requests[0].shape
    hits = full = misses = 0
    for layer in range(layers):
        wants = [[set(r[t, layer].tolist()) for r in requests] for t in range(tokens)]
        together = [set().union(*step) for step in wants]
        resident: dict[int, None] = {}
        counts: Counter[int] = Counter()
        later = _next_uses(together) if policy == "belady" else []
        for t, step in enumerate(wants):
            for want in step:
                there = sum(e in resident for e in want)
                hits += there
                full += there == k
            misses += sum(e not in resident for e in together[t])
            for e in sorted(together[t]):
                resident.pop(e, None)
                resident[e] = None
                counts[e] += 1
            while len(resident) > slots:
                order = list(resident)
                if policy == "lfu":
                    del resident[min(order, key=lambda e: (e in together[t], counts[e]))]
                elif policy == "belady":
                    del resident[max(order, key=lambda e, t=t: later[t].get(e) or tokens)]
                else:
                    del resident[order[0]]
    choices = tokens * layers * k * len(requests)
    return hits / choices, full / (choices / k), misses / choices


def _next_uses(steps: Sequence[set[int]]) -> list[dict[int, int]]:
    """For each step, when each expert is used next after it."""
    out: list[dict[int, int]] = []
    after: dict[int, int] = {}
    for t in range(len(steps) - 1, -1, -1):
        out.append(dict(after))
        after.update(dict.fromkeys(steps[t], t))
    return out[::-1]
