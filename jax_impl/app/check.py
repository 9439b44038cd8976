"""Judge event logs.

Reads what runs wrote with --log and checks it against the properties that a log can tell, which
know nothing of the scheduler. Prints each violation with its line; exit status 1 if there is one.
With the results of the run (--outputs) it checks what callers got, too. Several logs of one model
are also held against each other: equal requests must have equal bits in all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.event_log import Log, read_log
from reference.files.pools_log import is_pools
from reference.files.regular import reason
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

SHOWN_MAX = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey check`."""
    parser.add_argument("events", metavar="EVENTS", type=Path, nargs="+",
                        help="event log of a run (--log); several of one model")
    parser.add_argument("--outputs", metavar="OUT", type=Path,
                        help="what the run's requests gave (--json of the same run)")
    parser.add_argument("--incomplete", action="store_true",
                        help="accept a log without its last record: a run that was killed")


def run(args: argparse.Namespace) -> int:
    """0 when every property holds, 1 when one does not (APP-6)."""
    if args.outputs and len(args.events) > 1:
        raise BadInput("--outputs: belongs to one log; give one EVENTS")
    rows = outputs_of(args.outputs) if args.outputs else None
    logs = {str(path): read_log(path, pools=True) for path in args.events}
    for log in logs.values():
        if log.warning:
            print(log.warning)
    apart = {name: log for name, log in logs.items() if is_pools(log.head)}
    if apart and (rows is not None or len(args.events) > 1):
        raise BadInput(f"{min(apart)}: attention in another pool; such a log is checked alone")
    if apart:
        return max(judge_pools(log, name, not args.incomplete) for name, log in apart.items())
    if len(logs) < len(args.events):
        raise BadInput("EVENTS: the same file twice")
    weigh(logs)
    status = 0
    for name, log in logs.items():
        status = max(status, judge(log, name, complete=not args.incomplete, outputs=rows))
    return max(status, compare(logs)) if len(args.events) > 1 else status


def outputs_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an OUT of `covey run`. Raises BadInput for a file that is none."""
    where = place(path)
    try:
        document = strict_json.parse(path.read_bytes(), where)
    except OSError as error:
        raise BadInput(f"{where}: cannot be read: {reason(error)}") from None
    rows = document.get("requests") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise BadInput(f"{where}: no requests; what `covey run --json` writes is needed")
    for i, row in enumerate(rows):
        good = (
            isinstance(row, dict)
            and isinstance(row.get("id"), str)
            and isinstance(row.get("finish_reason"), str)
            and isinstance(row.get("tokens"), list)
            and all(type(token) is int for token in row["tokens"])
        )
        if not good:
            raise BadInput(f"{where}: requests[{i}] is {show(row, 60)}; id, tokens and "
                           "finish_reason are needed")
    return rows


def judge(
    log: Log,
    name: str,
    *,
    complete: bool = True,
    outputs: Iterable[Mapping[str, Any]] | None = None,
) -> int:
    """Prints the verdict on `log`, and on what callers got of it; `name` says where its lines
    are."""
    from oracle.checkers import CHECKS, check_log, judged

    try:
        violations = check_log(log, complete=complete, outputs=outputs)
        properties, rest = judged(log.head)
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from None
    for violation in violations[:SHOWN_MAX]:
        print(f"{name}:{violation.line}: {violation.property}: {violation.text}")
    if len(violations) > SHOWN_MAX:
        print(f"... and {len(violations) - SHOWN_MAX} more")
    records = len(log.records)
    if rest:
        print(f"decided by {show(log.head['options']['scheduler'], 60)}; {rest}")
    if violations:
        broken = ", ".join(p for p in ("LOG", *CHECKS) if any(v.property == p for v in violations))
        print(f"{records} records, {len(violations)} violations of {broken}")
        return 1
    print(f"{records} records, no violation of {', '.join(properties)}")
    return 0


def judge_pools(log: Log, name: str, complete: bool) -> int:
    """Prints the verdict on a log of attention in another pool (LAMINA-28)."""
    from oracle.checkers.pools import CHECKS, check_pools

    found = check_pools(log, complete=complete)
    for violation in found[:SHOWN_MAX]:
        print(f"{name}:{violation.line}: {violation.property}: {violation.text}")
    if found:
        broken = ", ".join(sorted({v.property for v in found}))
        print(f"{len(log.records)} records, {len(found)} violations of {broken}")
        return 1
    print(f"{len(log.records)} records, no violation of {', '.join(CHECKS)}")
    return 0


def compare(logs: Mapping[str, Log]) -> int:
    """Prints where runs contradict each other (S12, S13, S14, S16); 1 if they do."""
    from oracle.checkers import COMPARED, check_logs, differs, kin

    found = check_logs(logs)
    for name, violation in found[:SHOWN_MAX]:
        print(f"{name}:{violation.line}: {violation.property}: {violation.text}")
    if found:
        print(f"{len(logs)} logs, {len(found)} contradictions")
        return 1
    free = [name for name, log in logs.items() if not log.head["options"].get("grouping")]
    names = [p for p in COMPARED if p != "S16" or len(free) < len(logs) - 1]
    print(f"{len(logs)} logs, no contradiction between them ({', '.join(names)})")
    (first, head), *others = [(name, log.head) for name, log in logs.items()]
    for name, other in others:
        if kin(other) != kin(head):
            print(f"bits of {name} not compared with those of {first}: their heads differ in "
                  f"{', '.join(differs(head, other))}")
    if free:
        print(f"S16 not judged for {', '.join(free)}: no grouping of ours is claimed")
    return 0


def weigh(logs: Mapping[str, Log]) -> None:
    """Prints which situations occur in the logs, so that a clean verdict can be weighed (L8)."""
    from oracle.checkers.situations import SITUATIONS, not_seen

    try:
        missing = not_seen(logs.values())
    except ValueError:
        return  # a head that cannot be judged by, which `judge` says
    never = f"; never: {', '.join(missing)}" if missing else ""
    print(f"{len(SITUATIONS) - len(missing)} of {len(SITUATIONS)} situations occur (L8){never}")


def judge_again(log: Log, name: str) -> int:
    """S16 for a run of this scheduler: the same events a second time. Prints and returns 1 if
    something else is decided."""
    from jax_impl.app.replay import replay

    seen = replay(log, name)
    if seen.difference:
        print(f"{name}:{seen.line}: S16: the same events once more: {seen.difference}")
        return 1
    print(f"{seen.actions} actions, all decided again from the same events (S16)")
    return 0
