"""L6 and L7: after the last fault the rest takes bounded work; what is shut down ends in time."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Violation

FAULTS = ("LoadFailed", "Failed", "Cancelled", "Drain")


def check_l6(log: LogView) -> Iterator[Violation]:
    """LIVE-6: without a fault since it began, no load is lost: a step uses what it brings.

    A step always does something that was still to be done (S10). So with this the steps and loads
    after the last fault are at most the visits, and the experts of visits, that are left.
    """
    unused: dict[int, tuple[int, list[int]]] = {}
    for line in log.lines:
        record = line.record
        if line.name in FAULTS:
            unused.clear()
        elif line.name == "Load":
            slot = record["slot"]
            if slot in unused:
                ticket, key = unused[slot]
                text = f"Load into slot {slot}: what load {ticket} brought there, expert {key}, "
                yield Violation("L6", line.number, text + "was used by no step")
            unused.pop(slot, None)
            if not record.get("guess"):
                unused[slot] = record["ticket"], record["key"]
        elif line.name == "Compute":
            for _, slot in record["slots"]:
                unused.pop(slot, None)
    if log.complete:
        for ticket, key in unused.values():
            text = f"load {ticket} brought expert {key}, which no step has used"
            yield Violation("L6", log.last, text)


def check_l7(log: LogView) -> Iterator[Violation]:
    """LIVE-7: after Drain nobody waits in the queue; where a cancel has a date, all ends by then.

    `by` is optional on Cancelled and in the end: the time in seconds of `t` at which the engine,
    which is being closed, must have come to its end.
    """
    queued: set[int] = set()
    draining = asked = False
    due: float | None = None
    for line in log.lines:
        record = line.record
        if asked and line.kind != "action":
            asked = False
            if draining and queued:
                text = f"requests {sorted(queued)} are queued after Drain and an ask"
                yield Violation("L7", line.number, text)
                queued.clear()
        if line.kind == "ask":
            asked = True
        elif line.name == "Drain":
            draining = True
        elif line.name == "Arrived":
            queued.add(record["request"])
        elif line.name == "Cancelled":
            queued.discard(record["request"])  # to end it is for L3
            if record.get("by") is not None:
                due = record["by"] if due is None else min(due, record["by"])
        elif line.kind == "action" and line.name in ("Admit", "Finish", "Reject"):
            queued.discard(record["request"])
        elif line.kind == "end":
            dates = [d for d in (due, record["end"].get("by")) if d is not None]
            if dates and record["t"] > min(dates):
                text = f"the end comes at {record['t']:g} s; the engine was to be closed by "
                yield Violation("L7", line.number, f"{text}{min(dates):g} s")
