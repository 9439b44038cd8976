"""Judging a run from outside: every property is one pass over the event log with its own state.

    violations = check_log(records)          # a list of records, head first, or a Log

Nothing here knows the scheduler (`reference.control`): slots, tickets, steps and requests are
rebuilt from the log alone. What each property means is written in specs/properties.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from oracle.checkers.budget import check_s11
from oracle.checkers.order import check_s10
from oracle.checkers.records import LogView, Violation, view
from oracle.checkers.requests import check_s1, check_s2
from oracle.checkers.slots import check_s3, check_s5, check_s6, check_s7
from oracle.checkers.steps import check_s4, check_s8, check_s9
from oracle.checkers.work import check_l3

__all__ = ["CHECKS", "Violation", "check_log"]

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
    "L3": check_l3,
}


def check_log(log_or_records: Any, *, complete: bool = True) -> list[Violation]:
    """All violations, by line. `complete` = the log ends with its end record (LOG otherwise).

    Raises ValueError when the first record is not a head: then there is nothing to judge.
    """
    log = view(log_or_records, complete)
    if log.malformed:
        return log.malformed
    found = [violation for check in CHECKS.values() for violation in check(log)]
    return sorted(found, key=lambda v: v.line)
