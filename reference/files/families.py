"""Model families as data: the TOML files of `reference/vocab/families` (MODEL-2).

A family file says where in config.json each field of the description is found, what an absent key
means, which other keys must have certain values, and how the checkpoint names its tensors:

    [config]   field = "key" | { key = "key" or [keys], absent = v, null = v, default = v }
               | { value = v };   `default` stands for both `absent` and `null`
    [only]     key = [values that this version can honour; an absent key is fine]
    [tensors]  role = name or [names]           [layer]  the same, after `prefix`, with {i}
    [[experts]] one table a layout: role = name with {e}, or { tensor, part, of } for a tensor that
               stacks all experts along its first axis and packs roles along its second
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where one field comes from: `keys` of config.json (the first present wins) or a `value`.

    `absent` and `null` are what a missing key and a null mean; UNSET leaves it to the field.
    """

    keys: tuple[str, ...]
    value: Any
    absent: Any
    null: Any


UNSET = object()
"""No value stated; TOML has no null."""


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
    """One way of storing the experts (MODEL-13): role -> tensor, in the order of the roles."""

    name: str
    roles: dict[str, ExpertTensor]


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


def _source(entry: Any) -> Source:
    if isinstance(entry, str):
        entry = {"key": entry}
    if unknown := set(entry) - {"key", "absent", "null", "default", "value"}:
        raise ValueError(f"unknown words in a family file: {unknown}")
    key = entry.get("key", [])
    both = entry.get("default", UNSET)
    return Source(
        keys=(key,) if isinstance(key, str) else tuple(key),
        value=entry.get("value", UNSET),
        absent=entry.get("absent", both),
        null=entry.get("null", both),
    )


def _names(entry: str | list[str]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _layout(table: dict[str, Any]) -> ExpertLayout:
    roles: dict[str, ExpertTensor] = {}
    for role, entry in table.items():
        if role == "name":
            continue
        if isinstance(entry, str):
            roles[role] = ExpertTensor(entry)
        else:
            roles[role] = ExpertTensor(entry["tensor"], entry["part"], entry["of"])
    return ExpertLayout(table["name"], roles)


@cache
def families() -> dict[str, Family]:
    """Every family that this version knows, by its `model_type`."""
    found: dict[str, Family] = {}
    folder = files("reference.vocab").joinpath("families")
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if not entry.name.endswith(".toml"):
            continue
        table = tomllib.loads(entry.read_text("utf-8"))
        layer = dict(table["layer"])
        prefix = layer.pop("prefix")
        found[table["model_type"]] = Family(
            model_type=table["model_type"],
            config={name: _source(e) for name, e in table["config"].items()},
            only=table.get("only", {}),
            tensors={role: _names(e) for role, e in table["tensors"].items()},
            prefix=prefix,
            layer={role: _names(e) for role, e in layer.items()},
            layouts=tuple(_layout(t) for t in table.get("experts", [])),
        )
    return found
