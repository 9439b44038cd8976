"""The pooled engine's loop: hear what happened, tell `Serving`, obey, sleep until more happens.

One thread runs it and owns `Serving`, seats and the batches' tokens under way. Replicas and memory
devices post what they have done; callers post requests.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_impl.attention_pool.handover import HandOvers
from jax_impl.attention_pool.messages import Answer, Cancel, Lost, Pulled, Stop, Submit, Void
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.prefill import Made, PrefillWorker, Prompted
from jax_impl.attention_pool.seats import Aboard, Seats
from jax_impl.attention_pool.wire import Wire
from jax_impl.attention_pool.worker import Done, Job, Worker
from jax_impl.compute import Broken
from reference.control.attention_serving import Place, Prefill, Serving, Turn
from reference.handle import RequestHandle
from reference.vocab.actions import Finish, Reject
from reference.vocab.errors import one_line
from reference.vocab.sampling import Choice


class PoolLoop:
    """`post` may be called from any thread. timed: remember whose every tile was."""

    def __init__(
        self, serving: Serving, workers: Sequence[Worker], pool: MemoryPool, wire: Wire,
        seats: Seats, eos: frozenset[int], timed: bool, prefill: Sequence[PrefillWorker] = (),
    ) -> None:  # fmt: skip
        self.failure: BaseException | None = None
        self.ended_well = False
        self.tokens = self.rows = self.prompt_rows = 0
        self.batch_of_tile: dict[int, int] = {}
        self.seats = seats
        self.closing = False
        self._serving, self._workers, self._pool, self._wire = serving, workers, pool, wire
        self._eos, self._timed = eos, timed
        self._layers, self._batches = serving.options.layers, serving.options.batches
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.handles: dict[int, RequestHandle] = {}
        self._aboard: dict[int, Aboard] = {}
        self._epoch = [0] * self._batches
        self._turns: dict[int, Turn] = {}
        self._context: dict[int, np.ndarray | None] = {}
        self._answers: dict[int, dict[int, list[Answer]]] = {}
        self._batch_of: dict[int, int] = {}
        self._away: set[int] = set()
        self._losses: list[Lost] = []
        """Those that somebody waits for."""
        self._lock, self._next = threading.Lock(), 0
        self._stop: Stop | None = None
        self.handovers = HandOvers(
            serving, prefill, pool, seats.kind_of, lambda r, e: serving.cancelled(r, "error", e)
        )
        self._taking: dict[type, Callable[[Any], None]] = {
            Submit: self._arrive, Cancel: lambda c: serving.cancelled(c.request),
            Lost: self._lose, Stop: self._halt, Done: self._done, Answer: self._answer,
            Made: self.handovers.made, Prompted: self._prompted, Pulled: self.handovers.pulled,
            Broken: self._broken,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="covey-lamina", daemon=True)

    # -- any thread

    def begin(self) -> None:
        self._thread.start()

    def post(self, item: Any) -> None:
        self._inbox.put(item)

    def submit(self, make: Callable[[int], list[RequestHandle]]) -> list[RequestHandle] | None:
        """Number and post the requests that `make(first number)` gives; None once it has ended."""
        with self._lock:
            if self.closing:
                return None
            handles = make(self._next)
            self._next += len(handles)
            self.handles.update((h.number, h) for h in handles)
            self.post(Submit(tuple(handles)))
            return handles

    def lose(self, kind: str, number: int, timeout_s: float) -> bool | None:
        """Tell of a loss; whether it was heard of in time, None once the loop has ended."""
        lost = Lost(kind, number, threading.Event())
        with self._lock:
            if self.closing:
                return None
            self._losses.append(lost)
            self.post(lost)
        return lost.done.wait(timeout_s)

    def runs_here(self) -> bool:
        """The caller is on the loop's own thread."""
        return threading.current_thread() is self._thread

    def end(self, timeout_s: float) -> bool:
        """Cancel what is open and stop; False when it hangs (it is left behind)."""
        with self._lock:
            self.closing = True
        self.post(Stop(time.monotonic() + timeout_s))
        self._thread.join(timeout_s + 1.0)
        if self._thread.is_alive():
            self._over(TimeoutError("the engine did not stop in time"))
        return not self._thread.is_alive()

    # -- the engine thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not (self._stop and (self._serving.idle or time.monotonic() > self._stop.by)):
                try:
                    items = [self._inbox.get(timeout=1.0)]
                except queue.Empty:
                    continue
                while not self._inbox.empty():
                    items.append(self._inbox.get())
                for item in items:
                    self._taking[type(item)](item)
                self._obey()
            self.ended_well = self._serving.idle
        except BaseException as e:
            error = e
        self._over(error)

    def _over(self, error: BaseException | None) -> None:
        """No request stays without an end, nobody waits for a loss to be heard of."""
        with self._lock:
            self.failure, self.closing = self.failure or error, True
            left, self.handles = self.handles, {}
            losses, self._losses = self._losses, []
        for lost in losses:
            lost.done.set()
        for handle in left.values():
            text = f"the engine failed: {type(error).__name__}: {error}" if error else None
            handle.end("error" if error else "cancelled", text)

    def _broken(self, broken: Broken) -> None:
        raise broken.error

    def _arrive(self, submit: Submit) -> None:
        for h in submit.handles:
            assert h.request.max_new_tokens is not None
            self._serving.arrived(h.number, len(h.request.prompt), h.request.max_new_tokens)

    def _halt(self, stop: Stop) -> None:
        self._stop = stop
        for number in sorted(self.handles):
            self._serving.cancelled(number)

    def _obey(self) -> None:
        for action in self._serving.next_actions():
            match action:
                case Place(request, devices):
                    self.seats.admit(self.handles[request], devices)
                case Prefill(request, _):
                    self.handovers.start(action, self.seats.running[request])
                case Turn():
                    self._start(action)
                case Finish(request, reason, error):
                    self._ended(request, reason, error)
                case Reject(request, reason):
                    self._ended(request, "rejected", reason)

    def _ended(self, request: int, reason: str, error: str) -> None:
        self.handovers.ended(request)
        self.seats.end(request)
        with self._lock:
            handle = self.handles.pop(request)
        handle.end(reason, error)

    def _start(self, turn: Turn) -> None:
        batch = turn.batch
        if turn.slice == 0:
            aboard = self.seats.board(turn.spans, self._epoch[batch], self._wire)
            self._aboard[batch] = aboard
            self.rows += len(aboard.rows)
            for tile in aboard.tiles:
                self._batch_of[tile.number] = batch
                if self._timed:
                    self.batch_of_tile[tile.number] = batch
        aboard, context = self._aboard[batch], None
        if turn.held not in (-1, turn.replica):
            context = self._context[batch]
            assert context is not None
            # LAMINA-10: the residual goes along when a batch changes its replica.
            self._wire.send("context", aboard.tiles[0].number, turn.slice, turn.replica, context)
        answers = self._answers.pop(batch, {})
        self._turns[batch] = turn
        last = turn.slice == self._layers
        job = Job(turn, aboard, answers, context, dict(self.seats.running), last)
        self._workers[turn.replica].run(job)

    def _done(self, done: Done) -> None:
        batch = done.batch
        if done.epoch != self._epoch[batch]:
            return  # of a token that was begun again
        if done.error:
            done.failed.update((span.request, done.error) for span in self._aboard[batch].spans)
        for request, error in done.failed.items():
            self._serving.cancelled(request, "error", error)
        if done.error:  # LAMINA-26
            self._void_token(batch)
            self._serving.redo(batch)
            for span in self._turns[batch].spans:
                self._serving.cancelled(span.request, "error", done.error)
            return
        if not done.last:
            self._context[batch] = done.context
            self._serving.slice_done(batch)
            self._away.add(batch)
            self._answered(batch)
            return
        self._close_token(batch)
        stopped = set()
        for request, choice in done.chosen.items():
            if choice is None or request in done.failed or self._token(request, choice):
                stopped.add(request)
        self._serving.token_done(batch, stopped)

    def _token(self, request: int, choice: Choice) -> bool:
        """The text goes on with this token; whether that ends it."""
        seat = self.seats.running[request]
        seat.tokens.append(choice.token)
        seat.handle.put_token(choice, time.monotonic())
        self.tokens += 1
        try:
            return seat.handle.stops(choice.token) or choice.token in self._eos
        except Exception as error:  # the caller's own stop_at
            self._serving.cancelled(request, "error", one_line(error))
            return True

    def _prompted(self, m: Prompted) -> None:
        """A prefill worker is through with a prompt: the token after it is there."""
        if not self.handovers.current(m):
            return
        seat, stopped = self.seats.running.get(m.request), False
        if seat is not None and m.error:
            self._serving.cancelled(m.request, "error", m.error)
        elif seat is not None and len(seat.tokens) == len(seat.handle.request.prompt):
            self.prompt_rows += len(seat.tokens)
            stopped = m.choice is None or self._token(m.request, m.choice)
        self._serving.prefilled(m.worker, m.request, stopped)
        self.handovers.through(m.request)

    def _answer(self, answer: Answer) -> None:
        batch = self._batch_of.get(answer.tile)
        if batch is None:
            return  # of a token that was begun again
        self._answers.setdefault(batch, {}).setdefault(answer.tile, []).append(answer)
        self._answered(batch)

    def _answered(self, batch: int) -> None:
        """The turn is over and every device has answered to every tile: the attention is back."""
        if batch not in self._away:
            return
        found = self._answers.get(batch, {})
        if all(len(found.get(t.number, ())) == len(t.parts) for t in self._aboard[batch].tiles):
            self._away.discard(batch)
            self._serving.attention_done(batch)

    def _close_token(self, batch: int) -> None:
        aboard = self._aboard.pop(batch)
        for tile in aboard.tiles:
            self._batch_of.pop(tile.number, None)
        self.seats.leave(aboard)

    # -- losses (LAMINA-25)

    def _void_token(self, batch: int) -> None:
        """The batch's token is begun again: what still comes of it is not for anybody."""
        if batch in self._aboard:
            for tile in self._aboard[batch].tiles:
                for part in tile.parts:
                    self._pool.devices[part.device].post(Void(tile.number))
            self._epoch[batch] += 1
            self._close_token(batch)
            self._answers.pop(batch, None)
            self._away.discard(batch)

    def _lose(self, lost: Lost) -> None:
        serving = self._serving
        if lost.kind == "replica":
            self._workers[lost.number].forget()
            for batch in range(self._batches):
                turn = self._turns.get(batch)
                if batch in self._aboard and turn is not None and turn.replica == lost.number:
                    self._void_token(batch)
                    serving.redo(batch)
        elif lost.kind == "prefill":
            self.handovers.lose_worker(lost.number)
        else:
            self._pool.devices[lost.number].forget()
            before = list(serving.aboard)
            serving.lost(lost.number)
            for batch, spans in enumerate(before):
                if spans and not serving.aboard[batch]:
                    self._void_token(batch)
            self.handovers.lost_memory(lost.number)
        with self._lock:
            if lost in self._losses:
                self._losses.remove(lost)
        lost.done.set()
