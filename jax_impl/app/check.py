"""Judge an event log.

Reads what a run wrote with --log and checks it against the properties S1 to S11 and L3, which
know nothing of the scheduler. Prints each violation with its line; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reference.files.event_log import read_log
from reference.vocab.errors import BadInput

SHOWN_MAX = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey check`."""
    parser.add_argument("events", metavar="EVENTS", type=Path, help="event log of a run (--log)")
    parser.add_argument("--incomplete", action="store_true",
                        help="accept a log without its last record: a run that was killed")


def run(args: argparse.Namespace) -> int:
    """0 when every property holds, 1 when one does not (APP-6)."""
    return judge(read_log(args.events), str(args.events), complete=not args.incomplete)


def judge(log: Any, name: str, *, complete: bool = True) -> int:
    """Prints the verdict on `log` (a Log or its records); `name` says where its lines are."""
    from oracle.checkers import CHECKS, check_log

    try:
        violations = check_log(log, complete=complete)
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from None
    for violation in violations[:SHOWN_MAX]:
        print(f"{name}:{violation.line}: {violation.property}: {violation.text}")
    if len(violations) > SHOWN_MAX:
        print(f"... and {len(violations) - SHOWN_MAX} more")
    records = len(log.records)
    if violations:
        broken = ", ".join(p for p in ("LOG", *CHECKS) if any(v.property == p for v in violations))
        print(f"{records} records, {len(violations)} violations of {broken}")
        return 1
    print(f"{records} records, no violation of {', '.join(CHECKS)}")
    return 0
