"""The JAX engine, held by the hand: every transfer completes, fails or hangs when a test says so.

`Driven` wraps an open engine. `settle` returns when nothing more happens by itself: the engine
thread sleeps, no step is in flight, and every transfer in flight has its bytes and is held. From
there each call (submit, cancel, release, fail, give_up) leads to one next such moment, so a run is
the same each time whatever the threads do.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import SMALL, checkpoint

from jax_impl.engine import JaxEngine
from jax_impl.loop import Stop, Submit
from jax_impl.model import JaxModel
from jax_impl.steps import Outcome
from jax_impl.transfer import Transferred
from property_tests.meeting import HeldReader, Inbox, Points
from reference.vocab.events import Cancelled
from reference.vocab.ids import ExpertKey

REST_S = 20.0
"""Longer than anything that is not a hang."""


KINDS = {Submit: "submission", Cancelled: "cancel", Stop: "stop"}


class Driven:
    """An engine whose every wait is known."""

    def __init__(self, engine: JaxEngine) -> None:
        self.engine = engine
        self.loop: Any = engine._loop
        self.transfers: Any = self.loop.transfers
        self.reader: Any = engine.options.reader
        self.points = Points()
        self._told = 0
        self._posted: set[int] = set()
        """Ends of loads that fetch threads have told and the loop has not taken."""
        old, self._inbox = self.loop._inbox, Inbox()
        self._watch()
        self.loop._inbox = self._inbox
        old.put(Submit(()))  # wakes the engine thread, which goes to sleep at the new one

    def _watch(self) -> None:
        """Points are passed from now on; loads that were told are counted."""
        loop, points = self.loop, self.points

        def around(
            where: Any, name: str, before: Callable[..., None], after: Callable[..., None]
        ) -> None:
            real = getattr(where, name)

            @functools.wraps(real)
            def watched(*args: Any, **more: Any) -> Any:
                before(*args)
                out = real(*args, **more)
                after(*args)
                return out

            setattr(where, name, watched)

        def taking(item: Any) -> None:
            if id(item) in self._posted:
                self._posted.discard(id(item))
                self._told += 1
            points.at(f"before {self._word(item)} is taken")

        def taken(item: Any) -> None:
            word = self._word(item)
            if word in ("a submission", "a cancel"):
                points.at(f"after {word} is taken")
            else:
                points.at(f"between {word} and the ask")

        def nothing(*_: Any) -> None:
            pass

        around(loop, "_take", taking, taken)
        around(loop, "_obey", nothing, lambda: points.at("between the actions and sleep"))
        def telling(done: Transferred) -> None:
            self._posted.add(id(done))
            points.at("between a load and its telling")

        told = "after a load is told"
        around(self.transfers, "_post", telling, lambda _: points.at(told))
        step_told = "after a step is told"
        around(
            loop._computer, "_post",
            lambda _: points.at("between a step and its telling"), lambda _: points.at(step_told),
        )  # fmt: skip
        loop._computer._model = _Gated(loop._computer._model, points)

    @staticmethod
    def _word(item: Any) -> str:
        if isinstance(item, Transferred):
            return "the end of a load"
        if isinstance(item, Outcome):
            return "the end of a step"
        word = KINDS.get(type(item), "something")
        return f"{'the' if word == 'stop' else 'a'} {word}"

    # -- rest

    def quiet(self) -> bool:
        transfers = self.transfers
        if not self._inbox.at_rest or self.loop._step is not None:
            return False
        with transfers._lock:
            flying = len(transfers._open) + len(transfers._stuck)
            untold = transfers.stats.loads - self._told
        return not untold and flying == len(self.reader.held())

    def settle(self) -> dict[int, ExpertKey]:
        """Wait until nothing happens by itself; the loads that are held. TimeoutError: it hangs."""
        end = time.monotonic() + REST_S
        while not self.quiet():
            if not self.loop._thread.is_alive():
                break
            if time.monotonic() > end:
                raise TimeoutError("the engine did not come to rest")
            time.sleep(0.0003)
        return self.reader.held()

    # -- what a test decides

    def release(self, ticket: int) -> dict[int, ExpertKey]:
        self.reader.release(ticket)
        return self.settle()

    def fail(self, ticket: int) -> dict[int, ExpertKey]:
        self.reader.fail(ticket)
        return self.settle()

    def give_up(self, ticket: int) -> dict[int, ExpertKey]:
        """The load is overdue: told as failed, while its write may still land."""
        with self.transfers._lock:
            job = self.transfers._open[ticket]
            began, job.started = job.started, -1e9
        self._inbox.put(Submit(()))
        held = self.settle()
        job.started = began  # the log tells how long it took (S11)
        return held

    def overdue(self) -> set[int]:
        with self.transfers._lock:
            return set(self.transfers._stuck)

    def finish(self) -> None:
        """Everything completes, in order of issue."""
        while held := self.settle():
            self.reader.release(min(held))


class _Gated:
    """A model that passes a point before each of its calls."""

    def __init__(self, model: Any, points: Points) -> None:
        self._model, self._points = model, points

    def __getattr__(self, name: str) -> Any:
        if name in ("enter", "experts", "advance"):
            self._points.at("before a step runs")
        return getattr(self._model, name)


_models: dict[tuple[Any, ...], JaxModel] = {}


def one_model(ckpt: Any, **options: Any) -> JaxModel:
    """A model that was compiled before, where there is one: a hundred engines open in a second."""
    key = (str(ckpt.path), *sorted((k, str(v)) for k, v in options.items()))
    if key not in _models:
        _models[key] = JaxModel(ckpt, **options)
        _models[key].compile()
    model: Any = _models[key]
    model.compile = lambda progress=None: None
    return model


@contextmanager
def driven(memory: int, path: Path | None = None, **options: Any) -> Iterator[Driven]:
    """An engine under a HeldReader. On leaving, whatever is held is let go and it is closed."""
    given = {"reader": HeldReader(), "io": "buffered", "model": one_model}
    engine = JaxEngine.open(path or checkpoint(), memory, **(SMALL | given | options))
    held = Driven(engine)
    try:
        yield held
    finally:
        held.points.release()
        held.reader.open_all()
        engine.close()
