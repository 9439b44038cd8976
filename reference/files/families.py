"""Model families as data: the TOML files of `reference/vocab/families` (MODEL-2).

A family file says where in config.json each field of the description is found, what an absent key
means, which other keys must have certain values, and how the checkpoint names its tensors:

    [config]   field = "key" | { key = "key" or [keys], absent = v, null = v, default = v,
               map = { word = v } } | { value = v };   `default` stands for both `absent` and
               `null`; `map` says what the words of a key (true and false among them) stand for
    [only]     key = [values that this version can honour; an absent key is fine, and an empty list
               lifts the limit of a family that this one is like]
    [rope]     the rope table of a config.json without one
    [tensors]  role = name or [names]           [layer]  the same, after `prefix`, with {i}
    like       another family: what this file does not say is taken from that one, key by key
    ignore     beginnings of names of tensors that are no part of the model
    [[experts]] one table a layout: role = name with {e}, or { tensor, part, of } for a tensor that
               stacks all experts along its first axis and packs roles along its second;
               `interleaved`, `transposed`, `packed`: the layout's ExpertStorage
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from reference.vocab.config import ExpertStorage, PackedSpec


@dataclass(frozen=True)
class Source:
    """Where one field comes from: `keys` of config.json (the first present wins) or a `value`.

    `absent` and `null` are what a missing key and a null mean; UNSET leaves it to the field.
    """

    keys: tuple[str, ...]
    value: Any
    absent: Any
    null: Any
    words: dict[str, Any] = field(default_factory=dict)


UNSET = object()
"""No value stated; TOML has no null."""

MXFP4 = PackedSpec("mxfp4", (1, 32))


@dataclass(frozen=True)
class ExpertTensor:
    """One role of an expert in a layout: rows `part`/`of` of `name` (after the layer's prefix)."""

    name: str
    part: int = 0
    of: int = 1

    @property
    def stacked(self) -> bool:
        """All experts in one tensor, along its first axis."""
        return "{e}" not in self.name


@dataclass(frozen=True)
class ExpertLayout:
    """One way of storing the experts (MODEL-13): role -> tensor, and what that implies."""

    name: str
    roles: dict[str, ExpertTensor]
    interleaved: bool = False
    transposed: bool = False
    packed: str | None = None

    def storage(self, fp8: PackedSpec | None = None) -> ExpertStorage:
        """The storage of experts in this layout; `fp8` where its matrices turn out to be so."""
        return ExpertStorage(
            gate_up="interleaved" if self.interleaved else "split",
            transposed=self.transposed,
            packed=MXFP4 if self.packed == "mxfp4" else fp8,
        )


@dataclass(frozen=True)
class Family:
    """A family file, read. Names are lists of candidates; those of layers hold {i}."""

    model_type: str
    config: dict[str, Source]
    only: dict[str, list[Any]]
    tensors: dict[str, tuple[str, ...]]
    prefix: str
    layer: dict[str, tuple[str, ...]]
    layouts: tuple[ExpertLayout, ...]
    rope: dict[str, Any]
    ignore: tuple[str, ...]


def _source(entry: Any) -> Source:
    if isinstance(entry, str):
        entry = {"key": entry}
    if unknown := set(entry) - {"key", "absent", "null", "default", "value", "map"}:
        raise ValueError(f"unknown words in a family file: {unknown}")
    key = entry.get("key", [])
    both = entry.get("default", UNSET)
    return Source(
        keys=(key,) if isinstance(key, str) else tuple(key),
        value=entry.get("value", UNSET),
        absent=entry.get("absent", both),
        null=entry.get("null", both),
        words=entry.get("map", {}),
    )


def _names(entry: str | list[str]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _layout(table: dict[str, Any]) -> ExpertLayout:
    roles: dict[str, ExpertTensor] = {}
    told = {k: v for k, v in table.items() if k in ("name", "interleaved", "transposed", "packed")}
    for role, entry in table.items():
        if role in told:
            continue
        if isinstance(entry, str):
            roles[role] = ExpertTensor(entry)
        else:
            roles[role] = ExpertTensor(entry["tensor"], entry["part"], entry["of"])
    return ExpertLayout(roles=roles, **told)


def _inherited(table: dict[str, Any], tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The table with what its `like` says and it does not."""
    if "like" not in table:
        return table
    base = _inherited(tables[table["like"]], tables)
    whole = {k: v for k, v in base.items() if k not in ("rope", "ignore")} | table
    for name in ("config", "only", "tensors", "layer"):
        whole[name] = base.get(name, {}) | table.get(name, {})
    return whole


def _family(table: dict[str, Any]) -> Family:
    layer = dict(table["layer"])
    prefix = layer.pop("prefix")
    return Family(
        model_type=table["model_type"],
        config={name: _source(e) for name, e in table["config"].items()},
        only=table.get("only", {}),
        tensors={role: _names(e) for role, e in table["tensors"].items()},
        prefix=prefix,
        layer={role: _names(e) for role, e in layer.items()},
        layouts=tuple(_layout(t) for t in table.get("experts", [])),
        rope=table.get("rope", {}),
        ignore=tuple(table.get("ignore", ())),
    )


@cache
def families() -> dict[str, Family]:
    """Every family that this version knows, by its `model_type`."""
    folder = files("reference.vocab").joinpath("families")
    tables: dict[str, dict[str, Any]] = {}
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            table = tomllib.loads(entry.read_text("utf-8"))
            tables[table["model_type"]] = table
    return {name: _family(_inherited(table, tables)) for name, table in tables.items()}
