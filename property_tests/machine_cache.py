"""The expert cache as a rule-based machine, against a model that is nothing but lists.

Every operation that the scheduler may ask of `ExpertCache` is a rule; after each step every
question that the cache answers is asked of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from property_tests.machine import SMALL, Traced
from property_tests.obvious_evictions import PLAIN, Plain
from reference.control.cache import FREE, LOADING, QUARANTINED, READY, ExpertCache
from reference.vocab.options import EVICTIONS


@dataclass
class Lists:
    """What a cache is: slots with a state and an expert, and a policy that says who goes first."""

    policy: Plain
    state: list[int]
    code: list[int]
    ticket: dict[int, int] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    prompts: list[int] = field(default_factory=list)
    """Slots that came for a prompt, in order."""
    read: Counter = field(default_factory=Counter)
    held: Counter = field(default_factory=Counter)
    wanted: Counter = field(default_factory=Counter)
    tasks: Counter = field(default_factory=Counter)

    def slot_of(self, code: int) -> int:
        return self.code.index(code)

    def may_go(self, slot: int) -> bool:
        """CACHE-3, CACHE-4, CACHE-7, SCHED-9."""
        code = self.code[slot]
        unused_task = slot in self.fresh and self.tasks[code] > 0
        return (
            self.state[slot] == READY
            and not self.read[slot]
            and not self.held[code]
            and not unused_task
        )

    def room(self) -> int:
        """Slots that could be given away now."""
        return sum(s == FREE or self.may_go(i) for i, s in enumerate(self.state))

    def ready(self) -> list[int]:
        return [i for i, state in enumerate(self.state) if state == READY]

    def victim(self, code: int, strict: bool) -> int | None:
        """CACHE-6, for a full cache: wanted last, else as the policy says."""
        able = [i for i in self.ready() if self.may_go(i)]
        if strict:
            able = [i for i in able if not self.wanted[self.code[i]]]

        def rank(slot: int) -> tuple:
            here = self.code[slot]
            return self.wanted[here] > 0, self.policy.rank(slot, here, code)

        return min(able, key=rank, default=None)


class CacheMachine(Traced):
    """One cache, told what the scheduler might tell it."""

    make: ClassVar[Callable[..., Any]] = ExpertCache
    evictions: ClassVar[tuple[str, ...]] = EVICTIONS

    @initialize(
        slots=st.integers(1, 4),
        layers=st.integers(1, 2),
        experts=st.integers(3, 4),
        which=SMALL,
        resident=st.integers(0, 4),
    )
    def start(self, slots: int, layers: int, experts: int, which: int, resident: int) -> None:
        name = self.evictions[which % len(self.evictions)]
        self.cache = type(self).make(slots, layers, experts, name)
        self.layers, self.codes = layers, layers * experts
        policy: Any = PLAIN[name](name, slots, layers, experts)
        policy.limit = getattr(self.cache.policy, "LIMIT", 0)
        policy.step = getattr(self.cache.policy, "STEP", 0)
        policy.passes = getattr(self.cache.policy, "PASSES", 0)
        self.m = Lists(policy, [FREE] * slots, [-1] * slots)
        for which in range(min(resident, slots, self.codes)):
            self.transfer(self.absent()[(3 * which) % len(self.absent())], False, False)
            self.arrive(next(iter(self.m.ticket)))

    # -- rules

    def absent(self) -> list[int]:
        return [c for c in range(self.codes) if c not in self.m.code]

    @precondition(lambda self: self.absent() and self.m.room())
    @rule(which=SMALL, fresh=st.booleans(), bulk=st.booleans())
    def begin(self, which: int, fresh: bool, bulk: bool) -> None:
        """A transfer begins, into the slot that both think right."""
        absent = self.absent()
        self.transfer(absent[which % len(absent)], fresh, bulk)

    def transfer(self, code: int, fresh: bool, bulk: bool) -> None:
        m = self.m
        self.trace.append(f"begin {code}")
        slot = self.cache.victim(code, False)
        assert slot is not None
        self.check(m.state[slot] == FREE or m.may_go(slot), f"slot {slot} was handed out")
        if m.state[slot] == READY:
            m.policy.drop(slot, m.code[slot])
            m.policy.gone(m.code[slot])
        self.drop(slot)
        m.policy.begin(code)
        ticket = self.cache.begin(slot, code, fresh, bulk)
        self.check(ticket not in m.ticket and ticket > max(m.ticket, default=0), "ticket")
        m.state[slot], m.code[slot], m.ticket[ticket] = LOADING, code, slot
        if fresh:
            m.fresh.add(slot)
        if bulk:
            m.prompts.append(slot)

    def drop(self, slot: int) -> None:
        """What lay there is gone."""
        m = self.m
        m.state[slot], m.code[slot] = FREE, -1
        m.fresh.discard(slot)
        m.prompts = [i for i in m.prompts if i != slot]

    @precondition(lambda self: self.m.ticket)
    @rule(which=SMALL)
    def loaded(self, which: int) -> None:
        self.arrive(list(self.m.ticket)[which % len(self.m.ticket)])

    def arrive(self, ticket: int) -> None:
        self.trace.append("loaded")
        slot = self.m.ticket.pop(ticket)
        told = self.cache.loaded(ticket)
        if self.m.state[slot] == QUARANTINED:
            self.check(told == -1, "a late load counts")
            self.drop(slot)
        else:
            self.check(told == self.m.code[slot], "another expert")
            self.m.state[slot] = READY
            self.m.policy.arrive(slot, self.m.code[slot])

    @precondition(lambda self: self.m.ticket and QUARANTINED not in self.m.state)
    @rule(which=SMALL, drained=st.booleans())
    def failed(self, which: int, drained: bool) -> None:
        m = self.m
        ticket = list(m.ticket)[which % len(m.ticket)]
        self.trace.append(f"failed drained={drained}")
        slot = m.ticket[ticket]
        known = m.state[slot] == QUARANTINED
        told = self.cache.failed(ticket, drained)
        self.check(told == (-1 if known else m.code[slot]), "another expert")
        if not known:
            m.policy.gone(m.code[slot])
        self.drop(slot)
        if drained:
            del m.ticket[ticket]
        else:
            m.state[slot] = QUARANTINED

    @precondition(lambda self: self.m.ready())
    @rule(which=SMALL, bulk=st.booleans(), promote=st.booleans(), often=st.integers(1, 3))
    def read(self, which: int, bulk: bool, promote: bool, often: int) -> None:
        """FETCH-4: a prompt's use promotes nothing, and what came for it goes first."""
        m = self.m
        slot = m.ready()[which % len(m.ready())]
        code = m.code[slot]
        self.trace.append(f"read {code}")
        for _ in range(often):
            got = self.cache.read(code, bulk, promote)
            self.check(got == slot, "another slot")
            self.used(slot, code, bulk, promote)

    def used(self, slot: int, code: int, bulk: bool, promote: bool) -> None:
        m = self.m
        m.read[slot] += 1
        m.fresh.discard(slot)
        if bulk and not promote:
            if slot in m.prompts:
                m.policy.demote(slot, code)
            return
        m.policy.use(slot, code)
        if not bulk:
            m.prompts = [i for i in m.prompts if i != slot]

    @precondition(lambda self: +self.m.read)
    @rule(which=SMALL)
    def release(self, which: int) -> None:
        slots = sorted(+self.m.read)
        slot = slots[which % len(slots)]
        self.trace.append("release")
        self.cache.release(slot)
        self.m.read[slot] -= 1

    @precondition(lambda self: self.m.wanted.total() < 3)
    @rule(which=SMALL, task=st.booleans(), request=st.integers(0, 1))
    def want(self, which: int, task: bool, request: int) -> None:
        code = which % self.codes
        self.trace.append(f"want {code}")
        self.cache.name(request, (code,))
        self.cache.want((code,), 1, task)
        here = [i for i in self.m.ready() if self.m.code[i] == code]
        named = (code, here[0] if here else -1, not self.m.wanted[code])
        self.m.policy.named(request, [named])
        self.m.wanted[code] += 1
        self.m.tasks[code] += task

    @precondition(lambda self: +self.m.wanted)
    @rule(which=SMALL)
    def served(self, which: int) -> None:
        codes = sorted(+self.m.wanted)
        code = codes[which % len(codes)]
        self.trace.append("served")
        task = self.m.tasks[code] > 0
        self.cache.want((code,), -1, task)
        self.m.wanted[code] -= 1
        self.m.tasks[code] -= task

    @precondition(lambda self: self.m.held.total() < 2)
    @rule(which=SMALL)
    def hold(self, which: int) -> None:
        code = which % self.codes
        self.trace.append(f"hold {code}")
        self.cache.hold((code,), 1)
        self.m.held[code] += 1

    @precondition(lambda self: +self.m.held)
    @rule(which=SMALL)
    def let_go(self, which: int) -> None:
        codes = sorted(+self.m.held)
        code = codes[which % len(codes)]
        self.trace.append("let go")
        self.cache.hold((code,), -1)
        self.m.held[code] -= 1

    @precondition(lambda self: self.m.policy.name in ("least-stale", "frequency"))
    @rule(visits=st.integers(1, 2), running=st.integers(1, 3))
    def enter(self, visits: int, running: int) -> None:
        self.trace.append("enter")
        self.cache.policy.entered(visits, running)
        self.m.policy.entered(visits, running)

    @precondition(lambda self: self.m.policy.name == "frequency")
    @rule(request=st.integers(0, 1))
    def end(self, request: int) -> None:
        self.trace.append("end")
        self.cache.policy.ended(request)
        self.m.policy.ended(request)

    @precondition(lambda self: self.m.policy.name == "known-demand")
    @rule(stages=st.lists(st.integers(-1, 1), max_size=2))
    def look(self, stages: list[int]) -> None:
        self.trace.append("look")
        stages = [stage for stage in stages if stage < self.layers]
        self.cache.policy.look(stages)
        self.m.policy.look(stages)

    @rule()
    def go_on_with_a_copy(self) -> None:
        """A copy is the same and shares nothing: the old one is spoilt."""
        old, self.cache = self.cache, self.cache.copy()
        self.check(self.cache.key((0, 1)) == old.key((0, 1)), "a copy is another")
        for ticket in list(old.flying):
            old.loaded(ticket)
        for slot in self.m.ready():
            old.policy.use(slot, self.m.code[slot])
            old.policy.drop(slot, self.m.code[slot])
        old.policy.ended(0)
        old.policy.entered(9, 1)
        for code in range(self.codes):
            old.want((code,), 1, True)

    # -- questions

    @invariant()
    def the_book_is_right(self) -> None:
        if not hasattr(self, "m"):
            return
        c, m = self.cache, self.m
        self.check(c.state == m.state, f"states {c.state}, not {m.state}")
        self.check(c.code == m.code, f"experts {c.code}, not {m.code}")
        self.check(c.flying == m.ticket, "transfers")
        self.check(c.loading() == m.state.count(LOADING), "loading")
        for code in range(self.codes):
            here = code in m.code and m.state[m.slot_of(code)] == READY
            self.check(c.present(code) == here, f"expert {code} here: {here}")
        for slot in range(len(m.state)):
            self.check(c.evictable(slot) == m.may_go(slot), f"slot {slot}: {m.may_go(slot)}")
        for n in range(len(m.state) + 2):
            self.check(c.room(n) == (m.room() >= n), f"room for {n} of {m.room()}")

    @invariant()
    def the_victim_is_right(self) -> None:
        if not hasattr(self, "m"):
            return
        c, m = self.cache, self.m
        first = next((i for i in m.prompts if m.may_go(i)), None)
        waits = [i for i in m.prompts if m.may_go(i) and not m.wanted[m.code[i]]]
        self.check(c.bulk_victim() == (waits[0] if waits else first), "victim among prompts'")
        for code in self.absent():
            order = [slot for slots in c.policy.victims(code) for slot in slots]
            right_order = sorted(m.ready(), key=lambda i: m.policy.rank(i, m.code[i], code))
            self.check(order == right_order, f"order for {code}: {order}, not {right_order}")
            for strict in (False, True):
                got = c.victim(code, strict)
                if FREE in m.state:
                    self.check(got is not None and m.state[got] == FREE, "a free slot first")
                else:
                    right = m.victim(code, strict)
                    self.check(got == right, f"victim for {code}: {got}, not {right}")
