"""From a checkpoint's config.json to a `ModelConfig`, by the family's data (MODEL-1 to MODEL-9).

Nothing here asks for a family's name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference.files.config_attention import attentions
from reference.files.config_fields import FIELDS, REQUIRED
from reference.files.config_moe import feed_forwards, packing
from reference.files.config_rope import longest
from reference.files.families import UNSET, Family, Source, families
from reference.files.strict_json import show
from reference.vocab.config import LayerSpec, ModelConfig, NormSpec
from reference.vocab.errors import BadInput, Unsupported

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


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
    families, packed weights, rope kinds and activations that this version cannot run.
    """
    if not isinstance(raw, dict):
        raise BadInput(f"{where}: an object is needed")
    family = family_of(raw, where)
    _check_architectures(raw, where)
    for key, allowed in family.only.items():
        if allowed and raw.get(key) is not None and raw[key] not in allowed:
            raise Unsupported(where, f"{key} {show(raw[key])}", ", ".join(map(str, allowed)))
    values = {name: _resolve(name, family, raw, where) for name in FIELDS}
    return _build(family, values, raw, where)


def _check_architectures(raw: dict[str, Any], where: str) -> None:
    """A model of the family that does something else than predict the next token (MODEL-3)."""
    names = raw.get("architectures")
    if isinstance(names, list) and names:
        if not any(isinstance(n, str) and n.endswith("ForCausalLM") for n in names):
            said = f"architectures {show(names, 60)}"
            raise Unsupported(where, said, "a class that ends in ForCausalLM")


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
    values = [_told(source, raw[key]) for key in present if raw[key] is not None]
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


def _told(source: Source, value: Any) -> Any:
    """What a family's `map` makes of a value; one that it does not name stays."""
    if not source.words or type(value) not in (bool, str):
        return value
    return source.words.get(str(value).lower() if type(value) is bool else value, value)


def _build(family: Family, v: dict[str, Any], raw: dict[str, Any], where: str) -> ModelConfig:
    """Put the resolved fields together and check what no field can check alone."""
    packed = packing(family, raw, where)
    attention = attentions(family, v, raw, where)
    feed_forward = feed_forwards(family, v, packed, where)
    return ModelConfig(
        family=family.model_type,
        hidden=v["hidden"],
        vocab=v["vocab"],
        layers=tuple(map(LayerSpec, attention, feed_forward)),
        norm=NormSpec(v["norm.kind"], v["norm.eps"]),
        tied=v["tied"],
        max_position=longest(attention[0].rope, v["max_position"]),
        eos=v["eos"],
        bos=v["bos"],
        embed_scale=v["embed_scale"],
        residual_scale=v["residual_scale"],
        logits_scale=v["logits_scale"],
        head_bias=v["head_bias"],
        packed=packed,
        stored=_stored(raw),
    )


def _stored(raw: dict[str, Any]) -> str | None:
    """The dtype that config.json names, under either key."""
    for key in ("dtype", "torch_dtype"):
        if isinstance(raw.get(key), str):
            return DTYPES.get(raw[key])
    return None
