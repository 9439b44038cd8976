"""L8: situations that must occur somewhere, or the scopes show nothing about them (LIVE-8)."""

from __future__ import annotations

from collections.abc import Callable

from oracle.explorer import Explorer
from oracle.scope import Scope
from oracle.seen import Level
from oracle.transitions import Node
from oracle.world import (
    CANCELLED,
    LOADING,
    NEED,
    PHASE,
    QUARANTINED,
    READY,
    RUNNING,
    WHY,
)

Test = Callable[[Node], bool]


def _pinned(node: Node) -> bool:
    """Somebody wants a slot, and none may be given away."""
    cache = node.s.cache
    return bool(node.w.live) and not any(
        slot in cache.free or cache.evictable(slot) for slot in range(len(cache.state))
    )


def _waited_for_twice(node: Node) -> bool:
    wanted = node.s.cache.wanted
    return any(
        node.w.state[slot] == LOADING and wanted.get(code, 0) > 1
        for slot, code in enumerate(node.w.code)
    )


def _retrying(node: Node) -> bool:
    """Every transition out of a state is taken, so the retry's Loaded follows from here."""
    w = node.w
    return any(w.state[slot] == LOADING and code in w.fails for slot, code in enumerate(w.code))


SITUATIONS: dict[str, Test] = {
    "cache full": lambda n: n.w.state.count(READY) == len(n.w.state),
    "all slots pinned": _pinned,
    "double waiter on one load": _waited_for_twice,
    "cancel during load": lambda n: (
        LOADING in n.w.state and bool(n.w.scope.cancels) and not n.w.cancels
    ),
    "cancel during compute": lambda n: any(
        r[WHY] & CANCELLED and r[PHASE] == RUNNING for r in n.w.live
    ),
    "fail then retry ok": _retrying,
    "fail then give up": lambda n: any(
        fails > n.w.scope.options.retries for fails in n.w.fails.values()
    ),
    "quarantine then late completion": lambda n: QUARANTINED in n.w.state,
    "two transfers at once": lambda n: n.w.state.count(LOADING) > 1,
    "loading while a step runs": lambda n: LOADING in n.w.state and n.w.step is not None,
    "no room for a claim": lambda n: bool(n.w.live) and not n.s.cache.room(1),
    "a visit partly run": lambda n: any(r[PHASE] == RUNNING and r[NEED] for r in n.w.live),
    "two visits in one step": lambda n: n.w.step is not None and len(n.w.step[1]) > 1,
    "a failed step": lambda n: n.w.step_faults < n.w.scope.step_faults,
    "draining with requests running": lambda n: n.w.draining and bool(n.w.live),
    "a queue behind the admitted": lambda n: bool(n.s.queue) and bool(n.s.running),
}


class Watching(Explorer):
    """Notes in `seen` which situations occur, and in `at` the first state of each."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.at: dict[str, int] = {}

    def _expand(self, number: int, node: Node, following: Level) -> bool:
        for name, is_so in SITUATIONS.items():
            if name not in self.at and is_so(node):
                self.at[name] = number
        return super()._expand(number, node, following)
