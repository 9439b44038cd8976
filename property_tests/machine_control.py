"""The scheduler as a rule-based machine: anything may happen, in any order, and obvious books.

A rule is one event (with the results that come with it) and the ask that follows. Hypothesis draws
which of what is in flight it concerns, what routers name and which of equally good choices is
taken.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from property_tests.machine import SMALL, Traced
from property_tests.obvious import Books, Text, Wrong, must
from reference.control import Scheduler
from reference.vocab import events as ev
from reference.vocab.ids import Visit
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    READINESS,
    SCHEDULERS,
    ControlOptions,
)

ROUTES = st.lists(st.integers(0, 9), max_size=6)
"""Which experts each token names: indices into the choices; 0 where the list is too short."""


@st.composite
def any_options(draw: st.DrawFn) -> ControlOptions:
    """Small and uncomfortable: few slots, odd chunks, every policy."""
    top_k, experts = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    chunk = draw(st.integers(1, 3))
    return ControlOptions(
        layers=tuple(range(draw(st.integers(0, 2)))),
        experts=experts,
        top_k=top_k,
        slots=draw(st.integers(top_k, 5)),
        chunk=chunk,
        grouping=draw(st.sampled_from(SCHEDULERS)),
        readiness=draw(st.sampled_from(READINESS)),
        fetch_order=draw(st.sampled_from(FETCH_ORDERS)),
        eviction=draw(st.sampled_from(EVICTIONS)),
        bulk_every=draw(st.integers(1, 3)),
        max_lag=draw(st.integers(0, 3)),
        max_running=draw(st.integers(1, 4)),
        max_rows=draw(st.integers(chunk, 6)),
        kv_tokens=draw(st.sampled_from([8, 24])),
        kv_block=draw(st.sampled_from([1, 4])),
        retries=draw(st.integers(0, 2)),
    )


class ControlMachine(Traced):
    """One scheduler and everything that can happen to it."""

    make: ClassVar[Callable[[ControlOptions], Any]] = Scheduler
    arrivals: ClassVar[int] = 5
    faults: ClassVar[int] = 3
    cancellable: ClassVar[int] = 2
    drains: ClassVar[int] = 1

    @initialize(
        options=any_options(),
        channels=st.integers(1, 2),
        shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3),
    )
    def start(
        self, options: ControlOptions, channels: int, shapes: list[tuple[int, int]]
    ) -> None:
        self.begin(options, channels, shapes)

    def begin(
        self, options: ControlOptions, channels: int, shapes: list[tuple[int, int]]
    ) -> None:
        """The first requests arrive together."""
        self.o, self.channels = options, channels
        self.s = type(self).make(options)
        self.books = Books(options)
        self.came = len(shapes)
        self.left, self.cancels = type(self).faults, type(self).cancellable
        self.wrong = False
        self.happen("begin", *(ev.Arrived(n, *shape) for n, shape in enumerate(shapes)))

    # -- what every rule does

    def happen(self, what: str, *events: ev.Event, tie: int = 0) -> None:
        """The events, one ask, and what the books say to it."""
        self.trace.append(what)
        try:
            for event in events:
                self.s.handle(event)
                self.books.told(event)
            self.ask(tie)
        except Wrong as error:
            self.wrong = True
            self.check(False, str(error))
        except Exception as error:
            self.wrong = True
            self.check(False, f"control raised {type(error).__name__}: {error}")

    def ask(self, tie: int) -> list:
        books = self.books
        channels = max(0, self.channels - len(books.in_flight()))
        lanes = 0 if books.step else 1
        wishes, claimed = self.wishes(), self.claimed()
        actions = self.s.next_actions(channels, lanes, lambda options: tie % len(options))
        self.fair(wishes, claimed)
        idle = [channels, lanes]
        for action in actions:
            books.asked(action, *idle)
            name = type(action).__name__
            if name in ("Load", "Compute"):
                idle[name == "Compute"] -= 1
        books.settled(*idle)
        return actions

    def claimed(self) -> set[int]:
        return {n for n, r in self.s.running.items() if r.claimed}

    def wishes(self) -> list[Text]:
        """Decoding visits that lack what no transfer brings, and are not held back by SCHED-7."""
        books = self.books
        live = [t for t in books.live() if not books.bulk(t)]
        floor, here = min((t.progress for t in live), default=0), books.somewhere()
        return [t for t in live if t.left - here and t.progress - floor < books.lag]

    def fair(self, wishes: list[Text], claimed: set[int]) -> None:
        """FETCH-7 with fewest-missing: who was passed over `max_lag` times goes first, in order of
        Routed. Who claims is control's word; whether it was its turn the books know. With one
        channel an ask makes one claim that needs a load; others of `wishes` that claim in the
        same ask lacked only what that one lacked too."""
        if self.o.fetch_order != "fewest-missing" or self.channels > 1 or not self.s.claims:
            return
        new = self.claimed() - claimed
        chosen = [t for t in wishes if t.number in new]
        for t in wishes:
            if chosen and t not in chosen:
                fair = t.passed < self.books.lag or min(c.named for c in chosen) < t.named
                must(fair, f"FETCH-7: {t} is passed over by {chosen}")
                t.passed += 1

    def tickets(self, *kinds: str) -> list[int]:
        return sorted(s.ticket for s in self.books.slots if s.kind in kinds)

    def results(self, routes: list[int], stop: bool, failed: tuple[int, ...]) -> list[ev.Event]:
        """What the step's last parts lead to."""
        out: list[ev.Event] = []
        books, o = self.books, self.o
        choices = list(combinations(range(o.experts), o.top_k))
        draws = iter(routes)
        assert books.step is not None
        for visit, _, last in books.step.parts:
            t = books.texts[visit.request]
            if not last or visit.request in failed:
                continue
            if t.place < len(o.layers) - 1:
                layer = o.layers[t.place + 1]
                tokens = tuple(choices[next(draws, 0) % len(choices)] for _ in range(books.rows(t)))
                out.append(ev.Routed(Visit(t.number, t.chunk, layer), tokens))
            elif books.final(t):
                scored = t.new == 0
                out.append(ev.Sampled(t.number, None if scored else 7, scored or stop))
        return out

    # -- rules

    @precondition(lambda self: self.came < self.arrivals)
    @rule(prompt=st.integers(1, 5), new=st.integers(0, 3), tie=SMALL)
    def arrive(self, prompt: int, new: int, tie: int) -> None:
        self.came += 1
        self.happen("arrive", ev.Arrived(self.came - 1, prompt, new), tie=tie)

    @precondition(lambda self: self.tickets("loading"))
    @rule(which=SMALL, tie=SMALL)
    def loaded(self, which: int, tie: int) -> None:
        tickets = self.tickets("loading")
        self.happen("loaded", ev.Loaded(tickets[which % len(tickets)]), tie=tie)

    @precondition(lambda self: self.left and self.tickets("loading"))
    @rule(which=SMALL, drained=st.booleans(), tie=SMALL)
    def load_failed(self, which: int, drained: bool, tie: int) -> None:
        tickets = self.tickets("loading")
        self.left -= 1
        failed = ev.LoadFailed(tickets[which % len(tickets)], "EIO", drained)
        self.happen(f"load failed, drained={drained}", failed, tie=tie)

    @precondition(lambda self: self.tickets("late"))
    @rule(which=SMALL, well=st.booleans(), tie=SMALL)
    def late(self, which: int, well: bool, tie: int) -> None:
        tickets = self.tickets("late")
        ticket = tickets[which % len(tickets)]
        event = ev.Loaded(ticket) if well else ev.LoadFailed(ticket, "EIO")
        self.happen("late", event, tie=tie)

    @precondition(lambda self: self.books.step)
    @rule(routes=ROUTES, stop=st.booleans(), tie=SMALL)
    def computed(self, routes: list[int], stop: bool, tie: int) -> None:
        assert self.books.step is not None
        results = self.results(routes, stop, ())
        self.happen("computed", ev.Computed(self.books.step.step), *results, tie=tie)

    @precondition(lambda self: self.left and self.books.step)
    @rule(routes=ROUTES, who=st.none() | SMALL, tie=SMALL)
    def step_failed(self, routes: list[int], who: int | None, tie: int) -> None:
        assert self.books.step is not None
        self.left -= 1
        members = self.books.members()
        blamed = () if who is None else (members[who % len(members)],)
        results = self.results(routes, False, blamed or members)
        event = ev.Failed(self.books.step.step, "NaN", blamed)
        self.happen("step failed", event, *results, tie=tie)

    @precondition(lambda self: self.came and self.cancels)
    @rule(who=SMALL, tie=SMALL)
    def cancel(self, who: int, tie: int) -> None:
        self.cancels -= 1
        numbers = [*self.books.texts, *self.books.ended]
        self.happen("cancel", ev.Cancelled(numbers[who % len(numbers)]), tie=tie)

    @precondition(lambda self: self.drains and self.came > 2 and not self.books.draining)
    @rule()
    def drain(self) -> None:
        self.happen("drain", ev.Drain())

    @rule()
    def go_on_with_a_copy(self) -> None:
        """A copy behaves alike and shares nothing: the old one is spoilt."""
        old, self.s = self.s, self.s.copy()
        self.check(old.key() == self.s.key(), "a copy is another state")
        for number in list(old.running):
            old.handle(ev.Cancelled(number))
        old.next_actions(9, 1)

    # -- after each step

    @invariant()
    def control_agrees_with_the_books(self) -> None:
        if not hasattr(self, "s") or self.wrong:
            return
        s, books = self.s, self.books
        kinds = ("free", "loading", "ready", "late")
        self.check([kinds[x] for x in s.cache.state] == [x.kind for x in books.slots], "slots")
        codes = [-1 if x.key is None else x.key[0] * s.experts + x.key[1] for x in books.slots]
        self.check(s.cache.code == codes, f"experts in slots: {s.cache.code}, not {codes}")
        self.check([r.number for r in s.queue] == [t.number for t in books.queued()], "queue")
        self.check(sorted(s.running) == [t.number for t in books.live()], "running")
        held = sum(books.blocks(t) for t in books.live())
        self.check(s.kv_free == self.o.kv_tokens // self.o.kv_block - held, "KV blocks")
        wanted: dict[int, int] = {}
        for t in books.live():
            r = s.running[t.number]
            self.check(r.progress == t.progress, f"progress {r.progress}, not {t.progress}")
            for layer, e in t.left:
                code = layer * s.experts + e
                wanted[code] = wanted.get(code, 0) + 1
        self.check(s.cache.wanted == wanted, f"wanted: {s.cache.wanted}, not {wanted}")
        self.check(len(books.ended) + len(books.texts) == self.came, "S1")

    def teardown(self) -> None:
        """Whatever it has come to: played on without faults, everything ends."""
        if not hasattr(self, "s") or self.wrong or self.broken[-1:] == [len(self.runs)]:
            return
        for _ in range(2000):
            books = self.books
            if flying := books.in_flight():
                ticket = min(s.ticket for s in flying)
                self.happen("loaded", ev.Loaded(ticket))
            elif books.step:
                results = self.results([], False, ())
                self.happen("computed", ev.Computed(books.step.step), *results)
            elif not books.texts:
                break
            else:
                self.happen("ask")
        c = self.s.cache
        self.check(self.s.idle and not self.books.texts, "no end")
        kept = (c.holds, c.wanted, c.tasks, c.readers, c.flying, self.s.pending, self.s.fails)
        self.check(not any(kept), f"left behind: {kept}")
