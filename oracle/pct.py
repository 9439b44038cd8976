"""Beyond the scopes: randomised schedules with a stated chance to miss (probabilistic
concurrency testing).

The threads are what an executor does by itself: requests arriving, each slot's transfer, the
step, the failed reads, the failed steps, the cancels. Each gets a random priority; at each step
the event of the highest thread that has one happens; at d - 1 random points the highest falls
below all others. A fault that needs d orderings among n threads in k steps is found by a run with
a chance of at least 1 / (n k^(d-1)). Which experts are routed is drawn evenly and is no part of
the bound. Every action is judged as in the small worlds; a run must end (L1).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from oracle.judge import Fault
from oracle.scope import Scope, scope
from oracle.transitions import Make, Node, _tell, ask, start
from oracle.world import Events
from reference.control.scheduler import Scheduler
from reference.vocab import events as ev

_SOME = ((1, 2), (2, 1), (1, 2))
WORLDS: tuple[Scope, ...] = (
    scope("pct-visit", "", (2, 5, 2, 4), _SOME, initial=1, channels=2, load_faults=1,
          undrained=True, cancels=1, step_faults=1),
    scope("pct-expert", "", (2, 5, 2, 3), _SOME, initial=1, channels=2, load_faults=1,
          undrained=True, cancels=1, readiness="expert", eviction="global"),
    scope("pct-fewest", "", (2, 5, 2, 3), _SOME, initial=1, load_faults=2, cancels=1,
          fetch_order="fewest-missing", max_lag=3),
    scope("pct-lockstep", "", (2, 4, 2, 4), _SOME, initial=1, channels=2, load_faults=1,
          undrained=True, cancels=1, grouping="lockstep"),
)  # fmt: skip
MOST = 400
"""Steps after which a run counts as one that does not end."""


@dataclass
class Tally:
    """What some runs came to. threads, steps: the most that any run had (n and k)."""

    runs: int = 0
    threads: int = 0
    steps: int = 0
    transitions: int = 0
    fault: Fault | None = None
    seed: int = -1

    def chance(self, d: int) -> float:
        """The least chance of a run to find a fault of depth d."""
        return 1.0 / (self.threads * self.steps ** (d - 1))

    def miss(self, d: int) -> float:
        """The greatest chance that all the runs miss it."""
        return (1.0 - self.chance(d)) ** self.runs

    def __str__(self) -> str:
        told = ", ".join(f"d={d}: {self.miss(d):.2g}" for d in (1, 2, 3))
        return (
            f"{self.runs} schedules, n={self.threads} threads, k={self.steps} steps, "
            f"{self.transitions} transitions; chance to miss a fault of depth {told}"
        )


def _thread(events: Events, slots: dict[int, int]) -> str:
    """Whose event this is; a transfer belongs to its slot."""
    first = events[0]
    if isinstance(first, ev.Loaded):
        return f"slot {slots[first.ticket]}"
    if isinstance(first, ev.LoadFailed):
        return "failing reads" if first.drained else "late writes"
    return type(first).__name__


def run(world: Scope, seed: int, d: int, length: int, tally: Tally, make: Make) -> None:
    """One schedule; raises nothing, a fault is in the tally."""
    rng = random.Random(f"{world.name} {seed}")
    node: Node = start(world, make)
    points = {rng.randrange(length) for _ in range(d - 1)}
    rank: dict[str, float] = {}
    fault = ask(node, lambda options: rng.randrange(len(options)))
    at = 0
    while fault is None and not node.w.done:
        slots = {t: i for i, t in enumerate(node.w.ticket) if t}
        by_thread: dict[str, list[Events]] = {}
        for events, _ in node.w.events():
            by_thread.setdefault(_thread(events, slots), []).append(events)
        for name in by_thread:
            rank.setdefault(name, rng.random())
        if not by_thread or at >= MOST:
            fault = ("L1", f"not the end after {at} steps: {node.w.live}")
            break
        best = max(by_thread, key=rank.__getitem__)
        if at in points:
            rank[best] = -at - 1.0
            best = max(by_thread, key=rank.__getitem__)
        events = rng.choice(by_thread[best])
        fault = _tell(node, events)
        if fault is None:
            try:
                fault = ask(node, lambda options: rng.randrange(len(options)))
            except Exception as error:
                fault = ("L1", f"the ask raised {type(error).__name__}: {error}")
        at += 1
    if fault is None and not node.s.idle:
        fault = ("L1", "everything has ended, but control is not idle")
    tally.runs += 1
    tally.threads, tally.steps = max(tally.threads, len(rank)), max(tally.steps, at)
    tally.transitions += at
    if fault is not None and tally.fault is None:
        tally.fault, tally.seed = fault, seed


def pct(world: Scope, runs: int, d: int = 3, first: int = 0, make: Make = Scheduler) -> Tally:
    """Runs with the seeds from `first`, stopping at the first fault. The points where priorities
    fall lie within the length of the longest run so far."""
    tally, length = Tally(), 40
    for seed in range(first, first + runs):
        run(world, seed, d, length, tally, make)
        length = max(40, tally.steps)
        if tally.fault is not None:
            break
    return tally
