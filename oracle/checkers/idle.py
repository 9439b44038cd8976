"""S11 for what an ask says is idle: the log's own loads and steps must leave exactly that idle."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Violation


def check_idle(log: LogView) -> Iterator[Violation]:
    """SAFE-11: idle and busy channels are always as many, and lanes without a step are idle.

    A channel is busy from its Load until the load is first told to have ended. While a transfer
    that was given up may still write, its channel may be in use or have been replaced: both are
    right. Where there is a host tier, no more loads can begin than entries are not pinned. How
    many channels there are says the head, else the first ask. A last ask that nothing follows
    stands for no decision.
    """
    total, entries = log.head.channels, log.head.host_slots
    flying: set[int] = set()
    late: set[int] = set()
    entry_of: dict[int, int] = {}
    steps: set[int] = set()

    for line in log.lines:
        record = line.record
        if line.name == "Load":
            flying.add(record["ticket"])
            if "entry" in record:
                entry_of[record["ticket"]] = record["entry"]
        elif line.name in ("Loaded", "LoadFailed"):
            ticket = record["ticket"]
            if line.name == "LoadFailed" and not record["drained"] and ticket in flying:
                late.add(ticket)
            else:
                late.discard(ticket)
                entry_of.pop(ticket, None)
            flying.discard(ticket)
        elif line.name == "Compute":
            steps.add(record["step"])
        elif line.name in ("Computed", "Failed"):
            steps.discard(record["step"])
        elif line.kind == "ask" and line.number != log.last:
            channels, lanes = record["ask"]
            if total is None:
                total = channels + len(flying)
            most = total - len(flying)
            least = most - len(late)
            if entries is not None:
                free = entries - len(set(entry_of.values()))
                most, least = min(most, free), min(least, free)
            if not max(0, least) <= channels <= max(0, most):
                text = f"{channels} of {total} channels are said to be idle while {len(flying)} "
                text += f"loads are in flight and {len(late)} may still write"
                yield Violation("S11", line.number, text)
            if lanes != max(0, log.head.lanes - len(steps)):
                text = f"{lanes} compute lanes are said to be idle while {len(steps)} steps run"
                yield Violation("S11", line.number, text)
