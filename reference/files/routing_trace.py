"""Recorded routing: which experts each token of each request chose (TRACE-1 to TRACE-3).

A neutral file: npz without pickles, for every request n an array `topk/n` uint8 or uint16 [T, L, K]
in rank order, T tokens that went through the model (the prompt, then all generated ones but the
last), L layers with experts. `header` is JSON as uint8: {"format": "covey-routes-1", "model",
"experts", "k", "layers": [model layers], "expert_bytes": [a layer], "requests": [{"id",
"prompt_len", "tokens"}]}. Beside it, the CSV of github.com/Helldez/BigMoeOnEdge is read.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np

from reference.files import strict_json
from reference.files.packed import DAMAGED
from reference.files.regular import reason
from reference.files.strict_json import show
from reference.vocab.errors import BadInput

FORMAT = "covey-routes-1"
MAX_HEADER = 1 << 26
MAX_ROUTES = 1 << 32
"""Most bytes of all arrays together that a reader takes into memory."""


@dataclass(frozen=True)
class Recorded:
    """One request: topk uint16 [T, L, K] in rank order, of which `prompt_len` tokens came first."""

    id: str
    prompt_len: int
    topk: np.ndarray


@dataclass(frozen=True)
class RoutingTrace:
    """Requests of one model. `layers` are model layers with experts, `expert_bytes` a layer."""

    model: str
    experts: int
    top_k: int
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    requests: tuple[Recorded, ...]


def write_trace(file: IO[bytes], trace: RoutingTrace) -> None:
    """Write a trace as npz (TRACE-1)."""
    header = {
        "format": FORMAT, "model": trace.model, "experts": trace.experts, "k": trace.top_k,
        "layers": list(trace.layers), "expert_bytes": list(trace.expert_bytes),
        "requests": [{"id": r.id, "prompt_len": r.prompt_len, "tokens": len(r.topk)}
                     for r in trace.requests],
    }  # fmt: skip
    kind = np.uint8 if trace.experts <= 256 else np.uint16
    text = json.dumps(header).encode()
    arrays = {f"topk/{i}": r.topk.astype(kind) for i, r in enumerate(trace.requests)}
    np.savez_compressed(file, header=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]


def read_trace(path: str | Path) -> RoutingTrace:
    """Read an npz or a BigMoeOnEdge CSV, told apart by how it begins. Raises BadInput."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(4) == b"PK\x03\x04":
                return _read_npz(file, str(path))
        with open(path, encoding="utf-8", newline="") as text:
            return _read_csv(text, str(path), path.name.split(".")[0])
    except UnicodeDecodeError:
        raise BadInput(f"{path}: neither npz nor text: no routing trace") from None
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}") from None


def _read_npz(file: IO[bytes], where: str) -> RoutingTrace:
    """TRACE-2: sizes and types are known before anything is taken into memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            if "header.npy" not in names:
                raise BadInput(f"{where}: no 'header' in it: no routing trace")
            text = _array(archive, "header", where, (np.uint8,), None, MAX_HEADER)
            header = strict_json.parse(text.tobytes(), f"{where}: header")
            trace, told = _header(header, where)
            size = sum(tokens for _, _, tokens in told) * len(trace.layers) * trace.top_k * 2
            if size > MAX_ROUTES:
                raise BadInput(f"{where}: {size} bytes of routes; at most {MAX_ROUTES} are read")
            requests = []
            for i, (name, prompt_len, tokens) in enumerate(told):
                shape = (tokens, len(trace.layers), trace.top_k)
                topk = _array(archive, f"topk/{i}", where, (np.uint8, np.uint16), shape, MAX_ROUTES)
                _check(topk, trace.experts, f"{where}: topk/{i}")
                requests.append(Recorded(name, prompt_len, topk.astype(np.uint16)))
    except DAMAGED as error:
        raise BadInput(f"{where}: {show(str(error), 80)}") from None
    return RoutingTrace(trace.model, trace.experts, trace.top_k, trace.layers, trace.expert_bytes,
                        tuple(requests))  # fmt: skip


def _array(
    archive: zipfile.ZipFile, name: str, where: str, kinds: Sequence[type],
    shape: tuple[int, ...] | None, most: int,
) -> np.ndarray:  # fmt: skip
    """One array of the archive, after a look at what it says it is."""
    if f"{name}.npy" not in archive.namelist():
        raise BadInput(f"{where}: {name} is missing")
    with archive.open(f"{name}.npy") as member:
        try:
            version = np.lib.format.read_magic(member)
            read = {(1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0}[version]  # fmt: skip
            found, fortran, dtype = read(member)
        except (ValueError, KeyError, TokenError) as error:
            raise BadInput(f"{where}: {name}: not an array: {show(str(error), 80)}") from None
        if dtype not in [np.dtype(k) for k in kinds] or fortran:
            raise BadInput(f"{where}: {name}: {dtype}; {' or '.join(k.__name__ for k in kinds)} "
                           "in C order expected")  # fmt: skip
        if (shape is not None and found != shape) or (shape is None and len(found) != 1):
            raise BadInput(f"{where}: {name}: shape {list(found)}; "
                           f"{list(shape) if shape else 'one axis'} expected")  # fmt: skip
        size = int(np.prod(found, dtype=np.int64)) * dtype.itemsize
        if size > most:
            raise BadInput(f"{where}: {name}: {size} bytes; at most {most} expected")
        data = member.read(size)
    if len(data) != size:
        raise BadInput(f"{where}: {name}: {len(data)} bytes of {size}")
    return np.frombuffer(data, dtype).reshape(found)


def _header(header: Any, where: str) -> tuple[RoutingTrace, list[tuple[str, int, int]]]:
    """(the trace without requests, (id, prompt_len, tokens) of each)."""

    def fail(name: str, what: str) -> BadInput:
        value = header.get(name) if isinstance(header, dict) else header
        return BadInput(f"{where}: header.{name}: {show(value, 60)}; {what} expected")

    def count(value: Any, least: int = 0) -> bool:
        return type(value) is int and value >= least

    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise fail("format", f'"{FORMAT}"')
    if not isinstance(header.get("model"), str):
        raise fail("model", "a text")
    if not (count(header.get("experts"), 1) and header["experts"] <= 1 << 16):
        raise fail("experts", "1 to 65536")
    if not (count(header.get("k"), 1) and header["k"] <= header["experts"]):
        raise fail("k", f"1 to {header['experts']}")
    layers, sizes = header.get("layers"), header.get("expert_bytes")
    if not isinstance(layers, list) or not layers or not all(map(count, layers)) or (
        sorted(set(layers)) != layers
    ):
        raise fail("layers", "ascending layer numbers")
    if not isinstance(sizes, list) or len(sizes) != len(layers) or not all(map(count, sizes)):
        raise fail("expert_bytes", "a size a layer")
    told: list[tuple[str, int, int]] = []
    requests = header.get("requests")
    if not isinstance(requests, list):
        raise fail("requests", "an array")
    for r in requests:
        good = isinstance(r, dict) and isinstance(r.get("id"), str) and count(r.get("tokens"), 1)
        if not good or not count(r.get("prompt_len")) or r["prompt_len"] > r["tokens"]:
            raise BadInput(f"{where}: header.requests: {show(r, 80)}; id, prompt_len and tokens, "
                           "at least 1 and prompt_len, expected")  # fmt: skip
        told.append((r["id"], r["prompt_len"], r["tokens"]))
    trace = RoutingTrace(header["model"], header["experts"], header["k"], tuple(layers),
                         tuple(sizes), ())  # fmt: skip
    return trace, told


def _check(topk: np.ndarray, experts: int, where: str) -> None:
    """Every token names distinct experts that there are."""
    if topk.size and int(topk.max()) >= experts:
        raise BadInput(f"{where}: expert {int(topk.max())}; below {experts} expected")
    ordered = np.sort(topk, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise BadInput(f"{where}: an expert twice for one token")


def trace_of_records(
    records: Iterable[dict[str, Any]], model: str, experts: int, top_k: int,
    layers: Sequence[int], expert_bytes: int,
) -> RoutingTrace:  # fmt: skip
    """The routing in the records of an event log, whose chunks come in order (TRACE-3).

    A request that failed or was cancelled on its way is kept up to its last whole token.
    """
    names: dict[int, tuple[str, int]] = {}
    rows: dict[int, list[list[Any]]] = {}
    place = {layer: i for i, layer in enumerate(layers)}
    for record in records:
        if record.get("event") == "Arrived":
            number = record["request"]
            names[number] = str(record.get("id", number)), record["prompt_len"]
            rows[number] = [[] for _ in layers]
        elif record.get("event") == "Routed":
            number, _, layer = record["visit"]
            rows[number][place[layer]] += record["experts"]
    requests = []
    for number, (name, prompt_len) in names.items():
        whole = min(map(len, rows[number]), default=0)
        if whole:
            topk = np.array([layer[:whole] for layer in rows[number]], np.uint16).swapaxes(0, 1)
            requests.append(Recorded(name, min(prompt_len, whole), np.ascontiguousarray(topk)))
    return RoutingTrace(model, experts, top_k, tuple(layers), (expert_bytes,) * len(layers),
                        tuple(requests))  # fmt: skip


COLUMNS = ["turn", "phase", "step", "layer", "slot", "expert", "weight"]


def _read_csv(text: Iterable[str], where: str, name: str) -> RoutingTrace:
    """A route trace of BigMoeOnEdge: one request; tokens of which a layer is missing are left out
    (its prompts end at the last layer's router for all tokens but one)."""
    told: dict[str, str] = {}
    sizes: dict[int, int] = {}
    chosen: dict[tuple[int, int], dict[int, int]] = {}
    prompt: set[int] = set()
    columns: list[str] | None = None
    for line, row in enumerate(csv.reader(text), 1):
        try:
            if row and row[0].startswith("#"):
                pairs = dict(w.split("=", 1) for w in row[0].split() if "=" in w)
                told |= pairs
                if "layer" in pairs:
                    sizes[int(pairs["layer"])] = int(pairs["expert_bytes"])
            elif columns is None:
                columns = row
                if columns[: len(COLUMNS)] != COLUMNS:
                    raise BadInput(f"{where}:{line}: columns {','.join(row)[:80]}; "
                                   f"{','.join(COLUMNS)},.. expected")  # fmt: skip
            else:
                _, phase, step, layer, slot, expert = map(int, row[:6])
                chosen.setdefault((step, layer), {})[slot] = expert
                if phase == 0:
                    prompt.add(step)
        except (ValueError, KeyError):
            raise BadInput(f"{where}:{line}: {show(','.join(row), 60)} is no row of a route "
                           "trace") from None  # fmt: skip
    try:
        layers, experts, k = (int(told[f]) for f in ("n_layer", "n_expert", "n_expert_used"))
        expert_bytes = tuple(sizes[i] for i in range(layers))
    except (KeyError, ValueError):
        raise BadInput(f"{where}: no routing trace: n_layer, n_expert, n_expert_used and the bytes "
                       "of every layer are told at its beginning") from None  # fmt: skip
    steps = [s for s in sorted({s for s, _ in chosen})
             if all(len(chosen.get((s, i), ())) == k for i in range(layers))]
    if not steps:
        raise BadInput(f"{where}: no token of which all {layers} layers are there")
    topk = np.array([[[chosen[s, i][slot] for slot in range(k)] for i in range(layers)]
                     for s in steps], np.uint16)  # fmt: skip
    _check(topk, experts, where)
    one = Recorded(name, sum(s in prompt for s in steps), topk)
    return RoutingTrace(name, experts, k, tuple(range(layers)), expert_bytes, (one,))
