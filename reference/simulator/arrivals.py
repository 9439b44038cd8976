"""Requests as real traces have them: when they come, how long they are (SIM-11).

Read by their columns: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT's CSV
(Timestamp, Request tokens, Response tokens), and JSON lines with arrivals and lengths by the names
of Mooncake and Qwen-Bailian (timestamp, input_length, output_length), LLMServingSim (arrival_s,
input_toks, output_toks) and agent sessions (start_time_s or request_arrival_delta_s, input_tokens,
output_tokens); plain or gzipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from reference.files.regular import reason
from reference.files.strict_json import show
from reference.vocab.errors import BadInput

MAX_LINE = 1 << 22


class Arrival(NamedTuple):
    """A request: seconds after the first, prompt tokens, tokens to generate."""

    at_s: float
    prompt_len: int
    new_tokens: int


class _Form(NamedTuple):
    """Names of the three fields, and seconds in one unit of the first."""

    at: str
    prompt: str
    new: str
    unit_s: float


FORMS = (
    _Form("TIMESTAMP", "ContextTokens", "GeneratedTokens", 0.0),
    _Form("Timestamp", "Request tokens", "Response tokens", 1.0),
    _Form("timestamp", "input_length", "output_length", 1e-3),
    _Form("arrival_s", "input_toks", "output_toks", 1.0),
    _Form("start_time_s", "input_tokens", "output_tokens", 1.0),
    _Form("request_arrival_delta_s", "input_tokens", "output_tokens", 1.0),
)
"""unit_s 0: a date with a time."""


def read_arrivals(
    path: str | Path, *, first: int = 0, most: int = 1000, divide: int = 1, stretch: float = 1.0
) -> list[Arrival]:
    """Up to `most` requests from the `first`-th on, in order of arrival, from second 0.

    `divide` divides both lengths (rounded up), `stretch` multiplies times: both are for replaying
    at another scale, and keep the order and which length came when. Requests of unknown or zero
    length are left out. Raises BadInput naming file and line.
    """
    path = Path(path)
    if divide < 1 or not 0 < stretch < math.inf or most < 1 or first < 0:
        raise BadInput(f"arrivals: first {first}, most {most}, divide {divide}, stretch {stretch}; "
                       "at least 0, 1, 1 and above 0 expected")  # fmt: skip
    found: list[tuple[float, int, int]] = []
    form: _Form | None = None
    for line, row in _rows(path):
        where = f"{path}:{line}"
        form = form or _form(row, where)
        try:
            at = _seconds(row[form.at], form.unit_s)
            prompt, new = int(row[form.prompt]), int(row[form.new])
            if not math.isfinite(at):
                raise ValueError
        except (KeyError, ValueError, TypeError, OverflowError):
            raise BadInput(f"{where}: {show(row, 80)}: {form.at}, {form.prompt} and {form.new} "
                           "expected as a time and two numbers of tokens") from None  # fmt: skip
        if prompt > 0 and new > 0:
            found.append((at, prompt, new))
    found = sorted(found, key=lambda x: x[0])[first : first + most]
    if not found:
        raise BadInput(f"{path}: no requests from number {first} on")
    start = found[0][0]
    return [Arrival((at - start) * stretch, -(-prompt // divide), -(-new // divide))
            for at, prompt, new in found]  # fmt: skip


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, fields) of a CSV with a head, or of JSON lines."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8") as file:
            lines = _lines(file, path)
            line, text = next(lines, (1, ""))
            if text.lstrip().startswith("{"):
                yield line, _record(text, path, line)
                for line, text in lines:
                    if text.strip():
                        yield line, _record(text, path, line)
                return
            names = next(csv.reader([text]), [])
            for line, text in lines:
                if text.strip():
                    yield line, dict(zip(names, next(csv.reader([text])), strict=False))
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise BadInput(f"{path}: no request trace: {show(str(error), 80)}") from None
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}") from None


def _lines(file: Iterable[str], path: Path) -> Iterator[tuple[int, str]]:
    for line, text in enumerate(file, 1):
        if len(text) > MAX_LINE:
            raise BadInput(f"{path}:{line}: longer than {MAX_LINE} characters")
        yield line, text


def _record(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise BadInput(f"{path}:{line}: {show(text.strip(), 60)}: a JSON object expected")
    return record


def _form(row: Mapping[str, Any], where: str) -> _Form:
    for form in FORMS:
        if all(name in row for name in form[:3]):
            return form
    known = "; ".join(", ".join(form[:3]) for form in FORMS)
    told = show(", ".join(map(str, row)), 80)
    raise BadInput(f"{where}: fields {told}: no request trace that is known; known: {known}")


def _seconds(value: Any, unit_s: float) -> float:
    if unit_s:
        return float(value) * unit_s
    return datetime.fromisoformat(str(value)[:26]).replace(tzinfo=UTC).timestamp()
