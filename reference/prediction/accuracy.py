"""How good guesses were: from what control was told and what it asked for, live or from a log
(PREDICT-9).

A prediction of a visit is held against what its router then names, over all experts and over those
that were neither there nor on their way when the prediction was made: only there could a guess have
helped, and there guesses are worse (the others are in the cache because they are used often). A
guess that was read is *used* when a step reads it before its slot is given away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reference.vocab.actions import Action, Admit, Compute, Finish, Load, Reject
from reference.vocab.events import Event, Loaded, LoadFailed, Predicted, Routed
from reference.vocab.ids import ExpertKey


@dataclass
class Counts:
    """predicted, named: experts told beforehand, named by routers; right: both."""

    predicted: int = 0
    named: int = 0
    right: int = 0

    def add(self, predicted: set[int], named: set[int]) -> None:
        """One visit."""
        self.predicted += len(predicted)
        self.named += len(named)
        self.right += len(predicted & named)

    def as_dict(self) -> dict[str, Any]:
        """The counts; precision: right / predicted; recall: right / named (None of nothing)."""
        return {
            "predicted": self.predicted,
            "named": self.named,
            "right": self.right,
            "precision": self.right / self.predicted if self.predicted else None,
            "recall": self.right / self.named if self.named else None,
        }


@dataclass
class Accuracy:
    """most: how many experts of a prediction count (0: all of them). `named` of `overall` and
    `absent` counts visits that were predicted; `routed` is how many there were at all."""

    most: int = 0
    overall: Counts = field(default_factory=Counts)
    absent: Counts = field(default_factory=Counts)
    routed: int = 0
    predicted: int = 0
    guesses: int = 0
    used: int = 0
    failed: int = 0
    begun: bool = False
    """A request has been admitted; guesses before are a warm start's, and not counted (FETCH-8)."""
    _told: dict[int, dict[tuple[int, int], tuple[set[int], set[int]]]] = field(default_factory=dict)
    """Request -> (chunk, layer) -> (experts told, experts held at that time)."""
    _slots: dict[int, ExpertKey] = field(default_factory=dict)
    _tickets: dict[int, int] = field(default_factory=dict)
    _held: dict[int, set[int]] = field(default_factory=dict)
    """Layer -> experts there or on their way."""
    _unused: set[int] = field(default_factory=set)
    """Slots whose content came as a guess and was not read yet."""

    def event(self, e: Event) -> None:
        """Control was told this."""
        if isinstance(e, Predicted):
            number, chunk, layer = e.visit
            pairs = e.scores[: self.most] if self.most else e.scores
            told = {expert for expert, score in pairs if score > 0}
            held = set(self._held.get(layer, ()))
            self._told.setdefault(number, {})[chunk, layer] = told, held
        elif isinstance(e, Routed):
            self._routed(e)
        elif isinstance(e, Loaded):
            self._tickets.pop(e.ticket, None)
        elif isinstance(e, LoadFailed):
            slot = self._tickets.pop(e.ticket, None)
            if slot is not None and slot in self._slots:
                self.failed += slot in self._unused
                self._clear(slot)

    def action(self, a: Action) -> None:
        """Control asked for this."""
        if isinstance(a, Load):
            self._clear(a.slot)
            self._slots[a.slot] = a.key
            self._tickets[a.ticket] = a.slot
            self._held.setdefault(a.key.layer, set()).add(a.key.expert)
            if a.guess and self.begun:
                self.guesses += 1
                self._unused.add(a.slot)
        elif isinstance(a, Compute):
            for _, slot in a.slots:
                self.used += slot in self._unused
                self._unused.discard(slot)
        elif isinstance(a, Finish | Reject):
            self._told.pop(a.request, None)
        elif isinstance(a, Admit):
            self.begun = True

    def _routed(self, e: Routed) -> None:
        number, chunk, layer = e.visit
        self.routed += 1
        told = self._told.get(number, {})
        found = told.pop((chunk, layer), None)
        for place in [p for p in told if p < (chunk, layer)]:
            del told[place]
        if found is None:
            return
        self.predicted += 1
        named = {expert for row in e.experts for expert in row}
        predicted, held = found
        self.overall.add(predicted, named)
        self.absent.add(predicted - held, named - held)

    def _clear(self, slot: int) -> None:
        key = self._slots.pop(slot, None)
        if key is not None:
            self._held[key.layer].discard(key.expert)
        self._unused.discard(slot)

    def as_dict(self) -> dict[str, Any]:
        """routed, predicted: visits, and those of them that were spoken of; overall, absent (not
        held when predicted): see Counts; guesses read, those of them used, and those that failed.
        """
        return {
            "routed": self.routed,
            "predicted": self.predicted,
            "overall": self.overall.as_dict(),
            "absent": self.absent.as_dict(),
            "guesses": self.guesses,
            "used": self.used,
            "failed": self.failed,
        }


class Watched:
    """An observer of the virtual loop (simulator/loop.py) that counts, beside another."""

    def __init__(self, accuracy: Accuracy, other: Any = None) -> None:
        self.accuracy, self.other = accuracy, other

    def passed(self, loop: Any, until: float) -> None:
        """Nothing changes until then."""
        if self.other is not None:
            self.other.passed(loop, until)

    def event(self, loop: Any, event: Event) -> None:
        """About to be told."""
        self.accuracy.event(event)
        if self.other is not None:
            self.other.event(loop, event)

    def action(self, loop: Any, action: Action) -> None:
        """About to be obeyed."""
        self.accuracy.action(action)
        if self.other is not None:
            self.other.action(loop, action)


def of_log(head: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> Accuracy:
    """The accuracy of a whole event log, as reference.files.event_log.read_log gives it."""
    from reference.files.event_log import action_from_record, event_from_record

    accuracy = Accuracy(int(head["options"]["prefetch"]))
    for record in records:
        if "event" in record:
            accuracy.event(event_from_record(dict(record)))
        elif "action" in record:
            accuracy.action(action_from_record(dict(record)))
    return accuracy
