"""What makes a run of threads repeatable: an inbox that knows when its reader sleeps, loads that
end on command, the points where threads meet, and choices made one after another until all are.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from queue import Empty
from typing import Any

from jax_impl.fault_readers import ControlledReader
from reference.vocab.ids import ExpertKey


class Inbox:
    """In place of the loop's queue: knows whether its reader sleeps and there is nothing for it."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._asleep = False

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        with self._changed:
            self._asleep = True
            self._changed.wait_for(lambda: self._items, timeout)
            self._asleep = False
            return self._pop()

    def get_nowait(self) -> Any:
        with self._changed:
            return self._pop()

    def _pop(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    @property
    def at_rest(self) -> bool:
        with self._changed:
            return self._asleep and not self._items


class HeldReader(ControlledReader):
    """A ControlledReader whose loads can also be made to fail at their end."""

    def __init__(self) -> None:
        super().__init__()
        self._failing: set[int] = set()

    def landed(self, ticket: int, key: ExpertKey) -> None:
        super().landed(ticket, key)
        if ticket in self._failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(self, ticket: int) -> None:
        self._failing.add(ticket)
        self.release(ticket)

    def held(self) -> dict[int, ExpertKey]:
        """Loads that have their bytes and that nobody has let go, by ticket."""
        with self._changed:
            return {t: k for t, k in self._waiting.items() if t not in self._released}


class Points:
    """Where threads meet. At most one is armed: the nth thread that gets there stops until
    `release`."""

    NAMES = (
        "before a submission is taken", "after a submission is taken",
        "before a cancel is taken", "after a cancel is taken",
        "before the end of a load is taken", "between the end of a load and the ask",
        "before the end of a step is taken", "between the end of a step and the ask",
        "between the actions and sleep", "before a step runs",
        "between a step and its telling", "after a step is told",
        "between a load and its telling", "after a load is told",
    )  # fmt: skip
    CLOSING = ("before the stop is taken", "between the stop and the ask")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._armed, self._left = "", 0
        self.held = False

    def arm(self, name: str, nth: int = 1) -> None:
        assert name in (*self.NAMES, *self.CLOSING)
        with self._changed:
            self._armed, self._left, self.held = name, nth, False

    def release(self) -> None:
        with self._changed:
            self._armed = ""
            self._changed.notify_all()

    def reached(self, timeout_s: float) -> bool:
        """Some thread is stopped at the point."""
        with self._changed:
            return self._changed.wait_for(lambda: self.held, timeout_s)

    def at(self, name: str) -> None:
        with self._changed:
            if name != self._armed:
                return
            self._left -= 1
            if self._left:
                return
            self.held = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._armed != name)
            self.held = False


class Script:
    """Makes a run again and again, each time with other choices, until all have been made."""

    def __init__(self) -> None:
        self._next: list[int] = []
        self._taken: list[tuple[int, int]] = []
        self.runs = 0

    def another(self) -> bool:
        """Begin the next run; False after the last."""
        while self._taken:
            width, picked = self._taken.pop()
            if picked + 1 < width:
                self._next = [p for _, p in self._taken] + [picked + 1]
                break
        else:
            if self.runs:
                return False
        self._taken = []
        self.runs += 1
        return True

    def choose(self, width: int) -> int:
        at = len(self._taken)
        picked = self._next[at] if at < len(self._next) else 0
        assert picked < width, "the run is not the same twice"
        self._taken.append((width, picked))
        return picked
