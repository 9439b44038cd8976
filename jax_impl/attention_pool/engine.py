"""LaminaEngine: requests over two pools, n batches in flight on n - 1 replicas.

    with LaminaEngine.open("model", batches=3, memory_devices=2) as engine:
        result = engine.submit(Request("a", (1, 2, 3), max_new_tokens=8)).result()

`reference.control.attention_serving` decides; one thread here tells it what happened and obeys.
Replicas, memory devices and prefill workers have a dispatch thread each. For dense models, and for
mixtures whose experts fit on a replica, or are waited for there (`expert_slots`); under `JaxEngine`
with `Offloaded` a mixture over its budget does not wait. Either way tokens and logits are the bits
of the monolithic engine (LAMINA-13).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from jax_impl import compile_cache
from jax_impl.attention_pool.compute import Replica
from jax_impl.attention_pool.devices import memory_pool, pick
from jax_impl.attention_pool.expert_slots import Channel, ExpertSlots
from jax_impl.attention_pool.loop import PoolLoop
from jax_impl.attention_pool.messages import Cancel
from jax_impl.attention_pool.options import LaminaOptions, sizes_of
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.prefill import PrefillModel, PrefillWorker
from jax_impl.attention_pool.recorded import RecordedServing, log_of
from jax_impl.attention_pool.seats import Seats
from jax_impl.attention_pool.wire import Wire
from jax_impl.attention_pool.worker import Worker
from jax_impl.engine import OnLogits, StopAt, check_request
from reference.control.attention_serving import Serving
from reference.control.attention_wire import Protocol
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import LogWriter
from reference.files.requests import Request
from reference.handle import RequestHandle
from reference.vocab.errors import BadInput, CoveyError


class LaminaEngine:
    """Made by `open`. All methods may be called from any thread; `close` and `lose` say which not
    (LAMINA-29)."""

    def __init__(
        self, ckpt: Checkpoint, options: LaminaOptions, workers: list[Worker], pool: MemoryPool,
        wire: Wire, loop: PoolLoop, channel: Channel, log: LogWriter | None = None,
    ) -> None:  # fmt: skip
        self.options, self.config = options, ckpt.config
        self.wire, self.pool, self.workers, self.channel = wire, pool, workers, channel
        self.began = time.monotonic()
        self._ckpt, self._loop, self._log = ckpt, loop, log
        self._longest = workers[0].replica.max_len
        self._closing, self._closed = threading.Lock(), False

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> LaminaEngine:
        """Open a checkpoint directory; see `LaminaOptions`. Raises BadInput or Unsupported."""
        told = LaminaOptions.of(**options)
        ckpt = Checkpoint.open(path)
        try:
            return cls._open(ckpt, told)
        except BaseException:
            ckpt.close()
            raise

    @classmethod
    def _open(cls, ckpt: Checkpoint, told: LaminaOptions) -> LaminaEngine:
        sizes, control = sizes_of(ckpt, told)
        keep = told.keep_log or told.log is not None
        wire = Wire(keep=keep, protocol=Protocol() if told.check else None)
        serving = Serving(control)
        replicas = serving.rotation.replicas
        compute, memory = pick(replicas + told.prefill, told.memory_devices)
        compute, elsewhere = compute[:replicas], compute[replicas:]
        compile_cache.use(told.compile_cache)
        pull_bytes = told.pull_bytes if told.prefill else 0
        pool = memory_pool(
            ckpt, memory, wire, told.partition, told.overlap, told.timed, sizes, pull_bytes
        )
        pool.compile(told.progress)
        channel = Channel(ckpt, told.rate if told.expert_slots else None)
        workers: list[Worker] = []
        loop: PoolLoop
        for n, device in enumerate(compute):
            replica = Replica(
                ckpt, device=device, pool=pool, wire=wire, moves=len(compute) > 1, **sizes
            )
            replica.compile(told.progress)
            alone = len(compute) == 1
            experts = ExpertSlots(ckpt, device, channel, told.expert_slots)
            workers.append(Worker(n, replica, experts, alone, lambda done: loop.post(done)))
        prefill = []
        for n, device in enumerate(elsewhere):
            model = PrefillModel(ckpt, device=device, **sizes)
            model.compile(told.progress)
            experts = ExpertSlots(ckpt, device, channel, told.expert_slots)
            prefill.append(PrefillWorker(n, model, experts, lambda made: loop.post(made)))
        seats = Seats(
            ckpt.config, workers[0].replica.kinds, told.kv_block, sizes["rows"], told.tile,
            told.memory_devices, told.partition == "head",
        )  # fmt: skip
        log, began = None, time.monotonic()
        if keep:  # what can be refused has been: no file is left of an engine that there is not
            log = log_of(
                ckpt, control, told.kv_dtype, told.log, told.keep_log,
                lambda: time.monotonic() - began,
            )  # fmt: skip
            serving = RecordedServing(control, log, wire)
        eos = frozenset() if told.ignore_eos else frozenset(ckpt.config.eos)
        loop = PoolLoop(serving, workers, pool, wire, seats, eos, told.timed, prefill)
        pool.begin(loop.post)
        for worker in (*workers, *prefill):
            worker.begin()
        loop.begin()
        channel.reads = channel.bytes = 0  # what is counted is what turns waited for
        return cls(ckpt, told, workers, pool, wire, loop, channel, log)

    # -- any thread

    def submit(
        self, request: Request, *, logits: bool = False, on_logits: OnLogits | None = None,
        stop_at: StopAt | None = None,
    ) -> RequestHandle:  # fmt: skip
        """Start a request. Raises BadInput for one that the model cannot take."""
        return self._submit([request], logits, on_logits, stop_at)[0]

    def submit_all(
        self, requests: Iterable[Request], *, logits: bool = False,
        on_logits: OnLogits | None = None,
    ) -> list[RequestHandle]:  # fmt: skip
        """Like `submit`, for requests that arrive at the same moment."""
        return self._submit(requests, logits, on_logits, None)

    def _submit(
        self, requests: Iterable[Request], logits: bool, on_logits: OnLogits | None,
        stop_at: StopAt | None,
    ) -> list[RequestHandle]:  # fmt: skip
        checked = list(requests)
        for request in checked:
            check_request(self.config, request)
            size = len(request.prompt) + (request.max_new_tokens or 0)
            if size > self._longest:
                raise BadInput(f"request '{request.id}': {size} tokens; at most {self._longest}")
        now = time.monotonic()

        def make(first: int) -> list[RequestHandle]:
            return [
                RequestHandle(
                    r, first + i, now, lambda n: self._loop.post(Cancel(n)), logits, on_logits,
                    stop_at,
                )
                for i, r in enumerate(checked)
            ]

        handles = self._loop.submit(make)
        if handles is None:
            raise self._over()
        return handles

    def _over(self) -> CoveyError:
        """Why nothing can be asked any more."""
        failed = self._loop.failure
        return CoveyError(f"the engine failed: {failed}" if failed else "the engine is closed")

    def lose(self, kind: str, number: int) -> None:
        """Make a device lose all it holds, as if it had been replaced (LAMINA-25): a "replica" its
        rows, a "memory" device its KV, a "prefill" worker its prompts. Returns when the engine has
        heard of it, or has ended.

        Raises BadInput for a device that there is not; CoveyError on a closed engine, in a
        `stop_at`, which runs on the thread that is to hear of it, and where that does not within
        a minute.
        """
        there = {
            "replica": len(self.workers), "memory": len(self.pool.devices),
            "prefill": len(self._loop.handovers.workers),
        }  # fmt: skip
        if not isinstance(kind, str) or kind not in there:
            raise BadInput(f"lose: kind {kind!r}; one of {', '.join(there)} expected")
        if type(number) is not int or not 0 <= number < there[kind]:
            raise BadInput(f"lose: {kind} {number!r}; there are {there[kind]}, numbered from 0")
        if self._loop.runs_here():
            raise CoveyError("lose: called from a request's stop_at; call it from another thread")
        heard = self._loop.lose(kind, number, 60.0)
        if heard is None:
            raise self._over()
        if not heard:
            raise CoveyError(f"lose: the engine has not heard of {kind} {number} within 60 s")

    def totals(self) -> dict[str, Any]:
        """Tokens, bytes on the wire, and where the time of the devices went."""
        seconds = time.monotonic() - self.began
        busy = self.pool.busy
        computing = sum(e - b for w in self.workers for _, _, b, e in list(w.history))
        return {
            "seconds": seconds, "tokens": self._loop.tokens, "rows": self._loop.rows,
            "wire": dict(self.wire.by_kind), "replicas": len(self.workers),
            "replica_s": computing, "attend_s": busy.attend_s, "hidden_s": busy.hidden_s,
            "kv_bytes": self.pool.kv_bytes, "early": busy.early, "asks": busy.asks,
            "prompt_rows": self._loop.prompt_rows, "pulls": asdict(self.pool.told),
            "loads": self.channel.reads, "loaded_bytes": self.channel.bytes,
        }  # fmt: skip

    @property
    def records(self) -> list[dict[str, Any]]:
        """The event log from its head on, when `keep_log` was asked for."""
        return [] if self._log is None else [self._log.head, *self._log.records]

    @property
    def failure(self) -> BaseException | None:
        """Why the engine is dead, if it is."""
        return self._loop.failure

    @property
    def batch_of_tile(self) -> dict[int, int]:
        """With `timed`: whose every tile was, for a picture."""
        return self._loop.batch_of_tile

    def missing(self) -> dict[str, int]:
        """What did not come back; all 0 when nothing runs."""
        return self._loop.seats.missing() | {
            "handles": len(self._loop.handles), "prompts": len(self._loop.handovers),
            "backlog": sum(d.backlog for d in self.pool.devices),
        }  # fmt: skip

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what is open and stop all threads; returns within about `timeout_s` whatever
        hangs. May be called again, and from several threads: all return when it is over.

        Raises CoveyError in a callback of a request: those run on threads that are to be stopped.
        """
        workers = (*self.workers, *self._loop.handovers.workers)
        here = threading.current_thread()
        if self._loop.runs_here() or any(worker.thread is here for worker in workers):
            raise CoveyError("close: called from a request's callback; call it from another thread")
        with self._closing:
            if not self._closed:
                self._closed = True
                self._end(time.monotonic() + timeout_s, workers)

    def _end(self, by: float, workers: Iterable[Worker | PrefillWorker]) -> None:
        def left() -> float:
            return max(0.1, by - time.monotonic())

        self._loop.end(left())
        for worker in workers:
            worker.end(left())
        self.pool.end(left())
        if self._log is not None:
            if self._loop.ended_well:
                told = self.totals()
                self._log.end({"tokens": told["tokens"], "rows": told["rows"], **told["wire"]})
            self._log.close()
        self._ckpt.close()

    def __enter__(self) -> LaminaEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
