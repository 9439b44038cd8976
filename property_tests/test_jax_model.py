"""The JAX model against the NumPy one, and each request's bits against those it has alone."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.kernels.dots import dot
from jax_impl.model import JaxModel, Table
from oracle.tiny import tiny_config, write_checkpoint
from property_tests.jax_driver import Text, handles, poison, run_together
from reference.files.checkpoint import Checkpoint
from reference.numerics.model import Model
from reference.numerics.naive import remembering, run_chunk
from reference.vocab.config import (
    ActivationSpec,
    ExpertStorage,
    MoeSpec,
    NormSpec,
    PackedSpec,
)
from reference.vocab.errors import BadInput, Unsupported

SIZES = {"rows": 80, "kv_blocks": 24, "max_len": 48, "kv_block": 4}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    # Dense first, routed, dense last: every kind of stage. Norms of q and k.
    "qwen3": (
        tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 3], num_experts=16,
                    num_experts_per_tok=4, hidden_size=64, moe_intermediate_size=48),
        "BF16",
    ),
    "mixtral-window": (tiny_config("mixtral", sliding_window=7, num_hidden_layers=2), "F32"),
    "llama-bias": (tiny_config("llama", attention_bias=True, tie_word_embeddings=True), "F16"),
}  # fmt: skip


class Case:
    """A checkpoint, its compiled model and experts, and the lines that compiling printed."""

    def __init__(self, path: Path, name: str, **options: Any) -> None:
        config, dtype = MODELS[name]
        self.ckpt = Checkpoint.open(write_checkpoint(path / "model", config, seed=3, dtype=dtype))
        self.model = JaxModel(self.ckpt, **SIZES, **options)
        self.lines: list[str] = []
        self.model.compile(self.lines.append)
        self.experts = handles(self.ckpt)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("jax"), request.param)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("jax"), "mixtral-window", compute="bf16", kv_dtype="bf16")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("jax"), "mixtral-window", wide=32, kv_dtype="f16")


def words(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 96, length).tolist()


def alone(case: Case, tokens: list[int], chunks: list[int], table: list[int]) -> Text:
    text = Text(tokens, chunks, table)
    poison(case.model)
    run_together(case.model, case.experts, [text], Random(0))
    return text


def check_against_numpy(
    case: Case, got: Text, dtype: type, kv_dtype: Any, bound: float, share: float = 1.0
) -> None:
    """At least this share of the logits lies within `bound` deviations of the NumPy engine's."""
    model = Model(case.ckpt, dtype, SIZES["kv_block"], kv_dtype)
    want = run_chunk(model, model.start(), got.tokens, 0, remembering(model))
    assert want is not None
    logits = np.stack([got.logits[p] for p in range(len(got.tokens))])
    assert np.quantile(np.abs(logits - want), share) < bound * want.std()
    assert want.std() > 0.1


@pytest.mark.rule("NUM-10", "JAX-3", "ROUTE-1", "ROUTE-2", "ATTN-2")
def test_logits_against_numpy(case: Case) -> None:
    """Within 1e-4 of the logits' deviation, of which float32 needs a tenth at most."""
    got = alone(case, words(1, 30), [30], [7, 3, 9, 1, 0, 20, 21, 22])
    check_against_numpy(case, got, np.float64, "f32", 1e-5)
    check_against_numpy(case, got, np.float32, "f32", 1e-5)


@pytest.mark.rule("NUM-3", "NUM-9", "JAX-1", "JAX-2", "JAX-8", "ATTN-1")
def test_bits_do_not_depend_on_company_or_chunks(case: Case) -> None:
    """Told experts, weights and logits of every position: decoded one by one alone, and in random
    chunks, rows, tiles, KV blocks and company, over banks and pools full of NaN."""
    texts = [words(seed, length) for seed, length in enumerate((30, 1, 9, 17, 22))]
    singles = [alone(case, t, [1], list(range(8, 16))) for t in texts]
    programs = case.model.programs
    for seed in range(12):
        rng = Random(seed)
        blocks = list(range(SIZES["kv_blocks"]))
        rng.shuffle(blocks)
        together = []
        for t in rng.sample(texts, len(texts)):
            need = -(-len(t) // SIZES["kv_block"])
            if need > len(blocks):
                continue
            table, blocks = blocks[:need], blocks[need:]
            together.append(Text(t, rng.choice([[1], [3], [8, 1], [16], [5, 2, 1], [8]]), table))
        poison(case.model)
        run_together(case.model, case.experts, together, rng)
        assert len(together) >= 3
        for text in together:
            single = singles[texts.index(list(text.tokens))]
            assert text.told == single.told
    assert case.model.programs == programs


@pytest.mark.rule("JAX-12")
def test_a_wide_tile_with_the_bits_of_the_small_one(wide: Case) -> None:
    """The probe has accepted it, and no request notices whether it is used."""
    assert wide.model.wide == 32
    assert "tiles of 32 rows give the bits of 8" in wide.lines[-1]
    programs, told = wide.model.programs, []
    for size in (0, 32):
        wide.model.wide = size
        texts = [Text(words(i, n), [n, 1], range(8 * i, 8 * i + 8)) for i, n in enumerate((30, 22))]
        poison(wide.model)
        run_together(wide.model, wide.experts, texts, Random(3))
        told.append([t.told for t in texts])
    assert told[0] == told[1]
    assert wide.model.programs == programs


@pytest.mark.rule("NUM-3", "JAX-12")
def test_a_tile_that_follows_the_batch_is_caught(tmp_path: Path) -> None:
    """Negative control: tiles of 1 and 8 rows differ here. The probe says so, and so does the
    comparison of requests when the larger tile is used all the same."""
    config = tiny_config("mixtral", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    ckpt = Checkpoint.open(write_checkpoint(tmp_path / "m", config))
    model, lines = JaxModel(ckpt, **SIZES, tile=1, wide=8), []
    model.compile(lines.append)
    assert model.wide == 0
    assert "tiles of 8 rows differ in " in lines[-1]
    told = []
    for model.wide in (0, 8):
        text = Text(words(1, 8), [8], [1, 2])
        run_together(model, handles(ckpt), [text], Random(0))
        told.append(text.told)
    assert told[0] != told[1]


@pytest.mark.rule("JAX-12")
@pytest.mark.parametrize("place", ["jax_impl.attend.dot", "jax_impl.kernels.experts.dot"])
def test_the_probe_sees_one_changed_bit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nudged(compute: str, x: jax.Array, w: jax.Array) -> jax.Array:
        y = dot(compute, x, w)
        return y.at[9, 3].set(jnp.nextafter(y[9, 3], jnp.inf)) if len(x) == 16 else y

    monkeypatch.setattr(place, nudged)
    config = tiny_config("mixtral", num_hidden_layers=1)
    ckpt = Checkpoint.open(write_checkpoint(tmp_path / "m", config))
    model, lines = JaxModel(ckpt, **SIZES, wide=16), []
    model.compile(lines.append)
    assert model.wide == 0
    assert "differ in " + ("embed + layer 0" if "attend" in place else "experts of") in lines[-1]


@pytest.mark.rule("JAX-4", "ATTN-1", "NUM-2")
def test_bf16(routed: Case) -> None:
    """Inputs and KV rounded: near the exact logits, not equal, and just as independent."""
    got = alone(routed, words(1, 30), [1], list(range(8)))
    check_against_numpy(routed, got, np.float64, "bf16", 0.2)
    with pytest.raises(AssertionError):
        check_against_numpy(routed, got, np.float64, "bf16", 1e-4)
    other = Text(words(2, 13), [4], list(range(10, 14)))
    again = Text(words(1, 30), [8], list(range(16, 24)))
    poison(routed.model)
    run_together(routed.model, routed.experts, [other, again], Random(5))
    assert again.told == got.told


@pytest.mark.rule("ATTN-1")
def test_kv_dtype_rounds_as_numpy_does(wide: Case) -> None:
    """A K or V next to a rounding border may go the other way, so not every logit agrees."""
    got = alone(wide, words(1, 30), [8], list(range(8)))
    check_against_numpy(wide, got, np.float64, "f16", 1e-5, share=0.5)
    with pytest.raises(AssertionError):
        check_against_numpy(wide, got, np.float64, "f32", 1e-5, share=0.5)
    with pytest.raises(BadInput, match="wide: 12"):
        JaxModel(wide.ckpt, **SIZES, wide=12)


@pytest.mark.rule("JAX-7", "ROUTE-4", "JAX-2")
def test_a_nan_concerns_one_request(case: Case) -> None:
    """A NaN in one token's embedding marks that request, and its neighbours' bits are as alone."""
    if not case.ckpt.config.moe_layers or case.ckpt.config.layers[0].attention.window is None:
        pytest.skip("needs a router and no dense layer; one model is enough")
    good = alone(case, words(1, 16), [8], [0, 1, 2, 3])
    held = case.model._held
    embed = held.embed
    held.embed = embed.at[2].set(jnp.nan)
    try:
        texts = [Text(words(1, 16), [8], [0, 1, 2, 3]), Text([5, 2, 6], [3], [4])]
        poison(case.model)
        run_together(case.model, case.experts, texts, Random(1))
    finally:
        held.embed = embed
    assert [t.bad for t in texts] == [False, True]
    assert texts[0].told == good.told


@pytest.mark.rule("JAX-10")
def test_bank_and_pools_stay_where_they_are(case: Case) -> None:
    def places() -> list[int]:
        m = case.model
        held = (m._bank, m._out, m._keys, m._values)
        return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(held)]

    poison(case.model)
    before = places()
    text = Text(words(4, 20), [9, 1], list(range(5)))
    run_together(case.model, case.experts, [text], Random(2))
    assert places() == before


@pytest.mark.rule("JAX-17")
def test_temporaries_in_flight_are_bounded(wide: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one call of the largest the model waits between calls, and no bit changes."""
    model, free = wide.model, alone(wide, words(8, 25), [25, 1], list(range(8)))
    programs = (*model._programs._pieces.values(), *model._programs._experts.values())
    room = max(program.temporaries for program in programs)
    assert room > 0
    most, waits, wait = 0, 0, model.wait
    wait()

    def watched() -> None:
        nonlocal most, waits
        most, waits = max(most, model._ahead), waits + 1
        wait()

    monkeypatch.setattr(model, "wait", watched)
    monkeypatch.setattr("jax_impl.model.AHEAD", room)
    again = Text(words(8, 25), [25, 1], list(range(8)))
    run_together(model, wide.experts, [again], Random(0))
    assert again.told == free.told
    assert waits >= 3
    assert 0 < most <= room


@pytest.mark.rule("JAX-9")
def test_only_wanted_logits_are_made(case: Case) -> None:
    full = alone(case, words(6, 11), [11], [0, 1, 2])
    if case.ckpt.config.moe_layers:
        return  # the stages before the last are the driver's business
    want = [p in (3, 10) for p in range(11)]
    rows = list(range(11))
    table = [Table(([0, 1, 2],), 11)] * 11
    out = case.model.enter(rows, full.tokens, rows, table, want).get()
    assert sorted(out.logits) == [3, 10]
    for p in (3, 10):
        assert out.logits[p].tobytes() == full.logits[p].tobytes()
    assert case.model.enter(rows, full.tokens, rows, table, [False] * 11).get().logits == {}


def test_progress_and_sizes(case: Case) -> None:
    assert len(case.lines) == case.model.programs
    model = case.model
    pools = jax.tree.leaves((model._keys, model._values))
    assert model.kv_bytes == sum(a.nbytes for a in pools)
    assert model.non_expert_bytes_held >= case.ckpt.non_expert_bytes // 2
    held = jax.tree.leaves((model._bank, model._out))
    assert model.bank_bytes == sum(a.nbytes for a in held)


@pytest.mark.rule("NUM-8")
def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    good = Checkpoint.open(write_checkpoint(tmp_path / "m", tiny_config("mixtral")))
    layer = good.config.layers[0]
    assert isinstance(layer.feed_forward, MoeSpec) and layer.attention.rope is not None
    attention, routed = layer.attention, layer.feed_forward

    def refused(what: str, attention: Any = attention, routed: Any = routed, **other: Any) -> None:
        ckpt = copy(good)
        layers = (replace(layer, attention=attention, feed_forward=routed), *good.config.layers[1:])
        ckpt.config = replace(good.config, layers=layers, **other)
        with pytest.raises(Unsupported, match=what):
            JaxModel(ckpt, **SIZES)

    router, rope = routed.router, attention.rope
    assert rope is not None
    mla = replace(attention, kind="mla", kv_heads=1, kv_rank=4, nope_dim=4, rope_dim=4)

    def rope_(**other: Any) -> Any:
        return replace(attention, rope=replace(rope, **other))

    def router_(**other: Any) -> Any:
        return replace(routed, router=replace(router, **other))

    def stored(*spec: Any, **other: Any) -> Any:
        return replace(routed, storage=ExpertStorage(*spec, **other))

    odd: Any = "odd"
    refused("rope odd in layer 0", rope_(kind=odd))
    refused("rope over 3 entries", rope_(dims=3))
    refused("dynamic rope", rope_(kind="dynamic"))
    refused("0 short factors", rope_(kind="longrope"))
    refused("attention odd", replace(attention, kind=odd))
    refused("window 0", replace(attention, window=0))
    refused("norm of q and k odd", replace(attention, qk_norm=odd))
    refused("4 heads over 3", replace(attention, kv_heads=3))
    refused("MLA without rope", replace(mla, rope=None))
    refused("norm or clip of q and k in MLA", replace(mla, clip=1.0))
    refused("widths of MLA", replace(mla, nope_dim=5))
    refused("rope over 8 entries", replace(mla, head_dim=8))
    refused("activation odd", routed=replace(routed, activation=ActivationSpec(odd)))
    refused("router score odd", routed=router_(score=odd))
    refused("selection bias with sparsemixer", routed=router_(score="sparsemixer", groups=2))
    refused("group score odd", routed=router_(groups=2, group_score=odd))
    refused("8 experts in 3 groups", routed=router_(groups=3))
    refused("8 experts in 8 groups", routed=router_(groups=8, group_score="top2_sum"))
    refused("3 groups", routed=router_(groups=2, top_groups=3))
    refused("experts stored odd", routed=stored(odd))
    refused("packed experts in layer 0 of kind odd", routed=stored(packed=PackedSpec(odd, (1, 1))))
    refused("in blocks of", routed=stored(packed=PackedSpec("fp8_block", (0, 1))))
    turned = stored(transposed=True, packed=PackedSpec("mxfp4", (1, 32)))
    refused("packed and transposed", routed=turned)
    refused("expert tensors", routed=stored("interleaved"))
    refused("packed weights of kind odd", packed=PackedSpec(odd, (1, 32)))
    refused("norm odd", norm=NormSpec(odd))
    heads = replace(attention, qk_norm="head")
    refused("norm layer of q and k", heads, norm=NormSpec("layer"))
    with pytest.raises(BadInput, match="rows: 0"):
        JaxModel(good, **{**SIZES, "rows": 0})
    with pytest.raises(Unsupported, match="compute int3"):
        JaxModel(good, **SIZES, compute="int3")  # type: ignore[arg-type]
