"""A scheduler that may make any legal choice: safety for all policies at once, timed ones too.

Life cycle, slots and steps are the shipped ones (reference/control); what to read, where to, and
what to run is chosen by whoever explores: any absent expert that a visit has named, or none; any
free slot, or any resident expert that no step reads, whoever wants it or holds it; any layer, any
visits there, any of their resident experts, or none. Holding back now and acting after the next
event is among the choices; a policy with a clock can do no more. Only safety is asked of it
(SAFE-1 to SAFE-11): it may starve, thrash and stand still.
"""

from __future__ import annotations

from typing import Any

from reference.control.cache import READY
from reference.control.fetch import Chooser
from reference.control.grouping import Ready, _start
from reference.control.lifecycle import admit
from reference.control.requests import RUNNING, WAITING
from reference.control.scheduler import Scheduler
from reference.vocab.actions import Action, Load
from reference.vocab.ids import ExpertKey

NOTHING: Any = None


class AnyPolicy(Scheduler):
    """`next_actions` offers every legal choice to `choose`, one decision at a time."""

    __slots__ = ()

    def copy(self) -> AnyPolicy:
        """An independent copy."""
        new = super().copy()
        new.__class__ = AnyPolicy  # the same slots
        return new  # type: ignore[return-value]

    def key(self) -> tuple:
        """No policy is at work, so neither recency nor progress tells the future anything."""
        cache = self.cache
        place = {n: i for i, n in enumerate(self.running)}
        slots = sorted(zip(cache.state, cache.code, strict=True))
        return (
            tuple([
                (r.status, r.stage, r.chunk, r.need, r.running, r.last, r.sampled, r.doomed)
                for r in self.running.values()
            ]),
            len(self.queue),
            tuple(slots),
            tuple(sorted(self.fails.items())),
            tuple([tuple([place.get(n, -1) for n in s[0]]) for s in self.steps.values()]),
            tuple(self.terminal),
            self.draining,
        )  # fmt: skip

    def next_actions(
        self, idle_channels: int, idle_compute: int, choose: Chooser = lambda options: 0
    ) -> list[Action]:
        """Admission is no choice (ADMIT-2); all else is."""
        actions, self.terminal = self.terminal, []
        admit(self, actions)
        for _ in range(idle_channels):
            if not self._load(actions, choose):
                break
        if idle_compute and not self.steps:
            self._run(actions, choose)
        return actions

    def _load(self, actions: list[Action], choose: Chooser) -> bool:
        named = {c for r in self.running.values() if r.status in (WAITING, RUNNING) for c in r.need}
        code = _pick([NOTHING, *sorted(c for c in named if c not in self.cache.where)], choose)
        if code is NOTHING:
            return False
        slot = _pick(self._targets(), choose)
        if slot is NOTHING:
            return False
        ticket = self.cache.begin(slot, code, False, False)
        actions.append(Load(ticket, ExpertKey(*self.key_of(code)), slot))
        return True

    def _targets(self) -> list[int]:
        """A free slot (they are all alike), and each that a read may legally overwrite."""
        cache = self.cache
        out = cache.free[-1:]
        out += [
            slot
            for slot, state in enumerate(cache.state)
            if state == READY and slot not in cache.readers
        ]
        return out or [NOTHING]

    def _run(self, actions: list[Action], choose: Chooser) -> None:
        waiting = [
            r for r in self.running.values()
            if r.status == WAITING and r.doomed is None
            and (not r.need or any(self.cache.present(c) for c in r.need))
        ]  # fmt: skip
        stage = _pick([NOTHING, *sorted({r.stage for r in waiting})], choose)
        if stage is NOTHING:
            return
        chosen: list[Ready] = []
        rows = 0
        for r in waiting:
            if r.stage != stage or (chosen and rows + r.rows > self.options.max_rows):
                continue
            here = [c for c in r.need if self.cache.present(c)]
            parts = [(codes, last) for codes in _subsets(here) if codes or not r.need
                     for last in (False, True)
                     if (len(codes) == len(r.need) or not last) and (codes or last)]
            part = _pick([NOTHING, *parts], choose)
            if part is not NOTHING:
                chosen.append((r, *part))
                rows += r.rows
        if chosen:
            _start(self, actions, chosen)


def _pick(options: list[Any], choose: Chooser) -> Any:
    return options[choose(options)] if len(options) > 1 else options[0]


def _subsets(codes: list[int]) -> list[tuple[int, ...]]:
    return [
        tuple([c for i, c in enumerate(codes) if mask >> i & 1]) for mask in range(1 << len(codes))
    ]
