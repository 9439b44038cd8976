"""S11 for the host tier: its own budget, and no entry changes under a load that uses it."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Violation


def check_host(log: LogView) -> Iterator[Violation]:
    """SAFE-11: what lies in host memory and what is read into it are within the host budget.

    An entry counts from the first read into it. While a load in flight reads or writes an entry,
    also one that was given up and has not drained, nothing else is read into it; and what is said
    to come from host memory was read into that entry before, by a load that ended well.
    """
    held: dict[int, int] = {}
    content: dict[int, tuple[int, ...]] = {}
    pinned: dict[int, tuple[int, tuple[int, ...], bool]] = {}  # ticket: entry, key, from the disk
    late: set[int] = set()
    budget, slot = log.head.host_budget, log.head.slot_bytes or 0

    for line in log.lines:
        record, at = line.record, line.number
        if line.name == "Load" and "entry" in record:
            entry, key, size = record["entry"], tuple(record["key"]), record.get("bytes", slot)
            disk = record.get("from") == "disk"
            if record.get("disk_bytes") != (size if disk else 0):
                yield Violation("S11", at, f"{record.get('disk_bytes')} bytes of {size} from disk")
            if not disk and content.get(entry) != key:
                text = f"{key} from entry {entry} of host memory, which holds {content.get(entry)}"
                yield Violation("S11", at, text)
            if disk:
                users = [ticket for ticket, (used, *_) in pinned.items() if used == entry]
                if users:
                    text = f"a read into entry {entry}, which load {users[0]} uses"
                    yield Violation("S11", at, text)
                content.pop(entry, None)
                held[entry] = slot or size
                if sum(held.values()) > budget:
                    text = f"{sum(held.values())} bytes in host memory, the budget is {budget}"
                    yield Violation("S11", at, text)
            pinned[record["ticket"]] = entry, key, disk
        elif line.name == "LoadFailed" and not record["drained"]:
            late.add(record["ticket"])
        elif line.name in ("Loaded", "LoadFailed") and record["ticket"] in pinned:
            entry, key, disk = pinned.pop(record["ticket"])
            if line.name == "LoadFailed":
                content.pop(entry, None)
            elif disk and record["ticket"] not in late:
                content[entry] = key
