"""Kernels that only some families use: against plain float64 definitions, rung against rung."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.attend import Attend
from jax_impl.kernels import attention, rope
from jax_impl.kernels.dots import dot
from jax_impl.kernels.experts import FeedForward, activate, gated
from jax_impl.kernels.packed import (
    E2M1,
    Fp8Blocks,
    Mxfp4,
    Turned,
    nibbles_v0,
    nibbles_v1,
    wide,
)
from jax_impl.kernels.router import route
from jax_impl.kv import Table, kv_bytes, kv_kinds
from jax_impl.stages import row_turns
from jax_impl.stored import feed_forward_of
from reference.vocab.config import (
    ActivationSpec,
    AttentionSpec,
    DenseSpec,
    ExpertStorage,
    LayerSpec,
    ModelConfig,
    NormSpec,
    PackedSpec,
    RopeSpec,
    RouterSpec,
)

RNG = np.random.default_rng(11)
TILE = 8


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# -- routers


def plain_route(
    spec: RouterSpec, logits: np.ndarray, k: int, bias: np.ndarray | None
) -> tuple[list[int], np.ndarray]:
    """One row in float64: scores, the groups that stay, the k best, their weights."""
    s = 1 / (1 + np.exp(-logits)) if spec.score == "sigmoid" else softmax(logits)
    ranked = s if bias is None else s + bias
    size = len(s) // spec.groups
    groups = [ranked[g * size : (g + 1) * size] for g in range(spec.groups)]
    value = [g.max() if spec.group_score == "max" else np.sort(g)[-2:].sum() for g in groups]
    kept = np.argsort(-np.array(value), kind="stable")[: spec.top_groups]
    left = [e for e in range(len(s)) if e // size in kept]
    chosen = sorted(left, key=lambda e: (-ranked[e], e))[:k]
    w = softmax(logits[chosen]) if spec.score == "topk_softmax" else s[chosen]
    if spec.renormalise:
        w = w / (max(w.sum(), spec.renorm_min) + spec.renorm_eps)
    return chosen, w * spec.scale


ROUTERS = {
    "sigmoid": RouterSpec("sigmoid", renormalise=True, renorm_eps=1e-20, scale=2.5),
    "correction": RouterSpec("sigmoid", renormalise=True, selection_bias=True),
    "groups-of-sums": RouterSpec(
        "sigmoid", renormalise=True, renorm_eps=1e-20, scale=2.5, selection_bias=True, groups=4,
        top_groups=2, group_score="top2_sum",
    ),
    "sums-without-bias": RouterSpec("sigmoid", groups=4, top_groups=2, group_score="top2_sum"),
    "groups-of-best": RouterSpec(scale=16.0, groups=4, top_groups=2),
    "softmax-correction": RouterSpec(renormalise=True, renorm_min=1e-12, selection_bias=True),
    "least-sum": RouterSpec(renormalise=True, renorm_min=0.9),
    "chosen-only": RouterSpec("topk_softmax"),
}  # fmt: skip


@pytest.mark.rule("ROUTE-1", "ROUTE-3", "ROUTE-6", "ROUTE-7")
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str) -> None:
    spec, k = ROUTERS[name], 4
    logits = normal(64, 16)
    # Far below zero: a group put to 0 instead of -inf would win.
    bias = normal(16) - 3.0 if spec.selection_bias else None
    chosen, mix, bad = map(
        np.asarray, jax.jit(partial(route, spec), static_argnums=1)(logits, k, bias)
    )
    assert not bad.any()
    for row in range(64):
        b = None if bias is None else bias.astype(np.float64)
        want, weights = plain_route(spec, logits[row].astype(np.float64), k, b)
        assert chosen[row].tolist() == want
        np.testing.assert_allclose(mix[row], weights, rtol=2e-6)


@pytest.mark.rule("ROUTE-8")
def test_sparsemixer() -> None:
    """Two rounds; what is far from the best of a round, relative to its size, has no share."""
    spec = RouterSpec("sparsemixer", jitter=0.1)
    logits = np.concatenate([normal(60, 8), -np.abs(normal(4, 8)) - 1])
    chosen, mix, bad = map(np.asarray, jax.jit(partial(route, spec), static_argnums=1)(logits, 2))
    dropped = 0
    for row, s in enumerate(logits.astype(np.float64)):
        left = s.copy()
        for turn in range(2):
            e = int(left.argmax())
            near = (left[e] - s) / np.maximum(np.abs(s), left[e]) <= 2 * 0.1
            share = softmax(np.where(near, left, -np.inf))
            dropped += int((~near).sum())
            assert chosen[row, turn] == e
            np.testing.assert_allclose(mix[row, turn], share[e], rtol=2e-6)
            left[e] = -np.inf
    assert not bad.any()
    assert dropped > 100


@pytest.mark.rule("JAX-7", "ROUTE-4")
def test_a_nan_is_told_by_every_router() -> None:
    logits = normal(4, 16)
    logits[2, 5] = np.nan
    for spec in (*ROUTERS.values(), RouterSpec("sparsemixer", jitter=0.1)):
        bias = np.zeros(16, np.float32) if spec.selection_bias else None
        bad = jax.jit(partial(route, spec), static_argnums=1)(logits, 2, bias)[2]
        assert np.asarray(bad).tolist() == [False, False, True, False]


# -- packed weights


def fp8(out: int, inner: int, block: tuple[int, int], scale: Any = jnp.float32) -> Fp8Blocks:
    grid = -(-out // block[0]), -(-inner // block[1])
    values = jnp.asarray(RNG.integers(0, 256, (out, inner), np.uint8)).view(jnp.float8_e4m3fn)
    values = jnp.where(jnp.isnan(values.astype(jnp.float32)), 0, values)
    return Fp8Blocks(values, jnp.asarray(np.exp(normal(*grid)), scale), block)


@pytest.mark.rule("JAX-15", "NUM-18")
@pytest.mark.parametrize("scale", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_fp8_blocks(scale: Any) -> None:
    """Every code, subnormal ones included, times its block's scale; the last blocks are cut."""
    for out, inner, block in ((40, 72, (16, 32)), (16, 32, (16, 32)), (5, 7, (2, 3))):
        w = fp8(out, inner, block, scale)
        values = np.asarray(w.values).astype(np.float32)
        s = np.asarray(w.scales).astype(np.float32)
        want = np.empty((out, inner), np.float32)
        for r in range(out):
            for c in range(inner):
                want[r, c] = values[r, c] * s[r // block[0], c // block[1]]
        np.testing.assert_array_equal(np.asarray(jax.jit(wide)(w)), want)
    assert (np.abs(values[values != 0]).min() < 2.0**-6) or out < 16


@pytest.mark.rule("JAX-15", "NUM-19")
def test_mxfp4() -> None:
    """Both nibbles of every byte under every scale that gives a normal float32; rung by rung."""
    codes = jnp.arange(16, dtype=jnp.uint8)
    slow, fast = np.asarray(jax.jit(nibbles_v0)(codes)), np.asarray(jax.jit(nibbles_v1)(codes))
    assert slow.tobytes() == fast.tobytes()
    assert slow.tolist() == [*E2M1, *(-m for m in E2M1)]
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(4, 0)
    for scale in range(2, 253, 25):
        scales = np.full((4, 16), scale, np.uint8)
        got = np.asarray(jax.jit(wide)(Mxfp4(jnp.asarray(blocks), jnp.asarray(scales))))
        byte = np.arange(256)
        pairs = np.stack([slow[byte & 15], slow[byte >> 4]], -1).astype(np.float64)
        want = np.tile(pairs.reshape(1, 512) * 2.0 ** (scale - 127), (4, 1))
        np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.rule("JAX-15", "JAX-1")
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_products_with_packed_weights(compute: str) -> None:
    """The product with the widened weight, to the bit; a row is on its own."""
    x = normal(TILE, 96)
    mx = Mxfp4(
        jnp.asarray(RNG.integers(0, 256, (24, 3, 16), np.uint8)),
        jnp.asarray(RNG.integers(120, 130, (24, 3), np.uint8)),
    )
    f = jax.jit(partial(dot, compute))
    for w in (fp8(24, 96, (16, 64)), mx):
        got, want = np.asarray(f(x, w)), np.asarray(f(x, wide(w)))
        np.testing.assert_array_equal(got, want)
        for row in range(TILE):
            alone = np.full_like(x, np.nan)
            alone[3] = x[row]
            np.testing.assert_array_equal(np.asarray(f(alone, w))[3], got[row])
    for kind in (jnp.float32, jnp.bfloat16):
        w = jnp.asarray(normal(24, 96), kind)
        got, want = np.asarray(f(x, Turned(w.T))), np.asarray(f(x, w))
        np.testing.assert_allclose(got, want, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(wide(Turned(w.T))), np.asarray(wide(w)))


@pytest.mark.rule("NUM-15", "NUM-7")
def test_clamped_activation() -> None:
    spec = ActivationSpec("clamped_gated", limit=2.0, alpha=1.5)
    g, u = 3 * normal(16, 8), 3 * normal(16, 8)
    a, b = np.minimum(g.astype(np.float64), 2.0), np.clip(u.astype(np.float64), -2.0, 2.0)
    want = (b + 1) * a / (1 + np.exp(-1.5 * a))
    np.testing.assert_allclose(np.asarray(activate(spec, g, u)), want, rtol=2e-6, atol=1e-6)
    assert (g > 2).any() and (g < -2).any() and (np.abs(u) > 2).any()


@pytest.mark.rule("MODEL-13", "JAX-15")
def test_an_expert_however_it_is_stored() -> None:
    """The same expert split, interleaved, turned: within rounding of each other. Packed ones are
    those of their widened matrices."""
    h, i = 32, 64
    gate, up, down = normal(i, h), normal(i, h), normal(h, i)
    bias = {n: normal(s) for n, s in (("gate", i), ("up", i), ("down", h))}
    both, both_bias = np.stack([gate, up], 1).reshape(2 * i, h), None
    both_bias = np.stack([bias["gate"], bias["up"]], 1).reshape(-1)
    spec, x = ActivationSpec("clamped_gated", 7.0, 1.702), normal(TILE, h)
    run = jax.jit(partial(gated, "f32", spec))

    def arrays(*a: np.ndarray) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.asarray, a))

    split = feed_forward_of(
        ExpertStorage(),
        ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
        arrays(gate, up, down, bias["gate"], bias["up"], bias["down"]),
    )
    roles = ("gate_up", "gate_up_bias", "down", "down_bias")
    turned = feed_forward_of(
        ExpertStorage("interleaved", transposed=True),
        roles,
        arrays(both.T.copy(), both_bias, down.T.copy(), bias["down"]),
    )
    straight = feed_forward_of(
        ExpertStorage("interleaved"), roles, arrays(both, both_bias, down, bias["down"])
    )
    want = np.asarray(run(x, split))
    for other in (turned, straight):
        np.testing.assert_allclose(np.asarray(run(x, other)), want, rtol=1e-4, atol=1e-4)

    shapes = ((2 * i, h // 32), (h, i // 32))
    blocks, blocks_down = (RNG.integers(0, 256, (*s, 16), np.uint8) for s in shapes)
    scales, scales_down = (RNG.integers(122, 126, s, np.uint8) for s in shapes)
    packed = feed_forward_of(
        ExpertStorage("interleaved", packed=PackedSpec("mxfp4", (1, 32))),
        ("gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias"),
        arrays(blocks, scales, both_bias, blocks_down, scales_down, bias["down"]),
    )
    assert isinstance(packed.gate, Mxfp4)
    loose = FeedForward(wide(packed.gate), None, wide(packed.down), packed.gate_bias, None,
                        packed.down_bias)  # fmt: skip
    np.testing.assert_array_equal(np.asarray(run(x, packed)), np.asarray(run(x, loose)))


# -- attention


@pytest.mark.rule("ATTN-7", "JAX-5")
def test_sinks() -> None:
    """Against float64: one more logit in the softmax, without a value."""
    block, table, position = 8, np.array([2, 0, 1], np.int32), 19
    q, k, v, sink = normal(2, 3, 16), normal(2, 16), normal(2, 12), 2 * normal(2, 3)
    keys, values = normal(4, 2, block, 16), normal(4, 2, block, 12)
    run = jax.jit(partial(attention.attend_row_v0, "f32", scale=0.25, window=None))
    got = np.asarray(run(q, k, v, keys, values, table, np.int32(position), sink=sink))
    past = [(table[p // block], p % block) for p in range(position)]
    all_k = np.stack([*(keys[b, :, o] for b, o in past), k]).astype(np.float64)
    all_v = np.stack([*(values[b, :, o] for b, o in past), v]).astype(np.float64)
    s = np.einsum("gmd,pgd->gmp", q.astype(np.float64), all_k) * 0.25
    p = softmax(np.concatenate([s, sink[..., None]], -1))[..., :-1]
    np.testing.assert_allclose(got, np.einsum("gmp,pgd->gmd", p, all_v), atol=2e-6)
    without = np.asarray(run(q, k, v, keys, values, table, np.int32(position)))
    assert np.abs(got - without).max() > 0.01


@pytest.mark.rule("JAX-13", "ATTN-4", "ATTN-9")
def test_a_ring_of_blocks_gives_the_bits_of_a_whole_table() -> None:
    """As few blocks as `kv_kinds` gives, each overwritten as the text goes on, tile by tile."""
    window, size, rows, length = 11, 4, 5, 60
    layer = LayerSpec(AttentionSpec("gqa", 2, 2, 8, 8, None, 0.3, window), DenseSpec(8))
    config = ModelConfig("x", 16, 8, (layer,), NormSpec(), False, 64)
    kinds = kv_kinds(config, kv_block=size, kv_blocks=64, max_len=64, tile=rows, texts=2)
    assert len(kinds) == 1
    ring = kinds[0].ring
    assert ring == 4
    assert kinds[0].blocks == 8
    attend = Attend(layer.attention, config.norm, "f32", "f32")

    @jax.jit
    def step(keys: Any, values: Any, rows_of: Any, tables: Any, position: Any) -> Any:
        q, k, v = rows_of
        live = jnp.ones(rows, bool)
        keys, values = attend.write(keys, values, k, v, tables, position, live)
        return keys, values, attend.attend({}, q, k, v, keys, values, tables, position)

    told = []
    for width in (ring, 16, ring - 1):
        table = np.random.default_rng(width).permutation(16)[:width].astype(np.int32)
        keys, values = (jnp.full((17, 2, size, 8), np.nan) for _ in range(2))
        rng = np.random.default_rng(5)
        out = []
        for start in range(0, length, rows):
            position = np.arange(start, start + rows, dtype=np.int32)
            of = [rng.standard_normal((rows, 2, *m, 8), np.float32) for m in ((1,), (), ())]
            tables = np.tile(table, (rows, 1))
            keys, values, y = step(keys, values, of, tables, position)
            out.append(np.asarray(y))
        told.append(np.concatenate(out))
    assert told[0].tobytes() == told[1].tobytes()
    assert np.isfinite(told[0]).all()
    # One block fewer, and a row reads what has been written over.
    assert told[2].tobytes() != told[1].tobytes()


def mla(q_rank: int = 0, interleaved: bool = True) -> AttentionSpec:
    return AttentionSpec(
        "mla", 3, 1, 16, 10, RopeSpec(1e4, 4, interleaved=interleaved), 0.25, qkv_bias=q_rank > 0,
        o_bias=q_rank > 0, q_rank=q_rank, kv_rank=8, rope_dim=4, nope_dim=12,
    )  # fmt: skip


@pytest.mark.rule("ATTN-8", "JAX-5")
@pytest.mark.parametrize("q_rank", [0, 6])
def test_mla_is_attention_with_the_keys_and_values_unfolded(q_rank: int) -> None:
    """Absorbed, over a cache of compressed rows, against the uncompressed form in float64."""
    a, hidden, n = mla(q_rank), 20, 13
    shapes = {
        "kv_a": (12, hidden), "kv_a_norm": (8,), "kv_b": (3 * 22, 8), "o": (hidden, 30),
    } | ({"q": (48, hidden)} if not q_rank else {
        "q_a": (6, hidden), "q_a_bias": (6,), "q_a_norm": (6,), "q_b": (48, 6),
        "kv_a_bias": (12,), "o_bias": (hidden,),
    })  # fmt: skip
    w = {name: jnp.asarray(normal(*s) / np.sqrt(s[-1])) for name, s in shapes.items()}
    x = normal(n, hidden)
    attend = Attend(a, NormSpec(eps=0.5), "f32", "f32")
    turns = rope.turns(a.rope, np.arange(n))  # type: ignore[arg-type]
    q, k, v = attend.rows(w, jnp.asarray(x), jnp.asarray(turns))
    assert k.shape == (n, 1, 12) and v.shape == (n, 1, 8)
    keys = jnp.full((6, 1, 4, 12), np.nan)
    tables = jnp.asarray(np.tile(np.array([3, 1, 0, 4], np.int32), (n, 1)))
    where = jnp.arange(n, dtype=jnp.int32)
    keys, none = attend.write(keys, None, k, v, tables, where, jnp.ones(n, bool))
    assert none is None
    got = np.asarray(attend.output(w, attend.attend(w, q, k, v, keys, None, tables, where)))

    d = {name: np.asarray(t).astype(np.float64) for name, t in w.items()}

    def rms(y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(y: np.ndarray) -> np.ndarray:
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * (turns[:, :2] + 1j * turns[:, 2:])[:, None]
        return np.stack([z.real, z.imag], -1).reshape(y.shape)

    if q_rank:
        query = rms(x @ d["q_a"].T + d["q_a_bias"], d["q_a_norm"]) @ d["q_b"].T
    else:
        query = x @ d["q"].T
    query = query.reshape(n, 3, 16)
    latent = x @ d["kv_a"].T + d.get("kv_a_bias", 0.0)
    pairs = (rms(latent[:, :8], d["kv_a_norm"]) @ d["kv_b"].T).reshape(n, 3, 22)
    key_turned = np.broadcast_to(turned(latent[:, None, 8:]), (n, 3, 4))
    key = np.concatenate([pairs[..., :12], key_turned], -1)
    query = np.concatenate([query[..., :12], turned(query[..., 12:])], -1)
    s = np.einsum("ihd,jhd->hij", query, key) * 0.25
    p = softmax(np.where(np.tri(n, dtype=bool), s, -np.inf))
    out = np.einsum("hij,jhd->ihd", p, pairs[..., 12:]).reshape(n, 30)
    np.testing.assert_allclose(got, out @ d["o"].T + d.get("o_bias", 0.0), atol=5e-6)


@pytest.mark.rule("JAX-13")
def test_bytes_of_pools() -> None:
    """A layer without a window, one with, and MLA, by hand."""
    full = LayerSpec(AttentionSpec("gqa", 4, 2, 8, 6, None, 0.3), DenseSpec(8))
    near = LayerSpec(AttentionSpec("gqa", 4, 2, 8, 6, None, 0.3, 20), DenseSpec(8))
    latent = LayerSpec(mla(), DenseSpec(8))
    config = ModelConfig("x", 16, 8, (full, near, latent), NormSpec(), False, 4096)
    kinds = kv_kinds(config, kv_block=16, kv_blocks=100, max_len=1600, tile=8, texts=4)
    assert [(k.window, k.layers, k.ring, k.blocks) for k in kinds] == [
        (None, (0, 2), 100, 100), (20, (1,), 2, 8),
    ]  # fmt: skip
    assert kinds[1].held(16, 16) == 1 and kinds[1].held(1000, 16) == 2
    assert kinds[0].held(1000, 16) == 63
    row = 2 * (8 + 6)
    assert kv_bytes(config, kinds, 16, "bf16") == 2 * 16 * (101 * row + 101 * 12 + 9 * row)


# -- norms and rope


@pytest.mark.rule("NUM-14")
def test_layer_norm() -> None:
    x, w, b = normal(8, 32) + 3, normal(32), normal(32)
    got = rope.norm(NormSpec("layer", 1e-3), jnp.asarray(x), jnp.asarray(w), jnp.asarray(b))
    y = x.astype(np.float64)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(np.asarray(got), y * w + b, rtol=1e-5, atol=2e-6)


SHORT = tuple(1.0 + 0.25 * i for i in range(8))
LONG = tuple(1.0 + 0.5 * i * i for i in range(8))
LONGROPE = RopeSpec(1e4, 16, "longrope", original_max_position=32, short_factor=SHORT,
                    long_factor=LONG, short_mscale=1.25, long_mscale=1.5)  # fmt: skip
DYNAMIC = RopeSpec(1e4, 16, "dynamic", factor=4.0, original_max_position=32)
BY_PROMPT = [  # radians a position, as transformers 5.24 gives them for a text of this length
    (DYNAMIC, 20, [1.0, 0.3162277638912201, 0.10000000149011612, 0.03162277862429619,
                   0.009999999776482582, 0.003162277862429619, 0.0010000000474974513,
                   0.0003162277862429619], 1.0),
    (DYNAMIC, 33, [1.0, 0.3109514117240906, 0.09669076651334763, 0.030066126957535744,
                   0.009349104017019272, 0.002907116897404194, 0.0009039720753207803,
                   0.0002810913429129869], 1.0),
    (DYNAMIC, 100, [1.0, 0.22925837337970734, 0.052559398114681244, 0.012049682438373566,
                    0.002762490650638938, 0.0006333240889944136, 0.00014519484830088913,
                    3.328713501105085e-05], 1.0),
    (LONGROPE, 32, [1.0, 0.2529822289943695, 0.06666667014360428, 0.01807015761733055,
                    0.004999999888241291, 0.0014054568018764257, 0.00039999998989515007,
                    0.00011499191168695688], 1.25),
    (LONGROPE, 33, [1.0, 0.21081849932670593, 0.03333333507180214, 0.005749595817178488,
                    0.0011111111380159855, 0.0002342427906114608, 5.263157800072804e-05,
                    1.2401089406921528e-05], 1.5),
]  # fmt: skip


@pytest.mark.rule("NUM-13")
@pytest.mark.parametrize(
    ("spec", "length", "radians", "factor"), BY_PROMPT, ids=lambda v: getattr(v, "kind", "")
)
def test_ropes_that_follow_the_prompt(
    spec: RopeSpec, length: int, radians: list[float], factor: float
) -> None:
    got, amplitude = rope.frequencies(spec, length)
    np.testing.assert_allclose(got, radians, rtol=1e-6)
    assert amplitude == factor


@pytest.mark.rule("JAX-14", "NUM-13")
def test_a_row_turns_by_its_own_prompt() -> None:
    """Angles hang on position and prompt, not on who else is there; rows of padding are zero."""
    tables = [Table((), n) for n in (20, 33, 100, 33, 20)]
    positions = [5, 40, 7, 2, 5]
    together = row_turns(DYNAMIC, positions, tables, 8)
    assert not together[5:].any()
    for i, (table, p) in enumerate(zip(tables, positions, strict=True)):
        alone = row_turns(DYNAMIC, [p], [table], 8)[0]
        assert alone.tobytes() == together[i].tobytes()
        assert alone.tobytes() == rope.turns(DYNAMIC, np.array([p]), table.prompt)[0].tobytes()
    assert together[0].tobytes() == together[4].tobytes()
