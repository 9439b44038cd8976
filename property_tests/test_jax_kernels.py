"""The rungs of each kernel ladder against each other and against float64; rows on their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.backend import aligned, backend
from jax_impl.kernels import attention, rope
from jax_impl.kernels.dots import dot, round_bf16, split_v1, widen_v0
from jax_impl.kernels.experts import FeedForward, combine, experts_v0, experts_v1
from jax_impl.kernels.router import route, top_k_v0, top_k_v1
from reference.vocab.config import ActivationSpec, RopeSpec, RouterSpec

TILE = 8
SILU = ActivationSpec()
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def bits(a: jax.Array | np.ndarray) -> bytes:
    return np.asarray(a).tobytes()


def in_tiles(
    f: Callable[[np.ndarray], jax.Array], rows: np.ndarray, order: np.ndarray, filler: float
) -> np.ndarray:
    """f over `rows` [B, K] in tiles of TILE, taken in `order`, the last one filled up."""
    out = np.zeros(0)
    for start in range(0, len(rows), TILE):
        now = order[start : start + TILE]
        tile = np.full((TILE, rows.shape[1]), filler, np.float32)
        tile[: len(now)] = rows[now]
        y = np.asarray(f(tile))
        out = np.zeros((len(rows), y.shape[1]), np.float32) if not out.size else out
        out[now] = y[: len(now)]
    return out


def row_changes(f: Callable[[np.ndarray, np.ndarray], np.ndarray], rows: np.ndarray) -> bool:
    """Whether some row of f(rows, order) depends on the number, order or content of the others."""
    alone = np.concatenate([f(rows[i : i + 1], np.arange(1)) for i in range(len(rows))])
    for size in (2, 3, 5, 8, 11, 16, 24):
        order = np.random.default_rng(size).permutation(size)
        if bits(f(rows[:size], order)) != bits(alone[:size]):
            return True
    return False


SHAPES = [(512, 1024), (1024, 512), (300, 1000), (33, 40)]
TYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.mark.rule("JAX-1", "JAX-2", "JAX-4", "NUM-3")
@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.__name__)
def test_a_row_of_a_product_is_on_its_own(compute: str, kind: type) -> None:
    for out, inner in SHAPES:
        w = jnp.asarray(normal(out, inner), kind)
        f = jax.jit(partial(lambda c, w, x: dot(c, x, w), compute, w))
        for filler in (0.0, np.nan):
            assert not row_changes(lambda r, o: in_tiles(f, r, o, filler), normal(24, inner))  # noqa: B023


@pytest.mark.rule("JAX-1", "NUM-3")
def test_a_shape_that_follows_the_batch_is_caught() -> None:
    """Negative control: the same product without tiles does change with the number of rows."""
    changed = []
    for out, inner in SHAPES:
        for w in (jnp.asarray(normal(out, inner)), jnp.asarray(normal(inner, out)).T):
            f = jax.jit(partial(lambda w, x: dot("f32", x, w), w))

            def untiled(rows: np.ndarray, order: np.ndarray, f=f) -> np.ndarray:
                y = np.zeros((len(rows), out), np.float32)  # noqa: B023
                y[order] = np.asarray(f(rows[order]))
                return y

            changed.append(row_changes(untiled, normal(24, inner)))
    assert any(changed)


@pytest.mark.rule("JAX-3", "JAX-4")
def test_products_against_float64() -> None:
    for out, inner in SHAPES:
        x = normal(TILE, inner) * np.exp(2 * normal(TILE, inner))
        w = jnp.asarray(normal(out, inner), jnp.bfloat16)
        w64 = np.asarray(w).astype(np.float64)
        exact = x.astype(np.float64) @ w64.T
        # A float32 sum of n products is within n roundings of sum |x w|; in fact within sqrt(n).
        scale = np.abs(x).astype(np.float64) @ np.abs(w64).T
        ulp = 2.0**-24 * np.sqrt(inner)
        for f in (widen_v0, split_v1):
            assert (np.abs(np.asarray(jax.jit(f)(x, w)) - exact) < 2 * ulp * scale).all(), f
        rounded = np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).astype(np.float64) @ w64.T
        y = np.asarray(jax.jit(round_bf16)(x, w))
        assert (np.abs(y - rounded) < 2 * ulp * scale).all()
        assert np.abs(y - exact).max() > np.abs(y - rounded).max()


@pytest.mark.rule("JAX-3")
def test_the_three_parts_of_a_row_are_the_row() -> None:
    """Times the identity, split_v1 gives every float32 back exactly (above its lost tail)."""
    x = normal(TILE, 64) * np.float32(10.0) ** RNG.integers(-20, 20, (TILE, 64)).astype(np.float32)
    y = jax.jit(split_v1)(x, jnp.eye(64, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(y), x)


@pytest.mark.rule("JAX-6", "ROUTE-2")
def test_top_k_ladder() -> None:
    pool = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -np.inf, 1e-40, 3.0, np.inf], np.float32)
    fast, slow = (jax.jit(f, static_argnums=1) for f in (top_k_v1, top_k_v0))
    for experts, k in ((8, 2), (16, 4), (5, 5)):
        for _ in range(20):
            s = RNG.choice(pool, (64, experts))
            np.testing.assert_array_equal(np.asarray(fast(s, k)), np.asarray(slow(s, k)))
    s = np.array([[-0.0, 0.0, -1.0]], np.float32)
    assert np.asarray(fast(s, 2)).tolist() == [[0, 1]]


@pytest.mark.rule("JAX-7", "ROUTE-1", "ROUTE-3")
def test_route() -> None:
    logits = normal(6, 8)
    logits[1, 3], logits[4, 0] = np.nan, np.inf
    for renormalise in (False, True):
        spec = RouterSpec(renormalise=renormalise, scale=2.0)
        chosen, mix, bad = map(
            np.asarray, jax.jit(partial(route, spec), static_argnums=1)(logits, 3)
        )
        assert bad.tolist() == [False, True, False, False, True, False]
        good = ~bad
        l64 = logits[good].astype(np.float64)
        e = np.exp(l64 - l64.max(-1, keepdims=True))
        best = np.argsort(-l64, axis=-1)[:, :3]
        w = np.take_along_axis(e / e.sum(-1, keepdims=True), best, -1)
        w = w / w.sum(-1, keepdims=True) if renormalise else w
        np.testing.assert_array_equal(chosen[good], best)
        np.testing.assert_allclose(mix[good], 2 * w, rtol=1e-6)


@pytest.mark.rule("JAX-8", "ROUTE-5")
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.__name__)
def test_experts_ladder(kind: type) -> None:
    """Four tiles in one call equal four calls, for a small and a realistic expert."""
    for hidden, wide in ((32, 16), (512, 192)):
        x = np.concatenate([normal(16, hidden), np.full((1, hidden), np.nan, np.float32)])
        handles = tuple(
            FeedForward(
                *(jnp.asarray(normal(*s) / 8, kind) for s in ((wide, hidden),) * 2),
                jnp.asarray(normal(hidden, wide) / 8, kind),
            )
            for _ in range(4)
        )
        where = np.full((4, 2, TILE), 16, np.int32)
        where[:, 1] = 0
        for j in range(4):
            rows = RNG.permutation(16)[: 2 * j + 1]
            where[j, 0, : len(rows)], where[j, 1, : len(rows)] = rows, j
        out = jnp.zeros((17, 4, hidden), jnp.float32)
        one = jax.jit(partial(experts_v0, "f32", SILU))
        slow = out
        for j in (2, 0, 3, 1):
            slow = one(slow, x, where[j], handles[j])
        fast = jax.jit(partial(experts_v1, "f32", SILU))(out, x, where, handles)
        assert bits(fast[:16]) == bits(slow[:16])
        assert np.isfinite(np.asarray(fast[:16])).all()
        assert np.abs(np.asarray(fast[:16])).max() > 0.01


@pytest.mark.rule("ROUTE-5")
def test_combination_is_in_rank_order() -> None:
    outputs = np.array([[[1e8], [1.0], [-1e8]]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert np.asarray(combine(outputs, ones)).item() == 0.0
    assert np.asarray(combine(outputs[:, ::-1].copy(), ones)).item() == 0.0
    assert np.asarray(combine(outputs[:, [0, 2, 1]].copy(), ones)).item() == 1.0


@cache
def row_program(window: int | None) -> Any:
    return jax.jit(partial(attention.attend_row_v0, "f32", scale=0.25, window=window))


def one_row(
    position: int,
    window: int | None,
    heads: slice,
    keys: Any,
    values: Any,
    q: Any,
    k: Any,
    v: Any,
    table: np.ndarray,
) -> np.ndarray:
    """One row's attention with only some of the KV heads in the call."""
    run = row_program(window)
    pools = keys[:, heads], values[:, heads]
    return np.asarray(run(q[heads], k[heads], v[heads], *pools, table, np.int32(position)))


@pytest.mark.rule("JAX-5", "ATTN-2", "ATTN-3", "ATTN-4", "ATTN-5")
@pytest.mark.parametrize("window", [None, 1, 5, 8, 13])
def test_attention_of_a_row(window: int | None) -> None:
    """Against float64 softmax; what lies beyond the visible positions does not matter; heads are
    on their own."""
    block, table = 8, np.array([3, 0, 4, 1], np.int32)
    for position in (0, 1, 7, 8, 9, 16, 27):
        q, k, v = normal(4, 2, 16), normal(4, 16), normal(4, 12)
        past_k, past_v = normal(32, 4, 16), normal(32, 4, 12)
        keys = np.full((6, 4, block, 16), np.nan, np.float32)
        values = np.full((6, 4, block, 12), np.nan, np.float32)
        first = 0 if window is None else max(0, position - window + 1)
        for p in range(first, position):
            keys[table[p // block], :, p % block] = past_k[p]
            values[table[p // block], :, p % block] = past_v[p]
        got = one_row(position, window, slice(0, 4), keys, values, q, k, v, table)
        all_k = np.concatenate([past_k[first:position], k[None]]).astype(np.float64)
        all_v = np.concatenate([past_v[first:position], v[None]]).astype(np.float64)
        s = np.einsum("gmd,pgd->gmp", q.astype(np.float64), all_k) * 0.25
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("gmp,pgd->gmd", p / p.sum(-1, keepdims=True), all_v)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
        for g in range(4):
            part = one_row(position, window, slice(g, g + 1), keys, values, q, k, v, table)
            assert bits(part) == bits(got[g : g + 1])


@pytest.mark.rule("JAX-5")
def test_a_block_without_a_visible_position_changes_no_bit() -> None:
    f = jax.jit(partial(attention.add_block, "f32", scale=0.25))
    q, seen = normal(4, 2, 16), np.zeros(8, bool)
    nan = np.full((4, 8, 16), np.nan, np.float32)
    before = attention.empty(4, 2, 16)
    for _ in range(2):
        after = f(before, q, nan, nan, seen)
        for a, b in zip(before, after, strict=True):
            assert bits(a) == bits(b)
        before = f(before, q, normal(4, 8, 16), normal(4, 8, 16), np.arange(8) < 5)
        before = before._replace(a=before.a.at[0, 0, 0].set(-0.0))


@pytest.mark.rule("JAX-2", "ATTN-1")
def test_writes_of_padding_go_to_the_last_block_as_zeros() -> None:
    pool = jnp.zeros((4, 2, 8, 3), jnp.bfloat16)
    rows = attention.round_kv("bf16", jnp.asarray(normal(TILE, 2, 3)))
    live = np.arange(TILE) < 5
    block = np.where(live, np.arange(TILE) % 3, 3).astype(np.int32)
    offset = np.arange(TILE, dtype=np.int32)
    bad = jnp.where(jnp.asarray(live)[:, None, None], rows, jnp.nan)
    got = np.asarray(jax.jit(attention.write)(pool, block, offset, bad, live)).astype(np.float32)
    want = np.zeros_like(got)
    for t in range(5):
        want[block[t], :, offset[t]] = np.asarray(rows)[t]
    np.testing.assert_array_equal(got, want)


GOLDEN = [  # radians a position and factor, as transformers 5.24 gives them for these settings
    (
        RopeSpec(5e5, 16, "llama3", factor=8.0, original_max_position=8192),
        [1.0, 0.193922758102417, 0.03760603070259094, 0.00729266507551074, 0.0005248460220173001,
         3.428102354519069e-05, 6.647869668086059e-06, 1.289173155782919e-06],
        1.0,
    ),
    (
        RopeSpec(1e4, 16, "linear", factor=4.0),
        [0.25, 0.07905694097280502, 0.02500000037252903, 0.007905694656074047,
         0.0024999999441206455, 0.0007905694656074047, 0.0002500000118743628,
         7.905694656074047e-05],
        1.0,
    ),
    (
        RopeSpec(1e6, 16, "yarn", factor=4.0, original_max_position=4096),
        [1.0, 0.17782793939113617, 0.023717083036899567, 0.0028117066249251366,
         0.0002500000118743628, 4.4456985051510856e-05, 7.905693564680405e-06,
         1.405853367941745e-06],
        1.138629436111989,
    ),
    (
        RopeSpec(1.5e5, 16, "yarn", factor=32.0, original_max_position=4096, truncate=False),
        [1.0, 0.22541800141334534, 0.05081327259540558, 0.006794959306716919,
         0.0004564839182421565, 1.818833698052913e-05, 4.099978468730114e-06,
         9.242089618055616e-07],
        1.3465735902799727,
    ),
    (
        RopeSpec(1e4, 16, "yarn", factor=40.0, original_max_position=4096, mscale=0.707,
                 mscale_all_dim=1.0),
        [1.0, 0.3162277638912201, 0.10000000149011612, 0.023914724588394165, 0.005124999675899744,
         0.0008498621755279601, 2.499999936844688e-05, 7.905694474175107e-06],
        0.9210423553163399,
    ),
]  # fmt: skip


@pytest.mark.rule("NUM-5")
@pytest.mark.parametrize(
    ("spec", "radians", "factor"), GOLDEN, ids=lambda v: getattr(v, "kind", "")
)
def test_scaled_rope_frequencies(spec: RopeSpec, radians: list[float], factor: float) -> None:
    got, amplitude = rope.frequencies(spec)
    np.testing.assert_allclose(got, radians, rtol=3e-7)
    assert amplitude == pytest.approx(factor, rel=1e-12)


@pytest.mark.rule("NUM-6")
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_rotation_of_pairs(interleaved: bool) -> None:
    spec = RopeSpec(1e4, 8, interleaved=interleaved)
    x, position = normal(5, 3, 12), np.array([0, 1, 2, 30, 31])
    y = np.asarray(rope.rotate(spec, jnp.asarray(x), jnp.asarray(rope.turns(spec, position))))
    order = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(8))
    z = x[..., order[:4]] + 1j * x[..., order[4:]]
    angle = position[:, None, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    want = z * np.exp(1j * angle)
    np.testing.assert_allclose(y[..., order[:4]], want.real, atol=3e-6)
    np.testing.assert_allclose(y[..., order[4:]], want.imag, atol=3e-6)
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])


@pytest.mark.rule("JAX-11")
def test_backend_record() -> None:
    """The probe agrees with what is done here by hand, and knows an alignment that is too small."""
    found = backend()
    assert found is backend()
    assert json.loads(json.dumps(found.record()))["platform"] == jax.default_backend()
    if found.platform != "cpu":
        pytest.skip("the rest is what the CPU does")
    assert found.donation
    assert found.zero_copy == 64
    for alignment, in_place in ((64, True), (16, False)):
        host = aligned(4096, alignment)
        assert host.ctypes.data % alignment == 0
        assert host.ctypes.data % (2 * alignment) != 0
        there = jax.block_until_ready(jax.device_put(host))
        assert (there.unsafe_buffer_pointer() == host.ctypes.data) == in_place
