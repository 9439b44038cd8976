"""S11: what is held never exceeds what was granted, at every line."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.durations import check_durations
from oracle.checkers.host import check_host
from oracle.checkers.idle import check_idle
from oracle.checkers.records import Head, Line, LogView, Violation, parts_of


def check_s11(log: LogView) -> Iterator[Violation]:
    """SAFE-11: resident + in-flight bytes <= budget; KV, running, rows, lanes within their bounds.

    A slot counts from the first Load into it, whatever becomes of its content: memory once
    written is never given back, only overwritten.
    """
    yield from check_host(log)
    yield from check_idle(log)
    yield from check_durations(log)
    head = log.head
    held: dict[int, int] = {}
    asked: dict[int, tuple[int, int]] = {}
    kv: dict[int, int] = {}
    lanes = [0, 0]
    blocking = head.grouping == "lockstep-blocking"
    loading: set[int] = set()
    running: set[int] = set()
    size_of: dict[tuple[int, ...], int] = {}

    for line in log.lines:
        record, at = line.record, line.number
        if line.kind == "ask":
            lanes = list(record["ask"])
        elif line.name == "Arrived":
            asked[record["request"]] = (record["prompt_len"], record["max_new_tokens"])
        elif line.name in ("Loaded", "LoadFailed"):
            loading.discard(record["ticket"])
        elif line.name in ("Computed", "Failed"):
            running.discard(record["step"])
        elif line.name == "Load":
            loading.add(record["ticket"])
            if blocking and running:
                yield Violation("S11", at, "a load while a step runs, in lockstep-blocking")
            size = record.get("bytes", head.slot_bytes or 0)
            if "bytes" in record:
                yield from brought(line, head, size_of)
            if head.slot_bytes is not None and size > head.slot_bytes:
                text = f"{size} bytes into a slot of {head.slot_bytes}"
                yield Violation("S11", at, text)
            held[record["slot"]] = head.slot_bytes or size
            total = sum(held.values())
            if head.budget is not None and total > head.budget:
                text = f"{total} bytes resident and in flight, the budget is {head.budget}"
                yield Violation("S11", at, text)
            lanes[0] -= 1
            if lanes[0] == -1:
                yield Violation("S11", at, "more loads than idle channels of the ask before")
        elif line.name == "Compute":
            running.add(record["step"])
            if blocking and loading:
                yield Violation("S11", at, "a step while a load is under way, in lockstep-blocking")
            lanes[1] -= 1
            if lanes[1] == -1:
                yield Violation("S11", at, "more steps than idle compute lanes of the ask before")
            rows = [
                head.rows(chunk, asked[request][0])
                for request, chunk, *_ in parts_of(record)
                if request in asked
            ]
            if len(rows) > 1 and sum(rows) > head.max_rows:
                text = f"a step of {sum(rows)} rows, at most {head.max_rows}"
                yield Violation("S11", at, text)
        elif line.name == "Admit" and record["request"] in asked:
            needs = head.reserved(*asked[record["request"]])
            # Who does not say how large a block is may say what is set aside.
            kv[record["request"]] = max(needs, record.get("kv", 0) * ("kv_block" in head.absent))
            if sum(kv.values()) > head.kv_tokens:
                text = f"{sum(kv.values())} KV tokens reserved of {head.kv_tokens}"
                yield Violation("S11", at, text)
            if len(kv) > head.max_running:
                yield Violation("S11", at, f"{len(kv)} requests run, at most {head.max_running}")
        elif line.kind == "action" and line.name in ("Finish", "Reject"):
            kv.pop(record["request"], None)


def brought(line: Line, head: Head, size_of: dict[tuple[int, ...], int]) -> Iterator[Violation]:
    """What a Load brings is an expert: as many bytes as its layer's have, where the head tells
    them, no more than the largest has, and each time as many. `size_of`: of the loads before."""
    size, key = line.record["bytes"], tuple(line.record["key"])
    right = head.layer_bytes.get(key[0])
    if right is not None and size != right:
        text = f"{size} bytes of expert {key}, whose layer has experts of {right}"
        yield Violation("S11", line.number, text)
    elif head.expert_bytes is not None and size > head.expert_bytes:
        text = f"{size} bytes of expert {key}, the largest has {head.expert_bytes}"
        yield Violation("S11", line.number, text)
    elif size_of.setdefault(key, size) != size:
        text = f"{size} bytes of expert {key}, before it had {size_of[key]}"
        yield Violation("S11", line.number, text)
