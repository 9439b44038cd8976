"""The attention of each layer of a config.json (MODEL-5, MODEL-7, MODEL-15)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from reference.files.config_rope import rope
from reference.files.families import Family
from reference.files.strict_json import show
from reference.vocab.config import AttentionSpec, RopeSpec
from reference.vocab.errors import BadInput, Unsupported

SLIDING, FULL = "sliding_attention", "full_attention"


def attentions(
    family: Family, v: dict[str, Any], raw: dict[str, Any], where: str
) -> list[AttentionSpec]:
    """One spec a layer; `v` are the resolved fields. Errors: BadInput, Unsupported."""
    make = _mla if v["attention.kind"] == "mla" else _gqa
    spec = make(family, v, raw, where)
    windows = _windows(family, v, raw, where)
    one = {w: replace(spec, window=w) for w in windows}
    return [one[w] for w in windows]


def _gqa(family: Family, v: dict[str, Any], raw: dict[str, Any], where: str) -> AttentionSpec:
    heads, head_dim = v["heads"], v["head_dim"]
    if head_dim is None:
        if v["hidden"] % heads:
            raise BadInput(
                f"{where}: hidden_size {v['hidden']} is not a multiple of num_attention_heads "
                f"{heads}; head_dim is needed"
            )
        head_dim = v["hidden"] // heads
    if head_dim % 2:
        raise BadInput(f"{where}: head_dim is {head_dim}; an even number is needed")
    kv_heads = v["kv_heads"]
    if kv_heads is not None and heads % kv_heads:
        if any(raw.get(key) is not None for key in family.config["kv_heads"].keys):
            raise BadInput(
                f"{where}: num_key_value_heads is {kv_heads}; a divisor of the {heads} attention "
                "heads is needed"
            )
        kv_heads = None  # the family's default cannot be meant
    return AttentionSpec(
        kind="gqa",
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope=rope(family, v, head_dim, raw, where),
        scale=v["attention.scale"] or head_dim**-0.5,
        qkv_bias=v["attention.qkv_bias"],
        o_bias=v["attention.o_bias"],
        qk_norm=v["attention.qk_norm"],
        clip=v["attention.clip"],
        sinks=v["attention.sinks"],
    )


def _mla(family: Family, v: dict[str, Any], raw: dict[str, Any], where: str) -> AttentionSpec:
    """ATTN-8. head_dim of config.json is not read: files say different things there."""
    for name in ("mla.kv_rank", "mla.rope_dim", "mla.nope_dim", "mla.value_dim"):
        if not v[name]:
            raise BadInput(f"{where}: {family.config[name].keys[0]} of at least 1 is needed")
    spec = rope(family, v, v["mla.rope_dim"], raw, where)
    head_dim = v["mla.nope_dim"] + v["mla.rope_dim"]
    return AttentionSpec(
        kind="mla",
        heads=v["heads"],
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=v["mla.value_dim"],
        rope=spec,
        scale=head_dim**-0.5 * _sharpening(spec),
        qkv_bias=v["attention.qkv_bias"],
        o_bias=v["attention.o_bias"],
        q_rank=v["mla.q_rank"] or 0,
        kv_rank=v["mla.kv_rank"],
        rope_dim=v["mla.rope_dim"],
        nope_dim=v["mla.nope_dim"],
    )


def _sharpening(spec: RopeSpec) -> float:
    """Factor on the scale of scores over a stretched context: (0.1 mscale_all_dim ln f + 1)^2."""
    if not spec.mscale_all_dim or spec.factor <= 1.0:
        return 1.0
    return (0.1 * spec.mscale_all_dim * math.log(spec.factor) + 1.0) ** 2


def _windows(
    family: Family, v: dict[str, Any], raw: dict[str, Any], where: str
) -> list[int | None]:
    """The window of each layer (MODEL-7).

    A list of layer types decides where the family reads one; elsewhere it must say the same.
    """
    width = (v["attention.window"] if v["attention.window_used"] else None) or None
    bound, layers = v["attention.window_bound"], v["layers"]
    sliding = {
        "all": [True] * layers,
        "from": [i >= (bound or 0) for i in range(layers)],
        "even_below": [i % 2 == 0 and (bound is None or i < bound) for i in range(layers)],
    }[v["attention.window_layers"]]
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) < layers:
            raise BadInput(f"{where}: layer_types: a list of at least {layers} words is needed")
        read = "attention.layer_types" in family.config
        for i, word in enumerate(types[:layers]):
            usual = SLIDING if width and sliding[i] else FULL
            if word not in (SLIDING, FULL) or (word != usual and not read):
                known = f"{SLIDING} or {FULL}" if read else f"{usual} in every layer here"
                raise Unsupported(where, f"layer_types[{i}] {show(word, 40)}", known)
            sliding[i] = word == SLIDING
    return [width if s else None for s in sliding]
