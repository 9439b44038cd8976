"""L3: after every ask, whatever can be done is being done (work conservation)."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import ENTRY, Head, Line, LogView, Violation, parts_of

Key = tuple[int, int]


class _Request:
    """What a request could do next. stage: queued | ready | step | owed | ended | over."""

    def __init__(self, prompt_len: int, max_new: int) -> None:
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.stage = "queued"
        self.layer = ENTRY
        self.last = False
        self.needs: set[Key] = set()
        self.tokens = 0
        self.chunk = 0
        self.cancelled = False


class _Board:
    """The state that an ask is judged on, moved by every line."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.requests: dict[int, _Request] = {}
        self.steps: dict[int, Line] = {}
        self.key_of: dict[int, Key] = {}
        self.slot_of: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.loading: set[int] = set()
        self.undrained: set[int] = set()
        self.resident: dict[Key, int] = {}
        self.draining = False

    def running(self) -> list[_Request]:
        """Admitted and not over."""
        return [r for r in self.requests.values() if r.stage not in ("queued", "over")]

    def see(self, line: Line) -> None:
        """Take in one event or action."""
        record = line.record
        mover = getattr(self, f"_{line.kind}_{line.name}", None)
        if mover:
            mover(record, line)

    def _event_Arrived(self, record, line) -> None:
        new = _Request(record["prompt_len"], record["max_new_tokens"])
        self.requests.setdefault(record["request"], new)

    def _event_Cancelled(self, record, line) -> None:
        request = self.requests.get(record["request"])
        if request:
            request.cancelled = True

    def _event_Drain(self, record, line) -> None:
        self.draining = True

    def _event_Routed(self, record, line) -> None:
        request = self.requests.get(record["visit"][0])
        if request and request.stage == "owed":
            request.layer = record["visit"][2]
            request.needs = {(request.layer, e) for row in record["experts"] for e in row}
            request.stage = "ready"

    def _event_Sampled(self, record, line) -> None:
        request = self.requests.get(record["request"])
        if request and request.stage == "owed":
            request.tokens += 1
            over = record["stop"] or request.tokens >= request.max_new
            self._open(request, "ended" if over else "ready")

    def _open(self, request: _Request, stage: str) -> None:
        request.chunk += 1
        request.layer, request.stage, request.needs = ENTRY, stage, set()

    def _event_Loaded(self, record, line) -> None:
        ticket = record["ticket"]
        if ticket in self.loading:
            self.resident[self.key_of[ticket]] = self.slot_of[ticket]
        self.loading.discard(ticket)
        self.undrained.discard(ticket)

    def _event_LoadFailed(self, record, line) -> None:
        self.loading.discard(record["ticket"])
        (self.undrained.discard if record["drained"] else self.undrained.add)(record["ticket"])

    def _event_Computed(self, record, line) -> None:
        self._over(record["step"], set())

    def _event_Failed(self, record, line) -> None:
        step = self.steps.get(record["step"])
        inside = {part[0] for part in parts_of(step.record)} if step else set()
        self._over(record["step"], set(record["requests"]) or inside)

    def _over(self, step: int, blamed: set[int]) -> None:
        line = self.steps.pop(step, None)
        for number, *_ in parts_of(line.record) if line else ():
            request = self.requests.get(number)
            if request is None or request.stage != "step":
                continue
            if number in blamed:
                request.stage = "ended"
            elif not request.last:
                request.stage = "ready"
            else:
                later = any(layer > request.layer for layer in self.head.layers)
                final = request.chunk >= self.head.prompt_chunks(request.prompt_len) - 1
                if later or final:
                    request.stage = "owed"
                else:
                    self._open(request, "ready")

    def _action_Admit(self, record, line) -> None:
        request = self.requests.get(record["request"])
        if request:
            request.stage = "ready"

    def _action_Load(self, record, line) -> None:
        slot, ticket = record["slot"], record["ticket"]
        self.resident = {k: s for k, s in self.resident.items() if s != slot}
        self.key_of[ticket], self.slot_of[ticket] = tuple(record["key"]), slot
        self.loading.add(ticket)

    def _action_Compute(self, record, line) -> None:
        self.steps[record["step"]] = line
        for number, _, layer, experts, last in parts_of(record):
            request = self.requests.get(number)
            if request:
                request.stage, request.last = "step", last
                request.needs -= {(layer, e) for e in experts}

    def _action_Finish(self, record, line) -> None:
        request = self.requests.get(record["request"])
        if request:
            request.stage = "over"

    _action_Reject = _action_Finish


def check_l3(log: LogView) -> Iterator[Violation]:
    """L3, the rules (a), (b), (c) of specs/properties.md, judged where an ask's actions end."""
    board = _Board(log.head)
    ask: Line | None = None
    issued: list[Line] = []
    for line in log.lines:
        if line.kind == "action":
            issued.append(line)
            board.see(line)
            continue
        if ask:
            for text in _left_undone(board, ask, issued):
                yield Violation("L3", ask.number, text)
        ask, issued = (line, []) if line.kind == "ask" else (None, [])
        board.see(line)
    # Actions may be missing after the last ask of a log that was cut off: no verdict there.


def _left_undone(board: _Board, ask: Line, issued: list[Line]) -> Iterator[str]:
    channels, lanes = ask.record["ask"]
    for number, request in board.requests.items():
        given_up = request.cancelled and request.stage in ("queued", "ready")
        if request.stage == "ended" or given_up:
            yield f"request {number} is at its end and was not finished"
    waiting = [n for n, r in board.requests.items() if r.stage != "over"]
    owed = any(r.stage == "owed" for r in board.requests.values())
    moving = board.loading or board.undrained or board.steps or owed
    if waiting and not moving and channels and lanes:
        yield f"nothing is in flight while requests {waiting} wait"
    can_run = [
        n
        for n, r in board.requests.items()
        if r.stage == "ready" and r.needs <= board.resident.keys()
    ]
    stuck = lanes and not board.steps and not board.loading and not owed
    if can_run and stuck:
        yield f"no step runs and no load is under way while requests {can_run} are ready"
