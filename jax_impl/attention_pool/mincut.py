"""Minimum cut of a small directed network by maximum flow (Dinic: level graph, blocking flow)."""

from __future__ import annotations

INFINITE = 1 << 62


class Network:
    """Nodes are integers from 0; capacities non-negative integers."""

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._head: list[int] = []
        self._left: list[int] = []

    def arc(self, tail: int, head: int, capacity: int) -> None:
        """At most `capacity` from tail to head; the reverse arc starts empty."""
        for a, b, c in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[a].append(len(self._head))
            self._head.append(b)
            self._left.append(c)

    def _levels(self, source: int) -> list[int]:
        """Distance from the source along arcs with room, -1 where there is no way."""
        level = [-1] * len(self._arcs)
        level[source], queue = 0, [source]
        for node in queue:
            for arc in self._arcs[node]:
                head = self._head[arc]
                if self._left[arc] and level[head] < 0:
                    level[head] = level[node] + 1
                    queue.append(head)
        return level

    def _augment(self, source: int, sink: int, level: list[int], at: list[int]) -> int:
        """One way from source to sink down the levels, filled; 0 when there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            while at[node] < len(self._arcs[node]):
                arc = self._arcs[node][at[node]]
                head = self._head[arc]
                if self._left[arc] and level[head] == level[node] + 1:
                    path.append(arc)
                    node = head
                    break
                at[node] += 1
            else:
                if not path:
                    return 0
                # A dead end: never again from the node before.
                arc = path.pop()
                node = self._head[arc ^ 1]
                at[node] += 1
        flow = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= flow
            self._left[arc ^ 1] += flow
        return flow

    def minimum(self, source: int, sink: int) -> tuple[int, set[int]]:
        """(weight, the smallest source side) of a minimum cut. A weight of INFINITE or more means
        that source and sink cannot be parted."""
        total = 0
        while (level := self._levels(source))[sink] >= 0:
            at = [0] * len(self._arcs)
            while flow := self._augment(source, sink, level, at):
                total += flow
                if total >= INFINITE:
                    return total, set()
        return total, {n for n, d in enumerate(level) if d >= 0}
