"""L3: after every ask, whatever can be done is being done (work conservation)."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import ENTRY, Head, Line, LogView, Violation, parts_of

Key = tuple[int, int]


class _Request:
    """What a request could do next. stage: queued | ready | step | owed | ended."""

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
        """Given up: by the caller, or because an expert cannot be read."""
        self.fails: dict[Key, int] = {}
        """How often the load of an expert failed in a row while this request needed it."""
        self.perhaps_lost = False
        """An expert that it needs has failed too often, if the row began before it came: then it
        may be about to end when its step does, and need not be served."""
        self.made = 0
        """Visits of one row that it has ended: its progress is never further ahead than that."""


class Board:
    """Where every request, load and step stands, moved by every line."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.requests: dict[int, _Request] = {}
        """Who arrived and is not over."""
        self.steps: dict[int, Line] = {}
        self.key_of: dict[int, Key] = {}
        self.slot_of: dict[int, int] = {}
        self.loading: set[int] = set()
        self.undrained: set[int] = set()
        self.resident: dict[Key, int] = {}
        self.draining = False
        self.rows: dict[Key, int] = {}
        """How often the load of an expert failed since it last succeeded, whoever needed it."""

    @property
    def lag_bound(self) -> int:
        """max_lag, or four tokens' worth of visits."""
        return self.head.max_lag or 4 * (len(self.head.layers) + 1)

    def bulk(self, r: _Request) -> bool:
        """Its chunk has several rows."""
        return self.head.rows(r.chunk, r.prompt_len) > 1

    def running(self) -> list[_Request]:
        """Admitted and not over."""
        return [r for r in self.requests.values() if r.stage != "queued"]

    def waiting(self) -> list[int]:
        """Numbers of all requests."""
        return list(self.requests)

    def moving(self) -> bool:
        """Something is in flight: a load, a write that was given up, a step or an owed result."""
        owed = any(r.stage == "owed" for r in self.requests.values())
        return bool(self.loading or self.undrained or self.steps or owed)

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
            request.stage, request.fails, request.perhaps_lost = "ready", {}, False

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
            for request in self.running():
                request.fails.pop(self.key_of[ticket], None)
            self.rows.pop(self.key_of[ticket], None)
        self.loading.discard(ticket)
        self.undrained.discard(ticket)

    def _event_LoadFailed(self, record, line) -> None:
        ticket = record["ticket"]
        if ticket in self.loading:
            self._lose(self.key_of[ticket])
        self.loading.discard(ticket)
        if ticket in self.key_of:
            (self.undrained.discard if record["drained"] else self.undrained.add)(ticket)

    def _lose(self, key: Key) -> None:
        self.rows[key] = self.rows.get(key, 0) + 1
        for request in self.running():
            if key in request.needs:
                request.fails[key] = request.fails.get(key, 0) + 1
                if request.fails[key] > self.head.retries:
                    request.cancelled = True
                request.perhaps_lost |= self.rows[key] > self.head.retries

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
                request.made += not self.bulk(request)
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
        self.requests.pop(record["request"], None)

    _action_Reject = _action_Finish


def check_l3(log: LogView) -> Iterator[Violation]:
    """LIVE-3: the rules (a) to (e) of specs/properties.md, judged where an ask's actions end."""
    board = Board(log.head)
    ask: Line | None = None
    issued: list[str] = []
    for line in log.lines:
        if line.kind == "action":
            issued.append("Guess" if line.record.get("guess") else line.name)
            board.see(line)
            continue
        if ask:
            channels, lanes = ask.record["ask"]
            for text in _left_undone(board, channels, lanes, issued):
                yield Violation("L3", ask.number, text)
        ask, issued = (line, []) if line.kind == "ask" else (None, [])
        board.see(line)
    # Actions may be missing after the last ask of a log that was cut off: no verdict there.


def _left_undone(board: Board, channels: int, lanes: int, issued: list[str]) -> Iterator[str]:
    if channels and lanes and (waiting := board.waiting()) and not board.moving():
        yield f"(a) nothing is in flight while requests {waiting} wait"
    if lanes and "Compute" not in issued and not board.steps:
        runnable = [n for n, r in board.requests.items() if _runnable(board, r)]
        if runnable:
            yield f"(b) no step was started, requests {runnable} can run"
    if channels > issued.count("Load"):
        loadable = sorted({k for r in board.requests.values() for k in _loadable(board, r)})
        if loadable:
            yield f"(c) a channel is idle, experts {loadable} are missing and there is room"
    late = _admissible(board)
    if late is not None:
        yield f"(d) request {late} fits and was not admitted"
    for number, request in board.requests.items():
        given_up = request.cancelled and request.stage in ("queued", "ready")
        if request.stage == "ended" or given_up:
            yield f"(e) request {number} is at its end and was not finished"


def _free_to_go(board: Board, r: _Request) -> bool:
    """Neither the lag bound nor a barrier can be what holds this request."""
    if board.head.grouping in ("interleaved", "micro-queues"):
        return r.made < board.lag_bound
    if board.head.grouping == "balanced":
        return True
    return len({x.layer for x in board.running()}) == 1 and not any(
        x.stage in ("owed", "ended") for x in board.running()
    )


def _given_up(r: _Request) -> bool:
    """Nobody needs to serve it."""
    return r.cancelled or r.perhaps_lost


def has_room(board: Board) -> bool:
    """All experts that anybody needs, reads or is being brought fit into the slots together."""
    keys = {k for r in board.running() for k in r.needs}
    keys |= {board.key_of[t] for t in board.loading}
    for line in board.steps.values():
        keys |= {(line.record["layer"], expert) for expert, _ in line.record["slots"]}
    return len(keys) + len(board.undrained) <= board.head.slots


def _all_whole(board: Board) -> bool:
    """Whoever waits for whom, somebody can go on: all wait, and all that they lack is there."""
    return all(r.stage == "ready" and r.needs <= board.resident.keys() for r in board.running())


def _runnable(board: Board, r: _Request) -> bool:
    head = board.head
    if r.stage != "ready" or _given_up(r) or not _free_to_go(board, r):
        return False
    if head.grouping == "lockstep-blocking" and board.loading:
        return False
    here = r.needs & board.resident.keys()
    if not r.needs:
        return head.grouping in ("interleaved", "micro-queues") or _all_whole(board)
    by_task = (head.grouping, head.readiness) != ("interleaved", "visit") or board.bulk(r)
    if by_task:
        return bool(here)
    return here == r.needs and has_room(board)


def _loadable(board: Board, r: _Request) -> set[Key]:
    head = board.head
    if r.stage not in ("ready", "step") or _given_up(r) or not _free_to_go(board, r):
        return set()
    if head.grouping == "lockstep-blocking" and board.steps:
        return set()
    there = board.resident.keys() | {board.key_of[t] for t in board.loading}
    if head.grouping == "balanced":  # the least advanced, whoever that is
        if not all(x.stage in ("ready", "step") and x.needs - there for x in board.running()):
            return set()
    elif board.bulk(r) and any(not board.bulk(x) for x in board.running()):
        return set()
    lacking = r.needs - there
    return lacking if lacking and has_room(board) else set()


def _admissible(board: Board) -> int | None:
    """The first in the queue, when it fits (ADMIT-2)."""
    head, running = board.head, board.running()
    queued = [(n, r) for n, r in board.requests.items() if r.stage == "queued"]
    if not queued or board.draining or len(running) >= head.max_running:
        return None
    number, first = queued[0]
    held = sum(head.reserved(r.prompt_len, r.max_new) for r in running)
    fits = held + head.reserved(first.prompt_len, first.max_new) <= head.kv_tokens
    return number if fits and not first.cancelled else None
