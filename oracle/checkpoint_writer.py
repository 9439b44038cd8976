"""Writing seeded checkpoints in the Hugging Face form, as a stream.

The weights depend only on the seed and on each tensor's role: not on the NumPy version (raw 64-bit
words of PCG64), not on how the tensors are named, stacked or spread over shards.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from reference.files.config_json import family_of, model_config
from reference.files.families import ExpertLayout
from reference.files.layout import Shape, expert_shapes, layer_roles, top_roles
from reference.vocab.config import MoeSpec

WORDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SIZE = {"F32": 4, "F16": 2, "BF16": 2}
PIECE = 1 << 20
"""Values generated at a time."""
PATTERN = 1 << 18
"""Values of the block that a patterned checkpoint repeats."""


@dataclass(frozen=True)
class _Tensor:
    """One tensor as stored: `parts` are (role, shape) pairs whose values follow each other."""

    name: str
    shape: Shape
    parts: tuple[tuple[str, Shape], ...]


def write_checkpoint(
    path: str | Path,
    hf_config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: str = "F32",
    shards: int = 1,
    experts: str = "separate",
    tied_copy: bool = False,
    scale: float = 1.0,
    pattern: bool = False,
) -> Path:
    """Write config.json and the weights to the directory `path`, tensor after tensor.

    dtype      F32 | F16 | BF16 (values drawn as float64, rounded to nearest even)
    shards     1: model.safetensors; more: that many files of about equal bytes and an index
    experts    the layout, as the family file names it: "separate" | "fused"
    tied_copy  with tied embeddings, store the output head too, as an equal copy
    scale      factor on the standard deviation of every matrix
    pattern    every tensor repeats one block of 2^18 values from a place of its own: for
               checkpoints of gigabytes, written as fast as the disk takes them
    Memory stays within a few times `PIECE` values. Returns the directory.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    told = {k: WORDS[dtype] if k in ("dtype", "torch_dtype") else v for k, v in hf_config.items()}
    (path / "config.json").write_text(json.dumps(told, indent=2) + "\n")
    source = _Source(seed, dtype, scale, pattern, bool(hf_config.get("tie_word_embeddings")))
    tensors = list(_tensors(hf_config, experts, tied_copy))
    if shards == 1:
        _write_file(path / "model.safetensors", tensors, source)
        return path
    weight_map: dict[str, str] = {}
    total = sum(math.prod(t.shape) for t in tensors) * SIZE[dtype]
    groups: list[list[_Tensor]] = [[] for _ in range(shards)]
    done = 0
    for tensor in tensors:
        groups[min(shards - 1, done * shards // total)].append(tensor)
        done += math.prod(tensor.shape) * SIZE[dtype]
    for n, group in enumerate(groups):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        _write_file(path / file, group, source)
        weight_map.update({tensor.name: file for tensor in group})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def _tensors(hf_config: dict[str, Any], experts: str, tied_copy: bool) -> Iterator[_Tensor]:
    """All tensors of a model in the order in which they are stored."""
    config, family = model_config(hf_config, "config"), family_of(hf_config, "config")
    for role, shape in top_roles(config):
        yield _Tensor(family.tensors[role][0], shape, ((role, shape),))
    if config.tied and tied_copy:
        shape = (config.vocab, config.hidden)
        yield _Tensor(family.tensors["lm_head"][0], shape, (("embed", shape),))
    for i, layer in enumerate(config.layers):
        prefix = family.prefix.format(i=i)
        for role, shape in layer_roles(config, layer):
            yield _Tensor(prefix + family.layer[role][0], shape, ((f"layers.{i}.{role}", shape),))
        moe = layer.feed_forward
        if isinstance(moe, MoeSpec):
            layout = next(x for x in family.layouts if x.name == experts)
            yield from _expert_tensors(
                prefix, f"layers.{i}.experts.", layout, moe.experts, expert_shapes(config, moe)
            )


def _expert_tensors(
    prefix: str, role: str, layout: ExpertLayout, count: int, shapes: dict[str, Shape]
) -> Iterator[_Tensor]:
    """The experts of one layer: one tensor each, or stacks that pack several roles."""
    if not any(tensor.stacked for tensor in layout.roles.values()):
        for e in range(count):
            for name, tensor in layout.roles.items():
                yield _Tensor(
                    prefix + tensor.name.format(e=e),
                    shapes[name],
                    ((f"{role}{e}.{name}", shapes[name]),),
                )
        return
    stacks: dict[str, list[str]] = {}
    for name, tensor in layout.roles.items():
        stacks.setdefault(tensor.name, []).append(name)
    for stack, names in stacks.items():
        names.sort(key=lambda name: layout.roles[name].part)
        rows, width = shapes[names[0]]
        parts = tuple((f"{role}{e}.{n}", shapes[n]) for e in range(count) for n in names)
        yield _Tensor(prefix + stack, (count, rows * len(names), width), parts)


class _Source:
    """Draws the values of a role; equal for equal (seed, role), however they are stored."""

    def __init__(self, seed: int, dtype: str, scale: float, pattern: bool, tied: bool) -> None:
        self.seed, self.dtype, self.scale, self.tied = seed, dtype, scale, tied
        self.block = self._uniform("pattern", PATTERN) if pattern else None

    def _words(self, role: str) -> np.random.PCG64:
        digest = hashlib.sha256(f"{self.seed}:{role}".encode()).digest()
        return np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def _uniform(self, role: str, count: int) -> np.ndarray:
        return _spread(self._words(role).random_raw(count))

    def pieces(self, role: str, shape: Shape) -> Iterator[bytes]:
        """The stored bytes of a role, in pieces of at most `PIECE` values."""
        mean, deviation = self._moments(role, shape)
        count = math.prod(shape)
        if self.block is not None:
            start = int(self._words(role).random_raw(1)[0]) % PATTERN
            ring = encode(mean + deviation * np.roll(self.block, -start), self.dtype)
            for done in range(0, count, PATTERN):
                yield ring[: (min(PATTERN, count - done)) * SIZE[self.dtype]]
            return
        words = self._words(role)
        for done in range(0, count, PIECE):
            values = _spread(words.random_raw(min(PIECE, count - done)))
            yield encode(mean + deviation * values, self.dtype)

    def _moments(self, role: str, shape: Shape) -> tuple[float, float]:
        """Mean and standard deviation: norms near 1, biases small, matrices 1/sqrt(fan in)."""
        kind = role.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            return 1.0, 0.1
        if kind.endswith("_bias"):
            return 0.0, 0.1 * self.scale
        fan = 1.0 / math.sqrt(shape[-1])
        if kind == "router":
            return 0.0, 2.0 * fan * self.scale
        if kind == "embed" and not self.tied:
            return 0.0, 0.5 * self.scale
        return 0.0, fan * self.scale


def _spread(words: np.ndarray) -> np.ndarray:
    """64-bit words as float64, uniform with mean 0 and standard deviation 1."""
    return ((words >> np.uint64(11)) * 2.0**-53 - 0.5) * math.sqrt(12.0)


def encode(values: np.ndarray, dtype: str) -> bytes:
    """float64 values as little-endian F32, F16 or BF16 bytes, rounded to nearest even."""
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    single = values.astype("<f4")
    if dtype == "F32":
        return single.tobytes()
    bits = single.view("<u4")
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2").tobytes()


def _write_file(path: Path, tensors: list[_Tensor], source: _Source) -> None:
    """One safetensors file: the header from the shapes, then the values as they are drawn."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + math.prod(tensor.shape) * SIZE[source.dtype]
        header[tensor.name] = {
            "dtype": source.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            _write_values(out, tensor, source)


def _write_values(out: BinaryIO, tensor: _Tensor, source: _Source) -> None:
    for role, shape in tensor.parts:
        for piece in source.pieces(role, shape):
            out.write(piece)
