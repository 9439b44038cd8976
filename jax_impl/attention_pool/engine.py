"""LaminaEngine: requests over two pools, n batches in flight on n - 1 replicas.

    with LaminaEngine.open("model", batches=3, memory_devices=2) as engine:
        result = engine.submit(Request("a", (1, 2, 3), max_new_tokens=8)).result()

`reference.control.attention_serving` decides; one thread here tells it what happened and obeys.
Replicas and memory devices have a dispatch thread each. For dense models, and for mixtures whose
experts all fit on a replica; a mixture over its budget runs under `JaxEngine` with `Offloaded`.
Either way tokens and logits are the bits of the monolithic engine (LAMINA-13).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jax_impl import compile_cache
from jax_impl.attention_pool.compute import Replica
from jax_impl.attention_pool.devices import memory_pool, pick
from jax_impl.attention_pool.memory import Answer
from jax_impl.attention_pool.options import LaminaOptions, experts_on, sizes_of
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.seats import Aboard, Seats
from jax_impl.attention_pool.wire import Wire
from jax_impl.attention_pool.worker import Done, Job, Worker
from jax_impl.engine import OnLogits, check_request
from reference.control.attention_serving import Place, Serving, Turn
from reference.control.attention_wire import Protocol
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.handle import RequestHandle
from reference.vocab.actions import Finish, Reject
from reference.vocab.errors import BadInput, CoveyError


@dataclass(frozen=True)
class Submit:
    """Requests that arrive together."""

    handles: tuple[RequestHandle, ...]


@dataclass(frozen=True)
class Cancel:
    """The caller gave up."""

    request: int


@dataclass(frozen=True)
class Lost:
    """A replica ("replica") or a memory device ("memory") is gone and replaced by an empty one."""

    kind: str
    number: int
    done: threading.Event


@dataclass(frozen=True)
class Stop:
    """End, at the latest at `by`."""

    by: float


class LaminaEngine:
    """Made by `open`. All methods may be called from any thread."""

    def __init__(
        self, ckpt: Checkpoint, options: LaminaOptions, serving: Serving, workers: list[Worker],
        pool: MemoryPool, wire: Wire, seats: Seats,
    ) -> None:  # fmt: skip
        self.options, self.config = options, ckpt.config
        self.wire, self.pool, self.workers = wire, pool, workers
        self.failure: BaseException | None = None
        self.tokens = self.rows = 0
        self.began = time.monotonic()
        self.batch_of_tile: dict[int, int] = {}
        """With `timed`: whose every tile was, for a picture."""
        self._ckpt, self._serving, self._seats = ckpt, serving, seats
        self._longest = workers[0].replica.max_len
        self._eos = frozenset() if options.ignore_eos else frozenset(ckpt.config.eos)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handles: dict[int, RequestHandle] = {}
        self._aboard: dict[int, Aboard] = {}
        self._epoch = [0] * options.batches
        self._turns: dict[int, Turn] = {}
        self._context: dict[int, np.ndarray | None] = {}
        self._answers: dict[int, dict[int, list[Answer]]] = {}
        self._batch_of: dict[int, int] = {}
        self._away: set[int] = set()
        self._lock, self._next, self._closing = threading.Lock(), 0, False
        self._stop: Stop | None = None
        self._taking: dict[type, Callable[[Any], None]] = {
            Submit: self._arrive, Cancel: lambda c: serving.cancelled(c.request),
            Lost: self._lose, Stop: self._halt, Done: self._done, Answer: self._answer,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="covey-lamina", daemon=True)

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> LaminaEngine:
        """Open a checkpoint directory; see `LaminaOptions`. Raises BadInput or Unsupported."""
        told = LaminaOptions.of(**options)
        ckpt = Checkpoint.open(path)
        sizes, control = sizes_of(ckpt, told)
        serving = Serving(control)
        compute, memory = pick(serving.rotation.replicas, told.memory_devices)
        compile_cache.use(told.compile_cache)
        wire = Wire(protocol=Protocol() if told.check else None)
        pool = memory_pool(ckpt, memory, wire, told.partition, told.overlap, told.timed, sizes)
        pool.compile(told.progress)
        engine: LaminaEngine
        workers = []
        for n, device in enumerate(compute):
            replica = Replica(
                ckpt, device=device, pool=pool, wire=wire, moves=len(compute) > 1, **sizes
            )
            replica.compile(told.progress)
            experts = experts_on(ckpt, device)
            worker = Worker(n, replica, experts, len(compute) == 1, lambda done: engine._post(done))
            workers.append(worker)
        kinds = workers[0].replica.kinds
        seats = Seats(
            ckpt.config, kinds, told.kv_block, sizes["rows"], told.tile, told.memory_devices,
            told.partition == "head",
        )  # fmt: skip
        engine = cls(ckpt, told, serving, workers, pool, wire, seats)
        pool.begin(engine._post)
        for worker in workers:
            worker.begin()
        engine._thread.start()
        return engine

    # -- any thread

    def submit(
        self, request: Request, *, logits: bool = False, on_logits: OnLogits | None = None
    ) -> RequestHandle:
        """Start a request. Raises BadInput for one that the model cannot take."""
        return self.submit_all([request], logits=logits, on_logits=on_logits)[0]

    def submit_all(
        self, requests: Iterable[Request], *, logits: bool = False,
        on_logits: OnLogits | None = None,
    ) -> list[RequestHandle]:  # fmt: skip
        """Like `submit`, for requests that arrive at the same moment."""
        checked = list(requests)
        for request in checked:
            check_request(self.config, request)
            size = len(request.prompt) + (request.max_new_tokens or 0)
            if size > self._longest:
                raise BadInput(f"request '{request.id}': {size} tokens; at most {self._longest}")
        with self._lock:
            if self._closing or self.failure:
                raise CoveyError(f"the engine failed: {self.failure}" if self.failure else
                                 "the engine is closed")  # fmt: skip
            now, first = time.monotonic(), self._next
            self._next += len(checked)
            handles = [
                RequestHandle(r, first + i, now, lambda n: self._post(Cancel(n)), logits, on_logits)
                for i, r in enumerate(checked)
            ]
            self._handles.update((h.number, h) for h in handles)
            self._post(Submit(tuple(handles)))
        return handles

    def lose(self, kind: str, number: int) -> None:
        """Make a device lose all it holds, as if it had been replaced (LAMINA-25): a "replica" its
        rows, a "memory" device its KV. Returns when the engine has heard of it."""
        done = threading.Event()
        self._post(Lost(kind, number, done))
        done.wait(60.0)

    def totals(self) -> dict[str, Any]:
        """Tokens, bytes on the wire, and where the time of the devices went."""
        seconds = time.monotonic() - self.began
        busy = self.pool.busy
        computing = sum(e - b for w in self.workers for _, _, b, e in list(w.history))
        return {
            "seconds": seconds, "tokens": self.tokens, "rows": self.rows,
            "wire": dict(self.wire.by_kind), "replicas": len(self.workers),
            "replica_s": computing, "attend_s": busy.attend_s, "hidden_s": busy.hidden_s,
            "kv_bytes": self.pool.kv_bytes, "early": busy.early, "asks": busy.asks,
        }  # fmt: skip

    def missing(self) -> dict[str, int]:
        """What did not come back; all 0 when nothing runs."""
        return self._seats.missing() | {"handles": len(self._handles)}

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what is open and stop all threads."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._post(Stop(time.monotonic() + timeout_s))
        self._thread.join(timeout_s + 1.0)
        for worker in self.workers:
            worker.end(timeout_s)
        self.pool.end(timeout_s)
        self._ckpt.close()

    def __enter__(self) -> LaminaEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _post(self, item: Any) -> None:
        self._inbox.put(item)

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
        except BaseException as e:
            error = e
        with self._lock:
            self.failure, self._closing = error, True
            left, self._handles = self._handles, {}
        for handle in left.values():
            text = f"the engine failed: {type(error).__name__}: {error}" if error else None
            handle.end("error" if error else "cancelled", text)

    def _arrive(self, submit: Submit) -> None:
        for h in submit.handles:
            assert h.request.max_new_tokens is not None
            self._serving.arrived(h.number, len(h.request.prompt), h.request.max_new_tokens)

    def _halt(self, stop: Stop) -> None:
        self._stop = stop
        for number in sorted(self._handles):
            self._serving.cancelled(number)

    def _obey(self) -> None:
        for action in self._serving.next_actions():
            match action:
                case Place(request, devices):
                    self._seats.admit(self._handles[request], devices)
                case Turn():
                    self._start(action)
                case Finish(request, reason, error):
                    self._ended(request, reason, error)
                case Reject(request, reason):
                    self._ended(request, "rejected", reason)

    def _ended(self, request: int, reason: str, error: str) -> None:
        self._seats.end(request)
        with self._lock:
            handle = self._handles.pop(request)
        handle.end(reason, error)

    def _start(self, turn: Turn) -> None:
        batch = turn.batch
        if turn.slice == 0:
            aboard = self._seats.board(turn.spans, self._epoch[batch], self.wire)
            self._aboard[batch] = aboard
            self.rows += len(aboard.rows)
            for tile in aboard.tiles:
                self._batch_of[tile.number] = batch
                if self.options.timed:
                    self.batch_of_tile[tile.number] = batch
        aboard, context = self._aboard[batch], None
        if turn.held not in (-1, turn.replica):
            context = self._context[batch]
            assert context is not None
            # LAMINA-10: the residual goes along when a batch changes its replica.
            self.wire.send("context", aboard.tiles[0].number, turn.slice, turn.replica, context)
        answers = self._answers.pop(batch, {})
        self._turns[batch] = turn
        last = turn.slice == len(self.config.layers)
        job = Job(turn, aboard, answers, context, dict(self._seats.running), last)
        self.workers[turn.replica].run(job)

    def _done(self, done: Done) -> None:
        batch = done.batch
        if done.epoch != self._epoch[batch]:
            return  # of a token that was begun again
        if done.error:
            done.failed.update((span.request, done.error) for span in self._aboard[batch].spans)
        for request, error in done.failed.items():
            self._serving.cancelled(request, "error", error)
        if done.error:
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
            seat = self._seats.running[request]
            if choice is None or request in done.failed:
                stopped.add(request)
                continue
            seat.tokens.append(choice.token)
            seat.handle.put_token(choice, time.monotonic())
            self.tokens += 1
            if choice.token in self._eos or choice.token in seat.handle.request.stop:
                stopped.add(request)
        self._serving.token_done(batch, stopped)

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
        self._seats.leave(aboard)

    # -- losses (LAMINA-25)

    def _void_token(self, batch: int) -> None:
        """The batch's token is begun again: what still comes of it is not for anybody."""
        if batch in self._aboard:
            self._epoch[batch] += 1
            self._close_token(batch)
            self._answers.pop(batch, None)
            self._away.discard(batch)

    def _lose(self, lost: Lost) -> None:
        serving = self._serving
        if lost.kind == "replica":
            self.workers[lost.number].forget()
            for batch in range(self.options.batches):
                turn = self._turns.get(batch)
                if batch in self._aboard and turn is not None and turn.replica == lost.number:
                    self._void_token(batch)
                    serving.redo(batch)
        else:
            self.pool.devices[lost.number].forget()
            before = list(serving.aboard)
            serving.lost(lost.number)
            for batch, spans in enumerate(before):
                if spans and not serving.aboard[batch]:
                    self._void_token(batch)
        lost.done.set()
