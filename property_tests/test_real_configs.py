"""config.json as published: read without a word, and the sizes that follow, worked out by hand.

property_tests/configs holds facts alone: what the architecture needs, and where it was found.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jax_impl.app.main import main
from property_tests.refusals import refused
from reference.files.bare import BareModel
from reference.files.config_json import model_config
from reference.vocab.config import ModelConfig, MoeSpec
from reference.vocab.errors import Unsupported

FOLDER = Path(__file__).parent / "configs"

# name: bytes of an expert, numbers cached of a token, routed layers, experts, experts a token
BY_HAND: dict[str, tuple[int, int, int, int, int]] = {
    "Mixtral-8x7B": (3 * 4096 * 14336 * 2, 32 * 2 * 8 * 128, 32, 8, 2),
    "Qwen3-30B-A3B": (3 * 2048 * 768 * 2, 48 * 2 * 4 * 128, 48, 128, 8),
    "Qwen3-235B-A22B": (3 * 4096 * 1536 * 2, 94 * 2 * 4 * 128, 94, 128, 8),
    "OLMoE-1B-7B": (3 * 2048 * 1024 * 2, 16 * 2 * 16 * 128, 16, 64, 8),
    "DeepSeek-V2-Lite": (3 * 2048 * 1408 * 2, 27 * (512 + 64), 26, 64, 6),
    # a byte each, and a float32 for every block of 128 x 128: 16 x 56 of them a matrix
    "DeepSeek-V3": (3 * (7168 * 2048 + 16 * 56 * 4), 61 * (512 + 64), 58, 256, 8),
    # half a byte each, a byte for every 32, biases in 16 bits
    "gpt-oss-20b": (
        5760 * 2880 // 2 + 5760 * 90 + 5760 * 2 + 2880 * 2880 // 2 + 2880 * 90 + 2880 * 2,
        24 * 2 * 8 * 64, 24, 32, 4,
    ),
    "gpt-oss-120b": (13_236_480, 36 * 2 * 8 * 64, 36, 128, 4),
    "GLM-4.5-Air": (3 * 4096 * 1408 * 2, 46 * 2 * 8 * 128, 45, 128, 8),
    "Phi-3.5-MoE": (3 * 4096 * 6400 * 2, 32 * 2 * 8 * 128, 32, 16, 2),
}  # fmt: skip


def told(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def read(name: str, **changes: Any) -> ModelConfig:
    return model_config(told(name)["config"] | changes)


def test_every_file_is_used_and_names_its_source() -> None:
    assert {p.stem for p in FOLDER.glob("*.json")} == set(BY_HAND)
    for name in BY_HAND:
        assert told(name)["source"].startswith("https://huggingface.co/")


@pytest.mark.rule("MODEL-2", "MODEL-8", "MODEL-16")
@pytest.mark.parametrize("name", BY_HAND)
def test_sizes_by_hand(name: str, tmp_path: Path) -> None:
    nbytes, cached, layers, experts, top_k = BY_HAND[name]
    config = read(name)
    assert (len(config.moe_layers), config.experts, config.top_k) == (layers, experts, top_k)
    specs = [s.attention for s in config.layers]
    assert sum(a.cache_heads * (a.cache_key_dim + a.cache_value_dim) for a in specs) == cached
    (tmp_path / "config.json").write_text(json.dumps(told(name)["config"]))
    bare = BareModel.open(tmp_path)
    assert bare.expert_bytes() == nbytes
    assert bare.experts_bytes == nbytes * layers * experts
    shutil.rmtree(tmp_path)


SLOTS = {
    # experts that 16, 32, 64 and 128 GB hold: the quotient with the bytes above, at most all
    "Mixtral-8x7B": (45, 90, 181, 256),
    "Qwen3-30B-A3B": (1695, 3390, 6144, 6144),
    "Qwen3-235B-A22B": (423, 847, 1695, 3390),
    "OLMoE-1B-7B": (1024, 1024, 1024, 1024),
    "DeepSeek-V2-Lite": (924, 1664, 1664, 1664),
    "DeepSeek-V3": (363, 726, 1452, 2905),
    "gpt-oss-20b": (768, 768, 768, 768),
    "gpt-oss-120b": (1208, 2417, 4608, 4608),
    "GLM-4.5-Air": (462, 924, 1849, 3699),
    "Phi-3.5-MoE": (101, 203, 406, 512),
}


@pytest.mark.rule("PLAN-1")
@pytest.mark.parametrize("name", BY_HAND)
def test_what_plan_says_of_published_models(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nbytes, cached, layers, experts, _ = BY_HAND[name]
    (tmp_path / "config.json").write_text(json.dumps(told(name)["config"]))
    slots = []
    for size in (16, 32, 64, 128):
        words = ["--memory", f"{size}GB", "--no-probe", "--json", str(tmp_path / "out")]
        assert main(["plan", str(tmp_path), *words]) == 0
        said = json.loads((tmp_path / "out").read_text())
        assert said["expert_bytes"] == nbytes
        assert said["kv_bytes_a_token"] == 4 * cached  # K and V are float32 unless told otherwise
        assert said["slots"] == min(layers * experts, size * 10**9 // nbytes)
        slots.append(said["slots"])
    assert tuple(slots) == SLOTS[name]
    assert "KV" in capsys.readouterr().out


def moe(config: ModelConfig) -> MoeSpec:
    spec = config.layers[-1].feed_forward
    assert isinstance(spec, MoeSpec)
    return spec


@pytest.mark.rule("MODEL-5", "MODEL-7", "MODEL-14", "MODEL-15")
def test_what_else_the_files_say() -> None:
    v3 = read("DeepSeek-V3")
    a, router = v3.layers[0].attention, moe(v3).router
    assert a.scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    assert (a.heads, a.kv_heads, a.head_dim, a.v_head_dim, a.q_rank) == (128, 1, 192, 128, 1536)
    assert (router.groups, router.top_groups, router.scale) == (8, 4, 2.5)
    assert v3.packed is not None
    assert v3.packed.block == (128, 128)
    assert v3.max_position == 163840
    oss = read("gpt-oss-20b")
    assert [s.attention.window for s in oss.layers[:4]] == [128, None, 128, None]
    assert oss.layers[0].attention.rope is not None
    assert not oss.layers[0].attention.rope.truncate
    assert moe(oss).storage.gate_up == "interleaved"
    air = read("GLM-4.5-Air")
    assert air.layers[0].attention.rope is not None
    assert air.layers[0].attention.rope.dims == 64
    assert air.layers[0].attention.qkv_bias
    assert not air.layers[0].attention.o_bias
    phi = read("Phi-3.5-MoE")
    assert phi.layers[0].attention.window == 131072
    assert phi.norm.kind == "layer"
    assert phi.head_bias


@pytest.mark.rule("MODEL-3", "MODEL-16")
def test_other_packings_of_the_same_models_are_refused() -> None:
    for method in ("awq", "gptq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "mxfp4"):
        refused(
            lambda m=method: read("Qwen3-30B-A3B", quantization_config={"quant_method": m}),
            f"'{method}'", "unpacked copy", kind=Unsupported,
        )  # fmt: skip
