"""An obvious model of what control is told and asks for: requests and slots, nothing clever.

`Books.told` takes each event, `Books.asked` each action; both raise `Wrong` naming the rule that
was broken. It knows no policy but what a rule of specs/control.md says in so many words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reference.vocab import events as ev
from reference.vocab.actions import Admit, Compute, Finish, Load, Reject
from reference.vocab.ids import ENTRY, ExpertKey, Visit
from reference.vocab.options import ControlOptions


class Wrong(AssertionError):
    """A rule is broken."""


def must(true: Any, what: str) -> None:
    if not true:
        raise Wrong(what)


@dataclass
class Text:
    """A request. `place`: index of its layer with experts, -1 at ENTRY; `left`: experts that its
    visit has yet to run; `why`: reasons for which it may, and must, end."""

    number: int
    prompt: int
    new: int
    running: bool = False
    chunk: int = 0
    place: int = -1
    left: set[ExpertKey] = field(default_factory=set)
    computing: bool = False
    last: bool = False
    tokens: int = 0
    why: set[str] = field(default_factory=set)
    progress: int = 0
    passed: int = 0
    named: int = 0
    """When its visit was Routed: a running number."""


@dataclass
class Slot:
    """kind: free, loading, ready, late (failed, and its write may still land)."""

    kind: str = "free"
    key: ExpertKey | None = None
    ticket: int = 0


class Books:
    """The state of the world as far as the rules speak of it."""

    def __init__(self, options: ControlOptions) -> None:
        self.o = options
        self.texts: dict[int, Text] = {}
        self.ended: dict[int, Finish | Reject] = {}
        self.slots = [Slot() for _ in range(options.slots)]
        self.step: Compute | None = None
        self.failures: dict[ExpertKey, int] = {}
        self.draining = False
        self.newest = 0
        self.named = 0
        self.front: tuple[int, list[tuple[Text, int]]] = (-1, [])
        """Lock-step: where the last step was, and who stood there with which chunk."""
        self.lag = options.max_lag or 4 * (len(options.layers) + 1)  # SCHED-7
        self.apart = options.grouping in ("interleaved", "micro-queues")
        self.lockstep = options.grouping.startswith("lockstep")

    # -- words

    def rows(self, t: Text) -> int:
        return max(1, min(self.o.chunk, t.prompt - t.chunk * self.o.chunk))

    def bulk(self, t: Text) -> bool:
        return self.rows(t) > 1

    def kind(self, t: Text) -> bool:
        """The class that SCHED-6 speaks of: prompts are one where they run apart."""
        return self.apart and self.bulk(t)

    def blocks(self, t: Text) -> int:
        return -(-(t.prompt + t.new) // self.o.kv_block)

    def live(self) -> list[Text]:
        return [t for t in self.texts.values() if t.running]

    def queued(self) -> list[Text]:
        return [t for t in self.texts.values() if not t.running]

    def visit(self, t: Text) -> Visit:
        return Visit(t.number, t.chunk, ENTRY if t.place < 0 else self.o.layers[t.place])

    def somewhere(self) -> set[ExpertKey | None]:
        """Experts that are resident or in transfer."""
        return {s.key for s in self.slots if s.kind in ("loading", "ready")}

    def final(self, t: Text) -> bool:
        """The chunk ends the text so far."""
        return (t.chunk + 1) * self.o.chunk >= t.prompt

    def in_flight(self) -> list[Slot]:
        return [s for s in self.slots if s.ticket]

    def told(self, event: ev.Event) -> None:
        """What has happened."""
        match event:
            case ev.Arrived(number, prompt, new):
                new_text = self.texts[number] = Text(number, prompt, new)
                too_large = self.blocks(new_text) > self.o.kv_tokens // self.o.kv_block
                if self.draining or too_large:
                    new_text.why.add("rejected")
            case ev.Routed(visit, experts):
                self._routed(visit, experts)
            case ev.Loaded(ticket):
                slot = next(s for s in self.slots if s.ticket == ticket)
                late, slot.ticket = slot.kind == "late", 0
                slot.kind = "free" if late else "ready"
                if not late and slot.key is not None:
                    self.failures.pop(slot.key, None)
            case ev.LoadFailed(ticket, _, drained):
                self._load_failed(next(s for s in self.slots if s.ticket == ticket), drained)
            case ev.Computed(step):
                self._ended_step(step, ())
            case ev.Failed(step, _, numbers):
                assert self.step is not None
                self._ended_step(step, numbers or self.members())
            case ev.Sampled(number, token, stop):
                if number in self.texts:
                    self._sampled(self.texts[number], token, stop)
            case ev.Cancelled(number):
                if number in self.texts:
                    self._doom(self.texts[number], "cancelled")
            case ev.Drain():
                self.draining = True
                for t in self.queued():
                    t.why.add("rejected")
        # FETCH-6: a row of failures ends when nobody waits for the expert any more.
        named = {key for t in self.live() for key in t.left}
        self.failures = {key: n for key, n in self.failures.items() if key in named}

    def members(self) -> tuple[int, ...]:
        return tuple(p.visit.request for p in self.step.parts) if self.step else ()

    def _doom(self, t: Text, why: str) -> None:
        """It ends now, or with its step; what it wanted is released (CANCEL-1)."""
        t.why.add(why)
        t.left = set()

    def _routed(self, visit: Visit, experts: tuple[tuple[int, ...], ...]) -> None:
        t = self.texts.get(visit.request)
        if t is None:
            return
        self.named += 1
        t.place, t.named, t.passed = t.place + 1, self.named, 0
        t.left = {ExpertKey(visit.layer, e) for token in experts for e in token}

    def _load_failed(self, slot: Slot, drained: bool) -> None:
        key = slot.key
        if slot.kind == "loading" and key is not None:
            waiting = [t for t in self.live() if key in t.left]
            n = self.failures.get(key, 0) + 1 if waiting else 0
            self.failures[key] = n if n <= self.o.retries else 0
            for t in waiting:
                if n > self.o.retries:  # FETCH-6
                    self._doom(t, "error")
        slot.kind, slot.key = ("free" if drained else "late"), None
        if drained:
            slot.ticket = 0

    def _ended_step(self, step: int, failed: tuple[int, ...]) -> None:
        assert self.step is not None and self.step.step == step
        members, self.step = self.members(), None
        for number in members:
            t = self.texts[number]
            t.computing = False
            if number in failed:
                t.why.add("error")
            elif t.last and not t.why:
                t.progress += 1
                if t.place == len(self.o.layers) - 1 and not self.final(t):
                    self._open(t)

    def _open(self, t: Text) -> None:
        was = self.kind(t)
        t.chunk, t.place, t.left = t.chunk + 1, -1, set()
        if self.kind(t) != was:
            self._enter(t)

    def _enter(self, t: Text) -> None:
        """SCHED-6."""
        others = [o.progress for o in self.live() if o is not t and self.kind(o) == self.kind(t)]
        t.progress = min(others, default=0)
        if self.o.grouping == "balanced":
            while t.progress % (len(self.o.layers) + 1):
                t.progress += 1

    def _sampled(self, t: Text, token: int | None, stop: bool) -> None:
        t.tokens += token is not None
        if stop:
            t.why.add("stop")
        elif t.tokens >= t.new:
            t.why.add("length")
        elif not t.why:
            self._open(t)

    # -- actions

    def asked(self, action: object, channels: int, lanes: int) -> None:
        """What control asks for, with what was idle before this action."""
        if isinstance(action, Load):
            must(channels > 0, "more transfers than could start")
            self._load(action)
        elif isinstance(action, Compute):
            must(lanes > 0 and self.step is None, "SCHED-9: a step is running")
            self._compute(action)
        elif isinstance(action, Admit):
            queue = self.queued()
            must(queue and queue[0].number == action.request, f"ADMIT-2: {action} passes the head")
            must(not queue[0].why, "ADMIT-4, CANCEL-1: admitted after its end")
            queue[0].running = True
            held = sum(self.blocks(t) for t in self.live())
            must(held <= self.o.kv_tokens // self.o.kv_block, "ADMIT-2: KV")
            must(len(self.live()) <= self.o.max_running, "ADMIT-2: max_running")
            self._enter(queue[0])
        elif isinstance(action, Finish | Reject):
            t = self.texts.pop(action.request, None)
            must(t is not None, f"ended twice, or never came: {action}")
            assert t is not None
            must(not t.computing, f"CANCEL-1: {action} before its step ended")
            reason = action.reason if isinstance(action, Finish) else "rejected"
            must(reason in t.why, f"{action}: there is {t.why or 'no reason'}")
            self.ended[action.request] = action

    def _load(self, a: Load) -> None:
        slot = self.slots[a.slot]
        must(slot.kind != "loading", f"CACHE-7: slot {a.slot} is being written")
        must(slot.kind != "late", f"CACHE-9: slot {a.slot} may still be written")
        must(not self.step or a.slot not in dict(self.step.slots).values(), "CACHE-7: it is read")
        must(a.key not in self.somewhere(), f"CACHE-2: {a.key} twice")
        must(any(a.key in t.left for t in self.live()), f"FETCH-2: nobody named {a.key}")
        must(a.ticket > self.newest, "tickets grow")
        must(self.o.grouping != "lockstep-blocking" or not self.step, "SCHED-4: reads, computing")
        self.newest = a.ticket
        slot.kind, slot.key, slot.ticket = "loading", a.key, a.ticket

    def _compute(self, a: Compute) -> None:
        self.step = a
        used: set[ExpertKey] = set()
        texts = []
        for visit, experts, last in a.parts:
            t = self.texts.get(visit.request)
            must(t is not None and t.running, f"{visit} does not run")
            assert t is not None
            must(not t.why and not t.computing, f"{visit} has ended or computes")
            must(visit == self.visit(t), f"SCHED-1: {visit}, not {self.visit(t)}")
            keys = {ExpertKey(a.layer, e) for e in experts}
            must(keys <= t.left and bool(keys) == bool(t.left), "SCHED-3: twice, or not named")
            t.left -= keys
            must(not (last and t.left), "SCHED-3: the visit's last part")
            must(last or (keys and (t.left or not self.apart)), "SCHED-12: it is held for nothing")
            used |= keys
            t.computing, t.last = True, last
            texts.append(t)
            claims = (self.o.grouping, self.o.readiness) == ("interleaved", "visit")
            whole = claims and not self.bulk(t)
            must(last or not whole, "SCHED-3: a decoding visit runs as a whole")
        must({t.place for t in texts} == {texts[0].place}, "SCHED-4: one layer")
        for expert, number in a.slots:
            slot = self.slots[number]
            must(slot.kind == "ready" and slot.key == (a.layer, expert), "SCHED-9: not there")
        must({ExpertKey(a.layer, e) for e, _ in a.slots} == used, "SCHED-9: what it lists")
        rows = sum(self.rows(t) for t in texts)
        must(len(texts) == 1 or rows <= self.o.max_rows, "max_rows")
        loading = any(s.kind == "loading" for s in self.slots)
        must(self.o.grouping != "lockstep-blocking" or not loading, "SCHED-4: computes, reading")
        if self.apart:
            must(len({self.bulk(t) for t in texts}) == 1, "SCHED-5: prompts apart")
        if self.lockstep:
            here = {s.key for s in self.slots if s.kind == "ready"}
            level = [t for t in self.live() if t.place == texts[0].place and not t.why]
            whole = all(t.left <= here for t in level)
            must(whole or not any(t.last for t in texts), f"SCHED-12: gone on alone: {a}")
            place = texts[0].place
            for t, chunk in self.front[1] if place != self.front[0] else ():
                gone = t.number in self.ended or (t.chunk, t.place) != (chunk, self.front[0])
                must(gone, f"SCHED-4: left at the front: {t}")
            self.front = place, [(t, t.chunk) for t in self.live() if t.place == place]

    # -- after each ask

    def settled(self, channels: int, lanes: int) -> None:
        """What an ask may not leave undone."""
        for t in self.texts.values():
            must(not t.why or t.computing, f"not ended: {t}")
        moves = self.step or self.in_flight()
        must(moves or not self.texts or not (channels and lanes), f"nothing moves: {self.texts}")
        if (queue := self.queued()) and len(self.live()) < self.o.max_running:
            held = sum(self.blocks(t) for t in [*self.live(), queue[0]])
            must(held > self.o.kv_tokens // self.o.kv_block, f"ADMIT-2: {queue[0]} would fit")
        level = [t.progress for t in self.live() if not self.kind(t)]
        if not self.lockstep and level:  # balanced, one who comes waits for a token's begin
            most = self.lag + (0 if self.apart else len(self.o.layers) + 1)
            must(max(level) - min(level) <= most, f"SCHED-7: {level}")
