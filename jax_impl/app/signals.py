"""Signals that ask a process to end, where nothing else is made of them (APP-5)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_as_ctrl_c() -> Iterator[None]:
    """While entered, what would end the process at once raises KeyboardInterrupt, so that files
    half written and processes begun go too. What is ignored (nohup) or handled stays so; outside
    the main thread nothing changes."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
