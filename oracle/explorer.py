"""Every state that the shipped scheduler can get into, in a small world, breadth first.

A transition is one group of events followed by one ask (in a `batch` scope: either of them). Each
action is judged by `oracle.judge`; then the graph of all states is searched for ends that are not
the end (L1), for cycles (L2: progress never falls, so a cycle is one without progress) and for
states from which the end cannot be reached (L1). States are kept as 128-bit digests with their
parent and the number of the transition, so the shortest way to a fault can be told again as a log.
"""

from __future__ import annotations

import gc
import marshal
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import permutations
from math import factorial
from typing import Any

from oracle import graph
from oracle.checkers import check_log
from oracle.judge import Fault, obey
from oracle.scopes import Scope
from oracle.tell import Teller
from oracle.world import FREE, Events, World
from reference.control.scheduler import Scheduler
from reference.vocab.options import ControlOptions

Make = Callable[[ControlOptions], Any]
"""Builds the scheduler under test (the shipped one, or a mutant)."""


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


class _Choices:
    """Answers `choose` along a script, then with the first; `next` is the script after."""

    __slots__ = ("at", "script", "widths")

    def __init__(self, script: list[int]) -> None:
        self.script, self.at, self.widths = script, 0, []

    def __call__(self, options: list) -> int:
        picked = self.script[self.at] if self.at < len(self.script) else 0
        self.at += 1
        self.widths.append((len(options), picked))
        return picked

    def next(self) -> list[int] | None:
        """The next script in order, or None after the last."""
        widths = self.widths
        while widths:
            width, picked = widths.pop()
            if picked + 1 < width:
                return [p for _, p in widths] + [picked + 1]
        return None


class Node:
    """A scheduler, the world around it, and whether it was asked since the last event."""

    __slots__ = ("asked", "s", "w")

    def __init__(self, s: Any, w: World, asked: bool) -> None:
        self.s, self.w, self.asked = s, w, asked

    def digest(self, numbered: bool = False) -> bytes:
        """128 bits of the canonical form; `numbered`: slots count as different by their numbers.

        Slots are left unnumbered only where control's book of them agrees with the truth; then
        its own key, which lists their contents, describes both.
        """
        s, w = self.s, self.w
        cache = s.cache
        named = numbered or cache.state != w.state or cache.code != w.code
        key = (s.key(), w.key(named), self.asked, (cache.state, cache.code) if named else 0)
        try:
            data = marshal.dumps(key, 2)
        except ValueError:
            data = repr(key).encode()
        return blake2b(data, digest_size=16).digest()


@dataclass
class Step:
    """One transition: what happened, which choices were taken, and what came of it."""

    events: Events
    script: list[int]
    must: bool
    node: Node
    fault: Fault | None


def ask(node: Node, choose: Any) -> Fault | None:
    """One ask, obeyed and judged."""
    channels, lanes = node.w.idle()
    node.asked = True
    return obey(node.w, node.s.next_actions(channels, lanes, choose), channels, lanes)


def steps(scope: Scope, node: Node, symmetric: bool = True) -> Iterator[Step]:
    """All transitions out of a node, always in the same order.

    Not `symmetric`: once for each order in which the free slots might have been given out.
    """
    if not symmetric:
        for order in permutations(node.s.cache.free):
            again = Node(node.s.copy(), node.w, node.asked)
            again.s.cache.free = list(order)
            yield from steps(scope, again)
        return
    if not node.asked:
        yield from _answers(scope, node, (), True)
    for events, must in node.w.events():
        if scope.batch:
            new = Node(node.s.copy(), node.w.copy(), False)
            yield Step(events, [], must, new, _tell(new, events))
        else:
            yield from _answers(scope, node, events, must)


def _answers(scope: Scope, node: Node, events: Events, must: bool) -> Iterator[Step]:
    """The events and the ask, once for each of control's equally good choices."""
    script: list[int] | None = []
    while script is not None:
        new = Node(node.s.copy(), node.w.copy(), True)
        choices = _Choices(script)
        fault = _tell(new, events)
        if fault is None:
            try:
                fault = ask(new, choices)
            except Exception as error:  # a mutant may do anything
                fault = ("L1", f"the ask raised {type(error).__name__}: {error}")
        yield Step(events, script, must, new, fault)
        script = choices.next()


def _tell(node: Node, events: Events) -> Fault | None:
    try:
        for event in events:
            node.w.happen(event)
            node.s.handle(event)
    except Exception as error:
        return "L1", f"{events} raised {type(error).__name__}: {error}"
    return None


def start(scope: Scope, make: Make) -> Node:
    """The first state: `initial` requests have arrived, nobody has asked."""
    node = Node(make(scope.options), World(scope), False)
    for number in range(min(scope.initial, len(scope.requests))):
        _tell(node, (node.w.arrival(number),))
    return node


class Explorer:
    """Explores one scope; `run` gives the report, stopping at the first fault."""

    def __init__(
        self,
        scope: Scope,
        make: Make = Scheduler,
        limit: int = 0,
        work: bool = True,
        symmetric: bool = True,
    ) -> None:
        """`limit`: give up after so many states (0: never). `work`: judge L3 too. Not
        `symmetric`: states that differ only in the numbers of slots are explored one by one."""
        self.scope, self.make, self.limit, self.work = scope, make, limit, work
        self.symmetric = symmetric
        self.index: dict[bytes, int] = {}
        self.parent = array("L")
        self.via = array("L")
        self.sources, self.targets = array("L"), array("L")
        self.must = array("B")
        self.ends: list[int] = []
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
        if not report.violations and not report.truncated:
            self._judge_graph()
        report.seconds = time.perf_counter() - began
        report.cpu_seconds = time.process_time() - worked
        return report

    def _search(self) -> None:
        scope, index = self.scope, self.index
        root = start(scope, self.make)
        index[root.digest(not self.symmetric)] = 0
        self.parent.append(0)
        self.via.append(0)
        level: list[tuple[int, Node]] = [(0, root)]
        self.report.raw_states = orbit(root.w)
        while level:
            following: list[tuple[int, Node]] = []
            for number, node in level:
                if not self._expand(number, node, following):
                    return
            level = following
            self.report.depth += bool(level)
            if self.limit and len(index) > self.limit:
                self.report.truncated = True
                return

    def _expand(self, number: int, node: Node, following: list[tuple[int, Node]]) -> bool:
        """Take every transition out of a node; False stops the search."""
        index, way_on = self.index, False
        for via, step in enumerate(steps(self.scope, node, self.symmetric)):
            if step.fault is not None and (self.work or step.fault[0] != "L3"):
                self._found(step.fault, number, via)
                return False
            new = step.node
            way_on |= step.must
            digest = new.digest(not self.symmetric)
            target = index.get(digest)
            if target is None:
                target = index[digest] = len(index)
                self.parent.append(number)
                self.via.append(via)
                self.report.raw_states += orbit(new.w)
                following.append((target, new))
            self.sources.append(number)
            self.targets.append(target)
            self.must.append(step.must)
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
        log = replay(self.scope, path, self.make)
        violations = check_log(log, complete="end" in log[-1])
        broken = list(dict.fromkeys(v.property for v in violations))
        if not self.work and "L3" in broken:
            broken.remove("L3")
        # The log's own verdict has the first word: the world tells apart less (S8 from S9).
        name = fault[0] if fault[0] in broken or not broken else broken[0]
        also = [p for p in broken or [fault[0]] if p != name]
        self.report.violations.append(Found(name, fault[1], also, path, log))

    def _around(self, cycle: list[int]) -> list[int]:
        """Transition numbers once around a cycle of states."""
        path, node = [], replay_node(self.scope, self.path(cycle[0]), self.make)
        for target in cycle[1:] + cycle[:1]:
            for via, step in enumerate(steps(self.scope, node)):
                if step.fault is None and self.index.get(step.node.digest()) == target:
                    path.append(via)
                    node = step.node
                    break
        return path


def orbit(w: World) -> int:
    """How many states differ from this one only in the numbers of the slots."""
    return factorial(len(w.state)) // factorial(w.state.count(FREE))


def replay_node(scope: Scope, path: list[int], make: Make = Scheduler) -> Node:
    """The state at the end of a path of transition numbers."""
    node = start(scope, make)
    for via in path:
        node = next(s for i, s in enumerate(steps(scope, node)) if i == via).node
    return node


def replay(scope: Scope, path: list[int], make: Make = Scheduler) -> list[dict[str, Any]]:
    """The event log of a path, head first; whole when the path ends at the end."""
    teller = Teller(scope)
    node = Node(make(scope.options), World(scope), False)
    for number in range(min(scope.initial, len(scope.requests))):
        _retell(scope, teller, node, (node.w.arrival(number),), None)
    for via in path:
        step = next(s for i, s in enumerate(steps(scope, node)) if i == via)
        asks = not (scope.batch and step.events)
        again = Node(node.s.copy(), node.w.copy(), node.asked)
        _retell(scope, teller, again, step.events, step.script if asks else None)
        node = step.node
    if node.asked and node.w.done:
        teller.end()
    else:
        teller.close()
    return teller.records


def _retell(
    scope: Scope, teller: Teller, node: Node, events: Events, script: list[int] | None
) -> None:
    """Make a transition again, aloud; a fault cuts it off where it cut it off before."""
    for event in events:
        teller.event(event)
        if _tell(node, (event,)):
            return
    if script is None:
        return
    channels, lanes = node.w.idle()
    teller.ask(channels, lanes)
    try:
        actions = node.s.next_actions(channels, lanes, _Choices(script))
    except Exception:
        return
    for action in actions:
        teller.action(action)
