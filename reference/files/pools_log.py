"""The event log of an engine with its attention in another pool (LAMINA-27): its head, and which
records it may have. Lines, times and end are those of event_log.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reference.files.log_records import plain
from reference.files.strict_json import show
from reference.vocab.errors import BadInput

VERSION = 1
COUNTS = ("layers", "batches", "max_batch", "chunk", "devices", "blocks", "kv_block", "prefill")
WORDS = {"order": ("rotation", "queue"), "partition": ("head", "request")}
WIRE = {"open": 5, "q": 6, "kv": 6, "a": 6, "context": 6, "pull": 6}
"""Kinds of messages, and the entries of each: open has tile, devices, first and end layer; the
others tile (pull: request), layer, device, rows, bytes."""


def _count(v: Any) -> bool:
    return type(v) is int and v >= 0


def _number(v: Any) -> bool:
    return type(v) is int and v >= -1


def _flag(v: Any) -> bool:
    return type(v) is bool


def _text(v: Any) -> bool:
    return isinstance(v, str)


def _counts(v: Any) -> bool:
    return isinstance(v, list) and all(map(_count, v))


def _spans(v: Any) -> bool:
    return isinstance(v, list) and all(_counts(x) and len(x) == 3 for x in v)


Form = dict[str, Callable[[Any], bool]]
EVENTS: dict[str, Form] = {
    "Arrived": {"request": _count, "prompt_len": _count, "max_new_tokens": _count},
    "Cancelled": {"request": _count, "reason": _text, "error": _text},
    "Prefilled": {"worker": _count, "request": _count, "stopped": _flag},
    "Pulled": {"request": _count},
    "SliceDone": {"batch": _count},
    "AttentionDone": {"batch": _count},
    "TokenDone": {"batch": _count, "stopped": _counts},
    "Redo": {"batch": _count},
    "LostMemory": {"device": _count},
    "LostWorker": {"worker": _count},
}
ACTIONS: dict[str, Form] = {
    "Place": {"request": _count, "devices": _counts},
    "Prefill": {"request": _count, "worker": _count},
    "Turn": {"batch": _count, "slice": _count, "replica": _count, "held": _number, "spans": _spans},
    "Finish": {"request": _count, "reason": _text, "error": _text},
    "Reject": {"request": _count, "reason": _text},
}


def pools_head(
    options: Mapping[str, Any], model: Mapping[str, Any], versions: Mapping[str, str],
    wire: list[list[int]], windows: list[int | None], hidden_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    """A head. wire: for each layer the bytes of a token row's queries, of what is cached and of
    what was attended, over all heads; hidden_bytes: of a row's residual."""
    return plain({
        "pools": VERSION, "engine": "lamina", "options": dict(options), "model": dict(model),
        "versions": dict(versions), "wire": wire, "windows": windows, "hidden_bytes": hidden_bytes,
    })  # fmt: skip


def is_pools(head: Any) -> bool:
    """A first record that says it is one of these heads."""
    return isinstance(head, dict) and "pools" in head


def check_pools_head(head: dict[str, Any], where: str) -> dict[str, Any]:
    """The head, if it is a good one. Raises BadInput naming what is wrong."""
    if head["pools"] != VERSION or type(head["pools"]) is not int:
        raise BadInput(f"{where}: pools version {show(head['pools'], 30)}; {VERSION} is supported")
    options = head.get("options")
    if not isinstance(options, dict):
        raise BadInput(f"{where}: options: an object is needed")
    for name in COUNTS:
        least = 0 if name == "prefill" else 1
        if type(options.get(name)) is not int or not least <= options[name] <= 1 << 24:
            told = show(options.get(name), 30)
            raise BadInput(f"{where}: options.{name} is {told}; an integer of at least {least}")
    for name, words in WORDS.items():
        if options.get(name) not in words:
            told = show(options.get(name), 30)
            raise BadInput(f"{where}: options.{name} is {told}; {' or '.join(words)} is needed")
    layers = options["layers"]
    if not _counts(options.get("kv_heads")) or len(options["kv_heads"]) != layers:
        raise BadInput(f"{where}: options.kv_heads: a count for each of {layers} layers is needed")
    if unknown := sorted(set(options) - {*COUNTS, *WORDS, "kv_heads"}):
        raise BadInput(f"{where}: unknown option '{show(unknown[0], 40)}'")
    wire, windows = head.get("wire"), head.get("windows")
    if not _spans(wire) or len(wire) != layers:  # type: ignore[arg-type]
        raise BadInput(f"{where}: wire: three counts of bytes for each layer are needed")
    if not isinstance(windows, list) or len(windows) != layers:
        raise BadInput(f"{where}: windows: one for each layer is needed")
    if not all(w is None or (_count(w) and w) for w in windows):
        raise BadInput(f"{where}: windows: null or at least 1 is needed")
    if not _count(head.get("hidden_bytes")):
        raise BadInput(f"{where}: hidden_bytes: a count of bytes is needed")
    return head


def check_pools_record(record: dict[str, Any]) -> None:
    """Raises ValueError, one line, for an event or action that is none, and for bad messages."""
    for word, known in (("event", EVENTS), ("action", ACTIONS)):
        if word not in record:
            continue
        name = record[word]
        form = known.get(name) if isinstance(name, str) else None
        if form is None:
            raise ValueError(f"{word} is {show(name, 40)}; known: {', '.join(known)}")
        for field, good in form.items():
            if field not in record or not good(record[field]):
                raise ValueError(f"{name}.{field} is {show(record.get(field), 60)}")
    messages = record.get("wire", [])
    if not isinstance(messages, list) or not all(map(_message, messages)):
        raise ValueError("wire: a list of messages is needed")


def _message(m: Any) -> bool:
    if not isinstance(m, list) or not m or not isinstance(m[0], str) or WIRE.get(m[0]) != len(m):
        return False
    if m[0] == "open":
        return _count(m[1]) and _counts(m[2]) and _count(m[3]) and _count(m[4])
    return _counts(m[1:])
