"""What an event log tells, as intervals: loads on their lanes, steps, and what requests did.

Times are seconds of the log's own clock. Nothing here judges: for that there is `covey check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reference.files.event_log import Log
from reference.files.log_head import MOST
from reference.vocab.ids import ENTRY


@dataclass(slots=True)
class Load:
    """One transfer. `lane`: the lowest that was free when it started. `wanted`: the running
    requests that waited for the expert then. `error` is "" where it ended well."""

    start: float
    end: float
    lane: int
    layer: int
    expert: int
    ticket: int
    slot: int
    nbytes: int
    guess: bool
    wanted: tuple[int, ...]
    error: str = ""


@dataclass(slots=True)
class Step:
    """One step. `rows`: token rows by request, in the order of the step's parts."""

    start: float
    end: float
    number: int
    layer: int
    experts: int
    rows: dict[int, int]
    error: str = ""


@dataclass(slots=True)
class State:
    """What a request did from `start` to `end`: queued, waiting (for experts or its turn) or
    computing, at a layer."""

    start: float
    end: float
    what: str
    layer: int


@dataclass(slots=True)
class Life:
    """One request. `tokens`: when each came; `reason`: how it ended, "" if it did not."""

    number: int
    id: str
    prompt: int
    start: float
    end: float
    states: list[State] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    reason: str = ""
    needs: dict[int, set[int]] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """All of a log. `start`, `end`: its first and last moment; `lanes`: loads at a time."""

    start: float = 0.0
    end: float = 0.0
    lanes: int = 0
    loads: list[Load] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)

    def cut(self, start: float, end: float) -> History:
        """What lies between two moments, clipped to them."""
        kept = History(start, end)
        for theirs, ours in ((self.loads, kept.loads), (self.steps, kept.steps)):
            ours += clipped(theirs, start, end)  # type: ignore[operator]
        kept.lanes = max((load.lane + 1 for load in kept.loads), default=0)
        for life in self.lives.values():
            if life.start <= end and life.end >= start:
                tokens = [t for t in life.tokens if start <= t <= end]
                states = clipped(life.states, start, end)
                kept.lives[life.number] = Life(
                    life.number, life.id, life.prompt, max(life.start, start),
                    min(life.end, end), states, tokens, life.reason)
        return kept

    def busy(self) -> tuple[float, float]:
        """Seconds with a load in flight, and with a step in flight."""
        return union([(x.start, x.end) for x in self.loads]), union(
            [(x.start, x.end) for x in self.steps])


def clipped(items: list[Any], start: float, end: float) -> list[Any]:
    """Copies of the items that touch [start, end], cut to it."""
    from dataclasses import replace

    return [replace(x, start=max(x.start, start), end=min(x.end, end))
            for x in items if x.end > start and x.start < end]


def union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def history_of(log: Log) -> History:
    """Reads a log once. What had not ended when it was cut off ends with its last record."""
    # Without `chunk` a prompt is one (LOG-8).
    reader = _Reader(int(log.head["options"].get("chunk", MOST)))
    for record in log.records:
        reader.see(record)
    reader.finish()
    return reader.history


class _Reader:
    def __init__(self, chunk: int) -> None:
        self.history = History()
        self.chunk = chunk
        self.now: float | None = None
        self.flying: dict[int, Load] = {}
        self.running: dict[int, Step] = {}

    def see(self, record: dict[str, Any]) -> None:
        if self.now is None:
            self.history.start = float(record["t"])
        self.now = self.history.end = float(record["t"])
        word = record.get("event") or record.get("action")
        method = getattr(self, f"_{word}".lower(), None) if word else None
        if method:
            method(record)

    def finish(self) -> None:
        """Close what is open."""
        end = self.history.end
        for item in (*self.flying.values(), *self.running.values()):
            item.end = end
        for life in self.history.lives.values():
            if not life.reason:
                life.end = end
                self._now_does(life, "", 0)

    def _now_does(self, life: Life, what: str, layer: int) -> None:
        """Ends the request's state and begins another; "" begins none."""
        assert self.now is not None
        if life.states:
            life.states[-1].end = self.now
        if what:
            life.states.append(State(self.now, self.now, what, layer))

    def _arrived(self, r: dict[str, Any]) -> None:
        n, t = r["request"], float(r["t"])
        life = Life(n, str(r.get("id", n)), r["prompt_len"], t, t)
        self.history.lives[n] = life
        self._now_does(life, "queued", ENTRY)

    def _admit(self, r: dict[str, Any]) -> None:
        if life := self.history.lives.get(r["request"]):
            self._now_does(life, "waiting", ENTRY)

    def _routed(self, r: dict[str, Any]) -> None:
        number, _, layer = r["visit"]
        if (life := self.history.lives.get(number)) and not life.reason:
            life.needs = {layer: {e for row in r["experts"] for e in row}}
            self._now_does(life, "waiting", layer)

    def _sampled(self, r: dict[str, Any]) -> None:
        if life := self.history.lives.get(r["request"]):
            if r["token"] is not None:
                life.tokens.append(float(r["t"]))
            if not life.reason:
                self._now_does(life, "waiting", ENTRY)

    def _load(self, r: dict[str, Any]) -> None:
        layer, expert = r["key"]
        taken = {load.lane for load in self.flying.values()}
        lane = next(i for i in range(len(taken) + 1) if i not in taken)
        wanted = tuple(n for n, life in self.history.lives.items()
                       if not life.reason and expert in life.needs.get(layer, ()))
        load = Load(float(r["t"]), float(r["t"]), lane, layer, expert, r["ticket"], r["slot"],
                    int(r.get("bytes", 0)), bool(r["guess"]), wanted)
        self.flying[r["ticket"]] = load
        self.history.loads.append(load)
        self.history.lanes = max(self.history.lanes, lane + 1)

    def _loaded(self, r: dict[str, Any]) -> None:
        if load := self.flying.pop(r["ticket"], None):
            load.end = float(r["t"])

    def _loadfailed(self, r: dict[str, Any]) -> None:
        if load := self.flying.get(r["ticket"]):
            load.end, load.error = float(r["t"]), r["error"]
            if r["drained"]:
                del self.flying[r["ticket"]]

    def _compute(self, r: dict[str, Any]) -> None:
        step = Step(float(r["t"]), float(r["t"]), r["step"], r["layer"], len(r["slots"]), {})
        for (number, chunk, layer), experts, _ in r["parts"]:
            if life := self.history.lives.get(number):
                rows = min(self.chunk, life.prompt - chunk * self.chunk)
                step.rows[number] = max(1, rows)
                if layer in life.needs:
                    life.needs[layer] -= set(experts)
                self._now_does(life, "computing", layer)
        self.running[step.number] = step
        self.history.steps.append(step)

    def _computed(self, r: dict[str, Any]) -> None:
        if step := self.running.pop(r["step"], None):
            step.end = float(r["t"])
            step.error = r.get("error", "")
            for number in step.rows:
                life = self.history.lives[number]
                if not life.reason:
                    self._now_does(life, "waiting", step.layer)

    _failed = _computed

    def _finish(self, r: dict[str, Any]) -> None:
        if life := self.history.lives.get(r["request"]):
            life.end, life.reason = float(r["t"]), r["reason"]
            self._now_does(life, "", 0)

    def _reject(self, r: dict[str, Any]) -> None:
        self._finish({**r, "reason": "rejected"})
