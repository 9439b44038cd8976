"""From one state to the next, and the same again aloud.

A `Node` is a scheduler and the world around it. `steps` gives every transition out of a node;
`replay` tells a path, given as transition numbers, as an event log.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import permutations
from math import factorial
from typing import Any

from oracle.judge import Fault, obey
from oracle.scopes import Scope
from oracle.tell import Teller
from oracle.world import FREE, Events, World
from reference.control.scheduler import Scheduler
from reference.vocab.options import ControlOptions

Make = Callable[[ControlOptions], Any]
"""Builds the scheduler under test (the shipped one, or a mutant)."""


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

    def disagrees(self) -> bool:
        """Control's book of the slots is not what is true of them (S3)."""
        return self.s.cache.state != self.w.state or self.s.cache.code != self.w.code

    def digest(self, numbered: bool = False) -> bytes:
        """128 bits of the canonical form; `numbered`: slots count as different by their numbers.

        Slots are left unnumbered only where control's book of them agrees with the truth; then
        its own key, which lists their contents, describes both.
        """
        s, w = self.s, self.w
        cache = s.cache
        named = numbered or self.disagrees()
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


def orbit(w: World) -> int:
    """How many states differ from this one only in the numbers of the slots."""
    return factorial(len(w.state)) // factorial(w.state.count(FREE))


def replay_node(scope: Scope, path: list[int], make: Make = Scheduler) -> Node:
    """The state at the end of a path of transition numbers."""
    node = start(scope, make)
    for via in path:
        node = next(s for i, s in enumerate(steps(scope, node)) if i == via).node
    return node


def replay(
    scope: Scope, path: list[int], make: Make = Scheduler, book: bool = True
) -> list[dict[str, Any]]:
    """The event log of a path, head first; whole when the path ends at the end.

    `book`: each ask carries control's own count of its slots, for S3.
    """
    teller = Teller(scope, book)
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
        teller.close(node.s.cache.state)
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
    teller.ask(channels, lanes, node.s.cache.state)
    try:
        actions = node.s.next_actions(channels, lanes, _Choices(script))
    except Exception:
        return
    for action in actions:
        teller.action(action)
