"""The head of an event log: version, options, model, sizes (LOG-1), of this project's control
plane or of a scheduler of another kind (LOG-8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from reference.files.log_records import plain
from reference.files.strict_json import show
from reference.vocab.errors import BadInput
from reference.vocab.options import (
    MOST,
    ControlOptions,
    Eviction,
    FetchOrder,
    Grouping,
    Readiness,
)

VERSION = 1
_BYTES = ("expert_bytes", "budget_bytes", "slot_bytes")
_COUNTS = ("channels", "lanes", "host_budget_bytes", "host_slots")
"""What executors may add, where they have it."""
_HEAD = ("log", "options", "model", "engine", "versions", *_BYTES)
_WORDS: dict[str, tuple[str, ...]] = {
    "grouping": get_args(Grouping),
    "readiness": get_args(Readiness),
    "fetch_order": get_args(FetchOrder),
    "eviction": get_args(Eviction),
}
_FOREIGN = ("layers", "experts", "top_k", "slots")
"""What a scheduler of another kind has to tell; every other option is a promise of its own."""


def head_of(
    options: ControlOptions,
    *,
    engine: str,
    model: Mapping[str, Any],
    versions: Mapping[str, str],
    expert_bytes: int,
    budget_bytes: int,
    slot_bytes: int,
    **extra: Any,
) -> dict[str, Any]:
    """The head of a log: all options whole, so that control can be replayed (LOG-1)."""
    head: dict[str, Any] = {
        "log": VERSION,
        "options": asdict(options),
        "model": model,
        "engine": engine,
        "versions": versions,
        "expert_bytes": expert_bytes,
        "budget_bytes": budget_bytes,
        "slot_bytes": slot_bytes,
    }
    return plain(head | extra)


def check_head(head: Any, where: str) -> dict[str, Any]:
    """Check the head: version, every field, every option (LOG-1)."""
    if not isinstance(head, dict) or "log" not in head:
        raise BadInput(f"{where}: not the head of an event log")
    if head["log"] != VERSION or type(head["log"]) is not int:
        raise BadInput(f"{where}: log version {show(head['log'], 30)}; {VERSION} is supported")
    if absent := [name for name in _HEAD if name not in head]:
        raise BadInput(f"{where}: the head lacks {', '.join(absent)}")
    if not isinstance(head["model"], dict) or not isinstance(head["versions"], dict):
        raise BadInput(f"{where}: model and versions: objects are needed")
    if not isinstance(head["engine"], str):
        raise BadInput(f"{where}: engine is {show(head['engine'], 40)}; a string is needed")
    for name in _BYTES:
        if type(head[name]) is not int or head[name] < 0:
            raise BadInput(f"{where}: {name} is {show(head[name], 40)}; a count of bytes is needed")
    for name in _COUNTS:
        if head.get(name) is not None and (type(head[name]) is not int or head[name] < 0):
            raise BadInput(f"{where}: {name} is {show(head[name], 40)}; a count is needed")
    if is_foreign(head):
        _check_foreign(head["options"], where)
    else:
        options_of(head, where)
    return head


def is_foreign(head: Mapping[str, Any]) -> bool:
    """Whether a scheduler of another kind decided, which says its own name (LOG-8)."""
    options = head.get("options")
    return isinstance(options, dict) and "scheduler" in options


def _check_foreign(options: dict[str, Any], where: str) -> None:
    name = options["scheduler"]
    if not isinstance(name, str) or not name:
        raise BadInput(f"{where}: options.scheduler is {show(name, 40)}; a name is needed")
    if absent := [name for name in _FOREIGN if name not in options]:
        raise BadInput(f"{where}: options lack {', '.join(absent)}")
    for name, value in options.items():
        if name != "scheduler":
            _value(name, value, where)
    for name in ("chunk", "kv_block"):
        if options.get(name) == 0:
            raise BadInput(f"{where}: options.{name} is 0; at least 1, or leave it out")


def _is_key(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(x) is int and x >= 0 for x in value)
    )


def options_of(head: Mapping[str, Any], where: str = "head") -> ControlOptions:
    """The options of a head of this project's control plane.

    Errors: BadInput names the option, its value and what is right; also for a scheduler of
    another kind, which nobody here can be made to decide again.
    """
    options = head.get("options")
    if not isinstance(options, dict):
        raise BadInput(f"{where}: options: an object is needed")
    if is_foreign(head):
        raise BadInput(f"{where}: decided by {show(options['scheduler'], 40)}; only what this "
                       "project's own schedulers decided can be decided again")
    known = ControlOptions.__dataclass_fields__
    if absent := [name for name in known if name not in options]:
        raise BadInput(f"{where}: options lack {', '.join(absent)}{_HINT}")
    return ControlOptions(**{name: _value(name, x, where) for name, x in options.items()})


_HINT = "; a scheduler of another kind gives its own name, options.scheduler (docs/judge.md)"


def _value(name: str, value: Any, where: str) -> Any:
    """The value of an option as ControlOptions has it. Errors: BadInput, as `options_of`."""
    if name not in ControlOptions.__dataclass_fields__:
        raise BadInput(f"{where}: unknown option '{show(name, 40)}'")
    if name == "layers":
        good = isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
        good = good and value == sorted(set(value))
        right = "an ascending list of layer numbers"
        value = tuple(value) if good else value
    elif name == "warm":
        good = isinstance(value, list) and all(_is_key(x) for x in value)
        right = "a list of [layer, expert]"
        value = tuple(map(tuple, value)) if good else value
    elif name in _WORDS:
        good, right = value in _WORDS[name], " or ".join(_WORDS[name])
        right += _HINT if name == "grouping" else ""
    else:
        good = type(value) is int and 0 <= value <= MOST
        right = f"an integer from 0 to {MOST}"
    if not good:
        raise BadInput(f"{where}: options.{name} is {show(value, 60)}; needs {right}")
    return value
