"""S3, S5, S6, S7: what may be done with a slot, rebuilt from the loads of the log.

Each checker keeps only the state that it needs and shares no code with the others but `Loads`,
the bare record of which transfer was sent where.
"""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import Line, LogView, Violation

_FREE, _LOADING, _READY, _QUARANTINED = "free", "loading", "ready", "quarantined"
Key = tuple[int, int]


class _Slot:
    """One slot as the log tells it: who writes it, and what it holds.

    state        free | loading | ready | quarantined (its transfer failed and may still write)
    ticket, key  of the newest Load into it
    """

    __slots__ = ("key", "state", "ticket")

    def __init__(self) -> None:
        self.state = _FREE
        self.ticket = 0
        self.key: Key = (-1, -1)


class _Slots:
    """All slots, moved by Load, Loaded and LoadFailed; completions count only for their ticket."""

    def __init__(self) -> None:
        self.slots: dict[int, _Slot] = {}
        self.slot_of: dict[int, int] = {}

    def see(self, line: Line) -> None:
        if line.name == "Load":
            slot = self.slots.setdefault(line.record["slot"], _Slot())
            slot.state, slot.ticket = _LOADING, line.record["ticket"]
            slot.key = tuple(line.record["key"])
            self.slot_of[slot.ticket] = line.record["slot"]
        elif line.name in ("Loaded", "LoadFailed"):
            ticket = line.record["ticket"]
            slot = self.slots.get(self.slot_of.get(ticket, -1))
            if slot is None or slot.ticket != ticket:
                return
            if slot.state == _QUARANTINED:
                if line.name == "Loaded" or line.record["drained"]:
                    slot.state = _FREE
            elif slot.state == _LOADING:
                if line.name == "Loaded":
                    slot.state = _READY
                else:
                    slot.state = _FREE if line.record["drained"] else _QUARANTINED


def check_s3(log: LogView) -> Iterator[Violation]:
    """SAFE-3: free + loading + ready + quarantined = total: no slot invented, doubled or lost, and
    no expert invented."""
    total = log.head.slots
    slots = _Slots()
    newest = 0
    outstanding: set[int] = set()

    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Load":
            if not 0 <= record["slot"] < total:
                yield Violation("S3", at, f"Load into slot {record['slot']} of {total}")
            layer, expert = record["key"]
            if layer not in log.head.layers or not 0 <= expert < log.head.experts:
                text = f"Load of ({layer}, {expert}): layers {list(log.head.layers)} have experts, "
                yield Violation("S3", at, f"{text}{log.head.experts} each")
            if record["ticket"] <= newest:
                text = f"ticket {record['ticket']} after ticket {newest}: tickets only grow"
                yield Violation("S3", at, text)
            newest = max(newest, record["ticket"])
            outstanding.add(record["ticket"])
        elif line.name == "Loaded" or (line.name == "LoadFailed" and record["drained"]):
            if record["ticket"] not in outstanding:
                text = f"{line.name} of ticket {record['ticket']}, which is not outstanding"
                yield Violation("S3", at, text)
            outstanding.discard(record["ticket"])
        elif line.name == "LoadFailed" and record["ticket"] not in outstanding:
            yield Violation("S3", at, f"LoadFailed of ticket {record['ticket']}, not outstanding")
        slots.see(line)
        if line.kind == "ask" and "slots" in record:
            yield from _compare_counts(total, slots, record["slots"], at)
    if log.complete:
        for ticket in sorted(outstanding):
            text = f"ticket {ticket} never completed: its slot is lost"
            yield Violation("S3", log.last, text)


def _compare_counts(total: int, slots: _Slots, said: object, at: int) -> Iterator[Violation]:
    """An ask may carry control's own [free, loading, ready, quarantined]."""
    states = [slot.state for slot in slots.slots.values()]
    counts = [states.count(state) for state in (_LOADING, _READY, _QUARANTINED)]
    expected = [total - sum(counts), *counts]
    if list(said) != expected:  # type: ignore[call-overload]
        text = f"control counts slots {said} (free, loading, ready, quarantined), not {expected}"
        yield Violation("S3", at, text)


def check_s5(log: LogView) -> Iterator[Violation]:
    """SAFE-5: one expert is resident, or on its way, in one slot at most."""
    slots = _Slots()
    for line in log.lines:
        if line.name == "Load":
            key = tuple(line.record["key"])
            for index, slot in slots.slots.items():
                if slot.key == key and slot.state in (_LOADING, _READY):
                    text = f"Load of {key} into slot {line.record['slot']}"
                    text += f", it is {slot.state} in slot {index}"
                    yield Violation("S5", line.number, text)
        slots.see(line)


def check_s6(log: LogView) -> Iterator[Violation]:
    """SAFE-6: no Load into a slot that a running step reads, or whose own load is under way."""
    slots = _Slots()
    reading: dict[int, set[int]] = {}
    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Load":
            target = record["slot"]
            for step, read in reading.items():
                if target in read:
                    yield Violation("S6", at, f"Load into slot {target}, which step {step} reads")
            slot = slots.slots.get(target)
            if slot and slot.state == _LOADING:
                text = f"Load into slot {target}, which ticket {slot.ticket} is loading"
                yield Violation("S6", at, text)
        elif line.name == "Compute":
            reading[record["step"]] = {slot for _, slot in record["slots"]}
        elif line.name in ("Computed", "Failed"):
            reading.pop(record["step"], None)
        slots.see(line)


def check_s7(log: LogView) -> Iterator[Violation]:
    """SAFE-7: no slot is a write target, or read, while any transfer may still write into it."""
    writers: dict[int, set[int]] = {}
    slot_of: dict[int, int] = {}
    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Load":
            target = record["slot"]
            for ticket in sorted(writers.get(target, ())):
                text = f"Load into slot {target}, ticket {ticket} may still write there"
                yield Violation("S7", at, text)
            writers.setdefault(target, set()).add(record["ticket"])
            slot_of[record["ticket"]] = target
        elif line.name == "Loaded" or (line.name == "LoadFailed" and record["drained"]):
            writers.get(slot_of.get(record["ticket"], -1), set()).discard(record["ticket"])
