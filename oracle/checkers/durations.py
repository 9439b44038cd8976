"""S11 for what a load is said to have taken: it lies within what the times of its lines leave."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Violation

ROUNDED_S = 2e-6
"""Times and durations are rounded on their own."""


def check_durations(log: LogView) -> Iterator[Violation]:
    """SAFE-11: a load begins after the ask that it was decided at, and has ended when that is told;
    so its `seconds` are at most those between. (It may begin before its own line is written.)"""
    asked: float | None = None
    began: dict[int, float | None] = {}
    for line in log.lines:
        record = line.record
        if line.kind == "ask":
            asked = record.get("t")
        elif line.name == "Load":
            began[record["ticket"]] = asked
        elif line.name == "Loaded" and "seconds" in record:
            start = began.get(record["ticket"])
            if start is not None and record["seconds"] > record["t"] - start + ROUNDED_S:
                text = f"load {record['ticket']} is said to have taken {record['seconds']:g} s; "
                text += f"it was decided {record['t'] - start:g} s before"
                yield Violation("S11", line.number, text)
