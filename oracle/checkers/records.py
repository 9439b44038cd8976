"""Reading an event log for judging: the head, and every line as (number, kind, name, record).

Nothing here trusts the log. A line that does not have the form of specs/log.md is reported under
the property `LOG`, and then no other checker runs, since its verdict would mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reference.files.log_extras import extras_fault

ENTRY = -1
Record = Mapping[str, Any]


class Violation(NamedTuple):
    """`property` was broken at file line `line` (1 = the head); `text` says what was found."""

    property: str
    line: int
    text: str


class Line(NamedTuple):
    """One record: file line, `event` | `action` | `ask` | `end`, its name, its fields."""

    number: int
    kind: str
    name: str
    record: Record


@dataclass(frozen=True)
class Head:
    """What the judge needs of the head: the options as written, never control's own reading.

    layers, experts, top_k, slots, chunk, max_running, max_rows, kv_tokens, kv_block, retries:
    as in ControlOptions (specs/log.md). budget and slot_bytes: bytes, or None where not written.
    What a scheduler of another kind leaves out (LOG-8) is no bound: grouping and readiness are
    then "", bounds are UNBOUNDED, a prompt is one chunk, and KV blocks are single tokens.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    slots: int
    chunk: int
    grouping: str
    readiness: str
    bulk_slots: int
    max_lag: int
    max_running: int
    max_rows: int
    kv_tokens: int
    kv_block: int
    retries: int
    budget: int | None
    slot_bytes: int | None
    host_budget: int = 0
    """Bytes of the host tier; 0 where there is none."""
    host_slots: int | None = None
    """Entries of the host tier; None where it is not written, or there is none."""
    expert_bytes: int | None = None
    """Bytes of the largest expert; None where they are not written."""
    layer_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of every expert of a layer, where the head tells them."""
    channels: int | None = None
    """Loads that can be in flight together; None where it is not written."""
    lanes: int = 1
    """Steps that can run together."""
    absent: frozenset[str] = frozenset()
    """The options that a scheduler of another kind has left out."""

    def prompt_chunks(self, prompt_len: int) -> int:
        """Chunks of a prompt of `prompt_len` tokens (at least one)."""
        return max(1, -(-prompt_len // self.chunk))

    def rows(self, chunk: int, prompt_len: int) -> int:
        """Token rows of a request's chunk number `chunk`."""
        if chunk >= self.prompt_chunks(prompt_len):
            return 1
        return min((chunk + 1) * self.chunk, prompt_len) - chunk * self.chunk

    def reserved(self, prompt_len: int, max_new_tokens: int) -> int:
        """KV tokens that a running request holds: prompt + new, in whole blocks (ADMIT-2)."""
        return -(-(prompt_len + max_new_tokens) // self.kv_block) * self.kv_block


@dataclass
class LogView:
    """A head and its lines. `complete` asks for the properties of a finished log as well."""

    head: Head
    lines: list[Line]
    complete: bool
    malformed: list[Violation] = field(default_factory=list)
    raw: Record = field(default_factory=dict)
    """The head as it was written."""

    @property
    def last(self) -> int:
        """The file line of the last record."""
        return self.lines[-1].number if self.lines else 1


UNBOUNDED = 1 << 62
_ABSENT = {"chunk": UNBOUNDED, "max_running": UNBOUNDED, "max_rows": UNBOUNDED, "kv_block": 1,
           "kv_tokens": UNBOUNDED, "retries": UNBOUNDED, "bulk_slots": 0, "max_lag": 0}
_OPTION_INTS = (
    "experts top_k slots chunk bulk_slots max_lag max_running max_rows kv_tokens kv_block retries"
).split()


def read_head(record: Record) -> Head:
    """The judge's view of a log's first record. Raises ValueError for an unusable head.

    A head with options.scheduler is of a scheduler of another kind, and may leave out what it does
    not promise (LOG-8).
    """
    if record.get("log") != 1 or not isinstance(record.get("options"), Mapping):
        raise ValueError("the first record is not the head of a version 1 log")
    options = dict(record["options"])
    ints: dict[str, int] = {}
    missing: set[str] = set()
    if "scheduler" in options:
        missing = {*_ABSENT, "grouping", "readiness"} - options.keys()
        options = {**_ABSENT, "grouping": "", "readiness": "", **options}
    for name in _OPTION_INTS:
        value: Any = options.get(name)
        if not _is_int(value) or value < 0:
            raise ValueError(f"options.{name} is {value!r}, not a count")
        ints[name] = value
    if ints["chunk"] < 1 or ints["kv_block"] < 1:
        raise ValueError("options.chunk and options.kv_block must be positive")
    layers = options.get("layers")
    if not isinstance(layers, Sequence) or not all(_is_int(x) and x >= 0 for x in layers):
        raise ValueError(f"options.layers is {layers!r}, not a list of layers")
    if list(layers) != sorted(set(layers)):
        raise ValueError("options.layers is not ascending")
    return Head(
        layers=tuple(layers),
        grouping=str(options.get("grouping")),
        readiness=str(options.get("readiness")),
        budget=_count(record, "budget_bytes"),
        slot_bytes=_count(record, "slot_bytes"),
        host_budget=_count(record, "host_budget_bytes") or 0,
        host_slots=_count(record, "host_slots") or None,
        expert_bytes=_count(record, "expert_bytes"),
        layer_bytes=_layer_bytes(record, layers),
        channels=_count(record, "channels"),
        lanes=1 if record.get("lanes") is None else _count(record, "lanes") or 0,
        absent=frozenset(missing),
        **ints,
    )


def _count(record: Record, name: str) -> int | None:
    """A count in the head; None where it is not written. A written 0 is a bound."""
    value = record.get(name)
    if value is not None and (not _is_int(value) or value < 0):
        raise ValueError(f"{name} is {value!r}, not a count")
    return value


def _layer_bytes(record: Record, layers: Sequence[int]) -> dict[int, int]:
    """The head's model.layer_bytes by layer: for each of options.layers the bytes of its experts,
    or null where these are not of one size."""
    model = record.get("model")
    told = model.get("layer_bytes") if isinstance(model, Mapping) else None
    if told is None:
        return {}
    good = isinstance(told, (list, tuple)) and len(told) == len(layers)
    if not good or not all(b is None or (_is_int(b) and b > 0) for b in told):
        raise ValueError(f"model.layer_bytes is {told!r}, not the bytes of an expert of each layer")
    return {layer: b for layer, b in zip(layers, told, strict=True) if b is not None}


def view(log: Any, complete: bool) -> LogView:
    """Accept a `Log` (head, records) or the plain list of records, head first.

    Raises ValueError when there is no usable head.
    """
    if hasattr(log, "head") and hasattr(log, "records"):
        head, records = log.head, list(log.records)
        if records and "log" in records[0]:
            records = records[1:]
    else:
        everything = list(log)
        if not everything:
            raise ValueError("an empty log")
        head, records = everything[0], everything[1:]
    out = LogView(read_head(head), [], complete, raw=head)
    for number, record in enumerate(records, start=2):
        fault = _classify(out, number, record)
        if fault:
            out.malformed.append(Violation("LOG", number, fault))
    ends = [line.number for line in out.lines if line.kind == "end"]
    if ends and ends[0] != out.last:
        out.malformed.append(Violation("LOG", ends[0], "the end record is not the last one"))
    first = next((line for line in out.lines if line.name in ("Load", "Compute")), None)
    if first and not any(line.kind == "ask" for line in out.lines):
        text = f"{first.name}, and no ask: a line ask [idle channels, idle compute lanes] is needed"
        out.malformed.append(Violation("LOG", first.number, f"{text} before what is decided"))
    if complete and not ends and not out.malformed:
        out.malformed.append(Violation("LOG", out.last, "no end record: the log is incomplete"))
    return out


def parts_of(record: Record) -> Iterator[tuple[int, int, int, tuple[int, ...], bool]]:
    """(request, chunk, layer, experts, last) of each part of a Compute record."""
    for (request, chunk, layer), experts, last in record["parts"]:
        yield request, chunk, layer, tuple(experts), bool(last)


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _pair(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == 2 and all(_is_int(v) for v in x)


def _visit(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == 3 and all(_is_int(v) for v in x)


def _ints(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(_is_int(v) for v in x)


def _rows(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(_ints(row) for row in x)


def _parts(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(
        isinstance(p, (list, tuple))
        and len(p) == 3
        and _visit(p[0])
        and _ints(p[1])
        and isinstance(p[2], (bool, int))
        for p in x
    )


def _pairs(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(_pair(p) for p in x)


def _scores(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(
        isinstance(p, (list, tuple)) and len(p) == 2 and _is_int(p[0]) for p in x
    )


def _flag(x: Any) -> bool:
    return isinstance(x, bool)


def _text(x: Any) -> bool:
    return isinstance(x, str)


def _token(x: Any) -> bool:
    return x is None or _is_int(x)


_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("event", "Arrived"): {"request": _is_int, "prompt_len": _is_int, "max_new_tokens": _is_int},
    ("event", "Routed"): {"visit": _visit, "experts": _rows},
    ("event", "Predicted"): {"visit": _visit, "scores": _scores},
    ("event", "Loaded"): {"ticket": _is_int},
    ("event", "LoadFailed"): {"ticket": _is_int, "drained": _flag},
    ("event", "Computed"): {"step": _is_int},
    ("event", "Sampled"): {"request": _is_int, "token": _token, "stop": _flag},
    ("event", "Failed"): {"step": _is_int, "requests": _ints},
    ("event", "Cancelled"): {"request": _is_int},
    ("event", "Drain"): {},
    ("action", "Admit"): {"request": _is_int},
    ("action", "Load"): {"ticket": _is_int, "key": _pair, "slot": _is_int},
    ("action", "Compute"): {"step": _is_int, "layer": _is_int, "parts": _parts, "slots": _pairs},
    ("action", "Finish"): {"request": _is_int, "reason": _text},
    ("action", "Reject"): {"request": _is_int},
}


def _classify(out: LogView, number: int, record: Any) -> str:
    """Append the line, or say why it is not one."""
    if not isinstance(record, Mapping):
        return "not an object"
    kinds = [kind for kind in ("event", "action", "ask", "end") if kind in record]
    if len(kinds) != 1:
        return f"neither event, action, ask nor end: {sorted(record)}"
    kind = kinds[0]
    if kind == "end" and not isinstance(record["end"], Mapping):
        return f"end is {record['end']!r}, not an object"
    if fault := extras_fault(record):
        return fault
    if kind == "ask":
        if not _pair(record["ask"]) or min(record["ask"]) < 0:
            return f"ask is {record['ask']!r}, not [idle_channels, idle_compute]"
        out.lines.append(Line(number, kind, "", record))
        return ""
    if kind == "end":
        out.lines.append(Line(number, kind, "", record))
        return ""
    name = str(record[kind])
    form = _FORMS.get((kind, name))
    if form is None:
        return f"unknown {kind} {name!r}"
    for key, accepts in form.items():
        if key not in record or not accepts(record[key]):
            return f"{name}.{key} is {record.get(key)!r}"
    out.lines.append(Line(number, kind, name, record))
    return ""
