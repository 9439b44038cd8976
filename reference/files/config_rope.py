"""The rotary embedding of a config.json, in both spellings and of every kind (MODEL-6, MODEL-14).

Old: `rope_theta` and `rope_scaling` with `type` or `rope_type`. New: `rope_parameters`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from reference.files.config_fields import FIELDS, ROPE_FIELDS, FieldType
from reference.files.families import Family
from reference.files.strict_json import show
from reference.vocab.config import RopeSpec
from reference.vocab.errors import BadInput, Unsupported

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")


class _Table:
    """The rope table of one config.json, with the place for messages."""

    def __init__(self, family: Family, raw: dict[str, Any], where: str) -> None:
        self.key, self.where, self.values = "rope_scaling", where, dict(family.rope)
        for key in ("rope_scaling", "rope_parameters"):
            table = raw.get(key)
            if table is None or table == {}:
                continue
            if not isinstance(table, dict):
                raise BadInput(f"{where}: {key} is {show(table, 40)}; an object or null is needed")
            if any(isinstance(x, dict) for x in table.values()):
                raise Unsupported(where, f"{key} for each layer type", "one for all layers")
            self.key, self.values = key, table
            break
        self.kind = self.values.get("rope_type", self.values.get("type", "default"))
        if self.kind not in KINDS:
            said = f"{self.key} of type {show(self.kind, 40)}"
            raise Unsupported(where, said, ", ".join(KINDS))
        for key, value in self.values.items():
            if key not in _COMMON and key not in ROPE_FIELDS and value is not None:
                known = ", ".join(ROPE_FIELDS)
                raise Unsupported(where, f"{self.key} with {show(key, 40)}", known)

    def get(self, name: str, rule: FieldType, fallback: Any) -> Any:
        """The value of a key, checked; `fallback` where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return fallback
        good = rule.check(value)
        if good is None:
            said = show(value, 40)
            raise BadInput(f"{self.where}: {self.key}.{name} is {said}; needs {rule.right}")
        return good

    def said(self, name: str, fallback: Any = None) -> Any:
        """A parameter of the kind."""
        return self.get(name, ROPE_FIELDS[name], fallback)

    def needed(self, name: str) -> Any:
        """A parameter without which the kind means nothing. Errors: BadInput."""
        value = self.said(name)
        if value is None or value == ():
            rule = ROPE_FIELDS[name]
            raise BadInput(
                f"{self.where}: {self.key} of type {self.kind} needs {name}, {rule.right}"
            )
        return value


def rope(
    family: Family, v: dict[str, Any], width: int, raw: dict[str, Any], where: str
) -> RopeSpec:
    """The rotary embedding of heads of which it may turn `width` entries.

    `v` are the resolved fields. Errors: BadInput, Unsupported, naming the key.
    """
    table = _Table(family, raw, where)
    spec = RopeSpec(
        theta=table.get("rope_theta", FIELDS["rope.theta"], v["rope.theta"]),
        dims=_dims(family, table, v, width),
        kind=table.kind,
        interleaved=v["rope.interleaved"],
    )
    if v["rope.longrope"] == "mscales" and spec.kind not in ("default", "longrope"):
        said = f"{table.key} of type {spec.kind}"
        raise Unsupported(where, said, "default, longrope (in this family)")
    if spec.kind == "default":
        return spec
    if (spec.kind == "dynamic" and spec.dims <= 2) or (spec.kind == "yarn" and spec.theta <= 1.0):
        raise BadInput(
            f"{where}: {table.key} of type {spec.kind} over {spec.dims} entries with theta "
            f"{spec.theta:g} has no meaning"
        )
    limit = v["max_position"]
    original = v["rope.original"] or table.said("original_max_position_embeddings", limit)
    if spec.kind == "longrope":
        return _longrope(spec, table, original, v)
    factor = table.said("factor")
    if factor is None:
        factor = limit / original if spec.kind == "yarn" else table.needed("factor")
    spec = replace(spec, factor=factor)
    if spec.kind == "linear":
        return spec
    if spec.kind == "dynamic":
        return replace(spec, original_max_position=limit)
    spec = replace(spec, original_max_position=original)
    if spec.kind == "llama3":
        low, high = table.needed("low_freq_factor"), table.needed("high_freq_factor")
        if low >= high:
            raise BadInput(
                f"{where}: {table.key}: low_freq_factor {low:g} is not below high_freq_factor"
            )
        return replace(spec, low_freq_factor=low, high_freq_factor=high)
    return replace(
        spec,
        attention_factor=table.said("attention_factor"),
        beta_fast=table.said("beta_fast", 32.0),
        beta_slow=table.said("beta_slow", 1.0),
        truncate=table.said("truncate", True),
        mscale=table.said("mscale"),
        mscale_all_dim=table.said("mscale_all_dim"),
    )


def _dims(family: Family, table: _Table, v: dict[str, Any], width: int) -> int:
    """How much of a head is turned: the whole, a share of it, or a stated number of entries."""
    shares = "rope.share" in family.config
    share = table.get("partial_rotary_factor", FIELDS["rope.share"], v["rope.share"])
    if not shares and share not in (None, 1.0):
        raise Unsupported(table.where, f"{table.key} with partial_rotary_factor {share:g}", "1.0")
    dims = width if share is None else int(width * share)
    if v["rope.dims"] is not None and table.values.get("partial_rotary_factor") is None:
        dims = v["rope.dims"]
    if dims % 2 or not 2 <= dims <= width:
        raise BadInput(
            f"{table.where}: {dims} of the {width} entries of a head would be turned; an even "
            f"number from 2 to {width} is needed"
        )
    return dims


def _longrope(spec: RopeSpec, table: _Table, original: int, v: dict[str, Any]) -> RopeSpec:
    """MODEL-14: a family of kind "mscales" states its factors on cos and sin and never uses
    long_factor; others derive one from the ratio of the lengths, and use both."""
    short, long = table.needed("short_factor"), table.needed("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != spec.dims // 2:
            raise BadInput(
                f"{table.where}: {table.key}.{name} has {len(factors)} numbers; {spec.dims // 2} "
                "are needed"
            )
    spec = replace(spec, original_max_position=original, short_factor=short)
    if v["rope.longrope"] == "mscales":
        mscales = table.needed("short_mscale"), table.needed("long_mscale")
        return replace(spec, short_mscale=mscales[0], long_mscale=mscales[1])
    factor = table.said("factor", v["max_position"] / original)
    mscale = table.said("attention_factor")
    if mscale is None:
        grown = math.log(factor) / math.log(original) if factor > 1.0 and original > 1 else 0.0
        mscale = math.sqrt(1.0 + grown)
    return replace(spec, factor=factor, long_factor=long, short_mscale=mscale, long_mscale=mscale)


def longest(spec: RopeSpec | None, limit: int) -> int:
    """Positions that the rope reaches: yarn and dynamic stretch the model's own `limit`."""
    if spec is None or spec.kind not in ("yarn", "dynamic"):
        return limit
    return max(limit, int(spec.original_max_position * spec.factor))
