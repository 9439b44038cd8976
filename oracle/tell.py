"""A path of the explorer as an event log, so that the log checkers judge it and people read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reference.files.log_records import record_of
from reference.vocab.events import Event

if TYPE_CHECKING:
    from oracle.scopes import Scope

SLOT_BYTES = 1


class Teller:
    """Collects records in the form of specs/log.md; time is the number of the record."""

    def __init__(self, scope: Scope, book: bool) -> None:
        self.book = book
        slots = scope.options.slots
        self.records: list[dict[str, Any]] = [
            {
                "log": 1,
                "options": asdict(scope.options),
                "model": {},
                "engine": "simulator",
                "versions": {},
                "expert_bytes": SLOT_BYTES,
                "slot_bytes": SLOT_BYTES,
                "budget_bytes": slots * SLOT_BYTES,
                "channels": scope.channels,
                "scope": scope.name,
            }
        ]

    def event(self, event: Event) -> None:
        """What the environment told control."""
        self._add(record_of(event))

    def ask(self, channels: int, lanes: int, states: list[int]) -> None:
        """The environment asks; `states`: what control thinks of each slot."""
        told = {"slots": [states.count(i) for i in range(4)]} if self.book else {}
        self._add({"ask": [channels, lanes], **told})

    def action(self, action: Any) -> None:
        """What control answered."""
        self._add(record_of(action))

    def close(self, states: list[int]) -> None:
        """The path stops here: nothing is asked any more, so that the last ask can be judged."""
        self.ask(0, 0, states)

    def end(self) -> None:
        """The path is a whole run."""
        self._add({"end": {}})

    def _add(self, record: dict[str, Any]) -> None:
        self.records.append({"t": float(len(self.records)), **record})
