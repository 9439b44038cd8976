"""Judging a run from outside: every property is one pass over the event log with its own state.

    violations = check_log(records)          # a list of records, head first, or a Log
    violations = check_log(records, outputs=rows)        # and what callers got
    found = check_logs({"a": log, "b": log})             # runs of one model, held together

Nothing here knows the scheduler (`reference.control`): slots, tickets, steps and requests are
rebuilt from the log alone. What each property means is written in specs/properties.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from oracle.checkers.admission import check_l5, check_s14
from oracle.checkers.budget import check_s11
from oracle.checkers.claims import unjudged, unjudged_parts
from oracle.checkers.company import Book, check_s12, check_s13, differs, kin
from oracle.checkers.ends import check_l6, check_l7
from oracle.checkers.order import check_s10
from oracle.checkers.outputs import check_outputs
from oracle.checkers.progress import check_l1, check_l2, check_l4
from oracle.checkers.records import LogView, Violation, read_head, view
from oracle.checkers.repeat import check_repeat
from oracle.checkers.requests import check_s1, check_s2
from oracle.checkers.results import check_s15
from oracle.checkers.slots import check_s3, check_s5, check_s6, check_s7
from oracle.checkers.steps import check_s4, check_s8, check_s9
from oracle.checkers.work import check_l3

__all__ = [
    "CHECKS", "COMPARED", "LOG_ONLY", "Book", "Violation", "check_log", "check_logs",
    "differs", "judged", "kin",
]  # fmt: skip

CHECKS: dict[str, Callable[[LogView], Iterator[Violation]]] = {
    "S1": check_s1,
    "S2": check_s2,
    "S3": check_s3,
    "S4": check_s4,
    "S5": check_s5,
    "S6": check_s6,
    "S7": check_s7,
    "S8": check_s8,
    "S9": check_s9,
    "S10": check_s10,
    "S11": check_s11,
    "S12": check_s12,
    "S13": check_s13,
    "S14": check_s14,
    "S15": check_s15,
    "L1": check_l1,
    "L2": check_l2,
    "L3": check_l3,
    "L4": check_l4,
    "L5": check_l5,
    "L6": check_l6,
    "L7": check_l7,
}

LOG_ONLY = ("S12", "S13", "S14", "S15", "L6")
"""Of CHECKS, what nobody judges on the states of small worlds."""

COMPARED = ("S12", "S13", "S14", "S16")
"""What `check_logs` judges over several logs; S16 is about nothing else."""


def check_log(
    log_or_records: Any,
    *,
    complete: bool = True,
    outputs: Iterable[Mapping[str, Any]] | None = None,
) -> list[Violation]:
    """All violations, by line. `complete` = the log ends with its end record (LOG otherwise).

    outputs  what the requests' callers got, as `covey run --json` has it: see `check_outputs`
    Raises ValueError when the first record is not a head: then there is nothing to judge.
    """
    log = view(log_or_records, complete)
    if log.malformed:
        return log.malformed
    skipped = unjudged(log.head)
    checks = [check for name, check in CHECKS.items() if name not in skipped]
    found = [violation for check in checks for violation in check(log)]
    if outputs is not None:
        found += check_outputs(log, outputs)
    return sorted(found, key=lambda v: v.line)


def judged(head: Mapping[str, Any]) -> tuple[list[str], str]:
    """The properties that `check_log` judges under this head, and in one line what it does not and
    for want of which options; "" where it judges all. Raises ValueError as `check_log`."""
    read = read_head(head)
    skipped = unjudged(read)
    texts = [f"{name} ({', '.join(options)})" for name, options in skipped.items()]
    texts += unjudged_parts(read)
    line = f"not judged, for want of options in the head: {'; '.join(texts)}" if texts else ""
    return [name for name in CHECKS if name not in skipped], line


def check_logs(logs: Mapping[str, Any]) -> list[tuple[str, Violation]]:
    """S12, S13, S14 and S16 over logs by name: (name of the log, what is wrong in it).

    Bits are compared between logs whose heads agree in what bits depend on, decisions between logs
    with the same options, of schedulers that promise to decide the same again (LOG-8: by a
    grouping). Logs that are malformed are left out: `check_log` tells of them. Raises
    ValueError for one without a head.
    """
    books: dict[str, Book] = {}
    seen: list[tuple[str, LogView]] = []
    found: list[tuple[str, Violation]] = []
    for name, one in logs.items():
        log = view(one, complete=False)
        if log.malformed:
            continue
        book = books.setdefault(kin(log.raw), Book())
        found += [(name, violation) for violation in book.add(log, name)]
        for earlier_name, earlier in seen:
            found += [(name, v) for v in check_repeat(log, earlier, earlier_name)]
        seen.append((name, log))
    return found
