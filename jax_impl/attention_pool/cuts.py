"""Where to cut a graph of operators around one of its attentions (LAMINA-23).

Operators read values and make values; a value that is made before the cut and read behind it has to
be kept meanwhile, and is paid for once, however many read it. Before the cut lies everything that
the attention's inputs come from, behind it everything that its result goes to; an operator that is
before the cut has all of its sources there too. Among the cheapest cuts the one is taken that
leaves most work behind it, so that queries leave early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_impl.attention_pool.mincut import INFINITE, Network

SOURCE, SINK = 0, 1


@dataclass(frozen=True)
class Operator:
    """Values read and made. Values are integers; what costs nothing to have is left out."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    attention: bool = False


@dataclass(frozen=True)
class Cut:
    """weight: bytes kept; before: operators before the cut; kept: the values that cross it."""

    weight: int
    before: frozenset[int]
    kept: tuple[int, ...]


class NoCut(Exception):
    """There is no cut: something is both before and behind the attention."""


def _closure(start: Iterable[int], step: Sequence[Iterable[int]]) -> set[int]:
    """Everything that can be reached."""
    found, queue = set(start), list(start)
    while queue:
        for nxt in step[queue.pop()]:
            if nxt not in found:
                found.add(nxt)
                queue.append(nxt)
    return found


class Operators:
    """The whole graph, in an order in which values are made before they are read.

    sizes: bytes of each value. A value that no operator makes is an input, there from the start.
    """

    def __init__(self, operators: Sequence[Operator], sizes: dict[int, int]) -> None:
        self.operators, self.sizes = list(operators), sizes
        self.maker = {v: i for i, op in enumerate(operators) for v in op.makes}
        self.readers: dict[int, list[int]] = {}
        for i, op in enumerate(operators):
            for v in dict.fromkeys(op.reads):
                self.readers.setdefault(v, []).append(i)
        self._sources = [{self.maker[v] for v in op.reads if v in self.maker} for op in operators]
        self._targets = [{r for v in op.makes for r in self.readers.get(v, ())} for op in operators]
        self.attentions = [i for i, op in enumerate(operators) if op.attention]

    def cut(self, attention: int, already: frozenset[int] = frozenset()) -> Cut:
        """The cut at operator `attention`; operators of `already` are before it. Attentions that
        come earlier in the order are before it, later ones behind. Raises NoCut."""
        here = self.attentions.index(attention)
        before = _closure(
            [*self._sources[attention], *already, *self.attentions[:here]], self._sources
        )
        behind = _closure(
            [*self._targets[attention], *self.attentions[here + 1 :]], self._targets
        ) - {attention}
        if attention in before or before & behind:
            raise NoCut
        free = [
            i
            for i in range(len(self.operators))
            if i != attention and i not in before and i not in behind
        ]
        node = {i: 2 + n for n, i in enumerate(free)}
        node.update(dict.fromkeys(before, SOURCE))
        node.update(dict.fromkeys(behind, SINK))
        values = [
            v
            for v, readers in self.readers.items()
            if self.maker.get(v) != attention and any(r != attention for r in readers)
        ]
        net = Network(2 + len(free) + len(values))
        for n, v in enumerate(values):
            made = node[self.maker[v]] if v in self.maker else SOURCE
            through = 2 + len(free) + n
            net.arc(made, through, self.sizes[v])
            for r in self.readers[v]:
                if r != attention:
                    net.arc(through, node[r], INFINITE)
                    # What is before the cut has its sources before it.
                    net.arc(node[r], made, INFINITE)
        weight, side = net.minimum(SOURCE, SINK)
        if weight >= INFINITE:
            raise NoCut
        chosen = frozenset(before | {i for i in free if node[i] in side})
        return Cut(weight, chosen, self.crossing(attention, chosen))

    def crossing(self, attention: int, before: frozenset[int]) -> tuple[int, ...]:
        """The values made before a cut and read behind it, other than by the attention itself."""
        return tuple(
            v
            for v, readers in self.readers.items()
            if (v not in self.maker or self.maker[v] in before)
            and any(r != attention and r not in before for r in readers)
        )

    def cuts(self) -> list[Cut]:
        """One for each attention, each containing the one before."""
        found: list[Cut] = []
        for attention in self.attentions:
            already = found[-1].before if found else frozenset()
            found.append(self.cut(attention, already))
        return found
