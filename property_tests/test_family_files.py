"""Every family's config.json and tensors: defaults, spellings, packed forms, refusals."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.checkpoint_edit import header_edited
from oracle.family_variants import (
    DYNAMIC,
    FP8,
    FULL,
    LINEAR,
    LLAMA3,
    LONGROPE,
    MSCALED,
    MXFP4,
    PHI_LONGROPE,
    SLIDING,
    YARN,
    by_name,
)
from oracle.tiny import FAMILIES, tiny_config, write_checkpoint
from property_tests.refusals import one_line, refused
from reference.engine import ReferenceEngine
from reference.files import families as family_files
from reference.files.checkpoint import Checkpoint
from reference.files.config_fields import FIELDS, ROPE_FIELDS
from reference.files.config_json import model_config
from reference.files.families import UNSET, families
from reference.files.layout import layer_roles, top_roles
from reference.files.requests import Request
from reference.numerics.naive import naive_logits
from reference.vocab.config import AttentionSpec, ModelConfig, MoeSpec, RopeSpec
from reference.vocab.errors import BadInput, Unsupported

FOLDER = Path(family_files.__file__).parent.parent / "vocab" / "families"


def config(family: str, **changes: Any) -> ModelConfig:
    return model_config(tiny_config(family, **changes))


def first(c: ModelConfig) -> AttentionSpec:
    return c.layers[0].attention


def rope(c: ModelConfig) -> RopeSpec:
    spec = first(c).rope
    assert spec is not None
    return spec


def moe(c: ModelConfig) -> MoeSpec:
    spec = c.layers[c.moe_layers[-1]].feed_forward
    assert isinstance(spec, MoeSpec)
    return spec


# Data files


@pytest.mark.rule("MODEL-2")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_file_uses_only_known_words(name: str) -> None:
    family = families()[name]
    assert family.model_type == name
    assert family.config.keys() <= FIELDS.keys()
    for field, source in family.config.items():
        for stated in (source.value, source.absent, source.null, *source.words.values()):
            assert stated is UNSET or FIELDS[field].check(stated) is not None, (field, stated)
    assert set(family.rope) <= {*ROPE_FIELDS, "rope_type"}
    whole = config(name)
    for role, _ in top_roles(whole):
        assert family.tensors[role]
    for layer in whole.layers:
        for role, _ in layer_roles(whole, layer):
            assert "{" not in "".join(family.layer[role])


@contextmanager
def made_up(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts there is one family more, from the text of its file."""
    there = folder / "families"
    there.mkdir(parents=True)
    for file in FOLDER.glob("*.toml"):
        (there / file.name).write_bytes(file.read_bytes())
    (there / "made_up.toml").write_text(text)
    monkeypatch.setattr(family_files, "files", lambda _: folder)
    families.cache_clear()
    try:
        yield
    finally:
        families.cache_clear()
        monkeypatch.undo()


@pytest.mark.rule("MODEL-1", "MODEL-2")
def test_a_new_family_is_a_file_and_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router of one family, the attention of a second, the norm of a third, other names."""
    text = """
model_type = "made_up"
like = "glm4_moe"
[config]
hidden = "width"
"norm.kind" = { value = "layer" }
"attention.sinks" = { value = true }
"attention.qk_norm" = { value = "flat" }
"attention.window_layers" = { value = "even_below" }
"attention.window" = "reach"
"shared.gated" = { value = true }
"activation.kind" = { value = "clamped_gated" }
"activation.limit" = "limit"
"activation.alpha" = { value = 1.1 }
logits_scale = "temper"
[tensors]
final_norm_bias = "model.norm.bias"
[layer]
prefix = "net.{i}."
attn_norm_bias = "input_layernorm.bias"
mlp_norm_bias = "post_attention_layernorm.bias"
sinks = "drains"
shared_router = "mlp.shared_gate.weight"
[[experts]]
name = "one"
gate = "e.{e}.g"
up = "e.{e}.u"
down = "e.{e}.d"
"""
    raw = tiny_config(
        "glm4_moe", model_type="made_up", hidden_size=..., width=32, reach=5, temper=2.0, limit=0.7
    )
    prompt = tuple(range(3, 20))
    with made_up(text, tmp_path / "0", monkeypatch):
        path = write_checkpoint(tmp_path / "m", raw, seed=2)
        ckpt = Checkpoint.open(path)
        assert ckpt.config.family == "made_up"
        assert [s.attention.window for s in ckpt.config.layers] == [5, None, 5]
        with ReferenceEngine.open(path, memory="40%", chunk=4, ignore_eos=True) as engine:
            got = engine.submit(Request("a", prompt, 4), logits=True).result(60)
        want = naive_logits(ckpt, [*prompt, *got.tokens], kv_block=64)
        assert got.logits is not None
        assert got.logits.tobytes() == want[:-1].tobytes()
    # Each choice is in force: without its line the folder is refused, or says something else.
    choices = [line for line in text.splitlines() if line.startswith('"') or "temper" in line]
    assert len(choices) == 10
    misfits = []
    for n, line in enumerate(choices):
        with made_up(text.replace(line + "\n", ""), tmp_path / f"{n + 1}", monkeypatch):
            try:
                ckpt = Checkpoint.open(path)
            except BadInput:
                misfits.append(line.split('"')[1])
            else:
                other = naive_logits(ckpt, list(prompt), kv_block=64)
                assert np.abs(other - want[: len(prompt)]).max() > 1e-3, line
    assert misfits == ["norm.kind", "attention.sinks", "attention.qk_norm", "shared.gated"]


@pytest.mark.rule("MODEL-2")
def test_the_page_names_every_family_and_its_example_is_one() -> None:
    page = (FOLDER.parents[2] / "docs" / "families.md").read_text("utf-8")
    table, rest = page.split("Ropes:", 1)
    words = set(re.findall(r"[a-z0-9_]+", table))
    assert set(FAMILIES) <= words
    example = rest.split("```toml\n", 1)[1].split("```", 1)[0]
    tables = {f.stem: tomllib.loads(f.read_text("utf-8")) for f in FOLDER.glob("*.toml")}
    family = family_files._family(family_files._inherited(tomllib.loads(example), tables))
    assert family.config.keys() <= FIELDS.keys()
    assert family.config["attention.qk_norm"].words == {"true": "head", "false": "none"}
    assert family.layer["q"] == families()["qwen3_moe"].layer["q"]


@pytest.mark.rule("MODEL-2")
def test_the_same_model_under_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights depend on roles alone, so a renamed family gives the same bits."""
    text = """
model_type = "made_up"
like = "deepseek_v3"
[config]
"mla.kv_rank" = "rank"
[layer]
kv_a = "squeeze.weight"
"""
    plain = tiny_config("deepseek_v3")
    raw = {k: v for k, v in plain.items() if k != "kv_lora_rank"}
    raw |= {"model_type": "made_up", "rank": plain["kv_lora_rank"]}
    with made_up(text, tmp_path, monkeypatch):
        ours = Checkpoint.open(write_checkpoint(tmp_path / "a", raw))
        theirs = Checkpoint.open(write_checkpoint(tmp_path / "b", plain))
        a, b = (naive_logits(c, list(range(1, 9))) for c in (ours, theirs))
    assert a.tobytes() == b.tobytes()


# Spellings and defaults

TABLES: dict[str, dict[str, Any]] = {
    "linear": LINEAR, "dynamic": DYNAMIC, "yarn": YARN, "yarn with mscales": MSCALED,
    "llama3": LLAMA3,
}  # fmt: skip


@pytest.mark.rule("MODEL-6", "MODEL-14")
@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_of_every_rope(name: str) -> None:
    tables = {"longrope": PHI_LONGROPE} if name == "phimoe" else TABLES
    for kind, table in tables.items():
        new = config(name, rope=table, rope_theta=3e4)
        assert config(name, rope=table, rope_theta=3e4, spelling="old") == new, kind
        typed = {k: v for k, v in table.items() if k != "rope_type"} | {"type": table["rope_type"]}
        inside = config(name, rope_parameters=..., rope_scaling=typed | {"rope_theta": 3e4})
        assert inside == new, kind
        assert (rope(new).kind, rope(new).theta) == (table["rope_type"], 3e4)


DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"theta": 1e4, "eps": 1e-6, "max": 131072, "window": 4096},
    "qwen3": {"theta": 1e4, "eps": 1e-6, "max": 32768, "window": None},
    "olmoe": {"theta": 1e4, "eps": 1e-5, "max": 4096, "experts": 64, "k": 8, "renorm": False},
    "qwen2_moe": {"theta": 1e4, "eps": 1e-6, "max": 32768, "experts": 60, "k": 4, "bias": True,
                  "shared": 5632},
    "deepseek_v2": {"theta": 1e4, "eps": 1e-6, "max": 2048, "experts": 64, "scale": 1.0,
                    "shared": 2 * 1407},
    "deepseek_v3": {"theta": 1e4, "eps": 1e-6, "max": 4096, "experts": 256, "k": 8, "scale": 2.5,
                    "shared": 2048, "groups": 8, "renorm": True},
    "glm4_moe": {"theta": 1e4, "eps": 1e-5, "max": 131072, "experts": 128, "k": 8, "dims": 4,
                 "bias": False, "shared": 1408},
    "dots1": {"theta": 1e4, "eps": 1e-6, "max": 2048, "renorm": False, "scale": 1.0},
    "minimax_m2": {"theta": 5e6, "eps": 1e-6, "max": 196608, "experts": 256, "k": 8, "renorm": True,
                   "shared": 0},
    "ernie4_5_moe": {"theta": 5e5, "eps": 1e-5, "max": 131072, "experts": 64, "k": 6, "tied": True,
                     "shared": 2 * 1536, "renorm": True},
    "granitemoe": {"theta": 1e4, "eps": 1e-6, "max": 2048, "experts": 8, "k": 2},
    "phimoe": {"theta": 1e6, "eps": 1e-5, "max": 131072, "experts": 16, "k": 2, "window": None},
    "gpt_oss": {"theta": 150000.0, "eps": 1e-5, "max": 131072, "experts": 128, "k": 4,
                "window": 128, "bias": True},
}  # fmt: skip
KEPT = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
        "head_dim")  # fmt: skip
NEEDED: dict[str, tuple[str, ...]] = {
    "mistral": ("intermediate_size",), "qwen3": ("intermediate_size",),
    "granitemoe": ("intermediate_size",), "phimoe": ("intermediate_size",),
    "minimax_m2": ("intermediate_size",), "glm4_moe": ("intermediate_size",),
    "deepseek_v2": ("intermediate_size", "num_experts_per_tok"),
    "deepseek_v3": ("intermediate_size",),
    "dots1": ("n_routed_experts", "num_experts_per_tok"),
}  # fmt: skip


@pytest.mark.rule("MODEL-2", "MODEL-5", "MODEL-6")
@pytest.mark.parametrize("name", DEFAULTS)
def test_what_silence_means(name: str) -> None:
    kept = (*KEPT, *NEEDED.get(name, ()))
    raw = {k: v for k, v in tiny_config(name, num_hidden_layers=4).items() if k in kept}
    c = model_config(raw)
    said = DEFAULTS[name]
    found: dict[str, Any] = {
        "theta": rope(c).theta, "eps": c.norm.eps, "max": c.max_position, "tied": c.tied,
        "window": first(c).window, "bias": first(c).qkv_bias, "dims": rope(c).dims,
    }  # fmt: skip
    if c.moe_layers:
        m = moe(c)
        found |= {
            "experts": m.experts, "k": m.top_k, "renorm": m.router.renormalise,
            "scale": m.router.scale, "groups": m.router.groups,
            "shared": m.shared.intermediate if m.shared else 0,
        }  # fmt: skip
    assert {key: found[key] for key in said} == said
    if name == "gpt_oss":
        r = rope(c)
        assert (r.kind, r.factor, r.original_max_position, r.truncate) == ("yarn", 32, 4096, False)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: the table above stands",
)
@pytest.mark.parametrize("name", DEFAULTS)
def test_what_silence_means_to_transformers(name: str) -> None:
    from transformers import AutoConfig  # pyright: ignore[reportMissingImports]

    theirs: Any = AutoConfig.for_model(name)
    keys = {
        "eps": "rms_norm_eps", "max": "max_position_embeddings", "tied": "tie_word_embeddings",
        "experts": "num_experts", "k": "num_experts_per_tok", "scale": "routed_scaling_factor",
    }  # fmt: skip
    for key, value in DEFAULTS[name].items():
        if key == "theta":
            assert theirs.rope_parameters["rope_theta"] == value
        elif key in keys and hasattr(theirs, keys[key]):
            assert getattr(theirs, keys[key]) == value, key


@pytest.mark.rule("MODEL-7")
def test_windows_of_each_layer() -> None:
    def windows(family: str, **changes: Any) -> list[int | None]:
        c = config(family, num_hidden_layers=4, sliding_window=6, **changes)
        return [s.attention.window for s in c.layers]

    used = {"use_sliding_window": True}
    types = {"layer_types": [FULL, SLIDING, SLIDING, FULL]}
    assert windows("mistral") == [6, 6, 6, 6]
    assert windows("qwen3", max_window_layers=3, **used) == [None, None, None, 6]
    assert windows("qwen3", max_window_layers=3) == [None] * 4
    assert windows("qwen3", **used, **types) == [None, 6, 6, None]
    assert windows("qwen3", **types) == [None] * 4
    assert windows("qwen2_moe", max_window_layers=3, **used) == [6, None, 6, None]
    assert windows("qwen2_moe", max_window_layers=2, **used) == [6, None, None, None]
    assert windows("dots1", max_window_layers=2) == [None, None, 6, 6]
    assert windows("gpt_oss") == [6, None, 6, None]
    assert windows("gpt_oss", **types) == [None, 6, 6, None]
    assert windows("phimoe") == [6, 6, 6, 6]
    refused(lambda: windows("gpt_oss", layer_types=[FULL, "chunked", FULL, FULL]),
            "layer_types[1] chunked", kind=Unsupported)  # fmt: skip
    refused(lambda: windows("mistral", **types), "layer_types[0]", kind=Unsupported)


@pytest.mark.rule("MODEL-8")
def test_which_layers_are_routed() -> None:
    def routed(family: str, **changes: Any) -> tuple[int, ...]:
        return config(family, num_hidden_layers=6, **changes).moe_layers

    assert routed("deepseek_v3") == (1, 2, 3, 4, 5)
    assert routed("deepseek_v2", first_k_dense_replace=0) == (0, 1, 2, 3, 4, 5)
    assert routed("glm4_moe", first_k_dense_replace=6) == ()
    assert routed("ernie4_5_moe", moe_layer_interval=2) == (1, 3, 5)
    assert routed("ernie4_5_moe", moe_layer_start_index=2, moe_layer_end_index=3) == (2, 3)
    assert routed("ernie4_5_moe", moe_layer_end_index=-1) == (1, 2, 3, 4, 5)
    assert routed("qwen2_moe", decoder_sparse_step=3, mlp_only_layers=[2]) == (5,)
    grouped = {"n_group": 3, "topk_group": 1}
    refused(lambda: config("deepseek_v3", **grouped), "3 groups of 8 experts")
    refused(lambda: config("deepseek_v3", n_group=8, topk_group=4), "at least 2 in a group")
    refused(lambda: config("deepseek_v3", n_group=4, topk_group=1), "do not hold 3")
    refused(lambda: config("phimoe", num_experts_per_tok=3), "3 with this router", kind=Unsupported)


@pytest.mark.rule("MODEL-15")
def test_a_compressed_head_has_its_own_widths() -> None:
    """Files say different things under head_dim; none of them is this width."""
    want = first(config("deepseek_v3"))
    assert (want.head_dim, want.v_head_dim, want.kv_heads) == (10, 10, 1)
    for head_dim in (4, 10, 64, None):
        assert first(config("deepseek_v3", head_dim=head_dim)) == want
    assert first(config("deepseek_v3", num_key_value_heads=1)) == want
    assert first(config("deepseek_v3", q_lora_rank=None)).q_rank == 0
    sharp = first(config("deepseek_v3", rope=MSCALED)).scale / want.scale
    assert sharp == pytest.approx((0.1 * 0.7 * np.log(4) + 1) ** 2)
    assert first(config("deepseek_v3", rope=YARN)).scale == want.scale
    refused(lambda: config("deepseek_v3", kv_lora_rank=0), "kv_lora_rank is 0")
    refused(lambda: config("deepseek_v2", qk_rope_head_dim=7), "7 of the 7")


# Refusals

BAD_ROPES: list[tuple[dict[str, Any], tuple[str, ...], type[BadInput]]] = [
    ({"rope_type": "linear"}, ("linear needs factor",), BadInput),
    ({"rope_type": "linear", "factor": 0}, ("factor is 0",), BadInput),
    ({"rope_type": "linear", "factor": "2"}, ("factor is 2",), BadInput),
    ({"rope_type": "dynamic"}, ("dynamic needs factor",), BadInput),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, ("truncate is 1",), BadInput),
    ({**LLAMA3, "low_freq_factor": 4.0}, ("low_freq_factor 4",), BadInput),
    ({"rope_type": "llama3", "factor": 8.0}, ("needs low_freq_factor",), BadInput),
    ({**LONGROPE, "short_factor": [1.0] * 3}, ("short_factor has 3", "4"), BadInput),
    ({**LONGROPE, "long_factor": [1.0, "x"]}, ("long_factor",), BadInput),
    ({"rope_type": "longrope"}, ("needs short_factor",), BadInput),
    (
        {"rope_type": "yarn", "factor": 2.0, "mrope_section": [2, 2]},
        ("mrope_section",),
        Unsupported,
    ),
    ({"rope_type": "su", "factor": 2.0}, ("type su", "longrope"), Unsupported),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, ("partial_rotary",), Unsupported),
]


@pytest.mark.rule("MODEL-3", "MODEL-14")
@pytest.mark.parametrize(("table", "words", "kind"), BAD_ROPES)
@pytest.mark.parametrize("spelling", ["new", "old"])
def test_a_wrong_rope_table_is_named(
    table: dict[str, Any], words: tuple[str, ...], kind: type[BadInput], spelling: str
) -> None:
    for family in ("mistral", "qwen3_moe"):
        raw = tiny_config(family, rope=copy.deepcopy(table), spelling=spelling)
        where = "rope_parameters" if spelling == "new" else "rope_scaling"
        message = refused(lambda raw=raw: model_config(raw), *words, kind=kind)
        assert where in message or "llama3" in message


@pytest.mark.rule("MODEL-3")
def test_ropes_and_shares_that_a_family_has_not() -> None:
    refused(lambda: config("phimoe", rope=YARN), "type yarn", "longrope", kind=Unsupported)
    refused(lambda: config("phimoe", rope=LONGROPE), "needs short_mscale")
    assert rope(config("glm4_moe", partial_rotary_factor=0.25, head_dim=16)).dims == 4
    assert rope(config("minimax_m2")).dims == 4
    refused(lambda: config("minimax_m2", rotary_dim=10), "10 of the 8")
    refused(lambda: config("glm4_moe", partial_rotary_factor=0.4), "3 of the 8", "even")
    refused(lambda: config("ernie4_5_moe", partial_rotary_factor=0.5), "partial_rotary_factor")
    for family, key in (
        ("deepseek_v3", "scoring_func"),
        ("deepseek_v3", "topk_method"),
        ("deepseek_v2", "scoring_func"),
        ("minimax_m2", "qk_norm_type"),
    ):
        refused(lambda k=key, f=family: config(f, **{k: "x"}), f"{key} x", kind=Unsupported)


@pytest.mark.rule("MODEL-16")
@pytest.mark.parametrize("name", FAMILIES)
def test_packings_that_cannot_be_unpacked(name: str) -> None:
    for told, words in (
        ({"quant_method": "awq"}, ("'awq'", "unpacked copy")),
        ({"quant_method": "gptq", "bits": 4}, ("'gptq'",)),
        ({"quant_method": "bitsandbytes"}, ("'bitsandbytes'",)),
        ({"quant_method": "fp8"}, ("weight_block_size None",)),
        ({**FP8, "weight_block_size": [128]}, ("weight_block_size [128]",)),
        ({**FP8, "weight_block_size": [0, 128]}, ("weight_block_size",)),
        ({**FP8, "activation_scheme": "static"}, ("activation_scheme static",)),
        ({**FP8, "fmt": "e5m2"}, ("fmt e5m2",)),
        ({}, ("quantization_config",)),
        ("fp8", ("quantization_config",)),
    ):
        refused(
            lambda t=told: config(name, quantization_config=t), *words, kind=Unsupported
        )  # fmt: skip
    if name != "gpt_oss":
        refused(lambda: config(name, quantization_config=MXFP4), "'mxfp4'", kind=Unsupported)


@pytest.mark.rule("MODEL-3")
@pytest.mark.parametrize("name", FAMILIES)
def test_other_tasks_of_a_known_family_are_refused(name: str) -> None:
    for names in (["LlamaForSequenceClassification"], ["MixtralModel"], ["X", 3]):
        refused(lambda n=names: config(name, architectures=n), "ForCausalLM", kind=Unsupported)
    for good in (None, [], ..., ["PhiMoEForCausalLM"]):
        assert config(name, architectures=good) == config(name)


@pytest.mark.rule("MODEL-16", "NUM-19")
def test_mxfp4_needs_whole_groups() -> None:
    for key in ("hidden_size", "intermediate_size"):
        refused(
            lambda k=key: config("gpt_oss", quantization_config=MXFP4, **{k: 48}),
            f"{key} 48", "32", kind=Unsupported,
        )  # fmt: skip


@pytest.mark.rule("MODEL-4", "FILE-1")
@settings(max_examples=250)
@given(name=st.sampled_from(FAMILIES), data=st.data())
def test_anything_in_a_config_is_taken_or_refused(name: str, data: st.DataObject) -> None:
    keys = {k for s in families()[name].config.values() for k in s.keys}
    words = {*ROPE_FIELDS, "rope_theta", "type", "rope_type", "partial_rotary_factor",
             "quant_method", "weight_block_size"}  # fmt: skip
    value = st.recursive(
        st.none() | st.booleans() | st.integers(-2, 70) | st.floats(allow_nan=False)
        | st.sampled_from(["yarn", "dynamic", "longrope", "llama3", "fp8", "mxfp4", "greedy"]),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(sorted(words)), inner, max_size=6),
        max_leaves=8,
    )  # fmt: skip
    key = st.sampled_from(
        sorted({*keys, "rope_scaling", "rope_parameters", "quantization_config", "layer_types"})
    )
    changes = data.draw(st.dictionaries(key, value, min_size=1, max_size=4))
    try:
        assert isinstance(model_config(copy.deepcopy(tiny_config(name)) | changes), ModelConfig)
    except BadInput as e:
        one_line(e)


# Tensors


@pytest.mark.rule("MODEL-10", "MODEL-12", "FILE-1")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_is_gone_renamed_or_of_another_shape(name: str, tmp_path: Path) -> None:
    """Each role of a layer in turn: its name is in the message."""
    path = write_checkpoint(tmp_path / "m", tiny_config(name))
    ckpt = Checkpoint.open(path)
    family, i = families()[name], len(ckpt.config.layers) - 1
    roles = [r.split(".", 2)[2] for r in ckpt.roles if r.startswith(f"layers.{i}.")]
    assert len(roles) >= 7
    for role in roles:
        full = family.prefix.format(i=i) + family.layer[role][0]
        with header_edited(path, lambda entries, n=full: _renamed(entries, n, n + ".x")):
            refused(lambda: Checkpoint.open(path), full)
        with header_edited(path, lambda entries, n=full: entries[n].update(
            shape=[*entries[n]["shape"], 1])):  # fmt: skip
            refused(lambda: Checkpoint.open(path), full, "config.json implies")
        with header_edited(path, lambda entries, n=full: entries[n].update(dtype="I32")):
            refused(lambda: Checkpoint.open(path), full, "I32", kind=Unsupported)
    Checkpoint.open(path)


def _renamed(entries: dict[str, Any], old: str, new: str) -> None:
    entries[new] = entries.pop(old)


@pytest.mark.rule("MODEL-17")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e, n: e[n + "_scale_inv"].update(dtype="I32"), ("I32", "F32, BF16")),
        (lambda e, n: e[n + "_scale_inv"].update(shape=[4, 1]), ("[4, 1]", "[2, 2]")),
        (lambda e, n: e[n].update(dtype="U8"), ("U8", "F8_E4M3")),
        (lambda e, n: _renamed(e, n + "_scale_inv", n + "_scale"), ("model.layers.1.",)),
    ],
)
@pytest.mark.parametrize("which", ["self_attn.o_proj.weight", "mlp.experts.5.down_proj.weight"])
def test_an_fp8_matrix_and_its_scale(
    which: str, change: Callable[[dict[str, Any], str], None], words: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    packed = {**FP8, "weight_block_size": [16, 8 if "down" in which else 16]}
    raw = tiny_config("qwen3_moe", quantization_config=packed)
    path = write_checkpoint(tmp_path, raw, dtype="BF16")
    name = "model.layers.1." + which
    with header_edited(path, lambda entries: change(entries, name)):
        refused(lambda: Checkpoint.open(path), *words)
    Checkpoint.open(path)


@pytest.mark.rule("MODEL-17")
def test_a_scale_may_lie_in_another_file(tmp_path: Path) -> None:
    ckpt = Checkpoint.open(by_name("deepseek_v3-fp8").write(tmp_path))
    weight, scale = (ckpt.tensor(f"layers.0.{r}") for r in ("kv_b", "kv_b_scale"))
    assert weight.file != scale.file
    expert = dict(zip(ckpt.expert_roles, ckpt.expert(1, 0), strict=True))
    assert expert["gate"].file != expert["gate_scale"].file
    assert ckpt.expert_bytes() == sum(r.nbytes for r in expert.values())
    assert ckpt.tensor("layers.1.selection_bias").dtype == "F32"


@pytest.mark.rule("MODEL-16", "MODEL-17")
def test_packed_tensors_need_their_config(tmp_path: Path) -> None:
    raw = tiny_config("qwen3_moe", quantization_config=FP8)
    path = write_checkpoint(tmp_path, raw, dtype="BF16")
    file = path / "config.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in told.items() if k != "quantization_config"}))
    refused(lambda: Checkpoint.open(path), "weight_block_size", kind=Unsupported)
    other = {**FP8, "weight_block_size": [8, 20]}
    file.write_text(json.dumps(told | {"quantization_config": other}))
    refused(lambda: Checkpoint.open(path), "_scale_inv", "config.json implies")


@pytest.mark.rule("MODEL-13", "MODEL-17")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e, n: e[n + "_scales"].update(dtype="I8"), ("I8", "U8")),
        (lambda e, n: e[n + "_blocks"].update(shape=[8, 64, 16, 1]), ("[8, 64, 1, 16]",)),
        (lambda e, n: _renamed(e, n + "_scales", n + "_scale"), ("gate_up_proj_scales",)),
    ],
)
def test_mxfp4_blocks_and_scales(
    change: Callable[[dict[str, Any], str], None], words: tuple[str, ...], tmp_path: Path
) -> None:
    raw = tiny_config("gpt_oss", quantization_config=MXFP4)
    path = write_checkpoint(tmp_path, raw, dtype="BF16")
    ckpt = Checkpoint.open(path)
    assert ckpt.expert_roles == (
        "gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")  # fmt: skip
    name = "model.layers.2.mlp.experts.gate_up_proj"
    with header_edited(path, lambda entries: change(entries, name)):
        refused(lambda: Checkpoint.open(path), *words)


@pytest.mark.rule("MODEL-13")
def test_the_tensors_decide_how_experts_are_stored(tmp_path: Path) -> None:
    """A dequantised copy that kept its quantization_config, and blocks without one."""
    packed = tiny_config("gpt_oss", quantization_config=MXFP4)
    plain = write_checkpoint(tmp_path / "a", tiny_config("gpt_oss"), dtype="BF16")
    (plain / "config.json").write_text(json.dumps(packed))
    assert moe(Checkpoint.open(plain).config).storage.transposed
    blocks = write_checkpoint(tmp_path / "b", packed, dtype="BF16")
    (blocks / "config.json").write_text(json.dumps(tiny_config("gpt_oss")))
    storage = moe(Checkpoint.open(blocks).config).storage
    assert storage.packed is not None
    assert storage.packed.kind == "mxfp4"


@pytest.mark.rule("MODEL-12")
def test_parts_that_are_not_the_model(tmp_path: Path) -> None:
    """Layers for predicting several tokens at once, by their number or their names."""
    deep = write_checkpoint(tmp_path / "a", tiny_config("deepseek_v3", num_hidden_layers=4))
    file = deep / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    (note,) = Checkpoint.open(deep).notes
    assert "layers from 3 on are ignored" in note
    ernie = write_checkpoint(tmp_path / "b", tiny_config("ernie4_5_moe"))
    name = "model.layers.2.self_attn.q_proj.weight"
    with header_edited(ernie, lambda e: e.update({"model.mtp_block.0.w": e.pop("lm_head.weight")})):
        refused(lambda: Checkpoint.open(ernie), "lm_head.weight")
    tied = write_checkpoint(tmp_path / "c", tiny_config("ernie4_5_moe", tie_word_embeddings=...),
                            tied_copy=True)  # fmt: skip
    with header_edited(tied, lambda e: _renamed(e, "lm_head.weight", "model.mtp_block.0.w")):
        assert Checkpoint.open(tied).notes == (
            "1 tensors that are no part of the model are ignored",
        )
    with header_edited(ernie, lambda e: _renamed(e, name, "mtp.x")):
        refused(lambda: Checkpoint.open(ernie), name)


@pytest.mark.rule("FILE-8")
def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    """A published config.json may name a module beside it, and the folder may hold one."""
    code: dict[str, Any] = {
        "auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    }
    path = write_checkpoint(tmp_path, tiny_config("deepseek_v2", **code))
    for name in ("configuration_x.py", "modeling_x.py", "__init__.py", "sitecustomize.py"):
        (path / name).write_text("raise SystemExit('run!')")
    ckpt = Checkpoint.open(path)
    assert ckpt.notes == ("the folder brings code of its own (auto_map), which is not run",)
    assert np.isfinite(naive_logits(ckpt, [1, 2, 3])).all()
