"""From a checkpoint's config.json to a `ModelConfig`, by the family's data (MODEL-1 to MODEL-9).

Nothing here asks for a family's name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from reference.files.config_fields import FIELDS, REQUIRED
from reference.files.families import UNSET, Family, Source, families
from reference.files.strict_json import show
from reference.vocab.config import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from reference.vocab.errors import BadInput, Unsupported


def family_of(raw: dict[str, Any], where: str) -> Family:
    """The family that config.json names. Errors: BadInput, Unsupported (MODEL-3)."""
    known = families()
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput(f"{where}: model_type is needed (a string such as '{min(known)}')")
    if model_type not in known:
        raise Unsupported(where, f"model_type '{show(model_type)}'", ", ".join(sorted(known)))
    return known[model_type]


def model_config(raw: Any, where: str = "config.json") -> ModelConfig:
    """The description of a model, from the parsed object of its config.json.

    Errors: BadInput names the key, its value and what would be right; Unsupported (MODEL-3) for
    families, quantised weights, rope kinds and activations that this version cannot run.
    """
    if not isinstance(raw, dict):
        raise BadInput(f"{where}: an object is needed")
    family = family_of(raw, where)
    packed = raw.get("quantization_config")
    if packed is not None:
        method = packed.get("quant_method", "") if isinstance(packed, dict) else packed
        raise Unsupported(
            where, f"quantization_config '{show(method)}'", "unpacked F32, F16 or BF16 weights"
        )
    for key, allowed in family.only.items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise Unsupported(where, f"{key} {show(raw[key])}", ", ".join(map(str, allowed)))
    values = {name: _resolve(name, family, raw, where) for name in FIELDS}
    return _build(family, values, raw, where)


def with_generation(config: ModelConfig, raw: Any, where: str) -> ModelConfig:
    """The description with the stop tokens of a generation_config.json, if it has any (MODEL-9).

    Errors: BadInput for anything but token ids.
    """
    if not isinstance(raw, dict):
        raise BadInput(f"{where}: an object is needed")
    stated = raw.get("eos_token_id")
    if stated is None:
        return config
    rule = FIELDS["eos"]
    eos = rule.check(stated)
    if eos is None:
        raise BadInput(f"{where}: eos_token_id is {show(stated, 60)}; needs {rule.right}")
    return replace(config, eos=eos)


def _resolve(name: str, family: Family, raw: dict[str, Any], where: str) -> Any:
    """The value of one field (MODEL-4): constant, found, or what absence or null means."""
    rule = FIELDS[name]
    source = family.config.get(name, Source((), UNSET, UNSET, UNSET))
    if source.value is not UNSET:
        return source.value
    present = [key for key in source.keys if key in raw]
    values = [raw[key] for key in present if raw[key] is not None]
    if values:
        if any(type(v) is not type(values[0]) or v != values[0] for v in values):
            said = " and ".join(f"{key} {show(raw[key], 30)}" for key in present)
            raise BadInput(f"{where}: {said} contradict each other; one of them is enough")
        good = rule.check(values[0])
        if good is None:
            raise BadInput(f"{where}: {present[0]} is {show(values[0], 60)}; needs {rule.right}")
        return good
    stated = source.null if present else source.absent
    if stated is not UNSET:
        return rule.check(stated)
    if rule.default is REQUIRED:
        key = source.keys[0] if source.keys else name
        what = "is null" if present else "is missing"
        raise BadInput(f"{where}: {key} {what}; needs {rule.right}")
    return rule.default


def _missing(name: str, family: Family, where: str) -> NoReturn:
    """A field that this model needs was not given, or is zero."""
    raise BadInput(f"{where}: {family.config[name].keys[0]} of at least 1 is needed")


def _build(family: Family, v: dict[str, Any], raw: dict[str, Any], where: str) -> ModelConfig:
    """Put the resolved fields together and check what no field can check alone (MODEL-5)."""
    layers: list[LayerSpec] = []
    attention = _attention(family, v, raw, where)
    dense = DenseSpec(v["dense.intermediate"], bias=v["dense.bias"])
    moe = _moe(family, v, where) if v["moe.experts"] else None
    for i in range(v["layers"]):
        routed = moe and (i + 1) % v["moe.step"] == 0 and i not in v["moe.dense_layers"]
        if not routed and not dense.intermediate:
            name = "dense.intermediate" if "dense.intermediate" in family.config else "moe.experts"
            _missing(name, family, where)
        layers.append(LayerSpec(attention, moe if routed and moe else dense))
    return ModelConfig(
        family=family.model_type,
        hidden=v["hidden"],
        vocab=v["vocab"],
        layers=tuple(layers),
        norm=NormSpec(v["norm.kind"], v["norm.eps"]),
        tied=v["tied"],
        max_position=v["max_position"],
        eos=v["eos"],
        bos=v["bos"],
    )


def _attention(family: Family, v: dict[str, Any], raw: dict[str, Any], where: str) -> AttentionSpec:
    """The attention of every layer (MODEL-5, MODEL-6, MODEL-7)."""
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
    window = v["attention.window"] if v["attention.window_used"] else None
    window = window or None
    _check_layer_types(raw, v["layers"], window, where)
    return AttentionSpec(
        kind="gqa",
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope=_rope(v["rope.theta"], head_dim, raw, where),
        scale=head_dim**-0.5,
        window=window,
        qkv_bias=v["attention.qkv_bias"],
        o_bias=v["attention.o_bias"],
        qk_norm=v["attention.qk_norm"],
    )


def _check_layer_types(raw: dict[str, Any], layers: int, window: int | None, where: str) -> None:
    """A list of layer types must say the same as the window keys (MODEL-7)."""
    types = raw.get("layer_types")
    if types is None:
        return
    expected = "sliding_attention" if window else "full_attention"
    if not isinstance(types, list) or len(types) < layers:
        raise BadInput(f"{where}: layer_types: a list of at least {layers} words is needed")
    for i, word in enumerate(types[:layers]):
        if word != expected:
            raise Unsupported(
                where, f"layer_types[{i}] {show(word, 40)}", f"{expected} in every layer here"
            )


def _rope(theta: float, head_dim: int, raw: dict[str, Any], where: str) -> RopeSpec:
    """Both spellings of the rotary embedding (MODEL-6).

    Old: `rope_theta` and `rope_scaling` with `type` or `rope_type`. New: `rope_parameters`.
    """
    for key in ("rope_scaling", "rope_parameters"):
        table = raw.get(key)
        if table is None or table == {}:
            continue
        if not isinstance(table, dict):
            raise BadInput(f"{where}: {key} is {show(table, 40)}; an object or null is needed")
        if any(isinstance(x, dict) for x in table.values()):
            raise Unsupported(where, f"{key} for each layer type", "one for all layers")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise Unsupported(where, f"{key} of type {show(kind, 40)}", "default (no scaling)")
        if table.get("partial_rotary_factor", 1.0) not in (1, None):
            raise Unsupported(where, f"{key} with partial_rotary_factor", "1.0")
        if table.get("rope_theta") is not None:
            rule = FIELDS["rope.theta"]
            good = rule.check(table["rope_theta"])
            if good is None:
                said = show(table["rope_theta"], 40)
                raise BadInput(f"{where}: {key}.rope_theta is {said}; needs {rule.right}")
            theta = good
        break
    return RopeSpec(theta=theta, dims=head_dim)


def _moe(family: Family, v: dict[str, Any], where: str) -> MoeSpec:
    """The routed layers (MODEL-8)."""
    experts, top_k = v["moe.experts"], v["moe.top_k"]
    if top_k > experts:
        key = family.config["moe.top_k"].keys[0]
        raise BadInput(f"{where}: {key} is {top_k}; at most the {experts} experts can be chosen")
    if not v["moe.intermediate"]:
        _missing("moe.intermediate", family, where)
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        intermediate=v["moe.intermediate"],
        router=RouterSpec(score=v["router.score"], renormalise=v["router.renormalise"]),
    )
