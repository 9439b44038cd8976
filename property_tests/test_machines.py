"""Rule-based machines over the cache, the scheduler and the engine; and how good they are.

A machine that finds nothing proves little unless it finds what is known to be there: each seeded
fault must be found within EXAMPLES examples and shrunk to the shortest trace that there is. In CI
the examples are the same every time; `--hypothesis-profile=search` draws new ones, and more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from engines import alone
from hypothesis.stateful import initialize, run_state_machine_as_test

import jax_impl.holdings
import jax_impl.transfer
from oracle.patching import Mutant, mutated
from property_tests.machine import Traced, hunt, machine_settings
from property_tests.machine_cache import CacheMachine
from property_tests.machine_control import ControlMachine
from property_tests.machine_engine import ASKED, EngineMachine
from reference.control.eviction_counts import Adaptive, Frequency
from reference.control.eviction_frequency import Named
from reference.vocab.options import ControlOptions

EXAMPLES = 200
"""Within so many every seeded fault is found."""
CACHE, FETCH, LIFE, COUNTS = (
    f"reference.control.{name}" for name in ("cache", "fetch", "lifecycle", "eviction_counts")
)


def play(machine: type[Traced], examples: int, steps: int) -> Counter:
    """Run the machine; how often each kind of step was taken."""
    mine = type(machine.__name__, (machine,), {"runs": [], "broken": []})
    run_state_machine_as_test(mine, settings=machine_settings(examples, steps))
    return Counter(step.split(",")[0] for run in mine.runs for step in run)


# -- the shipped code


@pytest.mark.rule(
    "CACHE-3", "CACHE-4", "CACHE-5", "CACHE-6", "CACHE-7", "CACHE-8", "CACHE-9", "FETCH-4",
    "CACHE-10", "CACHE-11", "CACHE-12", "CACHE-13", "CACHE-14",
)  # fmt: skip
def test_the_cache_is_what_lists_say(monkeypatch: pytest.MonkeyPatch) -> None:
    # Counts are halved and shares change hands within so few steps.
    monkeypatch.setattr(Frequency, "LIMIT", 3)
    monkeypatch.setattr(Adaptive, "STEP", 1)
    monkeypatch.setattr(Named, "PASSES", 2)
    taken = play(CacheMachine, 150, 50)
    kinds = {step.split()[0] for step in taken}
    assert kinds == {
        "begin", "loaded", "failed", "read", "release", "want", "served", "hold", "let", "enter",
        "look", "end",
    }  # fmt: skip


@pytest.mark.rule(
    "ADMIT-1", "ADMIT-2", "ADMIT-3", "ADMIT-4", "CANCEL-1", "CANCEL-2", "SCHED-1", "SCHED-3",
    "SCHED-4", "SCHED-5", "SCHED-6", "SCHED-7", "SCHED-9", "SCHED-10", "SCHED-11", "CACHE-2",
    "CACHE-7", "CACHE-9", "FETCH-2", "FETCH-6", "FETCH-7",
)  # fmt: skip
def test_the_scheduler_is_what_the_books_say() -> None:
    taken = play(ControlMachine, 200, 50)
    assert set(taken) >= {
        "begin", "arrive", "loaded", "load failed", "late", "computed", "step failed", "cancel",
        "drain",
    }  # fmt: skip


@pytest.mark.rule("ENGINE-6", "ENGINE-7", "ENGINE-12", "XFER-7", "XFER-8")
def test_the_engine_keeps_the_promises_of_its_handles() -> None:
    taken = play(EngineMachine, 60, 25)
    assert set(taken) >= {"submit", "complete", "fail", "stall", "cancel", "drain", "close"}


# -- seeded faults: found, and shrunk to what is known to be the least


def control_world(
    shapes: list[tuple[int, int]], budgets: dict[str, int], **options: Any
) -> type[ControlMachine]:
    """A machine whose options and first requests are given; nothing else arrives."""
    base = ControlOptions(
        layers=(0,), experts=4, top_k=2, slots=2, chunk=1, kv_block=1, kv_tokens=64
    )

    def start(self: ControlMachine) -> None:
        self.begin(base.with_(**options), 1, shapes)

    more = {"arrivals": len(shapes), "start": initialize()(start)}
    return type("World", (ControlMachine,), more | budgets)


FREED = """s.pending = [c for c in s.pending if c in s.cache.holds]
        for code in r.need:
            slot = s.cache.where.get(code)
            if slot is not None and s.cache.state[slot] == 1:
                s.cache._forget(slot)"""
UNDRAINED = "if not drained:\n                self"
TWO, THREE = [(1, 2)] * 2, [(1, 2)] * 3
RECENT = ("per-layer", "global")
BROKEN_CACHES = {
    # The least recently used of two: both must be there, in a full cache.
    "most-recent-goes": (
        CACHE, "for slot in order:", "for slot in reversed(list(order)):", RECENT, 4,
    ),
    "quarantine-is-free": (
        CACHE, UNDRAINED, "if False:\n                self", RECENT, 2,
    ),
    # As above, and the older one is read.
    "use-does-not-count": (
        CACHE, "if not bulk or promote:\n", "if bulk and promote:\n", RECENT, 5,
    ),
    "claims-hold-nothing": (CACHE, "and code not in self.holds\n", "and True\n", RECENT, 3),
    # CACHE-13: the newcomer's layer has its share and no more.
    "share-is-exceeded": (COUNTS, ">= self.shares[own]", "> self.shares[own]", ("adaptive",), 4),
}  # fmt: skip


@pytest.mark.rule("CACHE-3", "CACHE-5", "CACHE-9", "CACHE-13")
@pytest.mark.parametrize("name", BROKEN_CACHES)
def test_a_broken_cache_is_found(name: str) -> None:
    where, old, new, evictions, least = BROKEN_CACHES[name]
    with mutated(Mutant(name, where, old, new, "")) as module:
        broken: Any = module
        parts = {"make": broken.ExpertCache, "evictions": evictions}
        found = hunt(type("Broken", (CacheMachine,), parts), EXAMPLES, 22)
    assert found is not None
    assert len(found.shortest) == least, found


BROKEN_CONTROLS = {
    # A load is in flight only after a router has spoken; then it must fail, and may still land.
    "slot-handed-out-while-written": (
        CACHE, UNDRAINED, "if False:\n                self",
        control_world(TWO, {}), ["begin", "computed", "load failed, drained=False"],
    ),
    # Nothing less than a load in flight and the cancel of who wanted it.
    "cancel-frees-a-loading-slot": (
        LIFE, "s.pending = [c for c in s.pending if c in s.cache.holds]", FREED,
        control_world(TWO, {}), ["begin", "computed", "cancel"],
    ),
    # Three visits lack two experts each. One is served and passes the others over; when both of
    # its experts have come, one of the others lacks less, and may not go before the older.
    "fewest-missing-without-FETCH-7": (
        FETCH, "if r.passed < s.max_lag", "if True",
        control_world(THREE, {"faults": 0, "cancellable": 0, "drains": 0}, experts=5, slots=4,
                      fetch_order="fewest-missing", max_lag=1),
        ["begin", "computed", "loaded", "loaded"],
    ),
}  # fmt: skip


@pytest.mark.rule("CACHE-9", "CANCEL-1", "FETCH-7")
@pytest.mark.parametrize("name", BROKEN_CONTROLS)
def test_a_broken_scheduler_is_found(name: str) -> None:
    where, old, new, world, least = BROKEN_CONTROLS[name]
    assert hunt(world, 50, 20) is None, "the shipped one is not blamed"
    with mutated(Mutant(name, where, old, new, "")) as module:
        broken: Any = module
        found = hunt(type("Broken", (world,), {"make": broken.Scheduler}), EXAMPLES, 20)
    assert found is not None and found.shortest == least, found


@pytest.mark.rule("ENGINE-12")
def test_an_engine_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV blocks of a request that ends are forgotten: it must come and end, no more."""

    def leak(self: Any, number: int) -> None:
        running = self.running.pop(number, None)
        if running is not None:
            self.give_rows(running)

    for asked in ASKED:
        alone(asked)
    monkeypatch.setattr(jax_impl.holdings.Holdings, "end", leak)
    found = hunt(EngineMachine, EXAMPLES, 8)
    assert found is not None and found.shortest == ["begin", "submit", "cancel"], found


@pytest.mark.rule("XFER-7", "CACHE-9")
def test_an_engine_that_calls_a_hanging_load_drained_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The retry goes into the slot that is still being written."""
    for asked in ASKED:
        alone(asked)
    real = jax_impl.transfer.Transfers.expire
    monkeypatch.setattr(
        jax_impl.transfer.Transfers, "expire",
        lambda self: [replace(late, drained=True) for late in real(self)],
    )  # fmt: skip
    found = hunt(EngineMachine, EXAMPLES, 5)
    assert found is not None and found.shortest == ["begin", "submit", "stall"], found
