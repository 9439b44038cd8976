"""Submitting requests, waiting for them with progress, and giving up cleanly on Ctrl-C (APP-5)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from jax_impl.app.output import Progress
from reference.files.requests import Request

LOOK_S = 0.2
"""How long a Ctrl-C may go unnoticed, in seconds."""


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is only noted; a second one raises
    KeyboardInterrupt.

    Outside the main thread nothing can be noted, and nothing is.
    """

    def __init__(self) -> None:
        self.noted = False
        self._before: dict[signal.Signals, Any] = {}
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._main:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._main:
            for number, before in self._before.items():
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            raise KeyboardInterrupt
        self.noted = True
        # Not through sys.stderr: the handler may have come in the middle of a line of its.
        os.write(2, b"interrupted: cancelling what runs (again to stop at once)\n")


def run_all(
    requests: Sequence[Request],
    submit: Callable[[Request], Any],
    progress: Progress,
    interrupt: Interrupt,
    *,
    virtual: bool,
) -> list[Any]:
    """Submits each request when it arrives and waits for all of them.

    Returns the handles in the order of `requests`, all ended; None for a request that had not
    arrived when Ctrl-C came. `virtual`: the engine lets requests arrive by itself.
    """
    handles: list[Any] = [None] * len(requests)
    started = time.monotonic()
    shown = started

    def look() -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= LOOK_S:
            shown = now
            done = sum(1 for handle in handles if handle is not None and handle.done)
            progress.show(f"{done} of {len(requests)} requests, {now - started:.0f} s")

    for index in sorted(range(len(requests)), key=lambda i: requests[i].arrival_s):
        at = started if virtual else started + requests[index].arrival_s
        while not interrupt.noted and (left := at - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
            look()
        if interrupt.noted:
            break
        handles[index] = submit(requests[index])
    cancelled = False
    submitted = [handle for handle in handles if handle is not None]
    for handle in submitted:
        while not handle.wait(LOOK_S):
            if interrupt.noted and not cancelled:
                cancelled = True
                for each in submitted:
                    each.cancel()
            look()
    return handles
