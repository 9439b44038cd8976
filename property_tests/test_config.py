"""config.json to a description, and the tensors that the description asks for."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from oracle.tiny import tiny_config, write_checkpoint
from property_tests.refusals import one_line, refused
from reference.files import families as family_files
from reference.files.checkpoint import Checkpoint
from reference.files.config_fields import FIELDS
from reference.files.config_json import model_config
from reference.files.families import UNSET, families
from reference.files.layout import layer_roles, summarise, top_roles
from reference.vocab.config import DenseSpec, ModelConfig, MoeSpec
from reference.vocab.errors import BadInput, Unsupported

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("llama", "mixtral", "qwen3_moe")


def config(family: str, **changes: Any) -> ModelConfig:
    return model_config(tiny_config(family, **changes))


def moe(c: ModelConfig, layer: int = 0) -> MoeSpec:
    spec = c.layers[layer].feed_forward
    assert isinstance(spec, MoeSpec)
    return spec


# Families as data


@pytest.mark.rule("MODEL-1")
def test_no_code_knows_a_family() -> None:
    """No module of the engines or of files has a family's name outside prose."""
    for package in ("reference", "jax_impl"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            # the command may write a model of some family, but it decides nothing by the name
            command = "app" in path.parts
            kinds = (ast.Compare, ast.match_case) if command else ast.Module
            for top in (node for node in ast.walk(tree) if isinstance(node, kinds)):
                for node in ast.walk(top):
                    named = isinstance(node, ast.Constant) and node.value in families()
                    assert not named, f"{path}: a family's name"


@pytest.mark.rule("MODEL-2")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_file_uses_only_known_fields(name: str) -> None:
    family = families()[name]
    assert family.model_type == name
    assert family.config.keys() <= FIELDS.keys()
    for field, source in family.config.items():
        for stated in (source.value, source.absent, source.null):
            assert stated is UNSET or FIELDS[field].check(stated) is not None, field
    whole = config(name, attention_bias=True, mlp_bias=True)
    for role, _ in top_roles(whole):
        assert family.tensors[role]
    for layer in whole.layers:
        for role, _ in layer_roles(whole, layer):
            assert "{" not in "".join(family.layer[role])


@pytest.mark.rule("MODEL-2")
def test_a_family_is_added_by_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A made-up family with other key names, other tensor names and stacked experts only."""
    text = (ROOT / "reference/vocab/families/qwen3_moe.toml").read_text()
    text = text.replace('"qwen3_moe"', '"made_up"').replace('"hidden_size"', '"width"')
    text = text.replace("mlp.gate.weight", "chooser").replace("model.layers", "net.blocks")
    text = text.replace('name = "separate"', 'name = "spread"')
    shipped = family_files.families()
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "made_up.toml").write_text(text)
    (folder / "README").write_text("not a family")
    monkeypatch.setattr(family_files, "files", lambda _: tmp_path)
    family_files.families.cache_clear()
    try:
        raw = tiny_config("qwen3_moe", model_type="made_up", hidden_size=..., width=32)
        path = write_checkpoint(tmp_path / "m", raw, experts="spread")
        ckpt = Checkpoint.open(path)
        assert (ckpt.config.family, ckpt.config.hidden) == ("made_up", 32)
        assert ckpt.tensor("layers.0.router").shape == (8, 32)
        refused(lambda: config("llama"), "made_up", kind=Unsupported)
    finally:
        family_files.families.cache_clear()
    monkeypatch.undo()
    assert family_files.families() == shipped


@pytest.mark.rule("MODEL-2")
def test_a_misspelt_word_in_a_family_file_is_seen() -> None:
    with pytest.raises(ValueError, match="defualt"):
        family_files._source({"key": "x", "defualt": 3})


# Spellings and defaults


@pytest.mark.rule("MODEL-6")
@pytest.mark.parametrize("name", FAMILIES)
def test_old_and_new_spelling_say_the_same(name: str) -> None:
    new = config(name, rope_theta=5e5)
    assert new.layers[0].attention.rope is not None
    assert new.layers[0].attention.rope.theta == 5e5
    assert config(name, spelling="old", rope_theta=5e5) == new
    for scaling in ({}, None, {"type": "default"}, {"rope_type": "default"}):
        assert config(name, spelling="old", rope_theta=5e5, rope_scaling=scaling) == new
    inside = {"rope_type": "default", "rope_theta": 5e5}
    assert config(name, spelling="old", rope_theta=7.0, rope_scaling=inside) == new
    both = {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": inside}
    assert config(name, spelling="old", rope_theta=7.0, **both) == new
    assert config(name, rope_parameters={"rope_theta": 500000}) == new


DEFAULTS = {
    "llama": {"theta": 1e4, "eps": 1e-6, "max": 2048, "eos": (2,), "bos": 1},
    "mixtral": {"theta": 1e6, "eps": 1e-5, "max": 131072, "eos": (2,), "bos": 1},
    "qwen3_moe": {"theta": 1e4, "eps": 1e-6, "max": 32768, "eos": (), "bos": None},
}


@pytest.mark.rule("MODEL-5", "MODEL-6")
@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys(name: str) -> None:
    keys = (
        "rope_parameters", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
        "hidden_act", "eos_token_id", "bos_token_id", "num_key_value_heads", "head_dim", "dtype",
    )  # fmt: skip
    c = config(name, **dict.fromkeys(keys, ...))
    a = c.layers[0].attention
    said = DEFAULTS[name]
    assert a.rope is not None
    assert (a.rope.theta, c.norm.eps, c.max_position) == (said["theta"], said["eps"], said["max"])
    assert (c.eos, c.bos, c.tied) == (said["eos"], said["bos"], False)
    assert (a.heads, a.kv_heads, a.head_dim, a.scale) == (4, 4, 8, 8**-0.5)
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "eos_token_id", "bos_token_id"))
    c = config(name, **nulls)
    a = c.layers[0].attention
    assert (a.kv_heads, a.head_dim, c.eos, c.bos) == (4, 8, (), None)


@pytest.mark.rule("MODEL-5")
def test_heads() -> None:
    wide = {"num_attention_heads": 16, "num_key_value_heads": ..., "head_dim": 2}
    assert config("mixtral", **wide).layers[0].attention.kv_heads == 8
    assert config("qwen3_moe", **wide).layers[0].attention.kv_heads == 4
    assert config("llama", **wide).layers[0].attention.kv_heads == 16
    assert config("llama", head_dim=16).layers[0].attention.head_dim == 16
    for family in FAMILIES:
        refused(lambda f=family: config(f, num_key_value_heads=3), "num_key_value_heads is 3")
        refused(lambda f=family: config(f, num_attention_heads=5, head_dim=...), "head_dim")
        refused(lambda f=family: config(f, head_dim=7), "head_dim is 7", "even")


@pytest.mark.rule("MODEL-7")
def test_windows() -> None:
    def window(family: str, **changes: Any) -> int | None:
        return config(family, **changes).layers[-1].attention.window

    assert window("mixtral") is None
    assert window("mixtral", sliding_window=5) == 5
    assert window("mixtral", sliding_window=None) is None
    assert window("mixtral", sliding_window=0) is None
    assert window("qwen3_moe", sliding_window=5) is None
    assert window("qwen3_moe", sliding_window=5, use_sliding_window=True) == 5
    assert window("qwen3_moe", use_sliding_window=True) == 4096
    assert window("qwen3_moe", sliding_window=0, use_sliding_window=True) is None
    assert window("qwen3_moe", sliding_window=None, use_sliding_window=True) is None
    assert window("llama", sliding_window=5) is None
    types = {"layer_types": ["full_attention"] * 3}
    assert window("mixtral", **types) is None
    assert window("mixtral", sliding_window=4, layer_types=["sliding_attention"] * 4) == 4


@pytest.mark.rule("MODEL-8")
def test_routed_and_dense_layers() -> None:
    c = config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert c.moe_layers == (1, 5)
    assert (c.experts, c.top_k) == (8, 2)
    assert c.layers[0].feed_forward == DenseSpec(48)
    assert moe(c, 1).intermediate == 16
    assert config("qwen3_moe", num_experts=0).moe_layers == ()
    assert config("qwen3_moe", mlp_only_layers=None).moe_layers == (0, 1, 2)
    assert config("mixtral").moe_layers == (0, 1, 2)
    assert config("llama").moe_layers == ()
    assert (config("llama").experts, config("llama").top_k) == (0, 0)
    assert moe(config("mixtral")).router.renormalise
    assert moe(config("qwen3_moe")).router.renormalise
    assert not moe(config("qwen3_moe", norm_topk_prob=False)).router.renormalise
    assert not moe(config("qwen3_moe", norm_topk_prob=...)).router.renormalise
    resaved = {"num_experts": ..., "num_local_experts": 8}
    assert config("qwen3_moe", **resaved) == config("qwen3_moe")
    refused(lambda: config("mixtral", num_experts_per_tok=9), "num_experts_per_tok is 9", "8")
    refused(lambda: config("mixtral", num_local_experts=0), "num_local_experts")
    refused(lambda: config("mixtral", intermediate_size=...), "intermediate_size")
    refused(lambda: config("llama", intermediate_size=...), "intermediate_size")


# Refusals


@pytest.mark.rule("MODEL-3")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v9"}, ("deepseek_v9", "llama, ", "mixtral, ")),
        ({"model_type": "x\n\x1b[31m" * 99}, ("x\\n",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("fp8", "BF16")),
        ({"quantization_config": {}}, ("quantization_config",)),
        ({"hidden_act": "gelu"}, ("hidden_act gelu", "silu")),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, ("type su", "longrope")),
        ({"rope_parameters": {"rope_type": "proportional"}}, ("proportional", "yarn")),
        ({"rope_scaling": {"rope_type": 3}}, ("type 3",)),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [1]}}, ("mrope",)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ("each layer type",)),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5",)),
        ({"layer_types": ["full_attention", "sliding_attention", "x"]}, ("layer_types[1]",)),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_supported(changes: dict[str, Any], words: Any, name: str) -> None:
    refused(lambda: config(name, **changes), *words, "supported", kind=Unsupported)


@pytest.mark.rule("MODEL-4", "FILE-1")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": ...}, ("model_type is needed",)),
        ({"model_type": 3}, ("model_type",)),
        ({"hidden_size": ...}, ("hidden_size is missing",)),
        ({"hidden_size": None}, ("hidden_size is null",)),
        ({"hidden_size": 0}, ("hidden_size is 0",)),
        ({"hidden_size": True}, ("hidden_size is True",)),
        ({"hidden_size": 32.0}, ("hidden_size is 32.0", "an integer")),
        ({"hidden_size": "32"}, ("hidden_size is 32", "an integer")),
        ({"hidden_size": 1 << 40}, ("hidden_size",)),
        ({"num_hidden_layers": -1}, ("num_hidden_layers is -1",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers",)),
        ({"rms_norm_eps": -1e-6}, ("rms_norm_eps",)),
        ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps",)),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings is 1", "true or false")),
        ({"eos_token_id": [1, "2"]}, ("eos_token_id",)),
        ({"eos_token_id": -1}, ("eos_token_id",)),
        ({"rope_parameters": 3}, ("rope_parameters is 3",)),
        ({"rope_parameters": {"rope_theta": 0}}, ("rope_parameters.rope_theta is 0",)),
        ({"spelling": "old", "rope_theta": "1e4"}, ("rope_theta is 1e4",)),
        ({"layer_types": "full"}, ("layer_types",)),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_value_is_named(changes: dict[str, Any], words: Any, name: str) -> None:
    refused(lambda: config(name, **changes), "config.json", *words)


@pytest.mark.rule("MODEL-4")
def test_contradictions_and_other_shapes() -> None:
    refused(lambda: config("qwen3_moe", num_local_experts=9), "num_experts 8", "contradict")
    assert config("qwen3_moe", num_local_experts=8) == config("qwen3_moe")
    refused(lambda: config("qwen3_moe", mlp_only_layers=[-1]), "mlp_only_layers")
    refused(lambda: config("qwen3_moe", mlp_only_layers=0), "mlp_only_layers")
    refused(lambda: config("qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step is 0")
    for other in ([], None, "x", 3):
        refused(lambda o=other: model_config(o), "an object is needed")


@pytest.mark.rule("MODEL-4", "FILE-1")
@given(
    name=st.sampled_from(FAMILIES),
    changes=st.dictionaries(
        st.sampled_from(sorted({k for f in families().values() for s in f.config.values()
                                for k in s.keys} | {"rope_scaling", "rope_parameters"})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["rope_theta", "type", "rope_type"]), inner),
            max_leaves=5,
        ),
        min_size=1,
        max_size=4,
    ),
)  # fmt: skip
def test_anything_in_a_config_is_taken_or_refused(name: str, changes: dict[str, Any]) -> None:
    raw = copy.deepcopy(tiny_config(name)) | changes
    try:
        assert isinstance(model_config(raw), ModelConfig)
    except BadInput as e:
        one_line(e)


@pytest.mark.rule("MODEL-9")
def test_stop_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config("llama", eos_token_id=[5, 6]))
    assert Checkpoint.open(path).config.eos == (5, 6)
    other = path / "generation_config.json"
    for text, eos in (
        ("{}", (5, 6)),
        ('{"eos_token_id": null}', (5, 6)),
        ('{"eos_token_id": 7}', (7,)),
        ('{"eos_token_id": [7, 8]}', (7, 8)),
    ):
        other.write_text(text)
        assert Checkpoint.open(path).config.eos == eos
    for text in ("[]", '{"eos_token_id": "x"}', "{", '{"eos_token_id": [true]}'):
        other.write_text(text)
        refused(lambda: Checkpoint.open(path), "generation_config.json")


# Tensors


def rewrite(path: Path, change: Any) -> None:
    """Change the tensors of model.safetensors, a dict of name to array, and write them again."""
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


LAYER = "model.layers.1."


@pytest.mark.rule("MODEL-10", "FILE-1")
def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config("mixtral"))

    def remove(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            gone = ("experts.3.", "experts.5.w2", LAYER + "input_layernorm.weight")
            if any(part in name for part in gone):
                del tensors[name]

    rewrite(path, remove)
    message = refused(
        lambda: Checkpoint.open(path),
        "13 tensors",
        LAYER + "input_layernorm.weight",
        "model.layers.{0-2}.block_sparse_moe.experts.3.w{1-3}.weight",
        "model.layers.{0-2}.block_sparse_moe.experts.5.w2.weight",
    )
    assert len(message) < 600


@pytest.mark.rule("MODEL-10")
@pytest.mark.parametrize(
    ("role", "array", "words"),
    [
        ("lm_head.weight", np.zeros((96, 33), "f4"), ("[96, 33]", "[96, 32]")),
        ("lm_head.weight", np.zeros((32, 96), "f4"), ("[32, 96]", "[96, 32]")),
        (LAYER + "self_attn.q_norm.weight", np.zeros(16, "f4"), ("q_norm", "[16]", "[8]")),
        (LAYER + "mlp.gate.weight", np.zeros((7, 32), "f4"), ("[7, 32]", "[8, 32]")),
        (LAYER + "mlp.experts.7.up_proj.weight", np.zeros((16, 31), "f4"), ("experts.7",)),
        (LAYER + "self_attn.q_proj.weight", np.zeros((32, 32), "f8"), ("F64", "F32, F16, BF16")),
        (LAYER + "self_attn.q_proj.weight", np.zeros((32, 32), "u1"), ("U8", "F32, F16, BF16")),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(role: str, array: Any, words: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    rewrite(path, lambda tensors: tensors.__setitem__(role, array))
    refused(lambda: Checkpoint.open(path), role, *words)


@pytest.mark.rule("MODEL-10")
def test_the_config_and_the_tensors_must_agree(tmp_path: Path) -> None:
    """Each of these changes of config.json alone asks for other tensors than there are."""
    path = write_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    file = path / "config.json"
    good = json.loads(file.read_text())
    for change in (
        {"num_hidden_layers": 4}, {"num_experts": 9}, {"num_experts": 7}, {"head_dim": 4},
        {"attention_bias": True}, {"vocab_size": 97}, {"mlp_only_layers": [1]},
        {"num_key_value_heads": 1}, {"moe_intermediate_size": 17}, {"hidden_size": 36},
        {"model_type": "mixtral", "num_experts": None, "num_local_experts": 8},
    ):  # fmt: skip
        file.write_text(json.dumps(good | change))
        refused(lambda: Checkpoint.open(path), "config.json")
    file.write_text(json.dumps(good | {"num_hidden_layers": 2}))
    assert Checkpoint.open(path).notes == ("33 tensors of layers from 2 on are ignored",)


@pytest.mark.rule("MODEL-12")
def test_tensors_without_a_place(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config("mixtral"))
    harmless = {LAYER + "self_attn.rotary_emb.inv_freq": np.zeros(4, "f4")}
    rewrite(path, lambda tensors: tensors.update(harmless))
    assert Checkpoint.open(path).notes == ()
    rewrite(path, lambda tensors: tensors.update({"model.layers.3.eh_proj": np.zeros(4, "u1")}))
    ckpt = Checkpoint.open(path)
    assert ckpt.config.notes == ckpt.notes == ("1 tensors of layers from 3 on are ignored",)
    odd = {LAYER + "self_attn.q_proj.bias": np.zeros(32, "f4"), "é": np.zeros(1, "f4")}
    rewrite(path, lambda tensors: tensors.update(odd))
    refused(lambda: Checkpoint.open(path), "2 tensors", "q_proj.bias", "no place")


@pytest.mark.rule("MODEL-11")
def test_tied_embeddings(tmp_path: Path) -> None:
    tied = tiny_config("llama", tie_word_embeddings=True)
    path = write_checkpoint(tmp_path / "absent", tied)
    ckpt = Checkpoint.open(path)
    assert not ckpt.has("lm_head")
    embed = ckpt.read(ckpt.tensor("embed"))
    path = write_checkpoint(tmp_path / "copy", tied, tied_copy=True)
    copied = Checkpoint.open(path)
    assert not copied.has("lm_head")
    assert copied.non_expert_bytes == ckpt.non_expert_bytes
    assert np.array_equal(copied.read(copied.tensor("embed")), embed)

    def touch(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    rewrite(path, touch)
    refused(lambda: Checkpoint.open(path), "tie_word_embeddings")
    rewrite(path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    swapped = Checkpoint.open(path)
    assert swapped.tensor("embed").shape == (96, 32)
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    refused(lambda: Checkpoint.open(path), "embed_tokens")


@pytest.mark.rule("MODEL-11")
def test_a_large_copy_is_compared_in_blocks(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True, vocab_size=160_000)
    path = write_checkpoint(tmp_path, config, tied_copy=True, pattern=True)
    ckpt = Checkpoint.open(path)
    size = ckpt.tensor("embed").nbytes
    assert size > 16 << 20
    file = path / "model.safetensors"
    copy_start = ckpt.tensor("final_norm").offset + 32 * 4
    with file.open("r+b") as out:
        out.seek(copy_start + size - 1)
        last = out.read(1)
        out.seek(copy_start + size - 1)
        out.write(bytes([last[0] ^ 1]))
    refused(lambda: Checkpoint.open(path), "tie_word_embeddings")


@pytest.mark.rule("MODEL-13")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stacked_experts_are_the_same_bytes(name: str, dtype: str, tmp_path: Path) -> None:
    raw = tiny_config(name)
    one = Checkpoint.open(write_checkpoint(tmp_path / "a", raw, dtype=dtype))
    two = Checkpoint.open(write_checkpoint(tmp_path / "b", raw, dtype=dtype, experts="fused"))
    assert one.config == two.config
    for layer in one.config.moe_layers:
        for e in range(8):
            for a, b in zip(one.expert(layer, e), two.expert(layer, e), strict=True):
                assert (a.shape, a.nbytes) == (b.shape, b.nbytes)
                assert np.array_equal(one.read(a), two.read(b))
    stack = LAYER + "mlp.experts.gate_up_proj"
    rewrite_bf16 = tmp_path / "b" / "model.safetensors"
    data = rewrite_bf16.read_bytes()
    rewrite_bf16.write_bytes(data.replace(stack.encode(), stack.replace("up", "uq").encode()))
    refused(lambda: Checkpoint.open(tmp_path / "b"), "1 tensors", stack)


@pytest.mark.rule("MODEL-10")
@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1))
def test_names_are_folded_exactly(rows: set[tuple[int, int]]) -> None:
    """Unfolding the summary gives the names again, each once."""

    def spread(text: str) -> list[str]:
        found = re.search(r"\{([^}]*)\}", text)
        if not found:
            return [text]
        out = []
        for span in found[1].split(","):
            low, _, high = span.partition("-")
            for n in range(int(low), int(high or low) + 1):
                out += spread(text[: found.start()] + str(n) + text[found.end() :])
        return out

    names = [f"a.{i}.b.{j}.w" for i, j in sorted(rows)]
    text = summarise(names, limit=10**6)
    pieces = re.split(r", (?=a)", text)
    assert sorted(x for p in pieces for x in spread(p)) == sorted(names)
    assert len(summarise([f"n{i}x{'y' * i}" for i in range(500)])) <= 1500
