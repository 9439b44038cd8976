"""S15: what failed yields nothing: no routing, no token."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Record, Violation, parts_of

Key = tuple[int, int]


class _Spoilt:
    """Which requests have part in a failure, and why."""

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self.why: dict[int, str] = {}
        self.needs: dict[int, set[Key]] = {}
        self.fails: dict[int, dict[Key, int]] = {}
        self.key_of: dict[int, Key] = {}
        self.newest: dict[int, int] = {}
        """Slot -> the ticket of the newest Load into it."""
        self.failed: set[int] = set()
        """Tickets whose load was first told as failed."""
        self.told: set[int] = set()
        self.steps: dict[int, tuple[int, ...]] = {}

    def load(self, record: Record) -> None:
        self.key_of[record["ticket"]] = (record["key"][0], record["key"][1])
        self.newest[record["slot"]] = record["ticket"]

    def load_ended(self, ticket: int, well: bool) -> None:
        if ticket in self.told or ticket not in self.key_of:
            return
        self.told.add(ticket)
        key = self.key_of[ticket]
        if not well:
            self.failed.add(ticket)
        for request, needs in self.needs.items():
            if key not in needs:
                continue
            fails = self.fails[request]
            fails[key] = 0 if well else fails.get(key, 0) + 1
            if fails[key] > self.retries:
                self.why[request] = f"expert {key} could not be read for it"

    def compute(self, record: Record) -> None:
        slot_of = dict(record["slots"])
        self.steps[record["step"]] = tuple(dict.fromkeys(part[0] for part in parts_of(record)))
        for request, _, layer, experts, _ in parts_of(record):
            for expert in experts:
                self.needs.get(request, set()).discard((layer, expert))
                ticket = self.newest.get(slot_of.get(expert, -1), 0)
                if ticket in self.failed:
                    text = f"step {record['step']} read expert {expert} where load {ticket} failed"
                    self.why[request] = text

    def routed(self, record: Record) -> None:
        request, _, layer = record["visit"]
        self.needs[request] = {(layer, e) for row in record["experts"] for e in row}
        self.fails[request] = {}

    def step_failed(self, record: Record) -> None:
        inside = self.steps.get(record["step"], ())
        for request in record["requests"] or inside:
            self.why[request] = f"step {record['step']} failed for it"

    def ended(self, request: int) -> None:
        for book in (self.why, self.needs, self.fails):
            book.pop(request, None)


def check_s15(log: LogView) -> Iterator[Violation]:
    """SAFE-15: no Routed and no Sampled comes of a failed load or of a failed step."""
    spoilt = _Spoilt(log.head.retries)
    for line in log.lines:
        record, name = line.record, line.name
        if name == "Load":
            spoilt.load(record)
        elif name in ("Loaded", "LoadFailed"):
            spoilt.load_ended(record["ticket"], name == "Loaded")
        elif name == "Compute":
            spoilt.compute(record)
        elif name == "Failed":
            spoilt.step_failed(record)
        elif name in ("Routed", "Sampled"):
            request = record["visit"][0] if name == "Routed" else record["request"]
            if request in spoilt.why:
                text = f"{name} for request {request}, but {spoilt.why[request]}"
                yield Violation("S15", line.number, text)
            if name == "Routed":
                spoilt.routed(record)
        elif line.kind == "action" and name in ("Finish", "Reject"):
            spoilt.ended(record["request"])
