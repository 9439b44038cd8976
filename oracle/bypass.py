"""L4, bounded bypass: how often a visit is passed by others that came to their router after it.

`bypass` explores a scope with the counts, and the order of arrival at the routers, in the state:
what it returns is the greatest count in any state that can be reached, so it is a bound for the
scope. A visit is passed when it lacks an expert, the lag bound does not hold it, and in an ask that
leaves it as it was a visit of its class that was routed later claims its experts or has one loaded.
"""

from __future__ import annotations

from typing import Any

from oracle.explorer import Explorer, Report
from oracle.scope import Scope
from reference.control.requests import RUNNING, WAITING
from reference.control.scheduler import Scheduler
from reference.vocab.actions import Load

BOUNDS = {
    "thrash-k1": 1, "lag-k1": 1, "visit-k2-s2": 0, "visit-k2-s3": 0, "expert-k2-s3": 1,
    "fewest-k2": 1, "first-come-k1": 1, "three-k2-s4": 2,
}  # fmt: skip
"""LIVE-4: scope -> B, proved by exploring all of it."""


def watching(base: type, worst: list[int]) -> type:
    """`base` (the shipped scheduler or a mutant of it) with the counts as part of its state."""

    class Watched(base):
        __slots__ = ("passes",)

        def __init__(self, options: Any) -> None:
            super().__init__(options)
            self.passes: dict[int, int] = {}

        def copy(self) -> Any:
            plain, new = super().copy(), Watched.__new__(Watched)
            for name in base.__slots__:  # type: ignore[attr-defined]
                setattr(new, name, getattr(plain, name))
            new.passes = self.passes.copy()
            return new

        def key(self) -> tuple:
            place = {n: i for i, n in enumerate(self.running)}
            return (
                *super().key(),
                tuple([self.passes.get(n, 0) for n in self.running]),
                tuple([place[n] for n in self.routed_order]),
            )

        def next_actions(self, *args: Any) -> Any:
            self.floor = self.least(False)
            lacking = {n: _lacks(self, n) for n in self.routed_order}
            claimed = {n for n, r in self.running.items() if r.claimed}
            actions = super().next_actions(*args)
            loaded = {
                self.options.layers.index(a.key[0]) * self.experts + a.key[1]
                for a in actions
                if isinstance(a, Load)
            }
            served = [
                n
                for n, before in lacking.items()
                if n in self.running
                and ((self.running[n].claimed and n not in claimed) or before & loaded)
            ]
            order = list(lacking)
            for n, before in lacking.items():
                if n not in self.running or n in served or _lacks(self, n) != before or not before:
                    self.passes.pop(n, None)
                    continue
                bulk = self.running[n].bulk
                later = [
                    x
                    for x in served
                    if order.index(x) > order.index(n) and self.running[x].bulk == bulk
                ]
                if later:
                    self.passes[n] = self.passes.get(n, 0) + len(later)
                    worst[0] = max(worst[0], self.passes[n])
            return actions

    return Watched


def _lacks(s: Any, number: int) -> set[int]:
    """Experts that the visit waits for and nobody has promised it."""
    r = s.running[number]
    if r.claimed or r.doomed is not None or r.status not in (WAITING, RUNNING):
        return set()
    return {c for c in r.need if s.absent(c)} if s.eligible(r) else set()


def bypass(scope: Scope, base: type = Scheduler, limit: int = 0) -> tuple[int, Report]:
    """(the greatest number of passes in any reachable state, what exploring gave)."""
    worst = [0]
    report = Explorer(scope, watching(base, worst), limit).run()
    return worst[0], report
