"""Seeded checkpoints: the same bytes everywhere, however they are stored, and not degenerate."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from oracle.checkpoint_writer import encode
from oracle.tiny import sized_config, tiny_config, write_checkpoint
from reference.files.checkpoint import Checkpoint

FAMILIES = ("llama", "mixtral", "qwen3_moe")


@pytest.mark.parametrize(
    ("family", "dtype", "digest"),
    [
        ("llama", "F32", "aeb9b789ad9a66c6"),
        ("mixtral", "BF16", "3175837159a1f641"),
        ("qwen3_moe", "F16", "7049a4ddbf3e0862"),
    ],
)
def test_the_bytes_are_pinned(family: str, dtype: str, digest: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config(family), seed=3, dtype=dtype)
    data = (path / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == digest


@pytest.mark.parametrize("family", FAMILIES)
def test_values_depend_on_seed_and_role_only(family: str, tmp_path: Path) -> None:
    raw = tiny_config(family)
    one = Checkpoint.open(write_checkpoint(tmp_path / "1", raw))
    two = Checkpoint.open(write_checkpoint(tmp_path / "2", raw, shards=4))
    other = Checkpoint.open(write_checkpoint(tmp_path / "3", raw, seed=1))
    assert len(two.files) == 4
    assert max(f.stat().st_size for f in two.files) < 2 * min(f.stat().st_size for f in two.files)
    for role in one.roles:
        a, b, c = (x.read(x.tensor(role)) for x in (one, two, other))
        assert np.array_equal(a, b)
        assert not np.array_equal(a, c)
    values = [one.read(one.tensor(role)) for role in one.roles]
    assert len({v.tobytes()[:32] for v in values}) == len(values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_library_opens_them(family: str, dtype: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config(family), dtype=dtype)
    with safetensors.safe_open(path / "model.safetensors", framework="numpy") as theirs:
        ours = Checkpoint.open(path)
        q = theirs.get_tensor("model.layers.2.self_attn.q_proj.weight")
        assert q.tobytes() == ours.read(ours.tensor("layers.2.q")).tobytes()


def test_scales_are_those_of_trained_models(tmp_path: Path) -> None:
    ckpt = Checkpoint.open(write_checkpoint(tmp_path, tiny_config("qwen3_moe")))
    for role, deviation in (("layers.0.q", 32**-0.5), ("embed", 0.5), ("layers.1.o", 32**-0.5)):
        assert abs(ckpt.read(ckpt.tensor(role)).std() / deviation - 1) < 0.1
    assert abs(ckpt.read(ckpt.tensor("layers.0.attn_norm")).mean() - 1) < 0.1
    x = ckpt.read(ckpt.tensor("embed"))[:64]
    x /= np.sqrt((x * x).mean(-1, keepdims=True))
    scores = np.sort(x @ ckpt.read(ckpt.tensor("layers.0.router")).T, axis=-1)
    assert np.diff(scores, axis=-1).min() > 1e-4  # no ties, and not close to one
    chosen = {int(e) for e in (x @ ckpt.read(ckpt.tensor("layers.0.router")).T).argmax(-1)}
    assert len(chosen) >= 6  # of 8: every expert matters


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_bf16_is_rounded_to_nearest_even(values: list[float]) -> None:
    array = np.array([v for v in values if abs(v) < 3e38], np.float64)
    expected = array.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert encode(array, "BF16") == expected.tobytes()
    ties = (np.arange(64, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32)
    assert encode(ties.astype("f8"), "BF16") == ties.astype(ml_dtypes.bfloat16).tobytes()


def test_large_ones_are_written_as_a_stream(tmp_path: Path) -> None:
    config = sized_config(64 << 20, layers=2, experts=8)
    tracemalloc.start()
    path = write_checkpoint(tmp_path, config, dtype="BF16", pattern=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ckpt = Checkpoint.open(path)
    assert 64 << 20 <= ckpt.experts_bytes < 70 << 20
    assert peak < 24 << 20
    assert ckpt.non_expert_bytes < 8 << 20
    gates = [ckpt.read(ckpt.expert(1, e)[0]) for e in range(3)]
    assert not np.array_equal(gates[0], gates[1])
    assert not np.array_equal(gates[1], gates[2])
