"""NUM, ATTN and ROUTE: each rule by itself. Against transformers: test_goldens.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.tiny import tiny_config, write_checkpoint
from oracle.variants import by_name
from reference.files.checkpoint import Checkpoint
from reference.numerics import attention
from reference.numerics.attention import LayerKV, attend, merge, part
from reference.numerics.dot import by_row, matvec
from reference.numerics.experts import FeedForward, combine, feed_forward, silu
from reference.numerics.formats import bf16_to_f32, f16_to_f32, f32_to_bf16, round_kv, widen
from reference.numerics.model import Model
from reference.numerics.naive import naive_greedy, naive_logits, remembering, run_chunk
from reference.numerics.norms import rms_norm
from reference.numerics.rope import inverse_frequencies, rotate, rotation
from reference.numerics.router import choose, route
from reference.vocab.config import (
    ActivationSpec,
    ExpertStorage,
    ModelConfig,
    MoeSpec,
    NormSpec,
    PackedSpec,
    RopeSpec,
    RouterSpec,
)
from reference.vocab.errors import RequestFailed, Unsupported
from reference.vocab.ids import ExpertKey

ALL_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def opened(path: Path, family: str, **config: Any) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(path, tiny_config(family, **config), seed=3))


# Formats


@pytest.mark.rule("NUM-1")
def test_every_f16_and_bf16_number_is_widened_to_itself() -> None:
    half = ALL_16.view(np.float16)
    wide = f16_to_f32(half)
    number = ~np.isnan(half)
    assert same_bits(wide[number], half[number].astype(np.float32))
    assert np.isnan(wide[~number]).all()
    brain = bf16_to_f32(ALL_16)
    # A BF16 number is sign, 8 bits of exponent, 7 of fraction: worked out, not cast.
    bits = ALL_16.astype(np.int64)
    sign = np.where(bits >> 15, -1.0, 1.0)
    exponent, fraction = (bits >> 7) & 255, bits & 127
    value = sign * np.where(
        exponent == 0, fraction * 2.0**-133, (128 + fraction) * 2.0 ** (exponent - 134.0)
    )
    finite = exponent != 255
    assert same_bits(brain[finite], value[finite].astype(np.float32))
    assert np.isinf(brain[~finite & (fraction == 0)]).all()
    assert np.isnan(brain[~finite & (fraction != 0)]).all()


@pytest.mark.rule("NUM-1")
def test_widening_is_by_storage_type() -> None:
    x = normal(0, 5, 7)
    assert widen(x) is x
    assert same_bits(widen(x[:, ::2]), np.ascontiguousarray(x[:, ::2]))
    assert same_bits(widen(f32_to_bf16(x), np.float64), bf16_to_f32(f32_to_bf16(x)).astype("f8"))
    assert widen(x.astype(np.float16)).dtype == np.float32
    for other in (np.int32, np.uint8, np.int16):
        with pytest.raises(TypeError, match="no widening"):
            widen(np.zeros(3, other))


@pytest.mark.rule("NUM-2")
def test_bf16_rounds_to_nearest_even() -> None:
    """Every BF16 number, its upper neighbour's midpoint, and one float32 to each side of that."""
    low = ALL_16[((ALL_16 >> 7) & 255) != 255]
    middle = (low.astype(np.uint32) << 16) | 0x8000
    assert np.array_equal(f32_to_bf16(bf16_to_f32(low)), low)
    assert np.array_equal(f32_to_bf16((middle - 1).view(np.float32)), low)
    assert np.array_equal(f32_to_bf16((middle + 1).view(np.float32)), low + 1)
    assert np.array_equal(f32_to_bf16(middle.view(np.float32)), low + (low & 1))
    for nan in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000):
        value = np.array([nan], np.uint32).view(np.float32)
        assert np.isnan(bf16_to_f32(f32_to_bf16(value))).all()


@pytest.mark.rule("NUM-2", "ATTN-1")
def test_kv_rounding() -> None:
    x = normal(1, 400) * np.float32(100)
    assert same_bits(round_kv(x, "f32"), x)
    assert same_bits(round_kv(x, "f16"), x.astype(np.float16).astype(np.float32))
    assert same_bits(round_kv(x, "bf16"), bf16_to_f32(f32_to_bf16(x)))
    assert round_kv(x.astype(np.float64) / 3, "bf16").dtype == np.float64
    assert np.isinf(round_kv(np.array([1e6], np.float32), "f16")).all()


# Products by row


@st.composite
def rows_and_matrix(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    t, o, i = draw(st.integers(1, 9)), draw(st.integers(1, 70)), draw(st.integers(1, 130))
    seed = draw(st.integers(0, 1 << 20))
    return normal(seed, t, i), normal(seed + 1, o, i)


@pytest.mark.rule("NUM-3")
@given(rows_and_matrix(), st.integers(1, 15))
def test_a_product_does_not_depend_on_the_batch_or_on_where_it_lies(
    xw: tuple[np.ndarray, np.ndarray], shift: int
) -> None:
    x, w = xw
    whole = by_row(lambda row: matvec(w, row), x)
    for t in range(len(x)):
        assert same_bits(matvec(w, x[t]), whole[t])
        assert same_bits(by_row(lambda row: matvec(w, row), x[t:]), whole[t:])
    # The same matrix at another address, as in another slot.
    room = np.empty(w.nbytes + 64 + 4 * shift, np.uint8)
    start = -room.ctypes.data % 64 + 4 * shift
    moved = room[start : start + w.nbytes].view(np.float32).reshape(w.shape)
    moved[:] = w
    assert same_bits(matvec(moved, x[0]), whole[0])
    assert same_bits(matvec(w, np.stack([x[0], x[0]], axis=1)[:, 0]), whole[0])


@pytest.mark.rule("NUM-3")
def test_a_product_is_right() -> None:
    for n in (1, 7, 64, 1000, 9001):
        w, x = normal(n, 3, n), normal(n + 1, n)
        exact = w.astype(np.float64) @ x
        # n rounded products and additions in units of 2^-24, with room for no more.
        bound = n * 2.0**-24 * (np.abs(w).astype(np.float64) @ np.abs(x))
        assert (np.abs(matvec(w, x) - exact) <= bound).all()
        assert matvec(w.astype(np.float64), x.astype(np.float64)).dtype == np.float64


@pytest.mark.rule("NUM-3", "NUM-7")
@given(st.integers(0, 1000), st.integers(1, 6))
def test_an_expert_does_not_depend_on_the_batch(seed: int, t: int) -> None:
    gate, up, down, x = normal(seed, 12, 20), normal(1, 12, 20), normal(2, 20, 12), normal(3, t, 20)
    whole = by_row(lambda row: feed_forward(FeedForward(gate, up, down), row), x)
    back = by_row(lambda row: feed_forward(FeedForward(gate, up, down), row), x[::-1])[::-1]
    assert same_bits(whole, np.ascontiguousarray(back))
    a = x.astype(np.float64) @ gate.T
    exact = (a / (1 + np.exp(-a)) * (x.astype(np.float64) @ up.T)) @ down.T
    assert np.abs(whole - exact).max() <= 1e-5 * (1 + np.abs(exact).max())


@pytest.mark.rule("NUM-7")
def test_silu_far_out() -> None:
    x = np.array([-1e4, -80, 0, 100, 1e4], np.float32)
    assert silu(x).tolist() == [0, pytest.approx(-80 * np.exp(-80.0), rel=1e-6), 0, 100, 1e4]


@pytest.mark.rule("NUM-4")
@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_rms_norm(seed: int, heads: int, eps: float) -> None:
    x, w = normal(seed, heads, 24), normal(seed + 1, 24)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + np.float32(eps)) * w
    got = rms_norm(x, w, eps)
    assert got.dtype == np.float32
    assert np.abs(got - exact).max() <= 1e-6 * np.abs(exact).max()
    assert same_bits(rms_norm(x[0], w, eps), got[0])


@pytest.mark.rule("NUM-4")
def test_rms_norm_of_nothing_is_nothing() -> None:
    assert rms_norm(np.zeros(8, np.float32), np.ones(8, np.float32), 1e-5).tolist() == [0.0] * 8


# Rope


@pytest.mark.rule("NUM-5")
def test_frequencies_and_angles() -> None:
    f = inverse_frequencies(RopeSpec(theta=1e4, dims=8))
    assert f.dtype == np.float32
    assert f.tolist() == [np.float32(v) for v in (1, 1e-1, 1e-2, 1e-3)]
    for dtype in (np.float32, np.float64):
        cos, sin = rotation(f, 777, dtype)
        angle = (np.float32(777) * f).astype(np.float64)  # rounded to float32 in both modes
        assert same_bits(cos, np.cos(angle).astype(dtype))
        assert same_bits(sin, np.sin(angle).astype(dtype))
    assert rotation(f, 0, np.float32)[0].tolist() == [1.0] * 4


@pytest.mark.rule("NUM-6")
def test_the_pairs_of_both_kinds() -> None:
    cos, sin = np.array([0.5, 2.0], np.float32), np.array([0.25, 4.0], np.float32)
    x = np.array([[1, 2, 4, 8, 16, 32]], np.float32)  # dims 4 of 6
    # pairs (1, 4) and (2, 8)
    assert rotate(x, cos, sin, False).tolist() == [[-0.5, -28, 2.25, 24, 16, 32]]
    # pairs (1, 2) and (4, 8)
    assert rotate(x, cos, sin, True).tolist() == [[0, 1.25, -24, 32, 16, 32]]


@pytest.mark.rule("NUM-5", "NUM-6")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [16, 8])
def test_rope_products_depend_on_the_distance_only(interleaved: bool, dims: int) -> None:
    f = inverse_frequencies(RopeSpec(theta=100.0, dims=dims))
    q, k = normal(1, 1, 16).astype(np.float64), normal(2, 1, 16).astype(np.float64)

    def product(i: int, j: int) -> float:
        a = rotate(q, *rotation(f, i, np.float64), interleaved)
        return float((a @ rotate(k, *rotation(f, j, np.float64), interleaved).T)[0, 0])

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-5)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


# Attention


def filled(n: int, g: int, d: int, block: int, seed: int = 0) -> LayerKV:
    """A layer's KV with n random positions."""
    kv = LayerKV(g, d, d, block, np.float32)
    for p in range(n):
        kv.write(p, normal(seed + 2 * p, g, d), normal(seed + 2 * p + 1, g, d))
    return kv


def direct(q: np.ndarray, kv: LayerKV, position: int, window: int | None, scale: float) -> Any:
    """Softmax attention in float64 with a mask over all positions: no blocks, no parts."""
    keys = np.concatenate(kv.keys, axis=1).astype(np.float64)
    values = np.concatenate(kv.values, axis=1).astype(np.float64)
    j = np.arange(keys.shape[1])
    visible = (j <= position) & (True if window is None else position - window < j)
    out = []
    for n, row in enumerate(q.astype(np.float64)):
        g = n // (len(q) // kv.kv_heads)
        s = keys[g, visible] @ row * scale
        p = np.exp(s - s.max())
        out.append(p @ values[g, visible] / p.sum())
    return np.array(out)


@pytest.mark.rule("ATTN-2", "ATTN-3", "ATTN-4", "ATTN-5")
@given(
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(1, 45)),
    st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 3)]),
    st.sampled_from([1, 4, 16, 64]),
)
def test_attention_is_softmax_over_the_visible(
    position: int, window: int | None, heads: tuple[int, int], block: int
) -> None:
    kv = filled(position + 1, heads[1], 8, block)
    q = normal(999, heads[0], 8) * np.float32(3)
    got = attend(q, kv, position, window, 0.4)
    assert got.dtype == np.float32
    assert np.abs(got - direct(q, kv, position, window, 0.4)).max() < 2e-6


@pytest.mark.rule("ATTN-2", "ATTN-3", "ATTN-4")
@pytest.mark.parametrize(
    ("position", "window", "parts"),
    [
        (0, None, [1]),
        (15, None, [15, 1]),
        (16, None, [16, 1]),
        (37, None, [16, 16, 5, 1]),
        (37, 6, [5, 1]),
        (37, 7, [1, 5, 1]),
        (37, 30, [8, 16, 5, 1]),
        (37, 1, [1]),
        (32, 1, [1]),
        (32, 2, [1, 1]),
        (5, 100, [5, 1]),
    ],
)
def test_the_parts_and_their_order(
    position: int, window: int | None, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = filled(position + 1, 1, 4, 16)
    seen: list[np.ndarray] = []

    def spy(q: Any, k: np.ndarray, v: np.ndarray, scale: Any) -> Any:
        seen.append(k)
        return part(q, k, v, scale)

    monkeypatch.setattr(attention, "part", spy)
    attend(normal(5, 2, 4), kv, position, window, 1.0)
    assert [len(k) for k in seen] == parts
    # Ascending, without a gap, and the row's own position by itself at the end.
    keys = np.concatenate(kv.keys, axis=1)[0, position + 1 - sum(parts) : position + 1]
    assert same_bits(np.concatenate(seen), keys)


@pytest.mark.rule("ATTN-3")
def test_merging_scales_to_the_greater_maximum() -> None:
    q, k, v = normal(1, 2, 4), normal(2, 9, 4), normal(3, 9, 4)
    k[7] *= 30  # the maximum comes late, and is far above
    one = np.float32(1)
    whole = part(q, k, v, one)
    merged = merge(merge(None, part(q, k[:4], v[:4], one)), part(q, k[4:], v[4:], one))
    assert same_bits(merged.peak, whole.peak)
    assert np.allclose(merged.acc / merged.total[:, None], whole.acc / whole.total[:, None])
    low = part(q * 0, k, v, one)
    assert same_bits(merge(low, merge(None, low)).total, low.total * 2)


@pytest.mark.rule("ATTN-1")
def test_what_is_not_written_is_not_a_number() -> None:
    kv = filled(3, 1, 4, 16)
    assert np.isfinite(attend(normal(5, 1, 4), kv, 2, None, 1.0)).all()
    assert np.isnan(attend(normal(5, 1, 4), kv, 4, None, 1.0)).all()


@pytest.mark.rule("ATTN-1")
@pytest.mark.parametrize("kv_dtype", ["bf16", "f16"])
def test_a_row_reads_its_own_rounded_value_back(kv_dtype: Any, tmp_path: Path) -> None:
    ckpt = opened(tmp_path, "llama")
    exact, rounded = Model(ckpt), Model(ckpt, kv_dtype=kv_dtype)
    states = exact.start(), rounded.start()
    a, b = exact.enter(states[0], [5], 0), rounded.enter(states[1], [5], 0)
    for kept, want in zip(states[1].layers[0].values, states[0].layers[0].values, strict=True):
        assert same_bits(kept[:, 0], round_kv(want[:, 0], kv_dtype))
        assert not same_bits(kept[:, 0], want[:, 0])
    # One position: attention is that position's V, so a row that used its own V unrounded would
    # give the bits of the exact model.
    assert a.logits is not None and b.logits is not None
    assert not same_bits(a.logits, b.logits)
    assert np.abs(a.logits - b.logits).max() < 0.05 * a.logits.std()


# The router


@pytest.mark.rule("ROUTE-2")
def test_ties_go_to_the_lower_index() -> None:
    assert choose(np.array([1, 3, 3, 2], np.float32), 2).tolist() == [1, 2]
    assert choose(np.array([3, 1, 3, 3], np.float32), 2).tolist() == [0, 2]
    assert choose(np.array([-0.0, 0.0, -0.0], np.float32), 2).tolist() == [0, 1]
    assert choose(np.array([-1, 0.0, -0.0], np.float32), 2).tolist() == [1, 2]
    # So far below the greatest that softmax gives 0 for both: the logits still tell them apart.
    assert choose(np.array([-300, 0, -200], np.float32), 2).tolist() == [1, 2]


@pytest.mark.rule("ROUTE-2")
@given(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=9), st.data())
def test_choosing_equals_a_sort_by_hand(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    by_hand = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]
    assert choose(np.array(scores, np.float32), k).tolist() == by_hand
    experts, _ = route(np.array(scores, np.float32), RouterSpec(), k, 0)
    assert experts.tolist() == by_hand


@pytest.mark.rule("ROUTE-1", "ROUTE-3")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights(dtype: Any) -> None:
    logits = np.log(np.array([1, 5, 2, 8], dtype))
    close = 1e-6 if dtype is np.float32 else 1e-14
    cases = [
        (RouterSpec(), [8 / 16, 5 / 16]),
        (RouterSpec(renormalise=True), [8 / 13, 5 / 13]),
        (RouterSpec(renormalise=True, renorm_eps=3 / 16), [8 / 16, 5 / 16]),
        (RouterSpec(scale=2.5), [20 / 16, 12.5 / 16]),
        (RouterSpec(renormalise=True, scale=2.0), [16 / 13, 10 / 13]),
        (RouterSpec("topk_softmax"), [8 / 13, 5 / 13]),
    ]
    for spec, want in cases:
        experts, weights = route(logits, spec, 2, 0)
        assert experts.dtype == np.int32 and experts.tolist() == [3, 1]
        assert weights.dtype == dtype and weights.tolist() == pytest.approx(want, rel=close)


@pytest.mark.rule("ROUTE-3")
def test_the_sum_of_the_chosen_is_in_rank_order() -> None:
    logits = normal(4, 16) * np.float32(2)
    _, raw = route(logits, RouterSpec(), 5, 0)
    _, weights = route(logits, RouterSpec(renormalise=True), 5, 0)
    total = raw[0]
    for w in raw[1:]:
        total = np.float32(total + w)
    assert same_bits(weights, raw / total)


@pytest.mark.rule("ROUTE-4")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
def test_a_score_that_is_no_number(bad: float) -> None:
    logits = np.array([0, 1, bad, 2], np.float32)
    with pytest.raises(RequestFailed, match=r"layer 17: a router score is NaN"):
        route(logits, RouterSpec(), 1, 17)
    assert route(np.array([0, -np.inf, 1], np.float32), RouterSpec(), 2, 0)[0].tolist() == [2, 0]


@pytest.mark.rule("ROUTE-4")
def test_a_nan_concerns_its_own_request(tmp_path: Path) -> None:
    model = Model(opened(tmp_path, "qwen3_moe"))
    good = model.start()
    before = run_chunk(model, good, [4, 9], 0)
    model.weights["embed"][7] = np.nan
    with pytest.raises(RequestFailed, match="layer 0"):
        model.enter(model.start(), [4, 7], 0)
    model.enter(good, [4], 2)
    assert before is not None
    again = run_chunk(model, model.start(), [4, 9], 0)
    assert again is not None and same_bits(before, again)


@pytest.mark.rule("ROUTE-5")
def test_outputs_are_added_in_rank_order_and_the_residual_last() -> None:
    big, one = np.float32(2**24), np.float32(1)
    w = np.ones(3, np.float32)
    assert combine(w, np.array([[one], [big], [-big]])).tolist() == [0.0]  # 1 is lost in 2^24
    assert combine(w, np.array([[big], [-big], [one]])).tolist() == [1.0]
    outputs = np.array([[2, 4], [1, 8]], np.float32)
    assert combine(np.array([0.5, 4], np.float32), outputs).tolist() == [5, 34]


@pytest.mark.rule("ROUTE-5")
def test_the_order_in_which_experts_run_does_not_matter(tmp_path: Path) -> None:
    """Experts by ascending id over all rows, as a grouped step would: bits of row after row."""
    ckpt = opened(tmp_path, "mixtral", num_experts_per_tok=3)
    model = Model(ckpt)
    tokens = [3, 90, 14, 15, 92, 65]
    want = run_chunk(model, model.start(), tokens, 0)
    state = model.start()
    h = model.enter(state, tokens, 0)
    read = remembering(model)
    while h.layer is not None:
        outputs = np.empty((*h.topk.shape, 32), np.float32)
        for e in sorted(set(h.topk.ravel().tolist()), reverse=True):
            for t, rank in zip(*np.nonzero(h.topk == e), strict=True):
                outputs[t, rank] = model.expert(h.layer, read(ExpertKey(h.layer, e)), h.x[t])
        h = model.advance(state, h, outputs)
    assert h.logits is not None and want is not None and same_bits(h.logits, want)


# The whole pass


CHUNKED = ["mixtral-window", "mixtral-mqa-top4-of-16", "qwen3_moe-dense-last", "llama-biases"]


@pytest.mark.rule("NUM-9", "NUM-3", "ATTN-2")
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_of_any_size_and_scoring_give_the_bits_of_generating(
    name: str, kv_dtype: Any, tmp_path: Path
) -> None:
    model = Model(Checkpoint.open(by_name(name).write(tmp_path)), kv_block=8, kv_dtype=kv_dtype)
    read = remembering(model)
    text = [int(t) for t in np.random.PCG64(5).random_raw(29) % np.uint64(96)]
    whole = run_chunk(model, model.start(), text, 0, read)
    assert whole is not None and np.isfinite(whole).all()
    for size in (1, 3, 8, 20):
        state = model.start()
        rows = []
        for at in range(0, len(text), size):
            logits = run_chunk(model, state, text[at : at + size], at, read)
            assert logits is not None
            rows.append(logits)
        assert same_bits(np.concatenate(rows), whole), size


@pytest.mark.rule("NUM-9")
def test_other_requests_in_between_change_nothing(tmp_path: Path) -> None:
    model = Model(opened(tmp_path, "mixtral"), kv_block=4)
    texts = [[5, 6, 7, 8, 9, 10], [90, 2], [33, 34, 35, 36]]
    alone = [run_chunk(model, model.start(), t, 0) for t in texts]
    states = [model.start() for _ in texts]
    rows: list[list[np.ndarray]] = [[] for _ in texts]
    for p in range(6):
        for r, text in enumerate(texts):
            if p < len(text):
                logits = run_chunk(model, states[r], [text[p]], p)
                assert logits is not None
                rows[r].append(logits[0])
    for got, want in zip(rows, alone, strict=True):
        assert want is not None and same_bits(np.stack(got), want)


@pytest.mark.rule("NUM-9")
def test_greedy_tokens_are_those_of_scoring(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, "qwen3_moe")
    out = naive_greedy(ckpt, [1, 2, 3], 6)
    scored = naive_logits(ckpt, [1, 2, 3, *out])
    assert scored.argmax(axis=1)[2:-1].tolist() == out


def test_only_the_wanted_logits_are_worked_out(tmp_path: Path) -> None:
    for family in ("llama", "mixtral"):
        model = Model(opened(tmp_path / family, family))
        whole = run_chunk(model, model.start(), [1, 2, 3], 0)
        last = run_chunk(model, model.start(), [1, 2, 3], 0, logits="last")
        assert whole is not None and last is not None and same_bits(last, whole[-1:])
        assert run_chunk(model, model.start(), [1, 2, 3], 0, logits="none") is None


def test_a_request_is_its_kv_blocks(tmp_path: Path) -> None:
    model = Model(opened(tmp_path, "llama"), kv_block=4)
    state = model.start()
    assert state.nbytes == 0
    block = 3 * 2 * 2 * 4 * 8 * 4  # layers, K and V, KV heads, positions, width, bytes
    for position, blocks in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 2)):
        model.enter(state, [1], position)
        assert state.nbytes == blocks * block
    with pytest.raises(AssertionError):
        model.enter(state, [1], 9)


def test_raw_and_widened_experts_give_the_same_bits(tmp_path: Path) -> None:
    for dtype in ("F32", "F16", "BF16"):
        path = write_checkpoint(tmp_path / dtype, tiny_config("mixtral"), dtype=dtype)
        model = Model(Checkpoint.open(path))
        raw = model.read_expert(ExpertKey(1, 2))
        x = normal(1, 32)
        assert same_bits(model.expert(1, raw, x), model.expert(1, model.widen(raw), x))


@pytest.mark.parametrize("name", CHUNKED)
def test_float32_is_close_to_float64(name: str, tmp_path: Path) -> None:
    ckpt = Checkpoint.open(by_name(name).write(tmp_path))
    text = list(range(1, 30))
    exact = naive_logits(ckpt, text, np.float64)
    assert exact.dtype == np.float64
    assert np.abs(naive_logits(ckpt, text) - exact).max() < 1e-5 * exact.std()


# What is not there is refused


def in_attention(c: ModelConfig, **changes: Any) -> ModelConfig:
    s = c.layers[1]
    s = replace(s, attention=replace(s.attention, **changes))
    return replace(c, layers=(c.layers[0], s, *c.layers[2:]))


def in_moe(c: ModelConfig, **changes: Any) -> ModelConfig:
    s = c.layers[1]
    assert isinstance(s.feed_forward, MoeSpec)
    s = replace(s, feed_forward=replace(s.feed_forward, **changes))
    return replace(c, layers=(c.layers[0], s, *c.layers[2:]))


def in_rope(c: ModelConfig, **changes: Any) -> ModelConfig:
    rope = c.layers[1].attention.rope
    assert rope is not None
    return in_attention(c, rope=replace(rope, **changes))


def in_router(c: ModelConfig, **changes: Any) -> ModelConfig:
    ff = c.layers[1].feed_forward
    assert isinstance(ff, MoeSpec)
    return in_moe(c, router=replace(ff.router, **changes))


def in_storage(c: ModelConfig, **changes: Any) -> ModelConfig:
    return in_moe(c, storage=ExpertStorage(**changes))


UNSUPPORTED: list[tuple[str, Any]] = [
    ("norm.kind 'batch'", lambda c: replace(c, norm=NormSpec("batch"))),  # type: ignore[arg-type]
    ("packed 'int4'", lambda c: replace(c, packed=PackedSpec("int4", (1, 32)))),  # type: ignore[arg-type]
    ("attention.kind 'linear'", lambda c: in_attention(c, kind="linear")),
    ("head_dim 8", lambda c: in_attention(c, kind="mla", kv_heads=1)),
    ("qk_norm 'both'", lambda c: in_attention(c, qk_norm="both")),
    ("qk_norm 'flat'", lambda c: in_attention(c, kind="mla", qk_norm="flat")),
    ("clip 1.0", lambda c: in_attention(c, kind="mla", clip=1.0)),
    ("window 0", lambda c: in_attention(c, window=0)),
    ("heads % kv_heads 1", lambda c: in_attention(c, kv_heads=3)),
    ("rope.kind 'su'", lambda c: in_rope(c, kind="su")),
    ("rope.dims 7", lambda c: in_rope(c, dims=7)),
    ("rope.dims 64", lambda c: in_rope(c, dims=64)),
    ("activation.kind 'gelu'", lambda c: in_moe(c, activation=ActivationSpec("gelu"))),  # type: ignore[arg-type]
    ("storage.gate_up 'stacked'", lambda c: in_storage(c, gate_up="stacked")),
    ("storage.packed 'int4'", lambda c: in_storage(c, packed=PackedSpec("int4", (1, 32)))),  # type: ignore[arg-type]
    ("storage.transposed True",
     lambda c: in_storage(c, transposed=True, packed=PackedSpec("mxfp4", (1, 32)))),
    ("router.score 'tanh'", lambda c: in_router(c, score="tanh")),
    ("router.group_score 'mean'", lambda c: in_router(c, group_score="mean")),
    ("experts % groups 2", lambda c: in_router(c, groups=3)),
    ("router.selection_bias True",
     lambda c: in_router(c, selection_bias=True, score="topk_softmax")),
    ("router.groups 2", lambda c: in_router(c, groups=2, score="sparsemixer")),
]  # fmt: skip


@pytest.mark.rule("NUM-8")
def test_values_without_code_are_refused_by_name(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, "mixtral")
    good = ckpt.config
    for what, change in UNSUPPORTED:
        ckpt.config = change(good)
        with pytest.raises(Unsupported, match="unsupported") as error:
            Model(ckpt)
        assert what in str(error.value), what
        where = "model" if "layer" not in str(error.value).split(":")[0] else "layer 1"
        assert str(error.value).startswith(where + ":"), str(error.value)
    ckpt.config = good
    Model(ckpt)
