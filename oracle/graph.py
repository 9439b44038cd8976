"""Two questions about a finished state graph, given as parallel arrays of edges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def _outgoing(n: int, sources: Sequence[int]) -> list[int]:
    """Where each state's edges begin; edges are stored in the order of their sources."""
    first = [0] * (n + 1)
    for source in sources:
        first[source + 1] += 1
    for i in range(n):
        first[i + 1] += first[i]
    return first


def cycle(n: int, sources: Sequence[int], targets: Sequence[int]) -> list[int]:
    """The states of one cycle, in order, or nothing when the graph has none.

    States without incoming edges are taken away until none is left (Kahn); what remains lies on
    cycles or behind them.
    """
    incoming = [0] * n
    for target in targets:
        incoming[target] += 1
    first = _outgoing(n, sources)
    ready = [i for i in range(n) if not incoming[i]]
    left = n
    while ready:
        state = ready.pop()
        left -= 1
        for target in targets[first[state] : first[state + 1]]:
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    if not left:
        return []
    return _one_cycle(n, first, targets, {i for i in range(n) if incoming[i]})


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
    order = sorted(range(len(targets)), key=targets.__getitem__)
    into = [0] * (n + 1)
    for target in targets:
        into[target + 1] += 1
    for i in range(n):
        into[i + 1] += into[i]
    good = bytearray(n)
    work = list(ends)
    for end in ends:
        good[end] = 1
    while work:
        state = work.pop()
        for edge in order[into[state] : into[state + 1]]:
            source = sources[edge]
            if allowed[edge] and not good[source]:
                good[source] = 1
                work.append(source)
    return None if all(good) else good.index(0)


def is_cycle(states: Sequence[int], edges: set[tuple[int, int]]) -> bool:
    """Whether the states, in order and back to the first, follow edges."""
    return all(pair in edges for pair in pairwise([*states, states[0]]))
