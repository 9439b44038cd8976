"""Requests drawn from ServeGen's client profiles (SIM-15; Xiang et al., arXiv 2505.09999).

A client is two files, plain or gzipped. chunk-N-trace.csv, without a head: start in s, requests a
second, CV of the gaps, family that was fitted to them (Gamma, Weibull; none where idle), its shape
and scale, for each window of 600 s. chunk-N-dataset.json: {start in s: {field: text}}, the text a
Python dict {tokens: probability}; of its fields input_tokens and output_tokens count (reason_ratio
is a share of the output). Both say what was measured of a window, not single requests: these are
drawn, prompt and output independently of each other, for nothing is known of how they hang
together.
"""

from __future__ import annotations

import ast
import heapq
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reference.files.packed import opened
from reference.files.regular import reason
from reference.files.strict_json import parse, show
from reference.vocab.errors import BadInput

WINDOW_S = 600.0
MAX_FILE = 1 << 26
MAX_TEXT = 1 << 22
MAX_RATE = 10_000.0
MAX_TOKENS = 10**9
NAME = re.compile(r"(.+)-trace\.csv(\.gz)?")
FIELDS = ("input_tokens", "output_tokens")

_FLAT = re.compile(r"\{(?:[0-9., :]|[eE][+-]?)*\}")
_GAPS: dict[str, Callable[[np.random.Generator, float, int], np.ndarray]] = {
    "Gamma": lambda rng, shape, n: rng.standard_gamma(shape, n),
    "Weibull": lambda rng, shape, n: rng.weibull(shape, n),
}
"""n gaps of a family, of any scale: they are rescaled to the window."""


class Window(NamedTuple):
    """Row of a trace: start in s, requests a second, family ("" where idle), its shape."""

    start: float
    rate: float
    family: str
    shape: float


def is_servegen(path: Path) -> bool:
    """A client's trace by its name, or a folder (of those)."""
    return path.is_dir() or NAME.fullmatch(path.name) is not None


def draw(
    path: Path, seed: int = 0, dataset: Path | None = None
) -> Iterator[tuple[float, int, int]]:
    """(second, prompt tokens, tokens to generate) in order of time, of the client of a trace, or of
    all clients of a folder, merged.

    `dataset` is the client's file of lengths if it does not lie beside the trace by its name. A
    client's draws hang on the seed and its own name and files, not on who else is there. A window's
    lengths are looked at when its first request is drawn. Raises BadInput naming file, window,
    field and value.
    """
    if not path.is_dir():
        return _client(path, dataset or _beside(path), seed)
    if dataset is not None:
        raise BadInput(f"{dataset}: the lengths of one client; {path} is a folder of several")
    try:
        traces = sorted(p for p in path.iterdir() if NAME.fullmatch(p.name))
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}") from None
    if not traces:
        raise BadInput(f"{path}: no client's trace in this folder: chunk-N-trace.csv, plain or "
                       "gzipped, expected")  # fmt: skip
    return heapq.merge(*(_client(p, _beside(p), seed) for p in traces))


def _beside(trace: Path) -> Path:
    name = NAME.fullmatch(trace.name)
    if not name:
        raise BadInput(f"{trace}: chunk-N-trace.csv, plain or gzipped, expected")
    return trace.with_name(f"{name[1]}-dataset.json{name[2] or ''}")


def _client(trace: Path, dataset: Path, seed: int) -> Iterator[tuple[float, int, int]]:
    name = trace.name.removesuffix(".gz")
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    lengths = Lengths(dataset)
    for window in read_windows(trace):
        times = window.start + arrivals(window, rng)
        if len(times):
            drawn = (lengths.draw(window.start, field, rng, len(times)) for field in FIELDS)
            yield from zip(times.tolist(), *(x.tolist() for x in drawn), strict=True)


def arrivals(window: Window, rng: np.random.Generator) -> np.ndarray:
    """Seconds [n] of a window's requests since its start.

    n is the rate times 600 s, a fraction being one more with that probability. n gaps are drawn of
    the fitted family and rescaled to fill the window, a request coming at the end of each: so the
    mean of the gaps is exact, and the scale that was fitted, as the CV, does not matter.
    """
    whole, part = divmod(window.rate * WINDOW_S, 1.0)
    n = int(whole) + int(rng.random() < part)
    if not n:
        return np.zeros(0)
    with np.errstate(over="ignore", invalid="ignore"):
        ends = np.cumsum(_GAPS[window.family](rng, window.shape, n))
    if not 0 < ends[-1] < np.inf:
        # A shape so small that floats tell no two gaps apart: one of them is the whole window.
        ends = (np.arange(n) >= rng.integers(n)).astype(float)
    return ends / ends[-1] * WINDOW_S


def read_windows(path: Path) -> list[Window]:
    """The windows of a trace, in order of time. Raises BadInput naming file, line, field, value."""
    out: list[Window] = []
    for line, text in enumerate(_text(path).splitlines(), 1):
        row = [x.strip() for x in text.split(",")]
        where = f"{path}:{line}"
        if len(row) != 6:
            raise BadInput(f"{where}: {show(text, 60)}: start, rate, CV, family, shape and scale "
                           "of a window expected")  # fmt: skip
        start = _number(row[0], f"{where}: start", math.inf)
        if out and start < out[-1].start + WINDOW_S:
            raise BadInput(f"{where}: start: {show(row[0], 40)}: {WINDOW_S:g} s or more after the "
                           "window before expected")  # fmt: skip
        rate = _number(row[1], f"{where}: window {start:g}: rate", MAX_RATE)
        for name, value in (("CV", row[2]), ("scale", row[5])):
            _number(value, f"{where}: window {start:g}: {name}", math.inf)
        shape = _number(row[4], f"{where}: window {start:g}: shape", math.inf)
        if rate and row[3] not in _GAPS:
            raise BadInput(f"{where}: window {start:g}: family: '{show(row[3], 40)}': "
                           f"{' or '.join(_GAPS)} expected")  # fmt: skip
        if rate and not shape:
            raise BadInput(f"{where}: window {start:g}: shape: {row[4]}: above 0 expected")
        out.append(Window(start, rate, row[3], shape))
    return out


def _number(word: str, where: str, most: float) -> float:
    """From 0 to `most`, finite."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most or value == math.inf:
        up_to = "" if most == math.inf else f" and at most {most:g}"
        raise BadInput(f"{where}: {show(word, 40)}: a number of at least 0{up_to} expected")
    return value


class Lengths:
    """A client's distributions of lengths, from its dataset file, read when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts: list[int] = []
        self.texts: dict[int, dict[str, Any]] = {}
        self.known: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    def draw(self, at: float, field: str, rng: np.random.Generator, n: int) -> np.ndarray:
        """n numbers of tokens [n] of the window that began last at `at` s."""
        if not self.starts:
            self._read()
        i = bisect_right(self.starts, at) - 1
        if i < 0:
            raise BadInput(f"{self.path}: windows from {self.starts[0]} on; requests from "
                           f"{at:g} on")  # fmt: skip
        key = self.starts[i], field
        if key not in self.known:
            where = f"{self.path}: window {key[0]}: {field}"
            self.known[key] = distribution(self.texts[key[0]].get(field), where)
        tokens, below = self.known[key]
        return tokens[np.searchsorted(below, rng.random(n) * below[-1], side="right")]

    def _read(self) -> None:
        found = parse(_text(self.path), str(self.path))
        if not isinstance(found, dict) or not found:
            raise BadInput(f"{self.path}: an object of windows by their starts in s expected")
        for start, fields in found.items():
            if not (start.isascii() and start.isdigit() and len(start) <= 12):
                raise BadInput(f"{self.path}: window {show(start, 40)}: seconds expected")
            if not isinstance(fields, dict):
                raise BadInput(f"{self.path}: window {start}: an object of "
                               f"{' and '.join(FIELDS)} expected")  # fmt: skip
            self.texts[int(start)] = fields
        self.starts = sorted(self.texts)


def distribution(text: object, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [K], cumulative probabilities [K]) of a text such as "{62: 0.25, 70: 0.75}".

    Only a flat dict of plain numbers comes to Python's parser, and no longer one than 4 MiB.
    Raises BadInput that begins with `where`.
    """
    found: Any = None
    if isinstance(text, str) and len(text) <= MAX_TEXT and _FLAT.fullmatch(text):
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
    fits = isinstance(found, dict) and all(
        type(n) is int and n <= MAX_TOKENS and isinstance(p, int | float) and p <= 1
        for n, p in found.items()
    )  # fmt: skip
    if not fits or abs(sum(found.values()) - 1) > 1e-3:
        raise BadInput(f"{where}: {show(text, 60)}: a text such as {{62: 0.25, 70: 0.75}}, of "
                       "numbers of tokens and probabilities that are 1 together, expected")
    some = [(n, p) for n, p in sorted(found.items()) if p > 0]
    return np.array([n for n, _ in some]), np.cumsum([p for _, p in some])


def _text(path: Path) -> str:
    with opened(path, "ServeGen profile") as file:
        text = file.read(MAX_FILE + 1)
    if len(text) > MAX_FILE:
        raise BadInput(f"{path}: longer than {MAX_FILE} characters")
    return text
