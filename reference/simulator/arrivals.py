"""Requests as real traces have them: when they come, how long they are (SIM-11, SIM-14).

Read by their columns: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT's CSV
(Timestamp, Request tokens, Response tokens), and JSON lines with arrivals and lengths by the names
of Mooncake and Qwen-Bailian (timestamp, input_length, output_length), LLMServingSim (arrival_s,
input_toks, output_toks) and agent sessions (start_time_s or request_arrival_delta_s, input_tokens,
output_tokens); plain or gzipped. Vidur's CSV (num_prefill_tokens, num_decode_tokens) has lengths
alone. From ServeGen's client profiles requests are drawn (servegen.py).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reference.files.packed import opened
from reference.files.strict_json import show
from reference.simulator import servegen
from reference.vocab.errors import BadInput

MAX_LINE = 1 << 22


class Arrival(NamedTuple):
    """A request: seconds after the first, prompt tokens, tokens to generate."""

    at_s: float
    prompt_len: int
    new_tokens: int


class _Form(NamedTuple):
    """Names of the three fields ("" for times that there are not), and seconds in one unit of the
    first."""

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
    _Form("", "num_prefill_tokens", "num_decode_tokens", 0.0),
)
"""unit_s 0: a date with a time."""


def read_arrivals(
    path: str | Path, *, first: int = 0, most: int = 1000, divide: int = 1, stretch: float = 1.0,
    rate: float | None = None, seed: int = 0, dataset: str | Path | None = None,
) -> list[Arrival]:  # fmt: skip
    """Up to `most` requests from the `first`-th on, in order of arrival, from second 0.

    `divide` divides both lengths (rounded up), `stretch` multiplies times: both are for replaying
    at another scale, and keep the order and which length came when. Requests of unknown or zero
    length are left out. A trace of lengths alone comes at `rate` requests a second, with
    exponential gaps drawn with `seed`; one that has times takes no rate. From ServeGen's profiles,
    a trace or a folder of them, requests are drawn with `seed`; `dataset` is the file of lengths of
    a trace that has none beside it. Raises BadInput naming file and line.
    """
    if not 0 < stretch < math.inf or not 0 < (1.0 if rate is None else rate) < math.inf:
        raise BadInput(f"arrivals: stretch {stretch}, rate {rate}; above 0 expected")
    found, timed = _found(Path(path), first, most, divide, seed, dataset)
    times = [at for at, _, _ in found]
    if timed and rate is not None:
        raise BadInput(f"{path}: has times of its own; a rate of {rate:g} is for lengths alone")
    if not timed:
        if rate is None:
            raise BadInput(f"{path}: lengths alone, no times: a rate of requests a second "
                           "(--rate), or a closed loop (--lengths), expected")  # fmt: skip
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(found) - 1)
        times = [0.0, *np.cumsum(gaps).tolist()]
    return [Arrival((at - times[0]) * stretch, -(-prompt // divide), -(-new // divide))
            for at, (_, prompt, new) in zip(times, found, strict=True)]  # fmt: skip


def read_lengths(
    path: str | Path, *, first: int = 0, most: int = 1000, divide: int = 1, seed: int = 0,
    dataset: str | Path | None = None,
) -> list[tuple[int, int]]:  # fmt: skip
    """(prompt tokens, tokens to generate) of the same requests, for a closed loop: of any trace,
    with times or without."""
    found, _ = _found(Path(path), first, most, divide, seed, dataset)
    return [(-(-prompt // divide), -(-new // divide)) for _, prompt, new in found]


def _found(
    path: Path, first: int, most: int, divide: int, seed: int, dataset: str | Path | None
) -> tuple[list[tuple[float, int, int]], bool]:
    """(time, prompt, new) of the requests asked for, in order, and whether the times mean
    anything."""
    if divide < 1 or most < 1 or first < 0 or seed < 0:
        raise BadInput(f"arrivals: first {first}, most {most}, divide {divide}, seed {seed}; "
                       "at least 0, 1, 1 and 0 expected")  # fmt: skip
    if dataset is not None or servegen.is_servegen(path):
        drawn = servegen.draw(path, seed, Path(dataset) if dataset is not None else None)
        found = list(islice((r for r in drawn if r[1] and r[2]), first, first + most))
        timed = True
    else:
        found, timed = _recorded(path)
        found = sorted(found, key=lambda x: x[0])[first : first + most]
    if not found:
        raise BadInput(f"{path}: no requests from number {first} on")
    return found, timed


def _recorded(path: Path) -> tuple[list[tuple[float, int, int]], bool]:
    found: list[tuple[float, int, int]] = []
    form: _Form | None = None
    for line, row in _rows(path):
        where = f"{path}:{line}"
        form = form or _form(row, where)
        try:
            at = _seconds(row[form.at], form.unit_s) if form.at else 0.0
            prompt, new = int(row[form.prompt]), int(row[form.new])
            if not math.isfinite(at) or any(isinstance(row.get(f), bool) for f in form[:3]):
                raise ValueError
        except (KeyError, ValueError, TypeError, OverflowError):
            names = ", ".join(filter(None, form[:2]))
            raise BadInput(f"{where}: {show(row, 80)}: {names} and {form.new} expected as "
                           f"{'a time and ' if form.at else ''}two numbers of tokens") from None
        if prompt > 0 and new > 0:
            found.append((at, prompt, new))
    return found, form is None or bool(form.at)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, fields) of a CSV with a head, or of JSON lines."""
    with opened(path, "request trace") as file:
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
        if all(name in row for name in form[:3] if name):
            return form
    known = "; ".join(", ".join(filter(None, form[:3])) for form in FORMS)
    told = show(", ".join(map(str, row)), 80)
    raise BadInput(f"{where}: fields {told}: no request trace that is known; known: {known}")


def _seconds(value: Any, unit_s: float) -> float:
    if unit_s:
        return float(value) * unit_s
    return datetime.fromisoformat(str(value)[:26]).replace(tzinfo=UTC).timestamp()
