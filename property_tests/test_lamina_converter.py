"""The converter: minimum cuts against brute force, slices against the whole."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_impl.attention_pool.converter import Converted, attention, convert
from jax_impl.attention_pool.cuts import NoCut, Operator, Operators
from jax_impl.attention_pool.decode_step import DecodeStep
from jax_impl.attention_pool.mincut import Network
from jax_impl.kv import block_shapes
from jax_impl.layers import Bank, Piece
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.checkpoint import Checkpoint
from reference.vocab.errors import Unsupported

# The cut


def brute(ops: Operators, attention: int) -> int:
    """The least weight over every set of operators that may be before the cut."""
    here = ops.attentions.index(attention)
    others = [i for i in range(len(ops.operators)) if i != attention]
    best = None
    for bits in itertools.product((False, True), repeat=len(others)):
        before = {i for i, b in zip(others, bits, strict=True) if b}
        if not set(ops.attentions[:here]) <= before or before & set(ops.attentions[here + 1 :]):
            continue
        makers = {i: {ops.maker[v] for v in ops.operators[i].reads if v in ops.maker}
                  for i in range(len(ops.operators))}
        if not makers[attention] <= before:
            continue
        if any(attention in makers[i] or not makers[i] <= before for i in before):
            continue
        weight = sum(ops.sizes[v] for v in ops.crossing(attention, frozenset(before)))
        best = weight if best is None else min(best, weight)
    assert best is not None
    return best


def random_graph(rng: Random) -> Operators:
    """Up to 9 operators, one to three of them attentions; values read by several; some read
    nothing but inputs."""
    sizes = {v: rng.randrange(1, 9) for v in range(2)}
    ops: list[Operator] = []
    n = rng.randrange(3, 10)
    marked = set(rng.sample(range(n), rng.randrange(1, min(4, n))))
    for i in range(n):
        have = sorted(sizes)
        reads = tuple(rng.sample(have, min(len(have), rng.randrange(1, 4))))
        makes = []
        for _ in range(1 if i in marked else rng.choice((1, 1, 2))):
            makes.append(len(sizes))
            sizes[len(sizes)] = rng.randrange(1, 9)
        ops.append(Operator(reads, tuple(makes), i in marked))
    return Operators(ops, sizes)


@pytest.mark.rule("LAMINA-23")
@given(st.integers(0, 10**9))
def test_the_cut_is_the_cheapest_there_is(seed: int) -> None:
    ops = random_graph(Random(seed))
    for marked in ops.attentions:
        cut = ops.cut(marked)
        assert cut.weight == sum(ops.sizes[v] for v in cut.kept) == brute(ops, marked)
    nested = ops.cuts()
    for one, two in itertools.pairwise(nested):
        assert one.before < two.before
    # Holding on to what is before an earlier cut costs nothing.
    assert [c.weight for c in nested] == [ops.cut(a).weight for a in ops.attentions]


@pytest.mark.rule("LAMINA-23")
def test_a_tensor_is_paid_for_once_and_a_circle_has_no_cut() -> None:
    """x goes to three readers behind the attention: its bytes count once."""
    readers = [Operator((0, 2), (3,)), Operator((0, 3), (4,)), Operator((0, 4), (5,))]
    ops = Operators([Operator((0,), (1,)), Operator((1,), (2,), True), *readers],
                    {0: 7, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert ops.cut(1).weight == 7
    circle = Operators([Operator((2,), (1,)), Operator((1,), (2,), True)], {1: 1, 2: 1})
    with pytest.raises(NoCut):
        circle.cut(1)


@pytest.mark.rule("LAMINA-23")
@given(st.integers(0, 10**9))
def test_flow_against_all_cuts_of_plain_networks(seed: int) -> None:
    rng = Random(seed)
    n = rng.randrange(2, 8)
    arcs = [(a, b, rng.randrange(0, 9)) for a in range(n) for b in range(n)
            if a != b and rng.random() < 0.5]
    net = Network(n)
    for arc in arcs:
        net.arc(*arc)
    weight, side = net.minimum(0, 1)

    def across(chosen: set[int]) -> int:
        return sum(c for a, b, c in arcs if a in chosen and b not in chosen)

    others = range(2, n)
    every = [{0, *s} for k in range(n) for s in itertools.combinations(others, k)]
    assert weight == min(map(across, every)) == across(side)
    assert all(side <= s for s in every if across(s) == weight)  # the smallest such side


# Functions

ROWS, HIDDEN, HEADS, WIDTH, LAYERS = 4, 32, 4, 8, 2
STREAM = ROWS * HIDDEN * 4


@attention
def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, at: jax.Array):
    """q [R, N, D], k, v [R, G, D]; cache [2, R, S, G, D]; position `at` is written."""
    cache = cache.at[:, jnp.arange(ROWS), at].set(jnp.stack([k, v]))
    keys, values = (jnp.repeat(c, q.shape[1] // k.shape[1], axis=2) for c in cache)
    score = jnp.einsum("rnd,rsnd->rns", q, keys) / np.sqrt(q.shape[-1])
    seen = jnp.arange(cache.shape[2])[None, None] <= at[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, score, -jnp.inf), axis=-1)
    return jnp.einsum("rns,rsnd->rnd", p, values), cache


def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama(kv_heads: int, block: str = "llama"):
    """(step, its arguments): a small decode step; `block` says how a layer is wired."""
    draw = np.random.default_rng(kv_heads)

    def matrix(*shape: int) -> np.ndarray:
        return (draw.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    layer = lambda: {  # noqa: E731
        "n1": matrix(1, HIDDEN)[0] + 1, "n2": matrix(1, HIDDEN)[0] + 1,
        "q": matrix(HIDDEN, HEADS * WIDTH), "k": matrix(HIDDEN, kv_heads * WIDTH),
        "v": matrix(HIDDEN, kv_heads * WIDTH), "o": matrix(HEADS * WIDTH, HIDDEN),
        "gate": matrix(HIDDEN, 48), "up": matrix(HIDDEN, 48), "down": matrix(48, HIDDEN),
    }  # fmt: skip
    weights = {"embed": matrix(50, HIDDEN), "layers": [layer() for _ in range(LAYERS)]}

    def mlp(w: dict, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    @jax.jit
    def one(w: dict, x: jax.Array, cache: jax.Array, at: jax.Array, first: jax.Array):
        angle = at[:, None, None] * (0.3 ** jnp.arange(WIDTH // 2))
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        n = norm(x, w["n1"])
        # Written in an order that is bad for queries on purpose.
        v = (n @ w["v"]).reshape(ROWS, kv_heads, WIDTH)
        k = turn((n @ w["k"]).reshape(ROWS, kv_heads, WIDTH), cos, sin)
        q = turn((n @ w["q"]).reshape(ROWS, HEADS, WIDTH), cos, sin)
        a, cache = attend(q, k, v, cache, at)
        y = a.reshape(ROWS, -1) @ w["o"]
        if block == "parallel":
            return (x + mlp(w, n)) + y, cache
        x = x + y
        if block == "shared":  # every layer also sees the embedding
            x = x + first
        return x + mlp(w, norm(x, w["n2"])), cache

    def step(weights: dict, at: jax.Array, caches: list, tokens: jax.Array):
        x = first = weights["embed"][tokens]
        new = []
        for w, cache in zip(weights["layers"], caches, strict=True):
            x, cache = one(w, x, cache, at, first)
            new.append(cache)
        return x @ weights["embed"].T, new

    caches = [matrix(2, ROWS, 16, kv_heads, WIDTH) for _ in range(LAYERS)]
    at = jnp.array([3, 9, 0, 15], jnp.int32)
    tokens = jnp.array([1, 7, 30, 49], jnp.int32)
    return step, (weights, at, caches, tokens)


def converted(kv_heads: int, block: str = "llama") -> tuple[Converted, object, tuple]:
    step, args = llama(kv_heads, block)
    return convert(step, args, free=(0, 1), cache=(2,)), step, args


@pytest.mark.rule("LAMINA-23", "LAMINA-24")
@pytest.mark.parametrize(
    ("kv_heads", "block", "weights"),
    [(4, "llama", [STREAM] * 2), (2, "parallel", [STREAM] * 2),
     # The first cut keeps the embedding once, the second stream and embedding.
     (2, "shared", [STREAM, 2 * STREAM])],
)  # fmt: skip
def test_slices_are_the_whole(kv_heads: int, block: str, weights: list[int]) -> None:
    c, step, args = converted(kv_heads, block)
    assert len(c.slices) == LAYERS + 1
    assert c.weights == weights
    whole = c.whole(*args)
    sliced = c.run(*args, op_by_op=True)
    want = jax.tree.leaves(step(*args))
    assert len(whole) == len(sliced) == len(want)
    for a, b in zip(whole, sliced, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    one = jax.tree.leaves(jax.jit(step)(*args))
    for a, b, w in zip(c.run(*args), one, want, strict=True):
        # Fused in other ways: a few roundings of float32 apart.
        bound = 1e-5 * np.abs(w).max()
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= bound
        assert np.abs(np.asarray(a) - np.asarray(w)).max() <= bound


@pytest.mark.rule("LAMINA-24")
@pytest.mark.parametrize("block", ["llama", "parallel", "shared"])
def test_queries_and_what_they_need_come_first(block: str) -> None:
    c, _, _ = converted(2, block)
    for part in c.slices[:-1]:
        assert part.order[part.early - 1].makes == (part.q,)
        needs = {part.q}
        for node in reversed(part.order[: part.early]):
            assert needs & set(node.makes), "an early operator that queries do not need"
            needs |= set(node.values())
        rest = {v for n in part.order[part.early :] for v in n.makes}
        assert part.k in rest and part.v in rest
        # Of the three products of a layer's input only that of q is early.
        early = [n.name for n in part.order[: part.early]].count("dot_general")
        assert early == (1 if part.number == 0 else 2 if block == "parallel" else 5)
    assert c.slices[-1].q is None and c.slices[-1].early == 0
    # No operator of the tokens is in two slices; tables of positions may be.
    seen = [n.makes for s in c.slices for n in s.order if c.kind[n.makes[0]] == "main"]
    assert len(seen) == len(set(seen))


@pytest.mark.rule("LAMINA-23")
def test_where_there_is_nothing_to_cut_it_is_said() -> None:
    x = jnp.ones((ROWS, HEADS, WIDTH))
    cache, at = jnp.ones((2, ROWS, 16, HEADS, WIDTH)), jnp.zeros(ROWS, jnp.int32)

    def refused(function, told: str, free: tuple = (1,), cache_at: tuple = (2,)) -> None:
        with pytest.raises(Unsupported, match=told):
            convert(function, (x, at, cache), free=free, cache=cache_at)

    refused(lambda x, at, c: x + 1, "without a marked attention")
    refused(lambda x, at, c: attend(x, x, x, c + x.sum(), at)[0], "mixes the cache")
    refused(lambda x, at, c: attend(x, x, x, c, at)[1] + attend(x, x, x, c, at)[0].sum(),
            "mixes the cache")
    refused(lambda x, at, c: attend(c[0, :, 0], x, x, c, at)[0], "whose q, k or v is the cache")
    refused(lambda x, at, c: attend(x, x, x, c, at)[0], "reads more of the tokens", free=())
    refused(lambda x, at, c: jax.lax.scan(lambda y, _: attend(y, y, y, c, at), x, length=2)[0],
            "attention inside scan")
    refused(lambda x, at, c: jax.lax.cond(at[0] > 0, lambda y: attend(y, y, y, c, at)[0],
                                          lambda y: y, x), "attention inside cond")

    def closes(x: jax.Array, at: jax.Array, c: jax.Array) -> jax.Array:
        y = x * 2
        return attention(lambda q, k, v: q + y)(x, x, x)

    refused(closes, "closes over computed values")


@pytest.mark.rule("LAMINA-23")
def test_two_attentions_side_by_side_and_a_cache_of_all_layers() -> None:
    """A user's own function: two attentions of one input, caches stacked in one array."""

    def step(at: jax.Array, cache: jax.Array, x: jax.Array, w: jax.Array):
        a, first = attend(x, x * 0.5, x, cache[0], at)
        b, second = attend(jnp.tanh(x), x, x * 2, cache[1], at)
        return (a * b).sum(-1) @ w, jnp.stack([first, second])

    draw = np.random.default_rng(4)
    x = draw.normal(size=(ROWS, HEADS, WIDTH)).astype(np.float32)
    cache = draw.normal(size=(2, 2, ROWS, 16, HEADS, WIDTH)).astype(np.float32)
    args = (jnp.array([3, 4, 5, 0]), cache, x, draw.normal(size=(HEADS, 3)).astype(np.float32))
    c = convert(step, args, free=(0, 3), cache=(1,))
    assert len(c.slices) == 3 and c.weights == [x.nbytes, x.nbytes]
    for a, b in zip(c.whole(*args), c.run(*args, op_by_op=True), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    np.testing.assert_allclose(c.run(*args)[0], step(*args)[0], rtol=1e-5)


# Our own families


@pytest.mark.rule("LAMINA-23", "LAMINA-24")
@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3_moe", {"mlp_only_layers": [0]}), ("deepseek_v3", {})],
)
def test_a_family_in_slices(family: str, more: dict, tmp_path: Path) -> None:
    """The cut is the residual stream; slices are the whole, op by op, and the engine's own pieces
    of a layer, op by op."""
    config = tiny_config(family, num_hidden_layers=2, **more)
    ckpt = Checkpoint.open(write_checkpoint(tmp_path / "m", config, seed=2))
    built = DecodeStep(ckpt, max_len=16)
    draw = np.random.default_rng(1)
    rows, block, width = 8, 4, 4
    caches = []
    for s in ckpt.config.layers:
        shapes = block_shapes(s.attention, block)
        caches.append(tuple(
            None if x is None else draw.normal(size=(rows * width + 1, *x)).astype(np.float32)
            for x in shapes))  # fmt: skip
    at = draw.integers(0, 16, rows).astype(np.int32)
    places = {"tables": np.arange(rows * width, dtype=np.int32).reshape(rows, width),
              "positions": at, "live": np.ones(rows, bool), "turns": built.turns(at)}
    tokens = draw.integers(3, 90, rows).astype(np.int32)
    args = (built.weights, places, caches, tokens)
    c = convert(built.step, args, free=(0, 1), cache=(2,))
    assert c.weights == [rows * ckpt.config.hidden * 4] * 2 and len(c.slices) == 3
    whole, sliced = c.whole(*args), c.run(*args, op_by_op=True)
    for a, b in zip(whole, sliced, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    # The engine's pieces of layer 0, run op by op: the same queries, keys and values.
    free, kept, _ = c.start(*args)
    first = c.slices[0]
    q, between = first.queries(free, kept, None, op_by_op=True)
    k, v, _, _ = first.rest(free, kept, None, between, op_by_op=True)
    spec, layers = ckpt.config.layers[0], built.layers
    hidden = jnp.zeros((rows + 1, ckpt.config.hidden), jnp.float32)
    where = np.stack([np.arange(rows), tokens, at], axis=1).astype(np.int32)
    opened = layers.opened(Piece("embed", spec))
    w, turn = built.weights["layers"][0], places["turns"][0]
    bank = Bank(hidden, hidden, hidden)
    _, x, q2 = opened(where, bank, None, w, built.weights["embed"], turn)
    k2, v2 = layers.keys_values(spec)(x, w, turn)
    assert np.asarray(q).tobytes() == np.asarray(q2).tobytes()
    assert np.asarray(k).tobytes() == np.asarray(k2).tobytes()
    if v2 is not None:
        assert np.asarray(v).tobytes() == np.asarray(v2).tobytes()
