"""Random play against the scheduler, with a model of its own of slots, readers and requests.

Everything that the scheduler promises about slots is asserted here at every action, from the
actions and events alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from reference.control import Scheduler
from reference.vocab.actions import Admit, Compute, Finish, Load, Reject
from reference.vocab.events import (
    Arrived,
    Cancelled,
    Computed,
    Drain,
    Event,
    Failed,
    Loaded,
    LoadFailed,
    Routed,
    Sampled,
)
from reference.vocab.ids import ExpertKey, Visit
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    READINESS,
    SCHEDULERS,
    ControlOptions,
)


def random_options(rng: random.Random) -> ControlOptions:
    """Small and uncomfortable: few slots, odd chunks, every policy."""
    experts = rng.randint(1, 5)
    top_k = rng.randint(1, min(3, experts))
    chunk = rng.randint(1, 4)
    return ControlOptions(
        layers=tuple(sorted(rng.sample(range(6), rng.randint(0, 3)))),
        experts=experts,
        top_k=top_k,
        slots=rng.randint(top_k, top_k + 4),
        chunk=chunk,
        grouping=rng.choice(SCHEDULERS),
        readiness=rng.choice(READINESS),
        fetch_order=rng.choice(FETCH_ORDERS),
        eviction=rng.choice(EVICTIONS),
        max_running=rng.randint(1, 5),
        max_rows=rng.randint(chunk, 8),
        kv_tokens=40,
        kv_block=4,
        max_lag=rng.choice([0, 1, 3]),
        bulk_every=rng.choice([1, 2, 3]),
        retries=rng.randint(0, 2),
    )


@dataclass
class Play:
    """One game: `step()` lets one thing happen; `run()` plays to the end."""

    rng: random.Random
    options: ControlOptions
    shapes: list[tuple[int, int]]
    channels: int = 1
    faults: int = 0
    cancels: int = 0
    drain: bool = False
    s: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.s = Scheduler(self.options)
        self.arrived = 0
        self.flying: dict[int, Load] = {}
        self.late: dict[int, Load] = {}
        self.step: Compute | None = None
        self.resident: dict[int, ExpertKey] = {}
        self.named: dict[int, set[ExpertKey]] = {}
        self.visits: dict[int, int] = {}
        self.over: dict[int, Finish | Reject] = {}
        self.admitted: list[int] = []
        self.fetched: list[ExpertKey] = []
        self.seen: set[str] = set()
        self.drained = False

    # -- what can happen ---------------------------------------------------------------------

    def kinds(self) -> list[str]:
        out = ["arrive"] if self.arrived < len(self.shapes) else []
        out += ["load"] * 2 if self.flying else []
        out += ["late"] if self.late else []
        out += ["compute"] * 2 if self.step else []
        out += ["cancel"] if out and self.cancels and self.arrived else []
        if out and self.drain and not self.drained and self.rng.random() < 0.05:
            out.append("drain")
        return out

    def happen(self, kind: str) -> list[Event]:
        rng = self.rng
        self.seen.add(kind)
        if kind == "arrive":
            self.arrived += 1
            return [Arrived(self.arrived - 1, *self.shapes[self.arrived - 1])]
        if kind == "cancel":
            self.cancels -= 1
            return [Cancelled(rng.randrange(self.arrived))]
        if kind == "drain":
            self.drained = True
            return [Drain()]
        if kind == "late":
            ticket = rng.choice(list(self.late))
            del self.late[ticket]
            return [rng.choice([Loaded(ticket), LoadFailed(ticket, "EIO")])]
        if kind == "load":
            ticket = rng.choice(list(self.flying))
            load = self.flying.pop(ticket)
            if self.faults and rng.random() < 0.3:
                self.faults -= 1
                drained = rng.random() < 0.5
                if not drained:
                    self.late[ticket] = load
                return [LoadFailed(ticket, "EIO", drained)]
            self.resident[load.slot] = load.key
            return [Loaded(ticket)]
        step, self.step = self.step, None
        assert step is not None
        return self.finish_step(step)

    def finish_step(self, step: Compute) -> list[Event]:
        if self.faults and self.rng.random() < 0.1:
            self.faults -= 1
            self.seen.add("failed step")
            blamed = self.rng.choice([(), (step.parts[0].visit.request,)])
            events: list[Event] = [Failed(step.step, "NaN", blamed)]
            if not blamed:
                return events
        else:
            blamed, events = (), [Computed(step.step)]
        for part in step.parts:
            if not part.last or part.visit.request in blamed:
                continue
            number, chunk, layer = part.visit
            prompt, new = self.shapes[number]
            self.visits[number] = self.visits.get(number, 0) + 1
            later = [x for x in self.options.layers if x > layer]
            if later:
                rows = max(1, min(self.options.chunk, prompt - chunk * self.options.chunk))
                pick = range(self.options.experts)
                experts = tuple(
                    tuple(self.rng.sample(pick, self.options.top_k)) for _ in range(rows)
                )
                self.named[number] = {ExpertKey(later[0], e) for t in experts for e in t}
                events.append(Routed(Visit(number, chunk, later[0]), experts))
            elif chunk >= (prompt - 1) // self.options.chunk:
                stop = new == 0 or self.rng.random() < 0.1
                events.append(Sampled(number, None if new == 0 else 7, stop))
        return events

    # -- what the scheduler may do -------------------------------------------------------------

    def obey(self, action: object) -> None:
        if isinstance(action, Load):
            busy = [x.slot for x in (*self.flying.values(), *self.late.values())]
            assert action.slot not in busy, "CACHE-9: written while a transfer may still write"
            if self.step:
                assert action.slot not in dict(self.step.slots).values(), (
                    "CACHE-7: read and written"
                )
            self.resident.pop(action.slot, None)
            held = [*self.resident.values(), *(x.key for x in self.flying.values())]
            assert action.key not in held, "CACHE-2: twice"
            live = {n for n in self.named if n not in self.over}
            assert any(action.key in self.named[n] for n in live), "FETCH-2: nobody named it"
            self.flying[action.ticket] = action
            self.fetched.append(action.key)
            if self.s.blocking:
                assert self.step is None, "SCHED-4: blocking reads while computing"
        elif isinstance(action, Compute):
            assert self.step is None
            for expert, slot in action.slots:
                assert self.resident.get(slot) == (action.layer, expert), "SCHED-9: not there"
            for part in action.parts:
                assert part.visit.layer == action.layer
                named = self.named.get(part.visit.request, set())
                for e in part.experts:
                    assert ExpertKey(action.layer, e) in named, "SCHED-3: run twice or not named"
                    named.discard(ExpertKey(action.layer, e))
                if part.last:
                    assert not named, "SCHED-3: the visit ended early"
            if self.s.blocking:
                assert not self.flying, "SCHED-4: blocking computes while reading"
            self.step = action
        elif isinstance(action, Admit):
            self.admitted.append(action.request)
        elif isinstance(action, Finish | Reject):
            assert action.request not in self.over, "two terminal actions"
            self.over[action.request] = action

    def turn(self) -> bool:
        """One thing happens. False when nothing can."""
        kinds = self.kinds()
        if not kinds:
            return False
        for event in self.happen(self.rng.choice(kinds)):
            self.s.handle(event)
        free = self.channels - len(self.flying) - len(self.late)
        choose = lambda options: self.rng.randrange(len(options))  # noqa: E731
        for action in self.s.next_actions(max(0, free), 0 if self.step else 1, choose):
            self.obey(action)
        return True

    def run(self, most: int = 100_000) -> Play:
        """To the end: everybody has ended, nothing is left behind."""
        turns = 0
        while self.turn():
            turns += 1
            assert turns < most, "no end in sight"
        s = self.s
        assert s.idle, f"deadlock: {s.key()}"
        assert len(self.over) == len(self.shapes)
        c = s.cache
        assert not (c.holds or c.wanted or c.tasks or c.readers or c.flying or s.pending or s.fails)
        assert s.kv_free == self.options.kv_tokens // self.options.kv_block
        return self


def random_play(seed: int) -> Play:
    """A whole game from a seed."""
    rng = random.Random(seed)
    return Play(
        rng,
        random_options(rng),
        [(rng.randint(1, 9), rng.randint(0, 4)) for _ in range(rng.randint(1, 7))],
        channels=rng.randint(1, 3),
        faults=rng.choice([0, 0, 3]),
        cancels=rng.choice([0, 0, 2]),
        drain=rng.random() < 0.2,
    )
