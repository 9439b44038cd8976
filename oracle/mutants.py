"""Seeded faults: one line of the shipped code changed, and the property that must notice.

A fault is a patch of the source text. It is applied to a copy of the package under another name,
so the shipped modules stay untouched; a patch whose line is no longer there is an error, never a
silent pass. `kill` explores the fault's scopes until a property breaks.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import reference.control
from oracle.explorer import Explorer, Found
from oracle.scopes import SCOPES

CONTROL = "reference.control"
LIMIT = 60_000
"""States that a fault may live through."""


class PatchFailed(Exception):
    """The line that a fault changes is not there exactly once."""


@dataclass(frozen=True)
class Mutant:
    """`old` -> `new` in `reference/control/<module>.py`; `declared` must break in one of `scopes`."""

    name: str
    module: str
    old: str
    new: str
    declared: str
    scopes: tuple[str, ...]


@dataclass
class Verdict:
    """What became of a mutant."""

    name: str
    declared: str
    killed_by: str | None = None
    also: list[str] = field(default_factory=list)
    trace_length: int = 0
    states: int = 0
    seconds: float = 0.0
    found: Found | None = None

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


class _Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves a package from patched source texts under a name of its own."""

    def __init__(self, alias: str, sources: dict[str, str]) -> None:
        self.alias, self.sources = alias, sources

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.sources:
            return None
        package = fullname == self.alias
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        exec(compile(self.sources[name], f"<{name}>", "exec"), module.__dict__)


def patched_sources(mutant: Mutant, alias: str) -> dict[str, str]:
    """The control package's sources by module name under `alias`. Raises PatchFailed."""
    out = {}
    for file in sorted(Path(reference.control.__file__).parent.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if file.stem == mutant.module:
            if text.count(mutant.old) != 1:
                count = text.count(mutant.old)
                raise PatchFailed(f"{mutant.name}: {count} places in {file.name} are {mutant.old!r}")
            text = text.replace(mutant.old, mutant.new)
        name = alias if file.stem == "__init__" else f"{alias}.{file.stem}"
        out[name] = text.replace(CONTROL, alias)
    return out


@contextmanager
def mutated(mutant: Mutant) -> Iterator[type]:
    """The Scheduler class with the fault in it."""
    alias = "covey_mutant_" + mutant.name.replace("-", "_")
    finder = _Sources(alias, patched_sources(mutant, alias))
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(f"{alias}.scheduler").Scheduler
    finally:
        sys.meta_path.remove(finder)
        for name in finder.sources:
            sys.modules.pop(name, None)


def kill(mutant: Mutant) -> Verdict:
    """Explore until something breaks; `killed_by` None: it lived.

    First without L3, then with it: a fault that endangers safety or an end also idles somewhere,
    and L3, asked at every ask, would hide which. L3 kills alone what the others let live.
    """
    began = time.perf_counter()
    verdict = Verdict(mutant.name, mutant.declared)
    with mutated(mutant) as scheduler:
        for work in (False, True):
            for name in mutant.scopes:
                explorer = Explorer(SCOPES[name], scheduler, limit=LIMIT, work=work)
                report = explorer.run()
                verdict.states += report.canonical_states
                if report.violations:
                    verdict.take(report.violations[0])
                    break
    verdict.seconds = time.perf_counter() - began
    return verdict


CACHE, FETCH, GROUP, LIFE, SCHED = "cache", "fetch", "grouping", "lifecycle", "scheduler"


def _m(name: str, module: str, old: str, new: str, declared: str, *scopes: str) -> Mutant:
    return Mutant(name, module, old, new, declared, scopes)


MUTANTS: Sequence[Mutant] = (
    _m(
        "cancel-in-queue-untold", LIFE, 's.terminal.append(Finish(e.request, "cancelled"))', "pass",
        "S1", "drain-k1",
    ),
    _m(
        "drain-untold", LIFE, 's.terminal.append(Reject(q.number, "draining"))', "pass",
        "S1", "drain-k1",
    ),
    _m(
        "finish-twice", LIFE,
        "s.terminal.append(Finish(r.number, reason, error))",
        "s.terminal += [Finish(r.number, reason, error)] * 2",
        "S2", "visit-k2-s2",
    ),
    _m(
        "cancel-ends-running-step", LIFE,
        "if r.status == RUNNING:\n        if r.doomed",
        "if False:\n        if r.doomed",
        "S2", "faults-k1",
    ),
    _m(
        "length-off-by-one", LIFE, "elif r.sampled >= r.max_new:", "elif r.sampled > r.max_new:",
        "S2", "visit-k2-s2",
    ),
    _m(
        "one-slot-too-many", SCHED, "ExpertCache(options.slots, ", "ExpertCache(options.slots + 1, ",
        "S3", "visit-k2-s2",
    ),
    _m(
        "ticket-of-the-slot", CACHE, "        ticket = self.next_ticket\n        self",
        "        ticket = slot + 1\n        self", "S3", "visit-k2-s2",
    ),
    _m("step-reused", GROUP, "s.next_step += 1", "pass", "S4", "visit-k2-s2"),
    _m(
        "reads-what-is-there", FETCH, "absent = [c for c in r.need if s.absent(c)]",
        "absent = list(r.need)", "S5", "expert-k2-s3",
    ),
    _m(
        "barrier-reads-twice", FETCH, "for c in r.need if s.absent(c)}", "for c in r.need}",
        "S5", "lockstep-k2-s3",
    ),
    _m(
        "evict-while-read", CACHE, "and slot not in self.readers\n",
        "and True\n", "S6", "bulk-k2-s3",
    ),
    _m(
        "quarantined-slot-is-free", CACHE, "if not drained:", "if drained and not drained:",
        "S7", "faults-k1",
    ),
    _m(
        "believes-late-completion", LIFE, "e.drained) if current(s, e.ticket) else -1",
        "e.drained) if e.drained and current(s, e.ticket) else -1", "S8", "faults-k1",
    ),
    _m(
        "slots-by-number", GROUP, "sorted((code % per_layer, slot) for code, slot in slots.items())",
        "list(zip(sorted(c % per_layer for c in slots), sorted(slots.values())))",
        "S9", "visit-k2-s3",
    ),
    _m(
        "directory-keeps-evicted", CACHE, "del self.where[self.code[slot]]", "pass", "S9",
        "visit-k2-s3",
    ),
    _m(
        "first-token-only", LIFE, "for token in e.experts for x in token}",
        "for token in e.experts[:1] for x in token}", "S10", "bulk-k2-s3",
    ),
    _m(
        "part-says-last", GROUP, "tuple([c % per_layer for c in codes]), not rest)",
        "tuple([c % per_layer for c in codes]), True)", "S10", "expert-k2-s2",
    ),
    _m(
        "layers-mixed", GROUP, "return [x for x in ready if x[0].stage == stage]", "return ready",
        "S10", "visit-k2-s4",
    ),
    _m(
        "kv-overcommitted", LIFE, " and s.queue[0].blocks <= s.kv_free:", ":", "S11", "kv-k1",
    ),
    _m(
        "one-running-too-many", LIFE, "len(s.running) < s.options.max_running",
        "len(s.running) <= s.options.max_running", "S11", "drain-k1",
    ),
    _m(
        "one-load-too-many", FETCH, "while channels > 0:", "while channels >= 0:", "S11",
        "visit-k2-s3",
    ),
    _m(
        "claim-outlives-request", LIFE, "s.cache.hold(r.need, -1)", "pass", "L1", "cancel-k2",
    ),
    _m("claims-hold-nothing", CACHE, "add(self.holds, codes, by)", "pass", "L1", "visit-k2-s3"),
    _m("claim-outlives-step", GROUP, "cache.hold(codes, -1)", "pass", "L1", "visit-k2-s3"),
    _m(
        "evict-claimed", CACHE, "and code not in self.holds\n", "and True\n", "L1", "bulk-k2-s3", "three-k2-s4",
    ),
    _m(
        "evict-unused", CACHE, "        if fresh:\n", "        if False:\n",
        "L2", "expert-k2-s2", "expert-k2-s3",
    ),
    _m(
        "reader-never-leaves", CACHE, "add(self.readers, (slot,), -1)", "pass", "L1", "expert-k2-s2",
    ),
    _m(
        "infeasible-admitted", LIFE, "elif blocks > o.kv_tokens // o.kv_block:", "elif False:",
        "L1", "kv-k1",
    ),
    _m("kv-not-returned", LIFE, "s.kv_free += r.blocks", "pass", "L1", "kv-k1"),
    _m(
        "fetch-waits-for-compute", FETCH, "if s.blocking and s.steps:", "if s.steps:", "L3",
        "expert-k2-s3",
    ),
    _m(
        "compute-waits-for-fetch", GROUP, "if s.blocking and (", "if (", "L3", "visit-k2-s3",
    ),
    _m(
        "forgets-to-retry", LIFE, "s.pending.insert(0, code)", "pass", "L1", "faults-k1",
    ),
    _m("newest-admitted-first", LIFE, "s.queue.pop(0)", "s.queue.pop()", "S2", "visit-k2-s2"),
    _m(
        "retries-for-ever", LIFE, "if fails <= s.options.retries:", "if True:", "L3", "lost-k1",
    ),
    _m(
        "failed-step-forgiven", LIFE, "e.requests or numbers", "e.requests", "L1", "failed-k2",
    ),
    _m(
        "drain-keeps-queue", LIFE, "    s.queue = []\n", "", "S2", "drain-k1",
    ),
)  # fmt: skip
