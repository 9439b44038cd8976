"""Events and actions as plain records and back: the lines of an event log (LOG-2, LOG-3).

A record has the dataclass's own field names; a tuple is an array. `event_from_record` and
`action_from_record` check every field, so that a record that passes is a legal event or action.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, get_args

from reference.files.strict_json import show
from reference.vocab import actions, events
from reference.vocab.ids import ENTRY, ExpertKey, Part, Visit


def record_of(item: events.Event | actions.Action) -> dict[str, Any]:
    """`{"event" | "action": name, field: value, ...}` of JSON values only."""
    kind = type(item)
    record: dict[str, Any] = {"event" if kind in _EVENTS else "action": kind.__name__}
    for name in FORMS[kind]:
        record[name] = plain(getattr(item, name))
    return record


def plain(value: Any) -> Any:
    """`value` as JSON values: tuples are lists, NumPy's integers are ints, text is encodable."""
    if value is None or type(value) in (int, bool, float):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, (tuple, list)):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    if hasattr(value, "__index__"):
        return index(value)
    return float(value)


def event_from_record(record: dict[str, Any]) -> events.Event:
    """The event of a record. Errors: ValueError, one line, for anything that is not one."""
    return _from(record, "event", _EVENT_NAMES)


def action_from_record(record: dict[str, Any]) -> actions.Action:
    """The action of a record. Errors: ValueError, one line, for anything that is not one."""
    return _from(record, "action", _ACTION_NAMES)


def _from(record: dict[str, Any], word: str, names: dict[str, Any]) -> Any:
    name = record.get(word)
    kind = names.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"{word} is {show(name, 40)}; known: {', '.join(names)}")
    values: dict[str, Any] = {}
    for field, form in FORMS[kind].items():
        if field not in record:
            if field == "ns":
                continue  # nobody measured
            raise ValueError(f"{name} has no {field}")
        try:
            values[field] = form(record[field])
        except (ValueError, TypeError):
            what = _MEANING[form]
            raise ValueError(
                f"{name}.{field} is {show(record[field], 60)}; {what} is needed"
            ) from None
    return kind(**values)


def _count(v: Any) -> int:
    if type(v) is not int or v < 0:
        raise ValueError
    return v


def _ticket(v: Any) -> int:
    if _count(v) < 1:
        raise ValueError
    return v


def _layer(v: Any) -> int:
    if type(v) is not int or v < ENTRY:
        raise ValueError
    return v


def _token(v: Any) -> int | None:
    return None if v is None else _count(v)


def _flag(v: Any) -> bool:
    if type(v) is not bool:
        raise ValueError
    return v


def _text(v: Any) -> str:
    if not isinstance(v, str):
        raise ValueError
    return v


def _array(v: Any, length: int | None = None) -> Any:
    if not isinstance(v, (list, tuple)) or (length is not None and len(v) != length):
        raise ValueError
    return v


def _counts(v: Any) -> tuple[int, ...]:
    return tuple(_count(x) for x in _array(v))


def _visit(v: Any) -> Visit:
    request, chunk, layer = _array(v, 3)
    return Visit(_count(request), _count(chunk), _layer(layer))


def _key(v: Any) -> ExpertKey:
    layer, expert = _array(v, 2)
    return ExpertKey(_count(layer), _count(expert))


def _rows(v: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_counts(row) for row in _array(v))


def _pairs(v: Any) -> tuple[tuple[int, int], ...]:
    return tuple((_count(a), _count(b)) for a, b in (_array(pair, 2) for pair in _array(v)))


def _scores(v: Any) -> tuple[tuple[int, float], ...]:
    out = []
    for expert, score in (_array(pair, 2) for pair in _array(v)):
        if type(score) not in (int, float):
            raise ValueError
        out.append((_count(expert), score))
    return tuple(out)


def _parts(v: Any) -> tuple[Part, ...]:
    parts = []
    for visit, experts, last in (_array(part, 3) for part in _array(v)):
        parts.append(Part(_visit(visit), _counts(experts), _flag(last)))
    return tuple(parts)


def _reason(v: Any) -> str:
    if v not in get_args(actions.Reason):
        raise ValueError
    return v


_MEANING: dict[Callable[[Any], Any], str] = {
    _count: "an integer of at least 0",
    _ticket: "an integer of at least 1",
    _layer: "a layer number, or -1",
    _token: "a token id or null",
    _flag: "true or false",
    _text: "a string",
    _counts: "an array of integers of at least 0",
    _visit: "[request, chunk, layer]",
    _key: "[layer, expert]",
    _rows: "an array of arrays of expert ids",
    _pairs: "an array of [expert, slot]",
    _scores: "an array of [expert, score]",
    _parts: "an array of [[request, chunk, layer], [experts], last]",
    _reason: " or ".join(get_args(actions.Reason)),
}

FORMS: dict[type, dict[str, Callable[[Any], Any]]] = {
    events.Arrived: {"request": _count, "prompt_len": _count, "max_new_tokens": _count},
    events.Routed: {"visit": _visit, "experts": _rows},
    events.Predicted: {"visit": _visit, "scores": _scores},
    events.Loaded: {"ticket": _ticket, "ns": _count},
    events.LoadFailed: {"ticket": _ticket, "error": _text, "drained": _flag},
    events.Computed: {"step": _ticket, "ns": _count},
    events.Sampled: {"request": _count, "token": _token, "stop": _flag},
    events.Failed: {"step": _ticket, "error": _text, "requests": _counts},
    events.Cancelled: {"request": _count},
    events.Drain: {},
    actions.Admit: {"request": _count},
    actions.Load: {"ticket": _ticket, "key": _key, "slot": _count, "guess": _flag},
    actions.Compute: {"step": _ticket, "layer": _layer, "parts": _parts, "slots": _pairs},
    actions.Finish: {"request": _count, "reason": _reason, "error": _text},
    actions.Reject: {"request": _count, "reason": _text},
}
"""How each field of each event and action is read; every field has an entry."""
_EVENTS = frozenset(get_args(events.Event))
_EVENT_NAMES = {kind.__name__: kind for kind in get_args(events.Event)}
_ACTION_NAMES = {kind.__name__: kind for kind in get_args(actions.Action)}
