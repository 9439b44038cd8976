"""The pinned counts of every scope: exploring less, or more, than before has to be explained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oracle.explorer import Report

FILE = Path(__file__).with_name("scopes.json")
Pins = dict[str, dict[str, int]]


def read_pins(file: Path = FILE) -> Pins:
    """Counts by scope: canonical_states, raw_states, transitions, depth."""
    return json.loads(file.read_text(encoding="utf-8"))["scopes"] if file.exists() else {}


def write_pins(reports: Iterable[Report], old: Mapping[str, dict[str, int]]) -> None:
    """Pin the counts of these reports and keep those of other scopes."""
    pins = dict(old) | {r.name: r.counts() for r in reports}
    text = json.dumps({"scopes": dict(sorted(pins.items()))}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


def difference(report: Report, pins: Mapping[str, dict[str, int]]) -> str:
    """What differs from the pinned counts, or an empty text."""
    pinned, counts = pins.get(report.name), report.counts()
    if pinned is None:
        return "not pinned"
    parts = [f"{k} {counts[k]}, pinned {pinned[k]}" for k in counts if counts[k] != pinned.get(k)]
    return "; ".join(parts)
