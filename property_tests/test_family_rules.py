"""The rules that only some families use: each shown to matter, each against a plainer version."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import golden
from oracle.family_variants import by_name
from oracle.golden import TOLERANCE, Answer, judge
from oracle.tiny import tiny_config, write_checkpoint
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.numerics.attention import LayerKV, attend
from reference.numerics.experts import FeedForward, clamped, feed_forward
from reference.numerics.model import Model
from reference.numerics.naive import naive_logits, remembering, run_chunk
from reference.numerics.norms import layer_norm
from reference.numerics.packed import FP4_VALUES, e4m3_to_f32, unpack_fp8, unpack_mxfp4
from reference.numerics.rope import amplitude, inverse_frequencies
from reference.numerics.router import route, sparsemixer
from reference.vocab.config import (
    ActivationSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    PackedSpec,
    RopeSpec,
    RouterSpec,
)
from reference.vocab.errors import RequestFailed
from reference.vocab.ids import ExpertKey

Mutate = Callable[[ModelConfig], ModelConfig]


def layers(change: Callable[[LayerSpec], LayerSpec]) -> Mutate:
    return lambda c: replace(c, layers=tuple(change(s) for s in c.layers))


def attn(**changes: Any) -> Mutate:
    return layers(lambda s: replace(s, attention=replace(s.attention, **changes)))


def rope(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        assert s.attention.rope is not None
        return replace(s, attention=replace(s.attention, rope=replace(s.attention.rope, **changes)))

    return layers(change)


def moe(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        ff = s.feed_forward
        return replace(s, feed_forward=replace(ff, **changes)) if isinstance(ff, MoeSpec) else s

    return layers(change)


def router(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        ff = s.feed_forward
        if not isinstance(ff, MoeSpec):
            return s
        return replace(s, feed_forward=replace(ff, router=replace(ff.router, **changes)))

    return layers(change)


def shared(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        ff = s.feed_forward
        if not isinstance(ff, MoeSpec) or ff.shared is None:
            return s
        return replace(s, feed_forward=replace(ff, shared=replace(ff.shared, **changes)))

    return layers(change)


def packed(kind: Any, block: tuple[int, int]) -> Mutate:
    def change(c: ModelConfig) -> ModelConfig:
        return replace(c, packed=PackedSpec(kind, block))

    return change


def no_windows_at(i: int) -> Mutate:
    def change(c: ModelConfig) -> ModelConfig:
        s = c.layers[i]
        s = replace(s, attention=replace(s.attention, window=None))
        return replace(c, layers=(*c.layers[:i], s, *c.layers[i + 1 :]))

    return change


WRONG: list[tuple[str, str, Mutate]] = [
    ("mistral-linear", "no scaling", rope(kind="default")),
    ("mistral-dynamic", "the length of no prompt", rope(kind="default")),
    ("mistral-dynamic", "another limit", rope(original_max_position=20)),
    ("mistral-llama3", "like linear", rope(kind="linear")),
    ("mistral-llama3", "another low factor", rope(low_freq_factor=0.4)),
    ("mistral-yarn", "no amplitude", rope(attention_factor=1.0)),
    ("mistral-yarn-not-truncated", "truncated", rope(truncate=True)),
    ("mistral-yarn-betas", "usual beta_fast", rope(beta_fast=32.0)),
    ("mistral-yarn-mscales", "one mscale", rope(mscale=None)),
    ("mistral-yarn-factor-stated", "factor by rule", rope(attention_factor=None)),
    ("mistral-longrope", "short factors only", rope(long_factor=())),
    ("mistral-longrope", "always short", rope(original_max_position=40)),
    ("phimoe-longrope", "long factors too", rope(long_factor=(1.2, 2.0, 3.5, 6.0))),
    ("phimoe-longrope", "always the short factor", rope(long_mscale=1.1)),
    ("qwen3-window-from-1", "no window", attn(window=None)),
    ("qwen2_moe-window", "no window in layer 2", no_windows_at(2)),
    ("gpt_oss-plain", "windows in all layers", attn(window=7)),
    ("gpt_oss-plain", "no sinks", attn(sinks=False)),
    ("gpt_oss-plain", "no clamping", moe(activation=ActivationSpec("clamped_gated", 1e6, 1.702))),
    ("gpt_oss-plain", "silu's alpha", moe(activation=ActivationSpec("clamped_gated", 0.8, 1.0))),
    ("gpt_oss-plain", "silu", moe(activation=ActivationSpec())),
    ("gpt_oss-plain", "no bias of the router", router(bias=False)),
    ("gpt_oss-plain", "softmax over all", router(score="softmax")),
    ("olmoe-plain", "renormalised", router(renormalise=True)),
    ("olmoe-plain", "norm of each head", attn(qk_norm="none")),
    ("olmoe-clipped", "not clamped", attn(clip=None)),
    ("qwen2_moe-plain", "no shared expert", moe(shared=None)),
    ("qwen2_moe-plain", "shared expert without gate", shared(gated=False)),
    ("qwen2_moe-plain", "no bias on q, k, v", attn(qkv_bias=False)),
    ("deepseek_v2-plain", "no groups", router(groups=1, top_groups=1)),
    ("deepseek_v2-plain", "weights not scaled", router(scale=1.0)),
    ("deepseek_v2-plain", "renormalised", router(renormalise=True)),
    ("deepseek_v2-plain", "half-split pairs", rope(interleaved=False)),
    ("deepseek_v2-yarn", "scale of the plain width", attn(scale=10**-0.5)),
    ("deepseek_v2-plain", "the model's eps", attn(latent_eps=1e-2)),
    ("deepseek_v2-biases", "no biases", attn(qkv_bias=False)),
    ("deepseek_v2-biases", "no bias of shared experts", shared(bias=False)),
    ("deepseek_v3-plain", "groups by their best", router(group_score="max")),
    ("deepseek_v3-plain", "softmax", router(score="softmax")),
    ("deepseek_v3-plain", "no correction", router(selection_bias=False)),
    ("deepseek_v3-half-split", "adjacent pairs", rope(interleaved=True)),
    ("deepseek_v3-not-renormalised", "renormalised", router(renormalise=True)),
    ("deepseek_v3-fp8", "another block", packed("fp8_block", (13, 20))),
    ("qwen3-fp8", "block from the grid", packed("fp8_block", (11, 16))),
    ("glm4_moe-plain", "the whole head turned", rope(dims=8)),
    ("glm4_moe-plain", "adjacent pairs", rope(interleaved=True)),
    ("glm4_moe-normed", "no norm of heads", attn(qk_norm="none")),
    ("minimax_m2-plain", "no norm", attn(qk_norm="none")),
    ("ernie4_5_moe-plain", "half-split pairs", rope(interleaved=False)),
    ("ernie4_5_moe-plain", "not renormalised", router(renormalise=False)),
    ("ernie4_5_moe-least-sum", "no least sum", router(renorm_min=0.0)),
    ("granitemoe-plain", "embedding not scaled", lambda c: replace(c, embed_scale=1.0)),
    ("granitemoe-plain", "branches not scaled", lambda c: replace(c, residual_scale=1.0)),
    ("granitemoe-plain", "logits not scaled", lambda c: replace(c, logits_scale=1.0)),
    ("granitemoe-plain", "usual scale of scores", attn(scale=8**-0.5)),
    ("phimoe-plain", "another jitter", router(jitter=0.01)),
    ("phimoe-plain", "softmax", router(score="softmax")),
    ("phimoe-plain", "no bias of the head", lambda c: replace(c, head_bias=False)),
]


def error_of(name: str, path: Path, mutate: Mutate) -> float:
    """The error of the logits of the longest prompt under a changed description."""
    ckpt = Checkpoint.open(by_name(name).write(path))
    ckpt.config = mutate(ckpt.config)
    want = golden.golden(name)
    got = Answer(naive_logits(ckpt, want.prompts[-1], kv_block=16), want.answers[-1].tokens)
    return judge(want.answers[-1:], [got]).error


@pytest.mark.rule(
    "NUM-13", "NUM-15", "NUM-16", "NUM-17", "NUM-18", "ATTN-7", "ATTN-8", "ROUTE-3", "ROUTE-6",
    "ROUTE-7", "ROUTE-8",
)  # fmt: skip
@pytest.mark.parametrize(("name", "what", "mutate"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_a_wrong_description_is_caught(
    name: str, what: str, mutate: Mutate, tmp_path: Path
) -> None:
    assert error_of(name, tmp_path, mutate) > 10 * TOLERANCE, what


# Packed formats


@pytest.mark.rule("NUM-18")
def test_every_fp8_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = e4m3_to_f32(codes)
    assert got.dtype == np.float32
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.rule("NUM-18")
@given(
    out=st.integers(1, 30), inner=st.integers(1, 30), rows=st.integers(1, 16),
    cols=st.integers(1, 16), bf16=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_fp8_blocks_one_number_at_a_time(
    out: int, inner: int, rows: int, cols: int, bf16: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 127, (out, inner)).astype(np.uint8)
    grid = rng.uniform(0.01, 2, (-(-out // rows), -(-inner // cols))).astype(np.float32)
    stored = grid.astype(ml_dtypes.bfloat16).view(np.uint16) if bf16 else grid
    exact = stored.view(ml_dtypes.bfloat16).astype(np.float32) if bf16 else grid
    got = unpack_fp8(codes, stored, (rows, cols))
    wide = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for i, j in itertools.product(range(out), range(inner)):
        assert got[i, j] == wide[i, j] * exact[i // rows, j // cols]


@pytest.mark.rule("NUM-19")
def test_every_mxfp4_byte_and_scale() -> None:
    assert np.array_equal(
        np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32), FP4_VALUES
    )
    codes = np.arange(256, dtype=np.uint8).reshape(16, 1, 16)
    for scale in (0, 1, 100, 127, 128, 200, 251):
        got = unpack_mxfp4(codes, np.full((16, 1), scale, np.uint8)).reshape(256, 2)
        for byte in range(256):
            for place, nibble in enumerate((byte & 15, byte >> 4)):
                sign = -1.0 if nibble & 8 else 1.0
                want = sign * float(FP4_VALUES[nibble & 7]) * 2.0 ** (scale - 127)
                assert float(got[byte, place]) == want
                assert np.signbit(got[byte, place]) == (nibble >= 8)


@pytest.mark.rule("NUM-20")
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4-wide", "deepseek_v3-fp8", "minimax_m2-fp8"])
def test_a_slot_holds_packed_bytes(name: str, tmp_path: Path) -> None:
    """What the budget counts is what the slots hold: no unpacked copy is kept beside it."""
    path = by_name(name).write(tmp_path)
    with ReferenceEngine.open(path, memory="100%", ignore_eos=True, keep_log=True) as engine:
        engine.submit(Request("a", tuple(range(3, 30)), 3)).result(60)
        ckpt = engine.checkpoint
        held = [slot for slot in engine.executor.slots if slot is not None]
        assert len(held) > 4
        for key, tensors in held:
            refs = ckpt.expert(*key)
            assert [t.nbytes for t in tensors] == [r.nbytes for r in refs]
            assert all(t.dtype == np.uint8 or r.dtype in ("F32", "BF16")
                       for t, r in zip(tensors, refs, strict=True))  # fmt: skip
            assert sum(t.nbytes for t in tensors) <= ckpt.expert_bytes()
        loads = [r for r in engine.records if r.get("action") == "Load"]
        assert engine.totals()["bytes"] == len(loads) * ckpt.expert_bytes()


@pytest.mark.rule("NUM-20")
def test_unpacking_keeps_one_expert_at_a_time(tmp_path: Path) -> None:
    """Peak memory of a whole step stays below packed experts and a few unpacked ones."""
    raw = tiny_config(
        "gpt_oss", quantization_config={"quant_method": "mxfp4"}, hidden_size=128,
        intermediate_size=256, num_local_experts=32, num_hidden_layers=1, num_experts_per_tok=8,
    )  # fmt: skip
    ckpt = Checkpoint.open(write_checkpoint(tmp_path, raw, dtype="BF16"))
    model = Model(ckpt)
    keys = [ExpertKey(0, e) for e in range(32)]
    slots = {key: model.read_expert(key) for key in keys}
    stored, wide = ckpt.experts_bytes, 3 * 128 * 256 * 4
    assert sum(t.nbytes for tensors in slots.values() for t in tensors) == stored
    assert stored < 32 * wide / 6
    tracemalloc.start()
    run_chunk(model, model.start(), list(range(1, 20)), 0, slots.__getitem__, "last")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * wide, (peak, wide)


# Attention


@pytest.mark.rule("ATTN-9")
@pytest.mark.parametrize("name", ["mistral-window", "gpt_oss-plain", "qwen2_moe-window"])
def test_blocks_out_of_every_window_are_dropped(name: str, tmp_path: Path) -> None:
    model = Model(Checkpoint.open(by_name(name).write(tmp_path)), kv_block=4)
    experts = remembering(model)
    whole, kept = model.start(), model.start(drop=False)
    tokens = [(7 * i + 3) % 64 for i in range(60)]
    most = 0
    for p, token in enumerate(tokens):
        a = run_chunk(model, whole, [token], p, experts)
        b = run_chunk(model, kept, [token], p, experts)
        assert a is not None and b is not None
        assert a.tobytes() == b.tobytes()
        most = max(most, whole.nbytes)
    dropped = 0
    for spec, kv in zip(model.config.layers, whole.layers, strict=True):
        live = sum(k.shape[1] > 0 for k in kv.keys)
        window = spec.attention.window
        assert live == (15 if window is None else len(range((59 - window + 1) // 4, 15)))
        dropped += 15 - live
    assert dropped > 0
    each = kept.nbytes // (15 * len(whole.layers))
    assert whole.nbytes == kept.nbytes - dropped * each
    assert most <= whole.nbytes + len(whole.layers) * each


@pytest.mark.rule("ATTN-7")
def test_a_sink_takes_its_share_of_the_softmax() -> None:
    rng = np.random.default_rng(0)
    kv = LayerKV(2, 4, 4, 8, np.float32)
    k, v = rng.standard_normal((2, 20, 2, 4)).astype("f4")
    for p in range(20):
        kv.write(p, k[p], v[p])
    q, sinks = rng.standard_normal((6, 4)).astype("f4"), rng.standard_normal(6).astype("f4")
    got = attend(q, kv, 19, 7, 0.5, sinks)
    for n in range(6):
        scores = np.append(k[13:, n // 3].astype("f8") @ q[n] * 0.5, sinks[n])
        share = np.exp(scores - scores.max())
        want = (share / share.sum())[:-1] @ v[13:, n // 3]
        assert np.allclose(got[n], want, rtol=1e-5, atol=1e-6)


@pytest.mark.rule("ATTN-8")
def test_a_compressed_key_is_all_that_is_cached(tmp_path: Path) -> None:
    ckpt = Checkpoint.open(by_name("deepseek_v3-plain").write(tmp_path))
    model = Model(ckpt, kv_block=8)
    state = model.start()
    run_chunk(model, state, list(range(20)), 0)
    # rank 16 and 4 turned entries of one head, in float32; three blocks of eight, two layers
    assert state.nbytes == 2 * 3 * 8 * (16 + 4) * 4
    a = model.config.layers[0].attention
    assert (a.cache_heads, a.cache_key_dim, a.cache_value_dim) == (1, 20, 0)
    assert (a.head_dim, a.v_head_dim, a.kv_heads) == (10, 10, 1)


# Norms, activations, routers, ropes


@pytest.mark.rule("NUM-14")
def test_layer_norm_in_float64() -> None:
    rng = np.random.default_rng(2)
    x, w, b = (rng.standard_normal(40) * 3 + 1 for _ in range(3))
    want = (x - x.mean()) / np.sqrt(x.var() + 1e-3) * w + b
    assert np.allclose(layer_norm(x, w, b, 1e-3), want, rtol=1e-12)
    single = layer_norm(x.astype("f4"), w.astype("f4"), b.astype("f4"), 1e-3)
    assert single.dtype == np.float32
    assert np.allclose(single, want, rtol=1e-4, atol=1e-5)


@pytest.mark.rule("NUM-15")
def test_the_gate_is_clamped_from_above_only() -> None:
    spec = ActivationSpec("clamped_gated", 2.0, 1.5)
    gate, up = np.array([-9.0, 0.5, 9.0, -9.0]), np.array([9.0, -9.0, 1.0, -0.5])
    want = []
    for g, u in zip(gate, up, strict=True):
        g, u = min(g, 2.0), max(-2.0, min(u, 2.0))
        want.append((u + 1) * g / (1 + np.exp(-1.5 * g)))
    assert np.allclose(clamped(gate, up, spec), want, rtol=1e-12)
    eye = np.eye(4)
    biased = FeedForward(eye, eye, eye, (gate, up, np.arange(4.0)))
    assert np.allclose(feed_forward(biased, np.zeros(4), spec), want + np.arange(4.0))


@pytest.mark.rule("ROUTE-2", "ROUTE-6", "ROUTE-7")
@given(data=st.data())
def test_grouped_choice_by_counting(data: st.DataObject) -> None:
    """Dyadic scores with many ties: every expert's rank is counted."""
    groups, width = data.draw(st.sampled_from([(1, 8), (2, 4), (4, 2), (3, 3)]))
    n = groups * width
    top_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, top_groups * width))
    by_sum = data.draw(st.booleans())
    draw = st.lists(st.integers(-8, 8), min_size=n, max_size=n)
    logits = np.array(data.draw(draw), np.float32) / 8
    bias = np.array(data.draw(draw), np.float32) / 8 if data.draw(st.booleans()) else None
    spec = RouterSpec(
        score="sigmoid", selection_bias=bias is not None, groups=groups, top_groups=top_groups,
        group_score="top2_sum" if by_sum else "max",
    )  # fmt: skip
    experts, weights = route(logits, spec, k, 0, bias)
    scores = np.float32(1) / (np.float32(1) + np.exp(-logits))
    by = list(scores + bias if bias is not None else scores if by_sum and groups > 1 else logits)
    best = []
    for g in range(groups):
        inside = sorted(by[g * width : (g + 1) * width], reverse=True)
        best.append((-(inside[0] + inside[1]) if by_sum else -inside[0], g))
    allowed = {g for _, g in sorted(best)[:top_groups]} if groups > 1 else {0}
    order = sorted((e for e in range(n) if e // width in allowed), key=lambda e: (-by[e], e))
    assert experts.tolist() == order[:k]
    assert weights.tobytes() == scores[experts].tobytes()


@pytest.mark.rule("ROUTE-8")
@given(
    st.lists(st.integers(-16, 16), min_size=3, max_size=9), st.sampled_from([0.01, 0.1, 0.25, 0.5])
)
def test_sparsemixer_by_hand(numbers: list[int], jitter: float) -> None:
    s = [x / 8 for x in numbers]
    experts, weights = sparsemixer(np.array(s), 2, jitter)
    left = dict(enumerate(s))
    for expert, weight in zip(experts.tolist(), weights, strict=True):
        m = max(left.values())
        assert expert == min(e for e in left if left[e] == m)
        near = []
        for x in left.values():
            bound = max(abs(x), m)
            near += [] if bound and (m - x) / bound > 2 * jitter else [x]
        assert weight == pytest.approx(1 / sum(np.exp(x - m) for x in near), rel=1e-12)
        del left[expert]


@pytest.mark.rule("ROUTE-4")
@pytest.mark.parametrize("score", ["sigmoid", "sparsemixer", "topk_softmax"])
def test_a_nan_score_fails_with_every_router(score: Any) -> None:
    with pytest.raises(RequestFailed, match="layer 3"):
        route(np.array([0.0, np.nan, 1.0]), RouterSpec(score=score), 2, 3)


@pytest.mark.rule("NUM-13")
def test_ropes_where_they_begin_and_end() -> None:
    base = RopeSpec(theta=1e4, dims=16)
    plain = inverse_frequencies(base)
    linear = inverse_frequencies(replace(base, kind="linear", factor=4.0))
    assert np.allclose(linear, plain / 4)
    dynamic = replace(base, kind="dynamic", factor=4.0, original_max_position=32)
    assert np.array_equal(inverse_frequencies(dynamic, 32), plain)
    assert (inverse_frequencies(dynamic, 33)[1:] < plain[1:]).all()
    yarn = replace(base, kind="yarn", factor=4.0, original_max_position=256)
    mixed = inverse_frequencies(yarn)
    assert mixed[0] == plain[0]
    assert mixed[-1] == plain[-1] / 4
    assert amplitude(yarn) == pytest.approx(0.1 * np.log(4) + 1)
    assert amplitude(replace(yarn, factor=0.5)) == 1.0
    assert amplitude(replace(yarn, mscale=1.0, mscale_all_dim=1.0)) == 1.0
    assert amplitude(replace(yarn, mscale=1.0, mscale_all_dim=0.0)) == amplitude(yarn)
    llama3 = replace(yarn, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = inverse_frequencies(llama3)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    for spec, follows in ((base, False), (yarn, False), (dynamic, True)):
        assert spec.by_prompt == follows


@pytest.mark.rule("NUM-13", "NUM-9")
def test_angles_follow_the_prompt_and_not_the_text(tmp_path: Path) -> None:
    """A long prompt in chunks of any size, and the text after it, have one set of angles."""
    ckpt = Checkpoint.open(by_name("mistral-dynamic").write(tmp_path))
    model = Model(ckpt, kv_block=8)
    tokens = [(5 * i + 1) % 64 for i in range(40)]
    want = run_chunk(model, model.start(30), tokens, 0)
    state, parts = model.start(30), []
    for first in range(0, 40, 7):
        parts.append(run_chunk(model, state, tokens[first : first + 7], first))
    assert np.concatenate(parts).tobytes() == want.tobytes()  # type: ignore[union-attr,arg-type]
    other = run_chunk(model, model.start(40), tokens, 0)
    assert np.abs(other - want).max() > 1e-3  # type: ignore[operator]
