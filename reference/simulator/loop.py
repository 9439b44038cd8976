"""The executor's loop in virtual time: what happens next, tell the scheduler, obey (SIM-2).

This is the whole of an engine, seen from the control plane: the JAX engine does the same with
threads and a real clock. The same arrivals, costs and faults give the same log, byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from reference.control import Scheduler
from reference.simulator.costs import CostModel, Costs, Work
from reference.vocab.actions import Action, Compute, Finish, Load, Reject
from reference.vocab.events import Computed, Event, Loaded, LoadFailed


def nanoseconds(seconds: float) -> int:
    """As events tell it."""
    return round(1e9 * seconds)


class Executor(Protocol):
    """What obeys: slots with content, and requests with state."""

    def clear(self, slot: int) -> None:
        """A transfer begins to write the slot: whatever it held is gone."""
        ...

    def fill(self, action: Load) -> None:
        """The transfer has ended: the slot holds the expert. Raises OSError when it cannot."""
        ...

    def work(self, action: Compute) -> Work:
        """What the step computes: rows of its last parts, products of all."""
        ...

    def run(self, action: Compute) -> list[Event]:
        """Do the step: Computed (or Failed), then what each last part led to."""
        ...

    def ended(self, action: Finish | Reject) -> None:
        """The request's terminal action; its state can be dropped."""
        ...


@dataclass(frozen=True)
class Fault:
    """A read that goes wrong: an error told at its normal end. With `late_s`, the write is not
    drained then, and the transfer is heard of again that much later."""

    error: str = "EIO"
    late_s: float | None = None


class Log(Protocol):
    """The part of reference.files.event_log.LogWriter that the loop uses."""

    def event(self, event: Event, **extra: Any) -> None: ...
    def ask(self, idle_channels: int, idle_compute: int) -> None: ...
    def action(self, action: Action, **extra: Any) -> None: ...


class Observer(Protocol):
    """What measures a run: see reference.simulator.meter."""

    def passed(self, loop: VirtualLoop, until: float) -> None:
        """Nothing changes between `loop.now` and `until`."""
        ...

    def event(self, loop: VirtualLoop, event: Event) -> None:
        """About to be told to the scheduler."""
        ...

    def action(self, loop: VirtualLoop, action: Action) -> None:
        """About to be obeyed."""
        ...


@dataclass
class Totals:
    """Where the virtual time went, in seconds; loads and their bytes."""

    seconds: float = 0.0
    compute_s: float = 0.0
    channel_s: float = 0.0
    loads: int = 0
    bytes: int = 0
    steps: int = 0

    @property
    def bound_s(self) -> float:
        """No schedule with these steps and these loads is faster than this (SIM-4)."""
        return max(self.compute_s, self.channel_s)


class VirtualLoop:
    """A scheduler, an executor, a clock that jumps. `faults` maps tickets to what goes wrong.

    channel_free: when the channel has moved all that it was given; outstanding: transfers whose end
    was not told; computing: a step runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        expert_bytes: int,
        costs: Costs | None = None,
        log: Log | None = None,
        faults: Mapping[int, Fault] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.expert_bytes = expert_bytes
        self.costs: Costs = costs or CostModel()
        self.log = log
        self.observer = observer
        self.faults = faults or {}
        self.now = 0.0
        self.totals = Totals()
        self._due: list[tuple[float, int, Callable[[], Iterable[Event]]]] = []
        self._count = 0
        self.channel_free = 0.0
        self.outstanding = 0
        self.computing = False

    def at(self, time: float, what: Callable[[], Iterable[Event]]) -> None:
        """Let `what` happen at a virtual time; it returns the events it amounts to."""
        heapq.heappush(self._due, (max(time, self.now), self._count, what))
        self._count += 1

    def tick(self) -> bool:
        """Go to the next moment at which something happens. False when nothing is left."""
        if not self._due:
            return False
        due, observer = self._due, self.observer
        if observer is not None:
            observer.passed(self, due[0][0])
        now = self.now = due[0][0]
        self.totals.seconds = now
        handle = self.scheduler.handle
        while due and due[0][0] == now:
            for event in heapq.heappop(due)[2]():
                if self.log:
                    self.log.event(event)
                if observer is not None:
                    observer.event(self, event)
                handle(event)
        channels = max(0, self.costs.depth - self.outstanding)
        compute = 0 if self.computing else 1
        if self.log:
            self.log.ask(channels, compute)
        for action in self.scheduler.next_actions(channels, compute):
            if self.log:
                extra = {"bytes": self.expert_bytes} if isinstance(action, Load) else {}
                self.log.action(action, **extra)
            if observer is not None:
                observer.action(self, action)
            self._obey(action)
        return True

    def run(self) -> Totals:
        """Until nothing is left to happen."""
        while self.tick():
            pass
        return self.totals

    def _obey(self, action: Action) -> None:
        if isinstance(action, Load):
            self._load(action)
        elif isinstance(action, Compute):
            seconds = self.costs.step(action, self._work(action))
            self.totals.compute_s += seconds
            self.totals.steps += 1
            self.computing = True
            self.at(self.now + seconds, lambda: self._computed(action, seconds))
        elif isinstance(action, Finish | Reject):
            self.executor.ended(action)

    def _work(self, action: Compute) -> Work:
        work = self.executor.work(action)
        return work._replace(loading=self.outstanding) if self.outstanding else work

    def _load(self, action: Load) -> None:
        seconds = self.costs.transfer(self.expert_bytes)
        start = max(self.now, self.channel_free)
        self.channel_free = start + seconds
        self.outstanding += 1
        self.totals.channel_s += seconds
        self.totals.loads += 1
        self.totals.bytes += self.expert_bytes
        self.executor.clear(action.slot)
        told = start + self.costs.delay(self.expert_bytes)
        self.at(told, lambda: self._loaded(action))

    def _loaded(self, action: Load) -> list[Event]:
        fault = self.faults.get(action.ticket)
        if fault is not None and fault.late_s is not None:
            self.at(self.now + fault.late_s, lambda: self._drained(action, fault.error))
            return [LoadFailed(action.ticket, fault.error, drained=False)]
        self.outstanding -= 1
        if fault is not None:
            return [LoadFailed(action.ticket, fault.error)]
        try:
            self.executor.fill(action)
        except OSError as error:
            return [LoadFailed(action.ticket, str(error))]
        return [Loaded(action.ticket, nanoseconds(self.costs.transfer(self.expert_bytes)))]

    def _drained(self, action: Load, error: str) -> list[Event]:
        self.outstanding -= 1
        return [LoadFailed(action.ticket, error)]

    def _computed(self, action: Compute, seconds: float) -> list[Event]:
        # SIM-3: the step reads its slots only now; had one been given away, it would show.
        self.computing = False
        end, *rest = self.executor.run(action)
        if isinstance(end, Computed):
            end = replace(end, ns=nanoseconds(seconds))
        return [end, *rest]
