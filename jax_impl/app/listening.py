"""Following one answer while Ctrl-C is listened for (CHAT-3)."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from reference.vocab.errors import RequestFailed

LOOK_S = 0.1
"""How long a Ctrl-C may go unnoticed, in seconds."""


class Pause:
    """While entered, a SIGINT is only noted, in `asked`; a second one before it was acted upon
    raises KeyboardInterrupt. Outside the main thread nothing can be noted, and nothing is."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Pause:
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Where a Ctrl-C is an ordinary KeyboardInterrupt: between answers."""
        self.asked = False
        if self._main:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            if self._main:
                signal.signal(signal.SIGINT, self._note)


class Listener:
    """Iterates the tokens of a request and cancels it when a pause is asked for.

    A thread waits for the tokens, so that the caller's thread, which gets the signals, never waits
    for long, and an engine that works in its caller's thread is not interrupted in the middle.
    """

    def __init__(self, handle: Any, pause: Pause) -> None:
        self._handle, self._pause = handle, pause
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        try:
            for token in self._handle:
                self._queue.put(token)
        except RequestFailed:
            pass  # the result says why
        finally:
            self._queue.put(None)

    def __iter__(self) -> Iterator[int]:
        self._thread.start()
        cancelled = False
        while True:
            try:
                token = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                token = -1
            if token is None:
                self._thread.join()
                return
            if self._pause.asked and not cancelled:
                cancelled = True
                self._handle.cancel()
            if token >= 0 and not cancelled:
                yield token
