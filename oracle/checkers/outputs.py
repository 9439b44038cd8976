"""S14 and S15 for what callers get: the results of a run, as `covey run --json` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from oracle.checkers.records import LogView, Violation


@dataclass
class _Told:
    """A request as the log has it."""

    line: int
    prompt_len: int
    max_new: int
    tokens: list[int] = field(default_factory=list)
    reason: str = ""


def check_outputs(log: LogView, rows: Iterable[Mapping[str, Any]]) -> Iterator[Violation]:
    """SAFE-14: the log has each request's declared lengths. SAFE-15: callers get the tokens that
    were sampled, in order and no others, and are told the end as it was.

    A row is {"id", "tokens", "finish_reason"}, with "prompt_tokens" and "max_new_tokens" where
    known. A stop text may take away tokens at the end. A row belongs to the request of its
    "number", the order of arrival, if it has one, else to that of its id, which Arrived tells.
    """
    by_number, by_name = _requests(log)
    for row in rows:
        name = row["id"]
        told = by_number.get(row["number"]) if "number" in row else by_name.get(name)
        if told is None:
            if row["tokens"]:
                text = f"request '{name}' gave {len(row['tokens'])} tokens and never arrived"
                yield Violation("S15", log.last, text)
            continue
        for key, logged in (("prompt_tokens", told.prompt_len), ("max_new_tokens", told.max_new)):
            if row.get(key) is not None and row[key] != logged:
                text = f"request '{name}' arrives with {key} {logged}, it declares {row[key]}"
                yield Violation("S14", told.line, text)
        fault = _faulty(told, list(row["tokens"]), row["finish_reason"])
        if fault and (told.reason or log.complete):
            yield Violation("S15", told.line, f"request '{name}': {fault}")


def _faulty(told: _Told, tokens: list[int], reason: str) -> str:
    if tokens != told.tokens[: len(tokens)]:
        return f"tokens {tokens} are not those that were sampled, {told.tokens}"
    if reason == "stop":
        return ""
    if len(tokens) < len(told.tokens):
        return f"{len(tokens)} tokens of the {len(told.tokens)} that were sampled"
    if reason != told.reason:
        return f"its end is told as {reason}, it was {told.reason or 'none'}"
    return ""


def _requests(log: LogView) -> tuple[dict[int, _Told], dict[str, _Told]]:
    """By order of arrival, and by id."""
    by_number: dict[int, _Told] = {}
    by_name: dict[str, _Told] = {}
    for line in log.lines:
        record = line.record
        if line.name == "Arrived":
            told = _Told(line.number, record["prompt_len"], record["max_new_tokens"])
            by_number[record["request"]] = told
            by_name[str(record.get("id"))] = told
        elif line.name == "Sampled" and record["request"] in by_number:
            if record["token"] is not None:
                by_number[record["request"]].tokens.append(record["token"])
        elif line.kind == "action" and line.name in ("Finish", "Reject"):
            if record["request"] in by_number:
                reason = record.get("reason", "") if line.name == "Finish" else "rejected"
                by_number[record["request"]].reason = reason
    return by_number, by_name
