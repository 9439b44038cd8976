"""Two questions about a finished state graph, given as parallel arrays of edges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def cycle(n: int, sources: Sequence[int], targets: Sequence[int]) -> list[int]:
    """The states of one cycle, in order, or nothing when the graph has none.

    States without incoming edges are taken away until none is left (Kahn); what remains lies on
    cycles or behind them. Edges are in the order of their sources.
    """
    to = np.asarray(targets, np.uint32)
    first = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(np.asarray(sources, np.uint32), minlength=n), out=first[1:])
    incoming = np.bincount(to, minlength=n).astype(np.int32)
    ready = np.flatnonzero(incoming == 0)
    left = n
    while ready.size:
        left -= ready.size
        hit, times = np.unique(to[_edges_of(ready, first)], return_counts=True)
        incoming[hit] -= times.astype(np.int32)
        ready = hit[incoming[hit] == 0].astype(np.int64)
    if not left:
        return []
    return _one_cycle(n, first.tolist(), targets, set(np.flatnonzero(incoming).tolist()))


def _edges_of(states: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The numbers of all edges out of some states; edges of state i are first[i] .. first[i+1]."""
    counts = first[states + 1] - first[states]
    begin = np.repeat(first[states] - np.cumsum(counts) + counts, counts)
    return begin + np.arange(counts.sum())


def _one_cycle(n: int, first: list[int], targets: Sequence[int], inside: set[int]) -> list[int]:
    """Every state in `inside` has a predecessor there: walking backwards must come round."""
    before: dict[int, int] = {}
    for state in inside:
        for target in targets[first[state] : first[state + 1]]:
            if target in inside:
                before[target] = state
    state = min(inside)
    seen: dict[int, int] = {}
    walk: list[int] = []
    while state not in seen:
        seen[state] = len(walk)
        walk.append(state)
        state = before[state]
    found = walk[seen[state] :][::-1]
    least = found.index(min(found))
    return found[least:] + found[:least]


def cannot_reach(
    n: int,
    sources: Sequence[int],
    targets: Sequence[int],
    allowed: Sequence[int],
    ends: Sequence[int],
) -> int | None:
    """The first state from which no path of allowed edges leads to an end, if there is one."""
    good = np.zeros(n, bool)
    good[np.asarray(ends, np.uint32)] = True
    free = np.asarray(allowed).astype(bool)
    from_ = np.asarray(sources, np.uint32)[free]
    to = np.asarray(targets, np.uint32)[free]
    while True:
        lead = good[to]
        reached = from_[lead & ~good[from_]]
        if not reached.size:
            break
        good[reached] = True
        open_ = ~good[from_]
        from_, to = from_[open_], to[open_]
    return None if good.all() else int(good.argmin())


def is_cycle(states: Sequence[int], edges: set[tuple[int, int]]) -> bool:
    """Whether the states, in order and back to the first, follow edges."""
    return all(pair in edges for pair in pairwise([*states, states[0]]))
