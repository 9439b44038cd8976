"""From a function of one decode step to slices that run between its attentions (LAMINA-23, 24).

    @attention
    def attend(q, k, v, cache, positions): ...        # -> attended, or (attended, *new cache)

    def step(weights, positions, cache, tokens): ...  # uses attend, any number of times
    converted = convert(step, args, free=(0, 1), cache=(2,))

The function is traced to a jaxpr, calls are opened up, and each attention is cut out of the graph
by minimum weight. `converted.slices` are n + 1 programs for n attentions; each begins with what the
last attention gave, computes the next queries and what they need as early as possible, then the
rest. Arguments in `free` (weights, positions, tables) are there in every slice, and so is whatever
follows from them alone; `cache` arguments belong to the memory pool, and so does whatever follows
from them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import jax

from jax_impl.attention_pool.cuts import Cut, NoCut, Operator, Operators
from jax_impl.attention_pool.flat import Flat, Node, attention
from reference.vocab.errors import Unsupported

__all__ = ["Converted", "Slice", "attention", "convert"]

FREE, CACHE, MAIN = "free", "cache", "main"
Values = dict[int, Any]


def evaluate(nodes: Iterable[Node], env: Values) -> None:
    """Run nodes one by one; called with tracers it builds a program, with arrays it is op by op."""
    for node in nodes:
        out = node.bind(*(env[a] if isinstance(a, int) else a[0] for a in node.reads))
        env.update(zip(node.makes, out, strict=True))


def needed(nodes: Sequence[Node], wanted: Iterable[int]) -> list[Node]:
    """Those of `nodes`, in order, that the wanted values come from."""
    want, out = set(wanted), []
    for node in reversed(nodes):
        if want & set(node.makes):
            want |= set(node.values())
            out.append(node)
    return out[::-1]


class Slice:
    """What lies between two attentions.

    kept_in   values kept from the slice before it (in the first one: the tokens' inputs)
    attended  the value that the attention gave, or None
    q, k, v   values for the next attention, or None in the last slice
    kept_out  values for the slice after it             outputs  results of the whole made here
    order     operators in the order of execution; the first `early` of them make q (LAMINA-24)
    free      inputs and constants that it has for itself
    """

    def __init__(
        self, number: int, free_nodes: Sequence[Node], nodes: Sequence[Node],
        kept_in: Iterable[int], attended: int | None, qkv: tuple[int, ...] | None,
        kept_out: Iterable[int], outputs: Iterable[int],
    ) -> None:  # fmt: skip
        self.number, self.attended = number, attended
        self.kept_in, self.kept_out = tuple(kept_in), tuple(kept_out)
        self.q, self.k, self.v = qkv or (None, None, None)
        self.outputs = tuple(outputs)
        later = {*(qkv or ())[1:], *self.kept_out, *self.outputs}
        first = needed([*free_nodes, *nodes], (qkv or ())[:1])
        done = {n.makes for n in first}
        rest = [n for n in nodes if n.makes not in done]
        tables = needed(free_nodes, reads_of(rest) | later)
        rest = [n for n in tables if n.makes not in done] + rest
        self.order, self.early = (*first, *rest), len(first)
        makes = {v for n in self.order for v in n.makes}
        given = {*self.kept_in, attended}
        self.free = tuple(sorted((reads_of(self.order) | later | {*(qkv or ())}) - makes - given))
        # What the early part hands on to the rest.
        self.between = tuple(sorted({v for n in first for v in n.makes} & (reads_of(rest) | later)))
        self._jit_queries, self._jit_rest = jax.jit(self._queries), jax.jit(self._rest)

    def _queries(self, free: Values, kept: Values, attended: Any) -> tuple[Any, Values]:
        env = {**free, **kept, **({} if self.attended is None else {self.attended: attended})}
        evaluate(self.order[: self.early], env)
        return (None if self.q is None else env[self.q]), {v: env[v] for v in self.between}

    def _rest(self, free: Values, kept: Values, attended: Any, between: Values) -> tuple[Any, ...]:
        env = {**free, **kept, **({} if self.attended is None else {self.attended: attended})}
        env.update(between)
        evaluate(self.order[self.early :], env)
        kv = [None if x is None else env[x] for x in (self.k, self.v)]
        return *kv, {x: env[x] for x in self.kept_out}, {x: env[x] for x in self.outputs}

    def queries(
        self, free: Values, kept: Values, attended: Any, op_by_op: bool = False
    ) -> tuple[Any, Values]:
        """(q, what the rest needs of it): the early part. q can be sent when this is done."""
        run = self._queries if op_by_op else self._jit_queries
        return run({v: free[v] for v in self.free}, kept, attended)

    def rest(
        self, free: Values, kept: Values, attended: Any, between: Values, op_by_op: bool = False
    ) -> tuple[Any, Any, Values, Values]:
        """(k, v, values to keep, outputs): everything else."""
        run = self._rest if op_by_op else self._jit_rest
        return run({v: free[v] for v in self.free}, kept, attended, between)


def reads_of(nodes: Iterable[Node]) -> set[int]:
    """All values that the nodes read."""
    return {v for n in nodes for v in n.values()}


class MemorySide:
    """What the memory pool knows: the cache, and what follows from it or is free; made when asked
    for, so that a node runs once and only on this side."""

    def __init__(self, flat: Flat, known: Values) -> None:
        self._maker = {v: n for n in flat.nodes for v in n.makes}
        self.known = dict(known)

    def value(self, atom: Any) -> Any:
        """A cache or free value, or a literal."""
        if not isinstance(atom, int):
            return atom[0]
        if atom not in self.known:
            node = self._maker[atom]
            out = node.bind(*(self.value(a) for a in node.reads))
            self.known.update(zip(node.makes, out, strict=True))
        return self.known[atom]

    def attend(self, node: Node, q: Any, k: Any, v: Any) -> Any:
        """Run an attention; its new cache stays here, what it attended is returned."""
        out = node.bind(q, k, v, *(self.value(a) for a in node.reads[3:]))
        self.known.update(zip(node.makes[1:], out[1:], strict=True))
        return out[0]


class Converted:
    """A step in slices. `cuts[i]` is the cut at `attentions[i]`, its weight in bytes."""

    def __init__(self, flat: Flat, kind: Sequence[str]) -> None:
        self.flat, self.kind = flat, kind
        made = [n for n in flat.nodes if n.attention or kind[n.makes[0]] == MAIN]
        results = {o for o in flat.outputs if isinstance(o, int)}
        wanted = {v for n in made if n.attention for v in n.values()}
        main = [n for n in needed(made, results | wanted) if n.makes]
        self.attentions = [n for n in main if n.attention]
        if not self.attentions:
            raise Unsupported("convert", "a function without a marked attention", "one or more")
        sizes = {v: a.size * a.dtype.itemsize for v, a in enumerate(flat.avals)}
        operators = Operators(
            [
                Operator(tuple(v for v in n.values() if kind[v] == MAIN), n.makes, n.attention)
                for n in main
            ],
            sizes,
        )
        try:
            self.cuts: list[Cut] = operators.cuts()
        except NoCut:
            raise Unsupported(
                "convert", "a graph without a cut at an attention", "a graph without circles"
            ) from None
        free = [n for n in flat.nodes if not n.attention and kind[n.makes[0]] == FREE]
        started = [v for v in flat.inputs if kind[v] == MAIN]
        edges = [frozenset(), *(c.before for c in self.cuts), frozenset(range(len(main)))]
        self.slices: list[Slice] = []
        for i, (low, high) in enumerate(pairwise(edges)):
            nodes = [main[n] for n in sorted(high - low) if not main[n].attention]
            last = self.attentions[i - 1].makes[0] if i else None
            kept = self.cuts[i - 1].kept if i else started
            here = {v for n in nodes for v in n.makes} | {last} | set(() if i else started)
            end = i == len(self.cuts)
            self.slices.append(
                Slice(
                    i, free, nodes, kept, last,
                    None if end else tuple(self.attentions[i].reads[:3]),
                    () if end else self.cuts[i].kept,
                    sorted(v for v in results & here if kind[v] == MAIN),
                )
            )  # fmt: skip

    @property
    def weights(self) -> list[int]:
        """Bytes kept across each cut."""
        return [c.weight for c in self.cuts]

    def start(self, *args: Any) -> tuple[Values, Values, MemorySide]:
        """(free values, the tokens' values, the memory side) of the function's arguments."""
        free, kept, cache = dict(self.flat.constants), {}, {}
        side = {FREE: free, MAIN: kept, CACHE: cache}
        for v, leaf in zip(self.flat.inputs, jax.tree.leaves(args), strict=True):
            side[self.kind[v]][v] = leaf
        return free, kept, MemorySide(self.flat, {**free, **cache})

    def run(self, *args: Any, op_by_op: bool = False) -> list[Any]:
        """Slices and attentions in turn, in this thread: the flat results of the function."""
        free, kept, memory = self.start(*args)
        attended, results = None, {}
        for i, part in enumerate(self.slices):
            q, between = part.queries(free, kept, attended, op_by_op)
            k, v, kept, out = part.rest(free, kept, attended, between, op_by_op)
            results.update(out)
            if part.q is not None:
                attended = memory.attend(self.attentions[i], q, k, v)
        return self.results(results, memory)

    def results(self, made: Values, memory: MemorySide) -> list[Any]:
        """The function's flat results, from those of the slices and the memory side."""
        return [
            made[o] if isinstance(o, int) and o in made else memory.value(o)
            for o in self.flat.outputs
        ]

    def whole(self, *args: Any) -> list[Any]:
        """The flat function op by op, uncut."""
        env = dict(self.flat.constants)
        env.update(zip(self.flat.inputs, jax.tree.leaves(args), strict=True))
        evaluate(self.flat.nodes, env)
        return [env[o] if isinstance(o, int) else o[0] for o in self.flat.outputs]


def convert(
    function: Callable[..., Any], args: Sequence[Any], *, free: Sequence[int],
    cache: Sequence[int] = (),
) -> Converted:  # fmt: skip
    """Cut `function(*args)` at its marked attentions. `args` may be shapes (ShapeDtypeStruct).

    free, cache  positions of the arguments that are weights, positions or tables, and of those
                 that the memory pool holds; the others belong to the tokens
    Raises Unsupported, saying what stands in the way.
    """
    flat = Flat(jax.make_jaxpr(function)(*args))
    kind = [FREE] * len(flat.avals)
    at = 0
    for i, arg in enumerate(args):
        for _ in jax.tree.leaves(arg):
            kind[flat.inputs[at]] = FREE if i in free else CACHE if i in cache else MAIN
            at += 1
    for number, node in enumerate(flat.nodes):
        read = {kind[v] for v in node.values()}
        if node.attention:
            _check_attention(node, kind)
            for v in node.makes:
                kind[v] = CACHE
            kind[node.makes[0]] = MAIN
            continue
        if read >= {CACHE, MAIN}:
            raise Unsupported(
                "convert", f"operator {number} ({node.name}), which mixes the cache with tokens",
                "a cache that only attention reads",
            )  # fmt: skip
        for v in node.makes:
            kind[v] = CACHE if CACHE in read else MAIN if MAIN in read else FREE
    return Converted(flat, kind)


def _check_attention(node: Node, kind: Sequence[str]) -> None:
    if any(not isinstance(a, int) or kind[a] == CACHE for a in node.reads[:3]):
        raise Unsupported("convert", "attention whose q, k or v is the cache's", "computed ones")
    if any(isinstance(a, int) and kind[a] == MAIN for a in node.reads[3:]):
        raise Unsupported(
            "convert", "attention that reads more of the tokens than q, k and v",
            "further arguments that are free or the cache's",
        )  # fmt: skip
