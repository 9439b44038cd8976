"""The scheduler: `handle(event)` updates, `next_actions(...)` decides. Pure, copyable, hashable.

The life of a request: Arrived -> queue -> Admit -> for each chunk: a visit at ENTRY, then one at
every layer with experts -> Finish. A visit at a layer with experts is Routed, gets its experts
(fetch.py), is run in one step or in several parts (grouping.py), and is Computed. What ships is
this object; the NumPy engine, the simulator, the explorer and the JAX engine all drive it.
"""

from __future__ import annotations

from reference.control.balance import Balance
from reference.control.cache import ExpertCache
from reference.control.fetch import Chooser, fetch, first
from reference.control.grouping import advance_front, group
from reference.control.lifecycle import HANDLERS, admit
from reference.control.prefetch import Guesses
from reference.control.requests import Request
from reference.vocab.actions import Action
from reference.vocab.errors import BadInput, BudgetTooSmall
from reference.vocab.events import Event
from reference.vocab.ids import ENTRY
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    LEAST,
    READINESS,
    READING_AHEAD,
    SCHEDULERS,
    ControlOptions,
    check_counts,
)


class Scheduler:
    """The control plane of one engine. Not thread-safe: one owner feeds and asks it."""

    __slots__ = (
        "alike", "apart", "balance", "blocking", "cache", "claims", "draining", "experts",
        "fails", "floor", "front", "guesses", "kv_free", "last_number", "loads_since_bulk",
        "lockstep", "max_lag", "next_step", "options", "pending", "queue", "routed_order",
        "running", "steps", "steps_since_bulk", "terminal", "warming",
    )  # fmt: skip

    def __init__(self, options: ControlOptions) -> None:
        """Raises BudgetTooSmall below top_k slots (CACHE-1), BadInput on a bad option."""
        _check(options)
        self.options = options
        self.experts = max(1, options.experts)
        self.lockstep = options.grouping.startswith("lockstep")
        self.alike = self.lockstep or options.grouping == "balanced"
        self.blocking = options.grouping == "lockstep-blocking"
        self.claims = options.grouping == "interleaved" and options.readiness == "visit"
        self.apart = True
        self.max_lag = options.max_lag or 4 * (len(options.layers) + 1)
        layers = len(options.layers)
        self.cache = ExpertCache(options.slots, layers, options.experts, options.eviction)
        self.queue: list[Request] = []
        self.running: dict[int, Request] = {}
        self.routed_order: list[int] = []
        self.pending: list[int] = []
        self.fails: dict[int, int] = {}
        self.guesses = Guesses()
        self.steps: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.terminal: list[Action] = []
        layers, guesses = len(options.layers), options.prefetch > 0
        self.balance = Balance(options.slots, layers, self.experts, guesses)
        self.kv_free = options.kv_tokens // options.kv_block
        self.front = -1
        self.floor = 0
        self.next_step = 1
        self.last_number = -1
        self.loads_since_bulk = 0
        self.steps_since_bulk = 0
        self.draining = False
        place = {layer: i * options.experts for i, layer in enumerate(options.layers)}
        self.warming = [place[layer] + expert for layer, expert in options.warm]

    # -- the two calls ---------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Take one event. Raises IllegalEvent when it breaks the protocol."""
        HANDLERS[event.__class__](self, event)

    def next_actions(
        self, idle_channels: int, idle_compute: int, choose: Chooser = first
    ) -> list[Action]:
        """Decide. `idle_channels`: transfers that could start now; `idle_compute`: 1 if no step
        is in flight. The actions are to be obeyed in order; each changes what the next may rely
        on. `choose(options)` picks among equally good choices."""
        actions, self.terminal = self.terminal, []
        admit(self, actions)
        self.floor = self.least(False)
        if self.options.grouping == "balanced":
            pays = self.balance.apart
            self.apart = (pays, not pays)[choose([pays, not pays])]
        if self.lockstep:
            advance_front(self)
        if self.options.layers:
            fetch(self, actions, idle_channels, choose)
        if idle_compute and not self.steps:
            group(self, actions, choose)
        return actions

    @property
    def idle(self) -> bool:
        """Nobody queued or running (a step's requests are), no transfer, nothing left to say."""
        return not (self.queue or self.running or self.terminal or self.cache.flying)

    # -- for the explorer ------------------------------------------------------------------

    def copy(self) -> Scheduler:
        """An independent copy; options are shared."""
        new = Scheduler.__new__(Scheduler)
        new.options = self.options
        new.experts = self.experts
        new.lockstep = self.lockstep
        new.alike = self.alike
        new.apart = self.apart
        new.blocking = self.blocking
        new.claims = self.claims
        new.max_lag = self.max_lag
        new.cache = self.cache.copy()
        new.queue = [r.copy() for r in self.queue]
        new.running = {n: r.copy() for n, r in self.running.items()}
        new.routed_order = self.routed_order[:]
        new.pending = self.pending[:]
        new.fails = self.fails.copy()
        new.guesses = self.guesses.copy()
        new.steps = self.steps.copy()
        new.terminal = self.terminal[:]
        new.balance = self.balance.copy()
        new.kv_free = self.kv_free
        new.front = self.front
        new.floor = self.floor
        new.next_step = self.next_step
        new.last_number = self.last_number
        new.loads_since_bulk = self.loads_since_bulk
        new.steps_since_bulk = self.steps_since_bulk
        new.draining = self.draining
        new.warming = self.warming[:]
        return new

    def key(self) -> tuple:
        """Equal keys behave alike for ever: requests in order of arrival but unnumbered, slots
        unnumbered, progress relative, tickets and steps as an order. Nothing in it counts for
        ever."""
        base = (self.least(False), self.least(not self.alike))
        running = self.running
        place = {n: i for i, n in enumerate(running)}
        return (
            tuple([r.key(base) for r in running.values()]),
            tuple([r.key(base) for r in self.queue]),
            self.cache.key(running),
            tuple(self.pending),
            tuple(sorted(self.fails.items())),
            tuple([tuple([place.get(n, -1) for n in s[0]]) for s in self.steps.values()]),
            tuple([place[n] for n in self.routed_order])
            if self.options.fetch_order != "least-progress"
            else (),
            tuple(self.terminal),
            self.front,
            self.loads_since_bulk,
            self.steps_since_bulk,
            self.draining,
            tuple(self.warming),
            self.guesses.key(running),
        )

    # -- shared with fetch.py and grouping.py ------------------------------------------------

    def key_of(self, code: int) -> tuple[int, int]:
        """(model layer, expert) of an expert code."""
        return self.options.layers[code // self.experts], code % self.experts

    def absent(self, code: int) -> bool:
        """No transfer has brought, brings or is promised to bring the expert (CACHE-2)."""
        return code not in self.cache.where and code not in self.pending

    def layer_of(self, stage: int) -> int:
        """The model layer of a stage; ENTRY for -1."""
        return ENTRY if stage < 0 else self.options.layers[stage]

    def least(self, bulk: bool) -> int:
        """The least progress among running requests of a class; of nobody, 0."""
        return min(
            [r.progress for r in self.running.values() if self.prompting(r) == bulk], default=0
        )

    def prompting(self, r: Request) -> bool:
        """The request is of the class of prompts; lock-step and balanced know no classes."""
        return r.bulk and not self.alike

    def eligible(self, r: Request) -> bool:
        """SCHED-7: nobody who decodes gets `max_lag` visits ahead of the least advanced; balanced,
        where it does not pay to go apart, nobody a single one (SCHED-13)."""
        if self.alike:
            return self.lockstep or r.progress - self.floor < self.window
        return r.bulk or r.progress - self.floor < self.max_lag

    @property
    def window(self) -> int:
        """Balanced: how many visits' lead somebody may have."""
        return self.max_lag if self.apart else 1

    def decoding(self) -> bool:
        """Somebody is past its prompt."""
        return any(not r.bulk for r in self.running.values())

    def bulk_cap(self) -> int:
        """FETCH-4: slots that prompts may take together: all of them while nobody decodes."""
        if not self.decoding():
            return self.options.slots
        return self.options.bulk_slots or max(1, self.options.slots // 4)


def _check(o: ControlOptions) -> None:
    for name, value, allowed in (
        ("scheduler", o.grouping, SCHEDULERS),
        ("readiness", o.readiness, READINESS),
        ("fetch order", o.fetch_order, FETCH_ORDERS),
        ("cache", o.eviction, EVICTIONS),
    ):
        if value not in allowed:
            raise BadInput(f"{name}: unsupported {value!r}; supported: {', '.join(allowed)}")
    check_counts(vars(o), LEAST | {"slots": 0, "prefetch": 0})
    if o.prefetch and o.grouping == "lockstep-blocking":
        raise BadInput(
            f"prefetch: {o.prefetch}; lockstep-blocking reads nothing ahead: 0, or scheduler "
            f"{READING_AHEAD}, expected"
        )
    if o.layers and not 1 <= o.top_k <= o.experts:
        raise BadInput(f"top_k: {o.top_k}; 1 to {o.experts} expected")
    if o.layers and o.slots < o.top_k:
        raise BudgetTooSmall(
            f"memory: {o.slots} expert slots; a token needs {o.top_k} experts at a time, so at "
            f"least {o.top_k} slots are needed"
        )
    known = dict.fromkeys(o.layers, o.experts)
    if len(set(o.warm)) < len(o.warm) or any(not 0 <= e < known.get(la, 0) for la, e in o.warm):
        raise BadInput("warm: experts of this model expected, as (layer, expert), none twice")
    if o.chunk > o.max_rows:
        raise BadInput(f"chunk: {o.chunk}; at most max_rows = {o.max_rows} expected")
