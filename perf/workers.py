"""Work in processes of its own that end with this one, however it ends (GRID-7)."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from typing import Any

PATIENCE_S = 2.0
"""How long a worker may take to end when it is told to."""


def done_by(
    work: Callable[..., Any], given: Iterable[tuple[Any, ...]], processes: int
) -> Generator[tuple[tuple[Any, ...], Any]]:
    """(arguments, work(*arguments)) of all `given`, begun in their order, as they are done.

    The processes end when the iterator does or is closed, and when this process is gone. Raises
    RuntimeError with the worker's traceback where the work failed, and where a worker died.
    """
    waiting, workers = deque(given), list[SpawnProcess]()
    busy: dict[Any, tuple[tuple[Any, ...], SpawnProcess]] = {}
    try:
        for _ in range(min(processes, len(waiting))):
            here, worker = _started(work)
            workers.append(worker)
            busy[here] = waiting.popleft(), worker
            here.send(busy[here][0])
        while busy:
            ready: list[Any] = connection.wait(list(busy))
            for here in ready:
                arguments, worker = busy.pop(here)
                good, result = _heard(here, arguments, worker)
                if not good:
                    raise RuntimeError(f"{arguments}: {result}")
                if waiting:
                    busy[here] = waiting.popleft(), worker
                    here.send(busy[here][0])
                yield arguments, result
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(PATIENCE_S)
            worker.kill()
            worker.join()


def _started(work: Callable[..., Any]) -> tuple[Any, SpawnProcess]:
    """A worker that Ctrl-C does not reach: it is told by this process."""
    context = get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_serve, args=(there, work), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the worker inherits it
    try:
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()
    return here, worker


def _heard(here: Any, arguments: tuple[Any, ...], worker: SpawnProcess) -> tuple[bool, Any]:
    try:
        return here.recv()
    except (EOFError, ConnectionResetError):
        worker.join(PATIENCE_S)
        raise RuntimeError(f"{arguments}: its process died: {worker.exitcode}") from None


def _serve(there: Any, work: Callable[..., Any]) -> None:
    """In the worker: what is asked for, until nobody asks."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            arguments = there.recv()
        except EOFError:
            return
        try:
            answer = True, work(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        there.send(answer)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
