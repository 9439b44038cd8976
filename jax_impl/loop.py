"""The loop: hear what happened, tell the scheduler, ask it, obey, sleep until more happens.

One thread runs it and owns the scheduler, the slots' contents, rows and KV blocks. It never waits
for a read or for a computation, only for its inbox: fetch threads and the compute thread put their
completions there, callers their requests. So loads are issued while a step is in flight, which is
the overlap that all of this is for (ENGINE-5).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax_impl.compute import Broken, Computer
from jax_impl.holdings import Holdings, Resident, distinct
from jax_impl.model import JaxModel
from jax_impl.slots import SlotPool
from jax_impl.steps import Outcome, Plan, checked, prepare
from jax_impl.totals import Totals
from jax_impl.transfer import Transferred, Transfers
from reference.control import Scheduler
from reference.files.event_log import LogWriter
from reference.handle import RequestHandle
from reference.prediction import Predictor
from reference.prediction.accuracy import Accuracy
from reference.prediction.listener import CarefulListener
from reference.vocab import events as ev
from reference.vocab.actions import Admit, Compute, Finish, Load, Reject
from reference.vocab.ids import Visit
from reference.vocab.sampling import Choice

GRACE_S = 1.0
"""What closing waits for the loop beyond its time."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests that arrive together."""

    handles: tuple[RequestHandle, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel what is open and end the loop, at the latest at `by` on its clock."""

    by: float


Item = Submit | ev.Cancelled | ev.Drain | Stop | Broken | Transferred | Outcome


class Loop:
    """The engine's thread and its compute thread. `post` may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: JaxModel,
        pool: SlotPool,
        start_transfers: Callable[[Callable[[Transferred], None]], Transfers],
        log: LogWriter,
        eos: frozenset[int],
        check: bool,
        sums: bool,
        predictor: Predictor | None,
        rate: float | None,
        warn: Callable[[str], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = scheduler.options
        self.totals = Totals()
        self.failure: BaseException | None = None
        self.transfers = start_transfers(self.post)
        self._scheduler, self._pool, self._log = scheduler, pool, log
        self._check, self._rate, self._clock = check, rate, clock
        self._chunk = options.chunk
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._handles: dict[int, RequestHandle] = {}
        self._held = Holdings(model.rows, model.kinds, options.kv_block)
        self._step: Plan | None = None
        self._warm: set[int] = set()
        """Tickets of a warm start's loads."""
        self._ear = CarefulListener(predictor, options, self._tokens, warn) if predictor else None
        self._accuracy = Accuracy(options.prefetch) if predictor else None
        self._told = {"channel_s": 0.0, "compute_s": 0.0}
        self._flying: set[int] = set()
        """Loads that control has not heard of: what is idle is told as the log has it (SAFE-11)."""
        whole = (i for i, kind in enumerate(model.kinds) if kind.window is None)
        self._whole, self._kv_block = next(whole, None), options.kv_block
        self.warmed = threading.Event()
        self._stop: Stop | None = None
        self._by = 0.0
        """When, in the log's time, `end` has no more patience."""
        self._lock = threading.Lock()
        self._next = 0
        self._computer = Computer(model, eos, self.post, clock, sums)
        self._thread = threading.Thread(target=self._run, name="covey-engine", daemon=True)

    # -- any thread

    def begin(self) -> None:
        self._thread.start()
        self._computer.begin()

    def post(self, item: Item) -> None:
        self._inbox.put(item)

    def submit(self, make: Callable[[int], list[RequestHandle]]) -> list[RequestHandle] | None:
        """Number and post the requests that `make(first number)` gives; None once it has ended."""
        with self._lock:
            if self.failure or self._stop:
                return None
            handles = make(self._next)
            self._next += len(handles)
            self._handles.update((h.number, h) for h in handles)
            self.post(Submit(tuple(handles)))
            return handles

    def snapshot(self) -> dict[str, Any]:
        """The totals up to now."""
        now = replace(self.totals, blamed=self.totals.blamed.copy(), ended=self.totals.ended.copy())
        told = now.as_dict(self._clock(), self._rate)
        if self._accuracy is not None:
            told["prediction"] = self._accuracy.as_dict()
            if self._ear is not None and self._ear.failed:
                told["prediction"]["gave_up"] = self._ear.failed
        return told

    def runs_here(self) -> bool:
        """The caller is on one of the engine's own threads."""
        return threading.current_thread() in (self._thread, self._computer.thread)

    def end(self, timeout_s: float) -> bool:
        """Cancel what is open and stop. False when something hangs (it is left behind)."""
        by = self._clock() + timeout_s
        self.post(Stop(by))
        self._thread.join(timeout_s + GRACE_S)
        stopped = self._computer.end(max(0.1, by - self._clock()))
        back = self.transfers.close(max(0.1, by - self._clock()))
        if self._thread.is_alive() or not stopped:
            self._fail(TimeoutError("the engine did not stop in time"))
        return back and stopped and not self._thread.is_alive()

    # -- the engine thread

    def _run(self) -> None:
        try:
            if self._scheduler.warming:  # there is something to read before anybody comes
                self._obey()
            while not self._over():
                self._hear()
                self._obey()
            if self._scheduler.idle:
                self._log.end({**self.snapshot(), "by": self._by})
        except BaseException as error:
            self._fail(error)
        else:
            self._fail(None)
        finally:
            self._log.close()

    def _hear(self) -> None:
        for item in (*self._wait(), *self.transfers.expire()):
            self._take(item)

    def _over(self) -> bool:
        stop = self._stop
        return stop is not None and (self._scheduler.idle or self._clock() >= stop.by)

    def _wait(self) -> list[Item]:
        """Everything that has happened; sleeps until something has, or something is overdue."""
        until = [self.transfers.next_deadline(), self._stop and self._stop.by]
        due = min((t for t in until if t is not None), default=None)
        timeout = None if due is None else max(0.0, due - self._clock())
        items: list[Item] = []
        try:
            items.append(self._inbox.get(timeout=timeout))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items

    def _fail(self, error: BaseException | None) -> None:
        """The loop has ended: no request stays without an end (ENGINE-7)."""
        with self._lock:
            self.failure = self.failure or error
            self._stop = self._stop or Stop(0.0)
            left, self._handles = self._handles, {}
        self.warmed.set()
        text = f"the engine failed: {type(error).__name__}: {error}" if error else None
        for handle in left.values():
            handle.end("error" if text else "cancelled", text)

    def _tell(self, event: ev.Event, **extra: Any) -> None:
        self._log.event(event, **extra)
        if self._accuracy is not None:
            self._accuracy.event(event)
        self._scheduler.handle(event)

    def _take(self, item: Item) -> None:
        """Turn what happened into events for the scheduler."""
        match item:
            case Submit(handles):
                for h in handles:
                    self._arrive(h)
                    if self._stop is not None:
                        self._tell(ev.Cancelled(h.number))
            case Transferred():
                self._transferred(item)
            case Outcome():
                self._computed(item)
            case ev.Cancelled() | ev.Drain():
                self._tell(item)
            case Stop():
                with self._lock:
                    self._stop = item
                    open_ = sorted(self._handles)
                by = round(self._log.now + item.by - self._clock(), 6)
                self._by = by + GRACE_S
                for number in open_:
                    self._tell(ev.Cancelled(number), by=by)
            case Broken(error):
                raise error

    def _arrive(self, handle: RequestHandle) -> None:
        request = handle.request
        assert request.max_new_tokens is not None
        size = len(request.prompt)
        self.totals.request_opened(self._clock(), size)
        told = {"id": request.id, "asked": handle.asked}
        self._tell(ev.Arrived(handle.number, size, request.max_new_tokens), **told)

    def _transferred(self, done: Transferred) -> None:
        ok = done.error is None
        self._flying.discard(done.ticket)
        self.transfers.heard(done)
        if done.drained:
            now, warm = self._clock(), done.ticket in self._warm
            self.totals.load_ended(now, done.key, done.nbytes, ok, warm, done.disk_bytes)
        if done.error is not None:
            self._tell(ev.LoadFailed(done.ticket, done.error, done.drained))
            return
        # What a late load brings is kept out of use by the scheduler, not here (CACHE-9).
        self._held.fill(done.slot, Resident(done.key, done.handle, done.sum))
        extra: dict[str, Any] = {} if done.sum is None else {"sum": done.sum}
        busy = self._busier("channel_s")
        self._tell(ev.Loaded(done.ticket, busy), seconds=round(done.seconds, 6), **extra)

    def _busier(self, side: str) -> int:
        """Nanoseconds by which a side's time has grown since this was last asked (SCHED-13)."""
        now = getattr(self.totals, side)
        was, self._told[side] = self._told[side], now
        return round(1e9 * (now - was))

    def _computed(self, outcome: Outcome) -> None:
        plan, self._step = self._step, None
        assert plan is not None and plan.step == outcome.step
        self.totals.step_ended(outcome.ended or self._clock(), plan.visits)
        if outcome.error:
            self._tell(ev.Failed(outcome.step, outcome.error, outcome.failed), **outcome.told)
        else:
            busy = self._busier("compute_s")
            self._tell(ev.Computed(outcome.step, busy), **outcome.told)
        for member in plan.members:
            running = member.running
            running.topk = outcome.routed.get(running.number)
            if running.topk is None:
                self._held.give_rows(running)
        for event in outcome.events:
            extra = {}
            if isinstance(event, ev.Sampled):
                if event.token is not None:
                    self._sampled(event.request, outcome.chosen[event.request])
                if event.request in outcome.sums:
                    extra["sum"] = outcome.sums[event.request]
            else:
                named = distinct(event.visit.layer, event.experts)
                self.totals.routed(named, self._held.present(named))
            self._tell(event, **extra)
            if self._ear is not None:
                self._expect(self._ear, event, plan, outcome)

    def _expect(
        self, ear: CarefulListener, event: ev.Routed | ev.Sampled, plan: Plan, outcome: Outcome
    ) -> None:
        """PREDICT-2: what is expected goes to control directly behind what it follows from."""
        number = event.visit.request if isinstance(event, ev.Routed) else event.request
        chunk = next(m.visit.chunk for m in plan.members if m.running.number == number)
        for said in ear.heard(event, chunk, outcome.gates.get(number)):
            self._tell(said)

    def _tokens(self, visit: Visit) -> list[int]:
        """Token ids of a visit's chunk."""
        running = self._held.running.get(visit.request)
        if running is None:
            return []
        start, end = running.span(visit.chunk, self._chunk)
        return running.tokens[start:end]

    def _sampled(self, number: int, choice: Choice) -> None:
        running = self._held.running[number]
        running.tokens.append(choice.token)
        running.handle.put_token(choice, self._clock())
        self.totals.tokens += 1

    def _obey(self) -> None:
        """Ask once, do what is said, in order."""
        channels = min(self.transfers.idle, self.transfers.threads - len(self._flying))
        lanes = channels, int(self._step is None)
        self._log.ask(*lanes)
        run = None
        for action in self._scheduler.next_actions(*lanes):
            if self._accuracy is not None:
                self._accuracy.action(action)
            match action:
                case Load(ticket, key, slot):
                    self._held.clear(slot)
                    self.totals.load_started(self._clock())
                    if action.guess and not self._scheduler.running:
                        self._warm.add(ticket)
                    self._flying.add(ticket)
                    told = self.transfers.start(ticket, key, slot)
                    self._log.action(action, bytes=self.transfers.bytes_of(key), **told)
                case Compute():
                    run = self._start(action)
                case Admit(number):
                    self._held.admit(self._handles[number])
                    self._log.action(action, **self._set_aside(number))
                case Finish() | Reject():
                    self._log.action(action)
                    self._ended(action)
        if run is not None:  # after all loads: their copies are dispatched before it (TIER-8)
            self._computer.run(run)
        if not (self._scheduler.warming or self._scheduler.cache.loading()):
            self.warmed.set()

    def _set_aside(self, number: int) -> dict[str, int]:
        """KV tokens that a request has been given, in layers that keep all of it (SAFE-14)."""
        if self._whole is None:
            return {}
        return {"kv": len(self._held.running[number].table.blocks[self._whole]) * self._kv_block}

    def _start(self, action: Compute) -> Plan | None:
        """Make the step ready; None when there is nothing to run."""
        now = self._clock()
        wrong, sums = checked(action, self._held, self.transfers) if self._check else ("", [])
        self._log.action(action, **({"sum": sums} if sums else {}))
        self._step = prepare(action, self._held, self._chunk)
        self.totals.step_started(now)
        if wrong:
            self.post(Outcome(action.step, wrong))
        return None if wrong else self._step

    def _ended(self, action: Finish | Reject) -> None:
        self._held.end(action.request)
        if self._ear is not None:
            self._ear.ended(action.request)
        with self._lock:
            handle = self._handles.pop(action.request)
        if isinstance(action, Reject):
            reason, error = "rejected", action.reason
        else:
            reason, error = action.reason, action.error
        self.totals.request_ended(self._clock(), reason)
        handle.end(reason, error)

    def missing(self) -> dict[str, int]:
        """What did not come back to its place; all 0 once nothing runs (for leak checks)."""
        return self._held.missing() | {
            "handles": len(self._handles),
            "steps": int(self._step is not None),
            "entries": len(self.transfers.host.tier.loads) if self.transfers.host else 0,
        }
