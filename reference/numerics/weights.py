"""The non-expert weights of a model, widened or unpacked once and held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reference.files.layout import SCALE, layer_roles, top_roles
from reference.numerics.experts import FeedForward
from reference.numerics.formats import Array, widen
from reference.numerics.packed import unpack
from reference.vocab.config import DenseSpec, ModelConfig, SharedExpertSpec


def resident(ckpt: Any, dtype: type[np.floating]) -> dict[str, Array]:
    """Every role of the description -> its tensor in `dtype` (NUM-1, NUM-18)."""
    return {role: _read(ckpt, role, dtype) for role in _roles(ckpt.config)}


def _roles(config: ModelConfig) -> Iterator[str]:
    yield from (role for role, _ in top_roles(config))
    for i, layer in enumerate(config.layers):
        yield from (f"layers.{i}.{role}" for role, _ in layer_roles(config, layer))


def _read(ckpt: Any, role: str, dtype: type[np.floating]) -> Array:
    raw = ckpt.read(ckpt.tensor(role))
    spec = ckpt.config.packed
    if spec is None or not ckpt.has(role + SCALE):
        return widen(raw, dtype)
    return widen(unpack(spec, raw, ckpt.read(ckpt.tensor(role + SCALE))), dtype)


def of_layer(weights: Mapping[str, Array], i: int) -> dict[str, Array]:
    """The roles of layer `i`, without "layers.{i}." in front."""
    prefix = f"layers.{i}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def dense(
    weights: Mapping[str, Array], spec: DenseSpec | SharedExpertSpec, of: str = ""
) -> FeedForward:
    """A layer's own feed-forward, or with `of` "shared_" its shared expert."""
    gate, up, down = (weights[f"{of}{n}"] for n in ("gate", "up", "down"))
    if not spec.bias:
        return FeedForward(gate, up, down)
    biases = (weights[f"{of}{n}_bias"] for n in ("gate", "up", "down"))
    return FeedForward(gate, up, down, tuple(biases))  # type: ignore[arg-type]
