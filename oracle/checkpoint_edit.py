"""Checkpoints changed on disk in ways that must not change what the model says.

Tensors are moved as opaque elements, so every storage type is handled alike.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oracle.weight_source import SIZE
from reference.files.checkpoint import Checkpoint
from reference.files.config_json import family_of
from reference.files.families import Family
from reference.vocab.config import AttentionSpec, ModelConfig, MoeSpec

Tensors = dict[str, np.ndarray]
"""Name -> elements of a void type of the stored width, in their shape."""


def edited(path: Path, out: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of the checkpoint in `out`, each of its files' tensors passed through `change`.

    `change` sees all tensors of the model together and may replace them by others of equal shape.
    """
    shutil.copytree(path, out)
    files = sorted(out.glob("*.safetensors"))
    heads, tensors = {}, {}
    for file in files:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        heads[file] = (8 + length, json.loads(data[8 : 8 + length]))
        for name, entry in heads[file][1].items():
            if name != "__metadata__":
                begin, end = (8 + length + x for x in entry["data_offsets"])
                flat = np.frombuffer(data[begin:end], f"V{SIZE[entry['dtype']]}")
                tensors[name] = flat.reshape(entry["shape"])
    change(tensors)
    for file, (start, entries) in heads.items():
        data = bytearray(file.read_bytes())
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, end = (start + x for x in entry["data_offsets"])
                data[begin:end] = np.ascontiguousarray(tensors[name]).tobytes()
        file.write_bytes(data)
    return out


@contextmanager
def header_edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """While it lasts, the header of the directory's one file is what `change` made of it; the data
    is where it was. `change` is given name -> entry."""
    file = path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    try:
        yield
    finally:
        file.write_bytes(whole)


def _opened(path: Path) -> tuple[ModelConfig, Family]:
    raw = json.loads((path / "config.json").read_text("utf-8"))
    with Checkpoint.open(path) as ckpt:
        return ckpt.config, family_of(raw, "config")


def _named(family: Family, i: int, roles: Sequence[str], tensors: Tensors) -> list[str]:
    """The names under which layer `i` has those roles; a role that it has not is left out."""
    prefix = family.prefix.format(i=i)
    names = [prefix + n for role in roles for n in family.layer.get(role, ())]
    return [n for n in names if n in tensors]


def permute_experts(path: Path, out: Path, seed: int, router: bool = True) -> Path:
    """Every layer's experts in another order, with what its router says of them.

    Groups stay together, in another order. router: False leaves the router as it was, which is
    another model.
    """
    config, family = _opened(path)
    rng = np.random.default_rng(seed)

    def change(tensors: Tensors) -> None:
        old = dict(tensors)
        for i in config.moe_layers:
            moe = config.layers[i].feed_forward
            assert isinstance(moe, MoeSpec)
            order = np.arange(moe.experts).reshape(moe.router.groups, -1)
            order = rng.permuted(order[rng.permutation(moe.router.groups)], axis=1).reshape(-1)
            assert (order != np.arange(moe.experts)).any()
            roles = ("router", "router_bias", "selection_bias") if router else ()
            for name in _named(family, i, roles, tensors):
                flat = old[name].reshape(moe.experts, -1)
                tensors[name] = flat[order].reshape(old[name].shape)
            prefix = family.prefix.format(i=i)
            for layout in family.layouts:
                for name in {prefix + t.name for t in layout.roles.values()}:
                    _reorder(name, order, old, tensors)

    return edited(path, out, change)


def _reorder(name: str, order: np.ndarray, old: Tensors, tensors: Tensors) -> None:
    """Of one role in one layout: tensors of experts by name, or a stack by its first axis."""
    if "{e}" not in name:
        if name in old:
            tensors[name] = old[name][order]
        return
    for suffix in ("", "_scale_inv"):
        for e, source in enumerate(order):
            target = name.replace("{e}", str(e)) + suffix
            if target in old:
                tensors[target] = old[name.replace("{e}", str(source)) + suffix]


def permute_heads(path: Path, out: Path, seed: int) -> Path:
    """Every layer's key/value heads in another order, each with its query heads."""
    config, family = _opened(path)
    rng = np.random.default_rng(seed)

    def change(tensors: Tensors) -> None:
        for i, layer in enumerate(config.layers):
            a = layer.attention
            groups = a.heads if a.kind == "mla" else a.kv_heads
            order = rng.permutation(groups)
            for role in _HEADED[a.kind]:
                for name in _named(family, i, _beside(role, a), tensors):
                    tensors[name] = _blocks(tensors[name], order, 1 if role == "o" else 0)

    return edited(path, out, change)


_HEADED = {"mla": ("q", "q_b", "kv_b", "o"), "gqa": ("q", "k", "v", "o", "sinks")}
"""Roles with an axis of heads: the first, of o the second. With q_b there is no q."""


def _beside(role: str, a: AttentionSpec) -> tuple[str, ...]:
    """The role, and its bias and norm where they go over all heads."""
    flat = (f"{role}_norm",) if a.qk_norm == "flat" else ()
    return (role,) if role == "o" else (role, f"{role}_bias", *flat)


def _blocks(t: np.ndarray, order: np.ndarray, axis: int) -> np.ndarray:
    """Cut an axis into as many blocks as `order` has, and reorder these."""
    moved = np.moveaxis(t, axis, 0)
    cut = moved.reshape(len(order), -1, *moved.shape[1:])
    return np.ascontiguousarray(np.moveaxis(cut[order].reshape(moved.shape), 0, axis))
