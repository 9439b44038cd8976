"""Counterexamples as event lists: printed by the explorer, kept, and played again.

A case is one JSON object: {"scope", "property", "text", "play"}, and "name", the seeded fault that
it came from. `play` lists the groups between the first state and the fault, each [events, script]:
events as in specs/log.md, then which of control's equally good choices the ask takes, by number
(null: no ask). `python -m oracle replay FILE` plays the cases of a file (one a line).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.judge import Fault
from oracle.scopes import SCOPES, Scope
from oracle.transitions import Make, _Choices, _tell, ask, start, steps
from reference.control.scheduler import Scheduler
from reference.files import strict_json
from reference.files.log_records import event_from_record, record_of
from reference.files.regular import reason
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

if TYPE_CHECKING:
    from oracle.explorer import Found

FILE = Path(__file__).with_name("vectors") / "counterexamples.jsonl"
Case = dict[str, Any]


def play_of(scope: Scope, path: Iterable[int], make: Make) -> list[list[Any]]:
    """The groups of a path of transition numbers."""
    out, node = [], start(scope, make)
    for via in path:
        step = next(s for i, s in enumerate(steps(scope, node)) if i == via)
        asks = not (scope.batch and step.events)
        out.append([[record_of(e) for e in step.events], step.script if asks else None])
        node = step.node
    return out


def play(case: Case, make: Make = Scheduler) -> tuple[Fault | None, list[bytes]]:
    """The first fault on the way, and the digests of the states passed. The shipped scheduler
    may refuse an event that could only follow on a fault; the case ends there without one."""
    node = start(SCOPES[case["scope"]], make)
    states = [node.digest()]
    for events, script in case["play"]:
        node.asked = False
        fault = _tell(node, tuple(event_from_record(record) for record in events))
        if fault is None and script is not None:
            try:
                fault = ask(node, _Choices(list(script)))
            except Exception as error:
                fault = ("L1", f"the ask raised {type(error).__name__}: {error}")
        if fault is not None:
            return fault, states
        try:
            states.append(node.digest())
        except Exception as error:  # a fault may break the key, too
            return ("L1", f"control cannot tell its state: {error!r}"), states
    return None, states


def case_of(name: str, scope: Scope, found: Found, make: Make) -> Case:
    """The case of a finding. `seen`: what breaks when it is played, if something does; `graph`:
    nothing does, for the fault lies in what cannot follow, or in control's own book (S3)."""
    case: Case = {
        "name": name,
        "scope": scope.name,
        "property": found.property,
        "text": found.text,
        "play": play_of(scope, found.path, make),
    }
    fault, _ = play(case, make)
    return {**case, "seen": fault and fault[0], "graph": fault is None}


def read_cases(file: Path = FILE) -> list[Case]:
    """One case a line. Raises BadInput for a file that cannot be read, has none, or has a line that
    is none."""
    where = place(file)
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{where}: cannot be read: {reason(error)}") from None
    cases = [_case(line, f"{where}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise BadInput(f"{where}: holds no case; one JSON object a line is needed")
    return cases


def _case(line: bytes, where: str) -> Case:
    case = strict_json.parse(line, where)
    if not isinstance(case, dict) or not isinstance(case.get("play"), list):
        raise BadInput(f"{where}: {show(case, 40)}; an object with scope and play is needed")
    scope = case.get("scope")
    if not isinstance(scope, str) or scope not in SCOPES:
        raise BadInput(f"{where}: scope is {show(scope, 40)}; no such scope")
    for i, group in enumerate(case["play"]):
        try:
            events, script = group
            for record in events:
                event_from_record(record)
            if any(type(n) is not int or n < 0 for n in script or ()):
                raise ValueError(f"{show(script, 40)} is not a list of choices")
        except (ValueError, TypeError, AttributeError) as error:
            text = f"{where}: play[{i}] is {show(group, 40)}; [events, choices] is needed: {error}"
            raise BadInput(text) from None
    return case


def write_cases(cases: Iterable[Case], file: Path = FILE) -> None:
    """Sorted by name, one a line."""
    lines = [json.dumps(c) for c in sorted(cases, key=lambda c: c["name"])]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
