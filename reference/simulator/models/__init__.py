"""Models as sizes: what a step reads and computes, from TOML files beside this one or from a
checkpoint's own description (SIM-6).

A file's figures are those of the published config.json; a test computes them again from it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from reference.files.layout import expert_shapes, layer_roles, top_roles
from reference.vocab.config import AttentionSpec, ModelConfig, MoeSpec
from reference.vocab.errors import BadInput


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer, in bytes as stored (`ModelShape.weight_bytes` a weight).

    attention   projections and norms; router; shared: experts that every token uses; dense: the
                feed-forward of a layer without routed experts
    kv_bytes    K and V of one token; attend_flops: a row's, for one token that it attends to
    window      tokens that a row sees, 0 for all
    """

    attention: int
    router: int
    shared: int
    dense: int
    kv_bytes: int
    attend_flops: float
    window: int


@dataclass(frozen=True)
class ModelShape:
    """A model. `moe_layers` are the layers with routed experts, `experts` of them each, `top_k` a
    token; `formats` bytes of one expert by format, the checkpoint's own first; `head` bytes."""

    name: str
    title: str
    layers: tuple[LayerShape, ...]
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    expert_params: int
    formats: dict[str, int]
    head: int
    weight_bytes: float = 2.0
    source: str = ""

    def bytes_of(self, stored: str = "") -> int:
        """Bytes of one expert in a format, "" for the checkpoint's own. Raises BadInput."""
        if not stored:
            return next(iter(self.formats.values()))
        if stored not in self.formats:
            raise BadInput(f"model {self.name}: experts are not known as {stored!r}; known: "
                           f"{', '.join(self.formats)}")  # fmt: skip
        return self.formats[stored]

    @property
    def all_experts(self) -> int:
        """Routed experts over all layers."""
        return len(self.moe_layers) * self.experts

    @property
    def kv_bytes(self) -> int:
        """K and V of one token over all layers."""
        return sum(layer.kv_bytes for layer in self.layers)

    @property
    def non_expert_bytes(self) -> int:
        """What every token goes through beside its experts."""
        return self.head + sum(x.attention + x.router + x.shared + x.dense for x in self.layers)


BITS = {"bf16": 16.0, "q8_0": 8.5, "q4_k_m": 4.85}
"""Bits a weight, scales included: llama.cpp's README of its quantizations for the latter two."""


def of_config(
    config: ModelConfig, name: str = "", *, expert_bytes: Mapping[str, int] | None = None,
    weight_bytes: float = 2.0, kv_item: float = 2.0, source: str = "",
) -> ModelShape:  # fmt: skip
    """The sizes of a described model: weights of `weight_bytes` each, K and V of `kv_item` bytes a
    number. `expert_bytes` by format; without it every one of BITS."""
    layers = []
    params = 0
    for spec in config.layers:
        sizes = {"attention": 0, "router": 0, "shared": 0, "dense": 0}
        for role, shape in layer_roles(config, spec):
            sizes[_part_of(role)] += math.prod(shape)
        if isinstance(spec.feed_forward, MoeSpec) and not params:
            params = _expert_params(config, spec.feed_forward)
        a = spec.attention
        kv = a.cache_heads * (a.cache_key_dim + a.cache_value_dim)
        layers.append(LayerShape(
            **{k: round(n * weight_bytes) for k, n in sizes.items()},
            kv_bytes=round(kv * kv_item), attend_flops=_attend_flops(a), window=a.window or 0,
        ))  # fmt: skip
    head = sum(math.prod(shape) for role, shape in top_roles(config) if role != "embed")
    if config.tied:
        head += config.vocab * config.hidden
    formats = dict(expert_bytes or {k: round(params * bits / 8) for k, bits in BITS.items()})
    return ModelShape(
        name or config.family, name or config.family, tuple(layers), config.moe_layers,
        config.experts, config.top_k, params, formats, round(head * weight_bytes), weight_bytes,
        source,
    )  # fmt: skip


def _part_of(role: str) -> str:
    if role in ("router", "router_bias", "selection_bias"):
        return "router"
    if role.startswith("shared_"):
        return "shared"
    return "dense" if role.split("_")[0] in ("gate", "up", "down") else "attention"


def _expert_params(config: ModelConfig, moe: MoeSpec) -> int:
    if moe.storage.packed is None:
        return sum(math.prod(shape) for shape in expert_shapes(config, moe).values())
    return 3 * config.hidden * moe.intermediate


def _attend_flops(a: AttentionSpec) -> float:
    """Of one row with one cached token: a product with its key, one with its value, each head."""
    if a.kind == "mla":  # absorbed: keys of kv_rank + rope_dim, values of kv_rank
        return 2.0 * a.heads * (2 * a.kv_rank + a.rope_dim)
    return 2.0 * a.heads * (a.head_dim + a.v_head_dim)


def names() -> tuple[str, ...]:
    """The models that there are files of."""
    found = files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in found if f.name.endswith(".toml")))


@cache
def load(name: str) -> ModelShape:
    """The model of a name. Raises BadInput for an unknown one."""
    if name not in names():
        raise BadInput(f"model: unknown {name!r}; there are: {', '.join(names())}")
    text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse(name, text)


def parse(name: str, text: str) -> ModelShape:
    """A model of TOML text: `[[layers]]` tables repeat `count` times; a period of several tables
    repeats as a whole (`periods`). Raises BadInput naming the field."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        layers: list[LayerShape] = []
        for table in raw.pop("layers"):
            count = table.pop("count")
            layers += [LayerShape(**table)] * count
        layers *= raw.pop("periods", 1)
        moe = tuple(i for i, layer in enumerate(layers) if layer.router)
        shape = ModelShape(name=name, layers=tuple(layers), moe_layers=moe, **raw)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise BadInput(f"model {name}: {error}") from None
    for label, value in {
        "experts": shape.experts,
        "top_k": shape.top_k,
        "head": shape.head,
        "expert_params": shape.expert_params,
        **shape.formats,
    }.items():
        if not isinstance(value, int) or value < 1:
            raise BadInput(f"model {name}: {label}: {value!r}; a positive integer expected")
    if not moe or shape.top_k > shape.experts:
        raise BadInput(f"model {name}: {len(moe)} layers with a router, {shape.top_k} of "
                       f"{shape.experts} experts a token")  # fmt: skip
    return shape
