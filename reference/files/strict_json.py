"""One strict JSON reader for every file that Covey opens (FILE-2).

The standard library's reader accepts NaN, Infinity, 1e400, repeated keys and lone surrogates, and
recurses as deep as the text says. None of these is let through here. Every refusal is a `BadInput`
of one ASCII line that begins with `where`.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from reference.vocab.errors import BadInput

MAX_DEPTH = 64
MAX_DIGITS = 40


def show(value: object, limit: int = 100) -> str:
    """`value` for an error message: printable ASCII, one line, at most about `limit` characters."""
    if isinstance(value, str):
        if value.isascii() and value.isprintable():
            text = value
        else:
            text = ascii(value)[1:-1]
    else:
        text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def place(path: object) -> str:
    """A path for an error message: whole, printable ASCII, one line."""
    return show(str(path), 8192)


def parse(data: bytes | str, where: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of one JSON text.

    Errors: BadInput for bytes that are not UTF-8, a syntax error, a repeated key, NaN or Infinity
    in any spelling, a number too long, nesting beyond `max_depth`, or a lone surrogate.
    """
    if isinstance(data, bytes):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise BadInput(f"{where}: not UTF-8 (byte {e.start})") from None
    else:
        text = data
    if text.startswith("\ufeff"):
        raise BadInput(f"{where}: begins with a byte order mark; plain UTF-8 is needed")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise BadInput(f"{where}: the key '{show(key)}' is there twice in one object")
                seen.add(key)
        return out

    def constant(name: str) -> NoReturn:
        raise BadInput(f"{where}: {name} is not a JSON number")

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise BadInput(f"{where}: a number of {len(digits)} digits is too long")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if value - value != 0.0:
            raise BadInput(f"{where}: the number {show(digits, 40)} is too large")
        return value

    try:
        value = json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=constant,
            parse_int=integer,
            parse_float=real,
        )
    except json.JSONDecodeError as e:
        place = f"line {e.lineno} column {e.colno}"
        raise BadInput(f"{where}: not JSON ({e.msg}, {place})") from None
    except RecursionError:
        raise BadInput(f"{where}: nested deeper than {max_depth}") from None
    _check(value, where, max_depth, surrogates="\\u" in text or not text.isascii())
    return value


def _check(value: Any, where: str, max_depth: int, surrogates: bool) -> None:
    """Refuse nesting beyond `max_depth` and, if asked, strings that UTF-8 cannot hold."""
    level, depth = [value], 0
    while level:
        depth += 1
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
                if surrogates:
                    for key in item:
                        _check_text(key, where)
            elif isinstance(item, list):
                below.extend(item)
            elif surrogates and isinstance(item, str):
                _check_text(item, where)
        if depth > max_depth and any(isinstance(item, (dict, list)) for item in level):
            raise BadInput(f"{where}: nested deeper than {max_depth}")
        level = below


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{where}: a string holds a lone surrogate: '{show(text, 40)}'") from None


def fields(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    """`value` as an object whose keys are all in `known`.

    Errors: BadInput for another type or for an unknown key, naming the known ones.
    """
    if not isinstance(value, dict):
        raise BadInput(f"{where}: an object is needed, not {kind(value)}")
    for key in value:
        if key not in known:
            raise BadInput(f"{where}: unknown field '{show(key)}'; known: {', '.join(known)}")
    return value


def kind(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"
