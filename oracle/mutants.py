"""Killing seeded faults: each must be noticed by the property that it declares."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from oracle.cases import Case, case_of
from oracle.checkers import CHECKS, Violation, check_log
from oracle.executor_faults import LOOP, TRANSFER
from oracle.explorer import Explorer, Found
from oracle.faults import ALL
from oracle.patching import CONTROL, Mutant, mutated
from oracle.scopes import SCOPES

LIMIT = 60_000
"""States that a fault may live through."""


@dataclass
class Verdict:
    """What became of a mutant. killed_by None: it lived."""

    name: str
    declared: str
    killed_by: str | None = None
    also: list[str] = field(default_factory=list)
    trace_length: int = 0
    states: int = 0
    seconds: float = 0.0
    trouble: str = ""
    found: Found | None = None
    case: Case | None = None

    @property
    def good(self) -> bool:
        """It died, and of what it should."""
        return self.killed_by == self.declared

    def take(self, found: Found) -> None:
        """The first finding names the killer, later ones stand under `also`."""
        if self.killed_by is None:
            self.killed_by, self.also = found.property, list(found.also)
            self.trace_length, self.found = len(found.path), found
        elif found.property not in (self.killed_by, *self.also):
            self.also.append(found.property)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "declared": self.declared,
            "killed_by": self.killed_by,
            "also": self.also,
            "trace_length": self.trace_length,
            "seconds": round(self.seconds, 3),
        }


def kill(mutant: Mutant) -> Verdict:
    """Run the faulty code until something breaks. Raises PatchFailed."""
    began = time.perf_counter()
    verdict = _explore(mutant) if mutant.scopes else _run(mutant)
    verdict.seconds = time.perf_counter() - began
    return verdict


def kill_by_name(name: str) -> Verdict:
    """`kill` for a process of its own; trouble is told in the verdict."""
    mutant = next(m for m in ALL if m.name == name)
    try:
        return kill(mutant)
    except Exception as error:
        text = f" {type(error).__name__}: {error}"
        return Verdict(mutant.name, mutant.declared, trouble=text)


def _explore(mutant: Mutant) -> Verdict:
    """First without L3 and without control's own book of slots, then with both: a fault that
    endangers safety or an end mostly idles somewhere and has a wrong book too, which would hide
    what it leads to. So these kill what the others let live."""
    verdict = Verdict(mutant.name, mutant.declared)
    with mutated(mutant) as module:
        for work in (False, True):
            for name in mutant.scopes:
                explorer = Explorer(SCOPES[name], module.Scheduler, limit=LIMIT, work=work)
                report = explorer.run()
                verdict.states += report.canonical_states
                if report.violations:
                    found = report.violations[0]
                    if verdict.killed_by is None:
                        verdict.case = case_of(mutant.name, SCOPES[name], found, module.Scheduler)
                    verdict.take(found)
                    break
    return verdict


def _run(mutant: Mutant) -> Verdict:
    """Judge the logs of some runs. In the first with a violation, of the properties broken at the
    earliest line the declared one counts, if it is there."""
    verdict = Verdict(mutant.name, mutant.declared)
    with mutated(mutant) as module:
        runs = [found for found in _violations(mutant.module, module) if found]
    if not runs:
        return verdict
    violations = runs[0]
    first = {v.property for v in violations if v.line == violations[0].line}
    broken = {v.property for found in runs for v in found}
    one = mutant.declared if mutant.declared in first else violations[0].property
    verdict.killed_by = one
    verdict.also = [p for p in (*CHECKS, "S16") if p in broken and p != one]
    verdict.trace_length = violations[0].line
    return verdict


def _violations(name: str, module: ModuleType) -> list[list[Violation]]:
    """What the checkers say of the runs of the rig for a module, run by run."""
    from oracle import company_rig, rigs

    if name.startswith(CONTROL):
        return company_rig.decided(module)
    if name in (LOOP, TRANSFER):
        rig = rigs.transfer if name == TRANSFER else rigs.loop
        return [check_log(rig(module))]
    return company_rig.engine(module)
