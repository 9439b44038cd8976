"""The eviction policies alone, against the obvious ones, in traffic that is like a cache's."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from oracle.patching import Mutant, mutated
from property_tests.obvious_evictions import PLAIN, Pooled
from reference.control import eviction_counts
from reference.control.eviction_frequency import Named
from reference.vocab.options import EVICTIONS

COUNTS, EVICT = "reference.control.eviction_counts", "reference.control.eviction"
FREQUENCY = "reference.control.eviction_frequency"
SEEDS, TURNS = 36, 300
LONGER = {"adaptive": 3, "frequency": 6}
"""What takes more turns to show."""


class Traffic:
    """Slots that are filled, used and given away; `agree` compares the whole order of going. Every
    third has slots for layers that remember more than one expert."""

    def __init__(self, name: str, seed: int, module: Any = eviction_counts) -> None:
        rng = self.rng = random.Random(f"{name} {seed}")
        self.slots, self.layers, self.experts = rng.randint(2, 12), rng.randint(1, 4), 6
        if seed % 3 == 2:
            self.slots, self.layers, self.experts = rng.randint(16, 40), rng.randint(1, 2), 24
        elif seed % 3 == 1:
            self.experts = rng.randint(1, 8)
        self.regret = seed // 3 % 4
        shape = (self.slots, self.layers, self.experts)
        self.policy = module.POLICIES[name](*shape)
        self.plain: Any = PLAIN[name](name, *shape)
        self.ready: dict[int, int] = {}
        self.loading: dict[int, int] = {}

    def tell(self, what: str, *values: Any) -> None:
        getattr(self.policy, what)(*values)
        getattr(self.plain, what)(*values)

    def turn(self) -> None:
        """An expert is named; it is used, or read into the slot of another; or something else."""
        rng = self.rng
        if rng.random() < 0.1:
            self.other()
            return
        # Few experts are named often, so that they come back.
        code = min(rng.randrange(self.layers * self.experts) for _ in range(2))
        if self.ready and self.regret & 1 and rng.random() < 0.3:  # what would go next is named
            code = self.ready[self.order(code)[0]]
        gone = [c for c in getattr(self.plain, "past", ()) if c < self.experts]
        if gone and self.regret & 2 and rng.random() < 0.3:  # what has just gone from layer 0 is
            code = rng.choice(gone)
        slot = next((s for s, c in self.ready.items() if c == code), -1)
        self.tell("named", rng.randrange(3), [(code, slot, rng.random() < 0.7)])
        more = [c for c in range(code, code + 2) if c // self.experts == code // self.experts]
        if rng.random() < 0.3:  # by somebody who needs two
            there = {c: s for s, c in self.ready.items()}
            self.tell("named", 3, [(c, there.get(c, -1), rng.random() < 0.7) for c in more])
        if rng.random() < 0.03:
            self.tell("ended", rng.randrange(4))
        if slot >= 0:
            self.tell("demote" if rng.random() < 0.1 else "use", slot, code)
        elif code not in self.loading.values():
            free = set(range(self.slots)) - self.ready.keys() - self.loading.keys()
            if free:
                slot = min(free)
            elif self.ready:
                kept = rng.choice([*self.ready, -1])
                order = [s for s in self.order(code) if s != kept]
                if not order:
                    return
                slot = order[0]
                self.tell("drop", slot, self.ready[slot])
                self.tell("gone", self.ready.pop(slot))
            else:
                return
            self.tell("begin", code)
            self.loading[slot] = code
        for slot, code in list(self.loading.items()):
            if rng.random() < 0.7:
                del self.loading[slot]
                if rng.random() < 0.1:
                    self.tell("gone", code)
                else:
                    self.ready[slot] = code
                    self.tell("arrive", slot, code)

    def other(self) -> None:
        rng = self.rng
        self.tell("entered", rng.randint(1, 3), 3)
        self.tell("look", [rng.randint(-1, self.layers - 1) for _ in range(rng.randint(0, 2))])
        old, self.policy = self.policy, self.policy.copy()
        assert self.policy.extra(range(4)) == old.extra(range(4))
        assert [list(x) for x in self.policy.ranks()] == [list(x) for x in old.ranks()]
        for slot, code in self.ready.items():  # the old one is spoilt
            old.named(slot % 2, [(code, slot, True)])
            old.use(slot, code)
            old.drop(slot, code)
            old.gone(code)
        old.ended(2)
        old.entered(9, 1)

    def order(self, code: int) -> list[int]:
        return [slot for slots in self.policy.victims(code) for slot in slots]

    def agree(self) -> bool:
        code = self.rng.randrange(self.layers * self.experts)
        plain = sorted(self.ready, key=lambda s: self.plain.rank(s, self.ready[s], code))
        return self.order(code) == plain


def first_difference(name: str, seeds: int, turns: int, module: Any = eviction_counts) -> Any:
    """(seed, turn) at which a policy does not do what the obvious one does, or fails; else None."""
    for seed in range(seeds):
        traffic = Traffic(name, seed, module)
        for turn in range(turns):
            try:
                traffic.turn()
                same = traffic.agree()
            except (KeyError, AssertionError):
                same = False
            if not same:
                return seed, turn
    return None


@pytest.mark.rule("CACHE-5", "CACHE-10", "CACHE-11", "CACHE-12", "CACHE-13", "CACHE-14")
@pytest.mark.parametrize("name", EVICTIONS)
def test_policies_order_slots_as_the_obvious_ones_do(name: str) -> None:
    assert first_difference(name, SEEDS, LONGER.get(name, 1) * TURNS) is None


@pytest.mark.rule("CACHE-14")
def test_what_fades_to_nothing_is_as_if_it_had_never_been(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is halved so often that of most requests nothing is left but what they named last."""
    monkeypatch.setattr(Named, "PASSES", 2)
    monkeypatch.setattr(Pooled, "passes", 2)
    assert first_difference("frequency", SEEDS, 2 * TURNS) is None


@pytest.mark.rule("CACHE-10", "CACHE-13")
@pytest.mark.parametrize("name", ["lfu", "lfru", "known-demand", "adaptive", "frequency"])
def test_nothing_counts_for_ever(name: str) -> None:
    """Whatever happens, the counts stay below their limit, and shares keep their sum."""
    traffic = Traffic(name, 0)
    policy = traffic.policy
    shares = sum(getattr(policy, "shares", []))
    for _ in range(3000):
        traffic.turn()
        if name == "adaptive":
            assert max(policy.gain + policy.loss) < 32
            assert sum(policy.shares) == shares and min(policy.shares) >= 1
            assert all(len(past) <= policy.reach for past in policy.past)
        elif name == "frequency":
            sums = [sum(policy.count[i * 6 : i * 6 + 6]) for i in range(traffic.layers)]
            assert policy.total == sums and policy.passes < 32
            assert max(policy.once) < 64 * 4 and max(policy.runs) <= 3 >= max(policy.last)
        else:
            assert max(policy.count) < 16


@pytest.mark.rule("CACHE-14")
def test_what_a_visit_counts_while_its_request_runs() -> None:
    """Worked by hand: 1 for ever, 3 more while the request runs, 8 more until its next visit."""
    policy = eviction_counts.POLICIES["frequency"](4, 2, 3)
    for slot, code in enumerate((0, 1, 3)):
        policy.begin(code)
        policy.arrive(slot, code)
    policy.named(7, [(0, 0, True), (1, 1, True)])
    policy.named(7, [(3, 2, True)])
    policy.named(9, [(0, 0, False), (2, -1, True)])
    assert policy.count == [24, 12, 12, 12, 0, 0]
    policy.named(7, [(1, 1, True), (2, -1, False)])  # its last visit of the layer named 0 and 1
    assert policy.count == [16, 16, 24, 12, 0, 0] and policy.total == [56, 12]
    policy.ended(7)
    assert policy.count == [13, 2, 13, 1, 0, 0] and policy.total == [28, 1]
    # 2 over 28 and two slots, 13 over the same; half as much again of 1 over 1 and one slot
    assert [list(slots) for slots in policy.victims(2)] == [[1], [0], [2]]
    for _ in range(32):
        policy.entered(1, 1)
    assert policy.count == [10, 1, 10, 0, 0, 0]  # halves of 2 and 3, and 8
    policy.ended(9)
    assert policy.count == [1, 1, 1, 0, 0, 0]


@pytest.mark.rule("CACHE-12")
def test_how_far_a_pass_is_belongs_to_the_state() -> None:
    policy = eviction_counts.POLICIES["least-stale"](4, 2, 6)
    assert policy.extra(()) == (0,)
    policy.entered(2, 3)
    assert policy.extra(()) == (2,) == policy.copy().extra(())
    policy.entered(1, 3)
    assert policy.extra(()) == (0,)
    assert eviction_counts.POLICIES["per-layer"](4, 2, 6).extra(()) == ()


FAULTS = {
    "counts-are-not-halved": (COUNTS, "self.count[code] >= self.LIMIT", "False", "lfu"),
    "classes-are-not-halved": (EVICT, "n // 2)  # FADED", "n)  # FADED", "lfru"),
    "counts-are-forgotten": (
        EVICT, "self._put(slot, code, self.count[code])\n\n    def use",
        "self._put(slot, code, 0)\n\n    def use", "known-demand",
    ),
    "prompts-count-as-unused": (
        EVICT, "        self._put(slot, code, FADED)\n"
        "        self.classes[code // self.experts][FADED]", "        self._put(slot, code, 0)\n"
        "        self.classes[code // self.experts][0]", "lfu",
    ),
    "counts-are-shared": (EVICT, "new.count = self.count[:]", "new.count = self.count", "lfru"),
    "one-round-is-enough": (COUNTS, "[*range(layers), *range(layers)]", "range(layers)",
                            "known-demand"),
    "nothing-is-traded": (COUNTS, "self.shares[layer] += 1", "self.shares[layer] += 0",
                          "adaptive"),
    "losses-do-not-count": (COUNTS, "self._count(self.loss, layer)", "pass", "adaptive"),
    "too-much-is-remembered": (COUNTS, "if len(past) > self.reach:", "if False:", "adaptive"),
    "the-past-is-shared": (COUNTS, "new.past = [order.copy() for order in self.past]",
                           "new.past = self.past", "adaptive"),
    "nobody-halves": (FREQUENCY, "if self.passes == self.PASSES:", "if False:", "frequency"),
    "a-pass-is-a-visit": (FREQUENCY, "if self.entries < running:", "if False:", "frequency"),
    "the-total-stays": (FREQUENCY, "self.total[layer] = sum(", "_ = sum(", "frequency"),
    "the-ended-count-on": (FREQUENCY, "less = self.runs.pop(request, {})", "less = {}",
                           "frequency"),
    "the-last-is-for-ever": (FREQUENCY, "self._less(code, LAST)", "pass", "frequency"),
    "the-last-outlives": (FREQUENCY, "in self.last.pop(request, {}).values():",
                          "in ({}).values():", "frequency"),
    "less-is-no-less": (FREQUENCY, "if slot >= 0 and self.at[slot] != FADED:", "if False:",
                        "frequency"),
    "the-faded-come-back": (FREQUENCY, "if slot >= 0 and self.at[slot] != FADED:",
                            "if slot >= 0:", "frequency"),
    "runs-do-not-fade": (FREQUENCY, "code: n // 2 for", "code: n for", "frequency"),
    "the-last-fades": (FREQUENCY, "self.count[code] += LAST\n", "pass\n", "frequency"),
    "running-counts-no-more": (FREQUENCY, "ONCE, RUNS, LAST = 1, 3,", "ONCE, RUNS, LAST = 1, 0,",
                               "frequency"),
    "the-least-is-stale": (FREQUENCY, "if low is not None and n < low:", "if False:", "frequency"),
    "the-least-is-gone": (FREQUENCY, "if self.low[layer] == n and", "if False and", "frequency"),
    "own-is-no-better": (FREQUENCY, "OWN, OTHER = 2, 3", "OWN, OTHER = 2, 2", "frequency"),
    "a-pass-never-ends": (EVICT, "if self.entries >= running:", "if False:", "least-stale"),
    "a-pass-is-too-long": (EVICT, "if self.entries >= running:", "if self.entries > running:",
                           "least-stale"),
    "forwards": (EVICT, "(own - back) % layers", "(own + back) % layers", "least-stale"),
    "most-used-goes-first": (EVICT, "self.drop(slot, code)\n        self.touched[code",
                             "return\n        self.touched[code", "least-stale"),
}  # fmt: skip


@pytest.mark.rule("CACHE-10", "CACHE-11", "CACHE-12", "CACHE-13")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_seen(fault: str) -> None:
    where, old, new, name = FAULTS[fault]
    with mutated(Mutant(fault, where, old, new, "")) as module:
        broken = sys.modules[f"{module.__name__.rsplit('.', 1)[0]}.eviction_counts"]
        assert first_difference(name, SEEDS, LONGER.get(name, 1) * TURNS, broken) is not None
