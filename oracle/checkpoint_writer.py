"""Writing seeded checkpoints in the Hugging Face form, as a stream; oracle.weight_source draws."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oracle.weight_source import SIZE, Form, Source, encode
from reference.files.config_json import family_of, model_config
from reference.files.families import ExpertLayout
from reference.files.layout import (
    SCALE,
    Shape,
    expert_shapes,
    layer_roles,
    scale_shape,
    top_roles,
)
from reference.vocab.config import MoeSpec

__all__ = ["encode", "write_checkpoint"]

WORDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NEVER_PACKED = ("embed", "lm_head", "router", "shared_router")


@dataclass(frozen=True)
class _Tensor:
    """One tensor as stored: `parts` are (role, shape) pairs whose values follow each other."""

    name: str
    shape: Shape
    parts: tuple[tuple[str, Shape], ...]
    dtype: str
    inputs: int
    form: Form = "plain"

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * SIZE[self.dtype]


def write_checkpoint(
    path: str | Path,
    hf_config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: str = "F32",
    shards: int = 1,
    experts: str | None = None,
    tied_copy: bool = False,
    scale: float = 1.0,
    pattern: bool = False,
    scale_dtype: str = "F32",
    unpacked: tuple[str, ...] = (),
    wide: tuple[str, ...] = (),
    as_rows: tuple[str, ...] = (),
    source: Source | None = None,
) -> Path:
    """Write config.json and the weights to the directory `path`, tensor after tensor.

    dtype      F32 | F16 | BF16 (values drawn as float64, rounded to nearest even)
    shards     1: model.safetensors; more: that many files of about equal bytes and an index
    experts    the layout, as the family file names it ("separate" | "fused" | ..); None: the usual
    tied_copy  with tied embeddings, store the output head too, as an equal copy
    scale      factor on the standard deviation of every matrix
    pattern    every tensor repeats one block of 2^18 values from a place of its own: for
               checkpoints of gigabytes, written as fast as the disk takes them
    scale_dtype   F32 | BF16: of FP8 scales
    unpacked   of an FP8 model: roles (the last word) that stay unpacked
    wide       roles that are F32 beside others that are not
    as_rows    roles of vectors that are stored as matrices of one row
    source     where values come from, instead of `seed`, `scale` and `pattern`

    quantization_config decides what is packed: with fp8 every matrix but embedding, head and
    routers, with mxfp4 the experts. FP8 scales come last: with shards, in another file.
    Memory stays within a few times `PIECE` values. Returns the directory.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    told = {k: WORDS[dtype] if k in ("dtype", "torch_dtype") else v for k, v in hf_config.items()}
    (path / "config.json").write_text(json.dumps(told, indent=2) + "\n")
    tied = bool(hf_config.get("tie_word_embeddings"))
    source = source or Source(seed, scale, pattern, tied)
    layout = _Layout(hf_config, dtype, scale_dtype, unpacked, wide, as_rows)
    tensors = list(layout.tensors(experts, tied_copy))
    if shards == 1:
        _write_file(path / "model.safetensors", tensors, source)
        return path
    weight_map: dict[str, str] = {}
    total = sum(t.nbytes for t in tensors)
    groups: list[list[_Tensor]] = [[] for _ in range(shards)]
    done = 0
    for tensor in tensors:
        groups[min(shards - 1, done * shards // total)].append(tensor)
        done += tensor.nbytes
    for n, group in enumerate(groups):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        _write_file(path / file, group, source)
        weight_map.update({tensor.name: file for tensor in group})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


class _Layout:
    """What a model consists of, tensor by tensor, and how each is stored."""

    def __init__(
        self,
        hf_config: dict[str, Any],
        dtype: str,
        scale_dtype: str,
        unpacked: tuple[str, ...],
        wide: tuple[str, ...],
        as_rows: tuple[str, ...],
    ) -> None:
        self.config = model_config(hf_config, "config")
        self.family = family_of(hf_config, "config")
        self.dtype, self.scale_dtype, self.wide = dtype, scale_dtype, wide
        self.unpacked, self.as_rows = (*NEVER_PACKED, *unpacked), as_rows
        self.scales: list[_Tensor] = []

    def tensors(self, experts: str | None, tied_copy: bool) -> Iterator[_Tensor]:
        """All tensors in the order in which they are stored."""
        config, family = self.config, self.family
        for role, shape in top_roles(config):
            yield self._one(family.tensors[role][0], role, shape)
        if config.tied and tied_copy:
            shape = (config.vocab, config.hidden)
            yield self._one(family.tensors["lm_head"][0], "embed", shape)
        for i, layer in enumerate(config.layers):
            prefix = family.prefix.format(i=i)
            for role, shape in layer_roles(config, layer):
                yield self._one(prefix + family.layer[role][0], f"layers.{i}.{role}", shape)
            moe = layer.feed_forward
            if isinstance(moe, MoeSpec):
                yield from self._experts(prefix, f"layers.{i}.experts.", self._chosen(experts), moe)
        yield from self.scales

    def _chosen(self, name: str | None) -> ExpertLayout:
        """The layout of that name; without one, the first that fits what config.json says."""
        packed = self.config.packed
        mxfp4 = packed is not None and packed.kind == "mxfp4"
        fit = [x for x in self.family.layouts if (x.packed == "mxfp4") == mxfp4]
        return next(x for x in fit if name in (None, x.name))

    def _one(self, name: str, role: str, shape: Shape) -> _Tensor:
        """A tensor of its own; where it is to be FP8, its scale is put aside for the end."""
        kind, packed = role.rsplit(".", 1)[-1], self.config.packed
        dtype = "F32" if kind in self.wide else self.dtype
        fp8 = packed is not None and packed.kind == "fp8_block" and len(shape) == 2
        if packed is None or not fp8 or kind in self.unpacked:
            stored = (1, *shape) if kind in self.as_rows else shape
            return _Tensor(name, stored, ((role, shape),), dtype, shape[-1])
        grid = scale_shape(packed, shape)
        parts = ((role + SCALE, grid),)
        self.scales.append(
            _Tensor(name + "_scale_inv", grid, parts, self.scale_dtype, shape[-1], "fp8_scale")
        )
        return _Tensor(name, shape, ((role, shape),), "F8_E4M3", shape[-1], "fp8")

    def _experts(
        self, prefix: str, role: str, layout: ExpertLayout, moe: MoeSpec
    ) -> Iterator[_Tensor]:
        """The experts of one layer: one tensor each, or stacks that pack several roles."""
        shapes = expert_shapes(self.config, replace(moe, storage=layout.storage()))
        if not any(tensor.stacked for tensor in layout.roles.values()):
            for e in range(moe.experts):
                for name, tensor in layout.roles.items():
                    full = prefix + tensor.name.format(e=e)
                    yield self._one(full, f"{role}{e}.{name}", shapes[name])
            return
        stacks: dict[str, list[str]] = {}
        for name, tensor in layout.roles.items():
            stacks.setdefault(tensor.name, []).append(name)
        for stack, names in stacks.items():
            names.sort(key=lambda name: layout.roles[name].part)
            one = shapes[names[0]]
            parts = tuple((f"{role}{e}.{n}", shapes[n]) for e in range(moe.experts) for n in names)
            shape = (moe.experts, one[0] * len(names), *one[1:])
            inputs = moe.intermediate if names[0].startswith("down") else self.config.hidden
            loose = layout.packed is None or names[0].endswith("_bias")
            dtype = self.dtype if loose else "U8"
            form: Form = "fp4_scale" if names[0].endswith(SCALE) else "fp4"
            yield _Tensor(prefix + stack, shape, parts, dtype, inputs, "plain" if loose else form)


def _write_file(path: Path, tensors: list[_Tensor], source: Source) -> None:
    """One safetensors file: the header from the shapes, then the values as they are drawn."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            for role, shape in t.parts:
                for piece in source.pieces(role, shape, t.dtype, t.inputs, t.form):
                    out.write(piece)
