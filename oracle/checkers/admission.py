"""S14 and L5: who is admitted follows from what a request declares, and is decided at once."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import LogView, Violation


def check_s14(log: LogView) -> Iterator[Violation]:
    """SAFE-14: what an admitted request is given is what its declared lengths ask for.

    `kv` is optional on Admit: the KV tokens that the executor has set aside for the request.
    """
    asked: dict[int, int] = {}
    if "kv_block" in log.head.absent:
        return
    for line in log.lines:
        record = line.record
        if line.name == "Arrived":
            size = log.head.reserved(record["prompt_len"], record["max_new_tokens"])
            asked.setdefault(record["request"], size)
        elif line.name == "Admit" and record.get("kv") is not None:
            right = asked.get(record["request"])
            if right is not None and record["kv"] != right:
                text = f"request {record['request']} is given {record['kv']} KV tokens; "
                text += f"prompt and max_new_tokens ask for {right}"
                yield Violation("S14", line.number, text)


def check_l5(log: LogView) -> Iterator[Violation]:
    """LIVE-5: a request that can never fit is refused by the ask that follows its arrival."""
    hopeless: dict[int, int] = {}
    asked = False
    for line in log.lines:
        if asked and line.kind != "action":
            for request, size in hopeless.items():
                text = f"request {request} needs {size} KV tokens of {log.head.kv_tokens} "
                text += "and was not refused"
                yield Violation("L5", line.number, text)
            hopeless, asked = {}, False
        if line.kind == "ask":
            asked = True
        elif line.name == "Arrived":
            size = log.head.reserved(line.record["prompt_len"], line.record["max_new_tokens"])
            if size > log.head.kv_tokens:
                hopeless[line.record["request"]] = size
        elif line.kind == "action" and line.name in ("Finish", "Reject"):
            hopeless.pop(line.record["request"], None)
