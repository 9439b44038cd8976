"""S4, S8, S9: what a step may read, and which completions may make a slot readable."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Violation, parts_of

Key = tuple[int, int]


def check_s4(log: LogView) -> Iterator[Violation]:
    """SAFE-4: a slot's count is the number of running steps that read it; 0 for all at the end."""
    reading: dict[int, tuple[int, ...]] = {}
    newest = 0
    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Compute":
            step = record["step"]
            if step <= newest:
                yield Violation("S4", at, f"step {step} after step {newest}: steps only grow")
            newest = max(newest, step)
            listed = [expert for expert, _ in record["slots"]]
            used = sorted({e for *_, experts, _ in parts_of(record) for e in experts})
            if listed != used:
                order = ": not in ascending order" if sorted(listed) == used else ""
                text = f"step {step} holds experts {listed} and uses {used}{order}"
                yield Violation("S4", at, text)
            held = tuple(slot for _, slot in record["slots"])
            if len(set(held)) != len(held):
                yield Violation("S4", at, f"step {step} lists a slot twice: {list(held)}")
            reading[step] = held
        elif line.name in ("Computed", "Failed"):
            if record["step"] not in reading:
                text = f"{line.name} of step {record['step']}, which does not run"
                yield Violation("S4", at, text)
            reading.pop(record["step"], None)
    if log.complete:
        for step in sorted(reading):
            yield Violation("S4", log.last, f"step {step} never ended: its slots stay held")


def check_s8(log: LogView) -> Iterator[Violation]:
    """SAFE-8: only the live completion of a slot's newest ticket makes it readable.

    A ticket is dead once it was reported failed, completed, or superseded in its slot.
    """
    newest: dict[int, int] = {}
    slot_of: dict[int, int] = {}
    dead: set[int] = set()
    made_by: dict[int, int] = {}
    stale: dict[int, int] = {}
    """Slot -> the ticket of a stale completion since its newest Load."""

    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Load":
            slot, ticket = record["slot"], record["ticket"]
            dead.add(newest.get(slot, 0))
            newest[slot], slot_of[ticket] = ticket, slot
            made_by.pop(slot, None)
            stale.pop(slot, None)
        elif line.name == "Loaded":
            ticket = record["ticket"]
            slot = slot_of.get(ticket, -1)
            if ticket in dead or slot < 0:
                stale[slot] = ticket
            else:
                made_by[slot] = ticket
            dead.add(ticket)
        elif line.name == "LoadFailed":
            dead.add(record["ticket"])
        elif line.name == "Compute":
            for expert, slot in record["slots"]:
                if slot in stale and slot not in made_by:
                    text = f"step {record['step']} reads expert {expert} in slot {slot} on the"
                    text += f" word of ticket {stale[slot]}, which was stale"
                    yield Violation("S8", at, text)


def check_s9(log: LogView) -> Iterator[Violation]:
    """SAFE-9: a step reads a slot only when the slot holds that expert, whole, with the same bits.

    `sum` is optional: on Loaded the checksum of the slot, on Compute a list of checksums aligned
    with `slots`, taken when the step ended or began.
    """
    tag: dict[int, Key] = {}
    target: dict[int, tuple[int, Key]] = {}
    written: set[int] = set()
    """Slots with a completion since their newest Load."""
    sums: dict[Key, object] = {}

    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Load":
            slot, key = record["slot"], tuple(record["key"])
            tag[slot], target[record["ticket"]] = key, (slot, key)
            written.discard(slot)
        elif line.name == "Loaded":
            slot, key = target.get(record["ticket"], (-1, (-1, -1)))
            written.add(slot)
            told = record.get("sum")
            if told is not None and sums.setdefault(key, told) != told:
                text = f"expert {key} loads with checksum {told}, before it was {sums[key]}"
                yield Violation("S9", at, text)
        elif line.name == "Compute":
            seen = record.get("sum") or [None] * len(record["slots"])
            for (expert, slot), told in zip(record["slots"], seen, strict=False):
                key = (record["layer"], expert)
                where = f"step {record['step']} reads expert {key} in slot {slot}"
                if tag.get(slot) != key:
                    yield Violation("S9", at, f"{where}, which holds {tag.get(slot)}")
                elif slot not in written:
                    yield Violation("S9", at, f"{where} before its load completed")
                elif told is not None and sums.setdefault(key, told) != told:
                    text = f"{where} with checksum {told}, loaded was {sums[key]}"
                    yield Violation("S9", at, text)
