"""What executors add to the lines of an event log: a field that is there has its form (LOG-9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from reference.files.strict_json import show

MOST_S = 1e15
"""Seconds beyond which no time of a log lies."""

Form = tuple[Callable[[Any], bool], str]


def is_seconds(x: Any, least: float = -MOST_S) -> TypeGuard[float]:
    """A number of seconds, from `least` on."""
    return type(x) in (int, float) and least <= x <= MOST_S


def _whole(x: Any, least: int) -> bool:
    return type(x) is int and x >= least


def _is_count(x: Any) -> bool:
    return _whole(x, 0)


def _is_sum(x: Any) -> bool:
    """In whatever spelling: sums are only compared."""
    return isinstance(x, str) or _whole(x, 0)


def _list(x: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(x, (list, tuple)) and all(of(item) for item in x)


_COUNT: Form = (_is_count, "a count")
_SUM: Form = (_is_sum, "a checksum")
_BY: Form = (is_seconds, "a time in seconds")
_EXTRAS: dict[str, dict[str, Form]] = {
    "Arrived": {
        "id": (lambda x: isinstance(x, str) or type(x) is int, "a name"),
        "asked": (lambda x: isinstance(x, str), "a string"),
    },
    "Admit": {"kv": _COUNT},
    "Load": {
        "bytes": (lambda x: _whole(x, 1), "at least one byte"),
        "from": (lambda x: x in ("disk", "host"), "disk or host"),
        "entry": _COUNT, "disk_bytes": _COUNT,
    },
    "Loaded": {"seconds": (lambda x: is_seconds(x, 0.0), "seconds, 0 or more,"), "sum": _SUM},
    "Compute": {"sum": (lambda x: _list(x, _is_sum), "a list of checksums")},
    "Sampled": {"sum": _SUM},
    "Cancelled": {"by": _BY},
    "ask": {
        "slots": (lambda x: _list(x, _is_count) and len(x) == 4, "[free, loading, ready, late]"),
    },
    "end": {"by": _BY},
}  # fmt: skip


def extras_fault(record: Mapping[str, Any]) -> str:
    """Which field of a record that is legal else has not its form, in one line; "" for none."""
    word = next((w for w in ("event", "action", "ask", "end") if w in record), "")
    name = word if word in ("ask", "end") else str(record.get(word))
    holder = record["end"] if word == "end" else record
    for field, (good, what) in _EXTRAS.get(name, {}).items():
        if field in holder and not good(holder[field]):
            return f"{name}.{field} is {show(holder[field], 40)}; {what} is needed"
    return ""
