"""Readers that misbehave on purpose, for the fault suites of this engine and of others.

Each counts what it did (`fired`), so that a test can show that its fault really happened.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Literal

from jax_impl.readers import FileReader
from reference.vocab.ids import ExpertKey

Fault = Literal["eio", "short", "eof", "eintr", "flip"]


class FaultyReader(FileReader):
    """Reads nth, nth + every, nth + 2 every, ... go wrong (counted from 1; every = 0: only nth).

    eio    OSError(EIO)          eintr  InterruptedError
    short  one byte less than half of what there is          eof    0 bytes
    flip   the right count, but one bit in the middle is wrong (a lying device)

    `times` bounds the number of faults; reads before `arm` is called are not counted. With `where`
    only reads at offsets for which it says True are counted.
    """

    def __init__(
        self,
        fault: Fault,
        nth: int,
        every: int = 0,
        times: int = 1 << 62,
        armed: bool = True,
        where: Callable[[int], bool] = lambda offset: True,
    ) -> None:
        self.fault = fault
        self.nth = nth
        self.every = every
        self.times = times
        self.reads = 0
        self.fired = 0
        self._armed = armed
        self._where = where
        self._lock = threading.Lock()

    def arm(self, nth: int | None = None) -> None:
        """Start counting, from nothing; the nth read goes wrong from now on, if given."""
        with self._lock:
            self.nth = self.nth if nth is None else nth
            self.reads = self.fired = 0
            self._armed = True

    def _due(self, offset: int) -> bool:
        with self._lock:
            if not self._armed or not self._where(offset):
                return False
            self.reads += 1
            past = self.reads - self.nth
            due = past == 0 or (self.every > 0 and past > 0 and past % self.every == 0)
            if due and self.fired < self.times:
                self.fired += 1
                return True
            return False

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if not self._due(offset):
            return super().read(fd, buffers, offset)
        if self.fault == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fault == "eintr":
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        if self.fault == "eof":
            return 0
        n = super().read(fd, buffers, offset)
        if self.fault == "short":
            return min(n, max(1, n // 2 - 1))
        if n:
            _flip(buffers, n // 2)
        return n


def _flip(buffers: list[memoryview], at: int) -> None:
    """Turn over the lowest bit of byte `at` of the buffers taken together."""
    for buffer in buffers:
        if at < len(buffer):
            buffer[at] ^= 1
            return
        at -= len(buffer)


class ControlledReader(FileReader):
    """Loads complete only when the test says so, in its order.

    `waiting()` lists the tickets whose bytes have come in; `release(ticket)` lets one complete.
    With `hold` given, only the loads that it answers True for are held.
    """

    def __init__(self, hold: Callable[[int, ExpertKey], bool] = lambda ticket, key: True) -> None:
        self._hold = hold
        self._waiting: dict[int, ExpertKey] = {}
        self._released: set[int] = set()
        self._open = False
        self._changed = threading.Condition()

    def landed(self, ticket: int, key: ExpertKey) -> None:
        with self._changed:
            if self._open or not self._hold(ticket, key):
                return
            self._waiting[ticket] = key
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open or ticket in self._released)
            self._released.discard(ticket)
            self._waiting.pop(ticket, None)
            self._changed.notify_all()

    def waiting(self, at_least: int = 0, timeout_s: float = 10.0) -> dict[int, ExpertKey]:
        """Held loads by ticket, once there are `at_least` so many. Raises TimeoutError."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self._waiting) >= at_least, timeout_s)
            if not enough:
                raise TimeoutError(f"{len(self._waiting)} of {at_least} loads came in")
            return dict(self._waiting)

    def release(self, ticket: int) -> None:
        """Let the held load `ticket` complete."""
        with self._changed:
            self._released.add(ticket)
            self._changed.notify_all()

    def open_all(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()
