"""The explorer's environment: what an executor may report next, and what is true of the slots.

`World` plays every executor at once. It knows the truth (what lies in each slot, where each
request stands, which transfers may still write) and says which events may happen; `oracle.judge`
holds each action against it. It shares nothing with control and is told nothing by it but actions.

A request is a list of small integers, see the index names below; expert codes are
`layer ordinal * experts + expert`, needs are bit masks over a layer's experts.
"""

from __future__ import annotations

from itertools import combinations, permutations, product

from oracle.scopes import Scope
from reference.vocab import events as ev
from reference.vocab.ids import Visit

FREE, LOADING, READY, QUARANTINED = 0, 1, 2, 3
QUEUED, WAITING, RUNNING, OWED, ENDED = 0, 1, 2, 3, 4
NUMBER, PROMPT, NEW, PHASE, CHUNK, STAGE, NEED, PART, LAST, TOKENS, WHY, MADE, LOST = range(13)
"""PART: experts in the running step. LAST: the visit ends with it. WHY: bits of the
reasons to end. MADE: visits of one row ended (bounds the request's lead).
LOST: per needed expert, in 4 bits, how often its load failed while the request needed it."""
STOP, LENGTH, CANCELLED, ERROR = 1, 2, 4, 8

Events = tuple[ev.Event, ...]


class Routes:
    """Every union of experts that a chunk of some rows can need, with tokens that make it.

    Control sees the union only, so one choice of tokens stands for each union.
    """

    def __init__(self, experts: int, top_k: int) -> None:
        self.experts, self.top_k = experts, top_k
        self.known: dict[int, list[tuple[int, tuple[tuple[int, ...], ...]]]] = {}

    def of(self, rows: int) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        """(mask, experts per token), each mask once."""
        if rows not in self.known:
            found: dict[int, tuple[tuple[int, ...], ...]] = {}
            for tokens in product(combinations(range(self.experts), self.top_k), repeat=rows):
                found.setdefault(sum({1 << e for t in tokens for e in t}), tokens)
            self.known[rows] = sorted(found.items())
        return self.known[rows]


class World:
    """One state of the environment; `copy` is cheap and `key` canonical."""

    __slots__ = (
        "arrived", "cancels", "code", "draining", "drains", "fails", "front", "live", "load_faults",
        "newest_step", "newest_ticket", "predictions", "scope", "state", "step", "step_faults",
        "ticket",
    )  # fmt: skip

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        slots = scope.options.slots
        self.live: list[list[int]] = []
        self.state = [FREE] * slots
        self.code = [-1] * slots
        self.ticket = [0] * slots
        self.step: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
        """(step, requests in it, slots that it reads)."""
        self.fails: dict[int, int] = {}
        self.arrived = 0
        self.cancels = scope.cancels
        self.load_faults = scope.load_faults
        self.step_faults = scope.step_faults
        self.drains = scope.drains
        self.predictions = scope.predictions
        self.draining = False
        self.newest_ticket = self.newest_step = 0
        self.front = -1
        """The stage that a barrier lets compute (lock-step); it goes on when nobody is left."""

    def copy(self) -> World:
        new = World.__new__(World)
        new.scope = self.scope
        new.live = [r[:] for r in self.live]
        new.state = self.state[:]
        new.code = self.code[:]
        new.ticket = self.ticket[:]
        new.step = self.step
        new.fails = self.fails.copy() if self.fails else self.fails
        new.arrived = self.arrived
        new.cancels = self.cancels
        new.load_faults = self.load_faults
        new.step_faults = self.step_faults
        new.drains = self.drains
        new.predictions = self.predictions
        new.draining = self.draining
        new.newest_ticket = self.newest_ticket
        new.newest_step = self.newest_step
        new.front = self.front
        return new

    def key(self, named: bool) -> tuple:
        """What the future depends on: unfinished requests in order, faults left, and the slots.

        Not `named`: control's book agrees with the truth, so its own key already tells the slots
        up to their numbers. `named`: they are told here, each with its number.
        """
        return (
            [r[1:] for r in self.live],
            self.step is not None,
            sorted(self.fails.items()),
            (
                self.arrived, self.cancels, self.load_faults, self.step_faults, self.drains,
                self.predictions,
            ),
            self.draining,
            self.front,
            (self.state, self.code, self.step and self.step[2]) if named else 0,
        )

    # -- what may happen -------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Everything arrived, ended, and nothing moves."""
        return (
            not self.live
            and self.step is None
            and self.arrived == len(self.scope.requests)
            and LOADING not in self.state
            and QUARANTINED not in self.state
        )

    @property
    def moving(self) -> bool:
        """Something in flight will report of itself, without luck from outside."""
        return (
            self.step is not None
            or LOADING in self.state
            or QUARANTINED in self.state
            or any(r[PHASE] == OWED for r in self.live)
        )

    def events(self) -> list[tuple[Events, bool]]:
        """Every group of events that may happen now, and whether it must (in the end)."""
        scope = self.scope
        out: list[tuple[Events, bool]] = []
        if self.arrived < len(scope.requests):
            out.append(((self.arrival(self.arrived),), True))
        for slot, state in enumerate(self.state):
            ticket = self.ticket[slot]
            if state == LOADING:
                out.append(((ev.Loaded(ticket),), True))
                if self.load_faults:
                    out.append(((ev.LoadFailed(ticket, "fault"),), False))
                    if scope.undrained:
                        out.append(((ev.LoadFailed(ticket, "fault", False),), False))
            elif state == QUARANTINED:
                out.append(((ev.Loaded(ticket),), True))
                out.append(((ev.LoadFailed(ticket, "fault", True),), True))
        if self.step is not None:
            number, members, _ = self.step
            done = ev.Computed(number)
            out += [((done, *results), True) for results in self._outcomes(members)]
            if self.step_faults:
                out.append(((ev.Failed(number, "fault"),), False))
                if len(members) > 1:
                    for n in members:
                        failed = ev.Failed(number, "fault", (n,))
                        rest = tuple(m for m in members if m != n)
                        out += [((failed, *results), False) for results in self._outcomes(rest)]
        elif scope.split:
            for r in self.live:
                if r[PHASE] == OWED:
                    out += [((result,), True) for result in self._results(r)]
        if self.cancels:
            out += [((ev.Cancelled(r[NUMBER]),), False) for r in self.live]
        if self.drains:
            out.append(((ev.Drain(),), False))
        if self.predictions:
            out += [((guess,), False) for r in self.live for guess in self._guesses(r)]
        return out

    def arrival(self, number: int) -> ev.Arrived:
        """The event by which a request of the scope arrives."""
        return ev.Arrived(number, *self.scope.requests[number])

    def idle(self) -> tuple[int, int]:
        """Idle channels and idle compute lanes."""
        return self.scope.channels - self.state.count(LOADING), 0 if self.step else 1

    def _outcomes(self, members: tuple[int, ...]) -> list[Events]:
        """Results that come with a Computed: none where they come later (`split`)."""
        if self.scope.split:
            return [()]
        results: list[list[Events]] = []
        for r in self.live:
            if r[NUMBER] in members and r[LAST] and self._owes(r):
                options = self._results(r)
                if r[WHY]:
                    options = options[:1]
                results.append([(x,) for x in options])
        return [tuple(x for one in combo for x in one) for combo in product(*results)]

    def _owes(self, r: list[int]) -> bool:
        """The end of this visit is told by a Routed or a Sampled."""
        scope = self.scope
        last_chunk = scope.prompt_chunks(r[PROMPT]) - 1
        return r[STAGE] < scope.last_stage or r[CHUNK] >= last_chunk

    def _results(self, r: list[int]) -> list[ev.Event]:
        scope = self.scope
        if r[STAGE] < scope.last_stage:
            visit = Visit(r[NUMBER], r[CHUNK], scope.options.layers[r[STAGE] + 1])
            rows = scope.rows(r[CHUNK], r[PROMPT])
            return [ev.Routed(visit, tokens) for _, tokens in scope.routes.of(rows)]
        if not r[NEW]:
            return [ev.Sampled(r[NUMBER], None, True)]
        out: list[ev.Event] = [ev.Sampled(r[NUMBER], 7, False)]
        if scope.stops and r[TOKENS] + 1 < r[NEW]:
            out.append(ev.Sampled(r[NUMBER], 7, True))
        return out

    def _guesses(self, r: list[int]) -> list[ev.Event]:
        """What may be told of the request's next two visits at layers with experts: of as many
        experts as control listens to, each choice in each order."""
        scope = self.scope
        out: list[ev.Event] = []
        if r[PHASE] in (QUEUED, ENDED):
            return out
        chunk, stage = r[CHUNK], r[STAGE]
        last_chunk = scope.prompt_chunks(r[PROMPT]) - 1 + max(0, r[NEW] - 1)
        for _ in range(2):
            stage += 1
            if stage > scope.last_stage:
                chunk, stage = chunk + 1, 0
            if chunk > last_chunk:
                break
            visit = Visit(r[NUMBER], chunk, scope.options.layers[stage])
            for told in permutations(range(scope.options.experts), scope.options.prefetch):
                out.append(ev.Predicted(visit, tuple((e, 0.5**i) for i, e in enumerate(told))))
        return out

    # -- what happened ---------------------------------------------------------------------

    def happen(self, event: ev.Event) -> None:
        """Make the event true."""
        HAPPEN[event.__class__](self, event)

    def find(self, number: int) -> list[int] | None:
        """The unfinished request of that number."""
        for r in self.live:
            if r[NUMBER] == number:
                return r
        return None

    def _arrived(self, e: ev.Arrived) -> None:
        self.arrived += 1
        new = [e.request, e.prompt_len, e.max_new_tokens, QUEUED, 0, -1, 0, 0, 0, 0, 0, 0, 0]
        self.live.append(new)

    def _loaded(self, e: ev.Loaded) -> None:
        slot = self.ticket.index(e.ticket)
        if self.state[slot] == QUARANTINED:
            self.state[slot], self.ticket[slot] = FREE, 0
            return
        self.state[slot], self.ticket[slot] = READY, 0
        code = self.code[slot]
        if code in self.fails:
            self.fails = {c: n for c, n in self.fails.items() if c != code}
            for r, shift in self._needing(code):
                r[LOST] &= ~(15 << shift)

    def _needing(self, code: int) -> list[tuple[list[int], int]]:
        """Requests that need the expert, with the place of its count in LOST."""
        stage, expert = divmod(code, self.scope.options.experts)
        return [(r, 4 * expert) for r in self.live if r[STAGE] == stage and r[NEED] >> expert & 1]

    def _load_failed(self, e: ev.LoadFailed) -> None:
        slot = self.ticket.index(e.ticket)
        if self.state[slot] == LOADING:
            self.load_faults -= 1
            code = self.code[slot]
            self.fails = {**self.fails, code: self.fails.get(code, 0) + 1}
            for r, shift in self._needing(code):
                r[LOST] += 1 << shift
                if r[LOST] >> shift & 15 > self.scope.options.retries:
                    r[WHY] |= ERROR
        self.code[slot] = -1
        if e.drained:
            self.state[slot], self.ticket[slot] = FREE, 0
        else:
            self.state[slot] = QUARANTINED

    def _computed(self, e: ev.Computed) -> None:
        self._end_step(())

    def _failed(self, e: ev.Failed) -> None:
        assert self.step is not None
        self.step_faults -= 1
        self._end_step(e.requests or self.step[1])

    def _end_step(self, blamed: tuple[int, ...]) -> None:
        assert self.step is not None
        members, self.step = self.step[1], None
        for r in self.live:
            if r[NUMBER] not in members:
                continue
            r[PART] = 0
            if r[NUMBER] in blamed:
                r[PHASE] = ENDED
                r[WHY] |= ERROR
            elif not r[LAST]:
                r[PHASE] = WAITING
            else:
                if self.scope.rows(r[CHUNK], r[PROMPT]) == 1:
                    r[MADE] += 1
                if self._owes(r):
                    r[PHASE] = OWED
                else:
                    self._open(r)
            r[LAST] = 0

    def _open(self, r: list[int]) -> None:
        r[CHUNK] += 1
        r[STAGE], r[NEED], r[PHASE] = -1, 0, WAITING

    def _routed(self, e: ev.Routed) -> None:
        r = self.find(e.visit.request)
        if r is not None:
            r[STAGE] += 1
            r[NEED] = sum({1 << x for token in e.experts for x in token})
            r[PHASE], r[LOST] = WAITING, 0

    def _sampled(self, e: ev.Sampled) -> None:
        r = self.find(e.request)
        if r is None:
            return
        r[TOKENS] += 1
        if e.stop:
            r[WHY] |= STOP
        if r[TOKENS] >= r[NEW]:
            r[WHY] |= LENGTH
        if e.stop or r[TOKENS] >= r[NEW]:
            r[PHASE] = ENDED
        else:
            self._open(r)

    def _cancelled(self, e: ev.Cancelled) -> None:
        self.cancels -= 1
        r = self.find(e.request)
        if r is not None:
            r[WHY] |= CANCELLED

    def _predicted(self, e: ev.Predicted) -> None:
        self.predictions -= 1

    def _drain(self, e: ev.Drain) -> None:
        self.drains -= 1
        self.draining = True


HAPPEN = {
    ev.Arrived: World._arrived,
    ev.Loaded: World._loaded,
    ev.LoadFailed: World._load_failed,
    ev.Computed: World._computed,
    ev.Failed: World._failed,
    ev.Predicted: World._predicted,
    ev.Routed: World._routed,
    ev.Sampled: World._sampled,
    ev.Cancelled: World._cancelled,
    ev.Drain: World._drain,
}
