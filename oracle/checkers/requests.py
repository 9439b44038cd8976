"""S1 and S2: no request is lost or invented, and each lives one legal life."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Record, Violation, parts_of

Key = tuple[int, int]

_QUEUED, _RUNNING, _OVER = "queued", "running", "over"


def check_s1(log: LogView) -> Iterator[Violation]:
    """SAFE-1: arrived = queued + running + ended, at every line; nothing but ended at the end."""
    arrived: set[int] = set()
    ended: set[int] = set()

    for line in log.lines:
        record = line.record
        if line.name == "Arrived":
            request = record["request"]
            if request in arrived:
                yield Violation("S1", line.number, f"request {request} arrives a second time")
            arrived.add(request)
        elif line.kind == "action" and line.name in ("Admit", "Finish", "Reject"):
            request = record["request"]
            if request not in arrived:
                yield Violation("S1", line.number, f"{line.name} of request {request}, unknown")
            elif line.name != "Admit":
                ended.add(request)
        elif line.name == "Compute":
            for request, *_ in parts_of(record):
                if request not in arrived:
                    yield Violation("S1", line.number, f"Compute of request {request}, unknown")
        elif line.kind == "end":
            totals = record["end"]
            said = totals.get("requests") if isinstance(totals, dict) else None
            if isinstance(said, int) and said != len(arrived):
                text = f"the totals count {said} requests, {len(arrived)} arrived"
                yield Violation("S1", line.number, text)
    if log.complete:
        for request in sorted(arrived - ended):
            yield Violation("S1", log.last, f"request {request} arrived and never ended")


def check_s2(log: LogView) -> Iterator[Violation]:
    """SAFE-2: Arrived, then Reject | Finish | Admit .. Finish; nothing after; reasons are true."""
    lives: dict[int, _Life] = {}
    steps: dict[int, tuple[int, ...]] = {}
    # Who does not say how often it tries again may give up after any failure (LOG-8).
    reads = _Reads(0 if "retries" in log.head.absent else log.head.retries)
    draining = False

    for line in log.lines:
        record, name, at = line.record, line.name, line.number
        if name == "Arrived":
            life = _Life(record["prompt_len"], record["max_new_tokens"])
            lives.setdefault(record["request"], life)
        elif name == "Cancelled":
            life = lives.get(record["request"])
            if life:
                life.cancelled = True
        elif name == "Drain":
            draining = True
        elif name in ("Load", "Loaded", "LoadFailed"):
            reads.see(name, record)
        elif name == "Compute":
            steps[record["step"]] = tuple(dict.fromkeys(part[0] for part in parts_of(record)))
            for request in steps[record["step"]]:
                life = lives.get(request)
                if life and life.state != _RUNNING:
                    text = f"Compute of request {request}, which is {life.state}"
                    yield Violation("S2", at, text)
                elif life and life.cancelled:
                    yield Violation("S2", at, f"Compute of request {request}, cancelled before")
                elif life and life.failed:
                    yield Violation("S2", at, f"Compute of request {request}, whose step failed")
                elif life and life.ending:
                    yield Violation("S2", at, f"Compute of request {request} after its last token")
                if life:
                    life.in_step = True
        elif name in ("Computed", "Failed"):
            inside = steps.pop(record["step"], ())
            blamed = set(record["requests"] or inside) if name == "Failed" else set()
            for request in inside:
                life = lives.get(request)
                if life:
                    life.in_step = False
                    life.failed |= request in blamed
                    life.late = life.state == _OVER and request not in blamed
        elif name in ("Routed", "Sampled"):
            request = record["visit"][0] if name == "Routed" else record["request"]
            life = lives.get(request)
            if life is None:
                yield Violation("S2", at, f"{name} for request {request}, unknown")
            elif life.state == _OVER and not life.late:
                yield Violation("S2", at, f"{name} for request {request} after its end")
            elif life.state == _QUEUED:
                yield Violation("S2", at, f"{name} for request {request}, which is queued")
            else:
                if name == "Sampled" and life.state == _RUNNING:
                    life.sample(record["stop"])
                if name == "Routed":
                    layer = record["visit"][2]
                    life.needs = {(layer, e) for row in record["experts"] for e in row}
                life.late = False
        elif line.kind == "action" and name in ("Admit", "Finish", "Reject"):
            request = record["request"]
            life = lives.get(request)
            if life is None:
                continue
            lost = bool(life.needs & reads.lost)
            fault = life.act(name, record.get("reason"), lost, draining)
            sized = "kv_tokens" not in log.head.absent
            if name == "Reject" and not fault and not draining and sized:
                size = log.head.reserved(life.prompt_len, life.max_new)
                fault = "" if size > log.head.kv_tokens else "it fits"
            if name == "Admit" and not fault and log.head.grouping:
                earlier = [
                    n
                    for n, x in lives.items()
                    if x.state == _QUEUED and not x.cancelled and n < request
                ]
                fault = f"{earlier} came before and are queued" if earlier else ""
            if life.in_step and not fault:
                fault = "its step still runs"
            if fault:
                yield Violation("S2", at, f"{name} of request {request}: {fault}")


class _Reads:
    """Experts whose load has failed more often in a row than it may be tried again (FETCH-6)."""

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self.key_of: dict[int, Key] = {}
        self.fails: dict[Key, int] = {}
        self.told: set[int] = set()
        self.lost: set[Key] = set()

    def see(self, name: str, record: Record) -> None:
        ticket = record["ticket"]
        if name == "Load":
            self.key_of[ticket] = (record["key"][0], record["key"][1])
            return
        key = self.key_of.get(ticket, (-1, -1))
        if ticket in self.told:
            return  # the late completion of a transfer that was given up
        self.told.add(ticket)
        self.fails[key] = 0 if name == "Loaded" else self.fails.get(key, 0) + 1
        (self.lost.add if self.fails[key] > self.retries else self.lost.discard)(key)


class _Life:
    """One request's state, and what entitles it to each reason of ending."""

    def __init__(self, prompt_len: int, max_new: int) -> None:
        self.state = _QUEUED
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.sampled = 0
        self.stopped = False
        self.cancelled = False
        self.failed = False
        self.in_step = False
        self.needs: set[Key] = set()
        self.late = False
        """Over while its step still ran: that step may report one result more."""

    @property
    def ending(self) -> bool:
        """It has all its tokens: only a Finish may follow."""
        return self.stopped or (self.max_new > 0 and self.sampled >= self.max_new)

    def sample(self, stop: bool) -> None:
        self.sampled += 1
        self.stopped |= stop

    def act(self, name: str, reason: object, lost: bool, draining: bool) -> str:
        """Make the transition; return what is wrong with it, or an empty text."""
        before, fault = self.state, ""
        if before == _OVER:
            return "it has ended before"
        if name == "Admit":
            self.state = _RUNNING
            if before == _RUNNING:
                fault = "it runs already"
            elif self.cancelled:
                fault = "it was cancelled"
            elif draining:
                fault = "no request starts after Drain"
            return fault
        self.state = _OVER
        if name == "Reject":
            return "" if before == _QUEUED else "it was admitted before"
        entitled = {
            "stop": self.stopped,
            "length": self.ending and not (self.stopped and self.sampled < self.max_new),
            "cancelled": self.cancelled,
            "error": self.failed or lost,
            "drained": draining and before == _QUEUED,
        }
        if reason not in entitled:
            return f"reason {reason!r} is none of {sorted(entitled)}"
        if not entitled[str(reason)]:
            return f"reason {reason!r} without its cause"
        if self.ending and reason in ("error", "drained"):
            return f"reason {reason!r} after its last token"
        return ""
