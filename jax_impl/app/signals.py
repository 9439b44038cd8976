"""Signals that ask a process to end, where nothing else is made of them (APP-5)."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.05


@contextmanager
def ending_as_ctrl_c() -> Iterator[None]:
    """While entered, what would end the process at once raises KeyboardInterrupt, so that files
    half written and processes begun go too. What is ignored (nohup) or handled stays so; outside
    the main thread nothing changes. Raised where exceptions are ignored (a callback of the garbage
    collector, say), by whatever signal, it is raised again a moment later. While a module is being
    imported it waits: compiled ones do not survive an exception there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        if signal.SIGALRM in before and _importing(frame):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            raise KeyboardInterrupt

    for number in (signal.SIGALRM, *ENDING, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            before[number] = signal.signal(number, end)
    told = sys.unraisablehook

    def ignored(lost: Any) -> None:
        if lost.exc_type is KeyboardInterrupt and signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            told(lost)

    sys.unraisablehook = ignored
    try:
        yield
    finally:
        sys.unraisablehook = told
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    """Whether the frame runs on behalf of an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
