"""Every state that the shipped scheduler can get into, in a small world, breadth first.

A transition is one group of events followed by one ask (in a `batch` scope: either of them). Each
action is judged by `oracle.judge`; then the graph of all states is searched for ends that are not
the end (L1), for cycles (L2: progress never falls, so a cycle is one without progress) and for
states from which the end cannot be reached (L1). States are kept as 128-bit digests with their
parent and the number of the transition, so the shortest way to a fault can be told again as a log;
that and the edges are arrays of plain integers, about eighty bytes a state (oracle/seen.py).
"""

from __future__ import annotations

import gc
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from oracle import graph
from oracle.any_policy import AnyPolicy
from oracle.checkers import LOG_ONLY, check_log
from oracle.judge import Fault
from oracle.scopes import Scope
from oracle.seen import Level, Seen
from oracle.transitions import Make, Node, orbit, replay, replay_node, start, steps
from reference.control.scheduler import Scheduler


@dataclass
class Found:
    """A broken property, and the shortest way there: transitions by number, and the log."""

    property: str
    text: str
    also: list[str]
    path: list[int]
    log: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {
            "property": self.property,
            "text": self.text,
            "also": self.also,
            "path": self.path,
            "log": self.log,
        }


@dataclass
class Report:
    """What exploring one scope gave."""

    name: str
    canonical_states: int = 0
    raw_states: int = 0
    transitions: int = 0
    depth: int = 0
    violations: list[Found] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    truncated: bool = False

    def counts(self) -> dict[str, int]:
        """What is pinned."""
        return {
            "canonical_states": self.canonical_states,
            "raw_states": self.raw_states,
            "transitions": self.transitions,
            "depth": self.depth,
        }


def explorer_of(scope: Scope, limit: int = 0) -> Explorer:
    """As the scope wants it: the shipped policy, or any legal choice and safety alone."""
    if scope.any_policy:
        return Explorer(scope, AnyPolicy, limit, lively=False)
    return Explorer(scope, Scheduler, limit)


class Explorer:
    """Explores one scope; `run` gives the report, stopping at the first fault."""

    def __init__(
        self,
        scope: Scope,
        make: Make = Scheduler,
        limit: int = 0,
        work: bool = True,
        symmetric: bool = True,
        lively: bool = True,
        most: int = 100_000,
    ) -> None:
        """`limit`: give up after so many states (0: never). `work`: judge L3 too, and
        control's own book of its slots (S3). Not
        `symmetric`: states that differ only in the numbers of slots are explored one by one.
        Not `lively`: L1, L2 and L3 are not asked for (a policy that may hold everything back).
        `most`: nodes of a level that stay in memory, some eight kilobytes each."""
        self.most = most
        self.scope, self.make, self.limit, self.work = scope, make, limit, work
        self.symmetric, self.lively = symmetric, lively
        self.index = Seen()
        self.parent = array("I")
        self.via = array("H")
        self.sources, self.targets = array("I"), array("I")
        self.must = array("B")
        self.ends = array("I")
        self.report = Report(scope.name)

    def run(self) -> Report:
        """Raises nothing for faults of the scheduler: they are in the report."""
        began, worked = time.perf_counter(), time.process_time()
        collected = gc.isenabled()
        gc.disable()  # nodes hold no cycles, and there are many
        try:
            self._search()
        finally:
            if collected:
                gc.enable()
        report = self.report
        report.canonical_states = len(self.index)
        report.transitions = len(self.sources)
        if self.lively and not report.violations and not report.truncated:
            self._judge_graph()
        report.seconds = time.perf_counter() - began
        report.cpu_seconds = time.process_time() - worked
        return report

    def _search(self) -> None:
        scope, index = self.scope, self.index
        root = start(scope, self.make)
        index.add(root.digest(not self.symmetric))
        self.parent.append(0)
        self.via.append(0)
        level = Level(scope, self.most)
        level.append((0, root))
        self.report.raw_states = orbit(root.w)
        while level:
            following = Level(scope, self.most)
            for number, node in level.taken():
                if not self._expand(number, node, following):
                    return
            level = following
            self.report.depth += len(level) > 0
            self.progress(self.report.depth, len(index), len(level))
            if self.limit and len(index) > self.limit:
                self.report.truncated = True
                return

    def progress(self, depth: int, states: int, width: int) -> None:
        """Called after each level; for whoever watches a long search."""

    def _expand(self, number: int, node: Node, following: Level) -> bool:
        """Take every transition out of a node; False stops the search."""
        index, way_on = self.index, False
        for via, step in enumerate(steps(self.scope, node, self.symmetric)):
            if step.fault is not None and ((self.work and self.lively) or step.fault[0] != "L3"):
                self._found(step.fault, number, via)
                return False
            new = step.node
            way_on |= step.must
            try:
                digest = new.digest(not self.symmetric)
            except Exception as error:  # a fault may break the key, too
                text = f"control cannot tell its state: {type(error).__name__}: {error}"
                self._found(("L1", text), number, via)
                return False
            target = index.find(digest)
            if target < 0:
                target = index.add(digest)
                self.parent.append(number)
                self.via.append(via)
                self.report.raw_states += orbit(new.w)
                following.append((target, new))
                if self.work and new.disagrees():
                    self._found(("S3", "control's book of slots is not the truth"), number, via)
                    return False
            self.sources.append(number)
            self.targets.append(target)
            self.must.append(step.must)
        if not self.lively:
            return True
        w, s = node.w, node.s
        if node.asked and w.live and not w.moving:
            name = "S1" if s.idle else "L1"
            self._found((name, f"these wait for nothing: {w.live}"), number, None)
            return False
        if w.done and node.asked:
            if not s.idle:
                self._found(("L1", "everything has ended, but control is not idle"), number, None)
                return False
            self.ends.append(number)
        elif not way_on:
            self._found(("L1", "nothing can happen and this is not the end"), number, None)
            return False
        return True

    # -- the graph -------------------------------------------------------------------------

    def _judge_graph(self) -> None:
        """LIVE-2 (L2), then LIVE-1 (L1)."""
        n = len(self.index)
        cycle = graph.cycle(n, self.sources, self.targets)
        if cycle:
            text = f"a cycle of {len(cycle)} transitions without progress"
            self._found(("L2", text), cycle[0], None, cycle)
            return
        stuck = graph.cannot_reach(n, self.sources, self.targets, self.must, self.ends)
        if stuck is not None:
            self._found(("L1", "the end cannot be reached from here"), stuck, None)

    # -- telling ---------------------------------------------------------------------------

    def path(self, number: int) -> list[int]:
        """Transition numbers from the first state to this one."""
        out = []
        while number:
            out.append(self.via[number])
            number = self.parent[number]
        return out[::-1]

    def _found(
        self, fault: Fault, number: int, via: int | None, cycle: list[int] | None = None
    ) -> None:
        path = self.path(number) + ([] if via is None else [via])
        if cycle:
            path += self._around(cycle)
        strict = self.work and self.lively
        log = replay(self.scope, path, self.make, strict)
        violations = check_log(log, complete="end" in log[-1])
        broken = list(dict.fromkeys(v.property for v in violations))
        if not strict and "L3" in broken:
            broken.remove("L3")
        # The log's own verdict has the first word: the world tells apart less (S8 from S9). What is
        # judged on logs alone may be broken on the way, and is not the fault that was found.
        shown = [p for p in broken if p not in LOG_ONLY]
        name = fault[0] if fault[0] in broken or not shown else shown[0]
        also = [p for p in broken or [fault[0]] if p != name]
        self.report.violations.append(Found(name, fault[1], also, path, log))

    def _around(self, cycle: list[int]) -> list[int]:
        """Transition numbers once around a cycle of states."""
        path, node = [], replay_node(self.scope, self.path(cycle[0]), self.make)
        for target in cycle[1:] + cycle[:1]:
            for via, step in enumerate(steps(self.scope, node)):
                if step.fault is None and self.index.find(step.node.digest()) == target:
                    path.append(via)
                    node = step.node
                    break
        return path
