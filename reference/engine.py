"""The readable engine: the shipped scheduler, the NumPy model, virtual time.

It is the whole system in one thread. Nothing happens until somebody waits for a request: then the
loop (reference/simulator/loop.py) goes from event to event until that request has what is asked.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reference.control import Scheduler
from reference.executor import NumpyExecutor
from reference.files.budget import expert_budget, slot_size, slots_for
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import LogWriter, head_of
from reference.files.requests import Request, check_request
from reference.files.residency import warm_order
from reference.handle import RequestHandle
from reference.numerics.model import Model
from reference.prediction import predictor
from reference.prediction.accuracy import Accuracy, Watched
from reference.prediction.listener import CarefulListener, Predicting
from reference.simulator.costs import CostModel
from reference.simulator.loop import Executor, VirtualLoop
from reference.vocab.errors import BadInput, CoveyError, one_line
from reference.vocab.events import Arrived, Cancelled, Drain, Event
from reference.vocab.ids import ExpertKey
from reference.vocab.options import LEAST, ControlOptions, check_counts, check_prefetch


class _Handle(RequestHandle):
    """Waiting is working: the caller's thread drives the engine."""

    drive: Callable[[Callable[[], bool], float | None], bool]

    def _until(self, true: Callable[[], bool], timeout_s: float | None) -> bool:
        return self.drive(true, timeout_s)


class _Telling:
    """The log as the loop writes it: with what the executor knows of an event."""

    def __init__(self, log: LogWriter, executor: NumpyExecutor) -> None:
        self.ask, self.action = log.ask, log.action
        self._log, self._executor = log, executor

    def event(self, event: Event, **extra: Any) -> None:
        self._log.event(event, **self._executor.told(event), **extra)


class ReferenceEngine:
    """One checkpoint, one budget, one virtual clock. Use it as a context manager.

    memory     bytes for routed experts: a size ("4GiB"), a share of them ("40%"), "auto", or an int
    scheduler, cache, readiness, fetch_order, chunk, max_running, ...: as in ControlOptions
    kv_tokens  KV capacity in tokens; 0 takes max_running requests of the model's length, at most
               4096 tokens each
    prefetch   what guesses experts ahead: none | next-gate | activation | layer | token;
               prefetch_experts: how many of each visit (0: as many as a token uses)
    warm       (layer, expert) pairs to read before the first request, the hottest first
    costs      how long things take in virtual time
    log        file for the event log; keep_log also keeps it in memory (`records`)
    dtype      np.float32, or np.float64 for the oracle

    Thread-safe. Errors: BudgetTooSmall, BadInput, Unsupported, before anything is read.
    """

    def __init__(
        self,
        path: str | Path | Checkpoint,
        *,
        memory: str | int = "100%",
        scheduler: str = "interleaved",
        cache: str = "per-layer",
        prefetch: str = "none",
        prefetch_experts: int = 0,
        prefetch_loads: int = 1,
        readiness: str = "visit",
        fetch_order: str = "least-progress",
        chunk: int = 64,
        max_running: int = 32,
        max_rows: int = 64,
        kv_tokens: int = 0,
        kv_block: int = 64,
        kv_dtype: str = "f32",
        retries: int = 2,
        bulk_slots: int = 0,
        bulk_every: int = 2,
        max_lag: int = 0,
        warm: Sequence[tuple[int, int]] = (),
        ignore_eos: bool = False,
        costs: CostModel | None = None,
        log: str | Path | None = None,
        keep_log: bool = False,
        dtype: type[np.floating] = np.float32,
    ) -> None:
        check_counts(locals(), LEAST)
        check_prefetch(prefetch, prefetch_experts, scheduler)
        self.checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        config = self.config = self.checkpoint.config
        keys = [ExpertKey(layer, e) for layer in config.moe_layers for e in range(config.experts)]
        slot = slot_size(self.checkpoint.expert(*key) for key in keys)
        self.budget = expert_budget(memory, len(keys), slot)
        longest = min(config.max_position, 4096)
        if kv_tokens and kv_tokens < kv_block:
            raise BadInput(f"kv_tokens: {kv_tokens}; at least one block of {kv_block} expected")
        slots = slots_for(self.budget, len(keys), slot, config.top_k)
        self.options = ControlOptions(
            layers=config.moe_layers,
            experts=config.experts,
            top_k=config.top_k,
            slots=slots,
            chunk=chunk,
            grouping=scheduler,  # type: ignore[arg-type]
            readiness=readiness,  # type: ignore[arg-type]
            fetch_order=fetch_order,  # type: ignore[arg-type]
            eviction=cache,  # type: ignore[arg-type]
            bulk_slots=bulk_slots,
            bulk_every=bulk_every,
            max_lag=max_lag,
            max_running=max_running,
            max_rows=max(max_rows, chunk),
            kv_tokens=kv_tokens or max_running * -(-longest // kv_block) * kv_block,
            kv_block=kv_block,
            retries=retries,
            prefetch=0 if prefetch == "none" else prefetch_experts or config.top_k,
            prefetch_loads=prefetch_loads,
            warm=warm_order(warm, slots),
        )
        costs = costs or CostModel()
        control = Scheduler(self.options)
        model = Model(self.checkpoint, dtype, kv_block, kv_dtype)  # type: ignore[arg-type]
        eos = frozenset() if ignore_eos else frozenset(config.eos)
        self.executor = NumpyExecutor(model, self.options.slots, chunk, eos, lambda: self.loop.now)
        expert_bytes = self.checkpoint.expert_bytes() if keys else 0
        head = head_of(
            self.options,
            engine="reference",
            model={"path": str(self.checkpoint.path), "family": config.family,
                   "layers": len(config.layers), "hidden": config.hidden},
            versions={"python": sys.version.split()[0], "numpy": np.__version__},
            expert_bytes=expert_bytes,
            budget_bytes=self.budget,
            slot_bytes=slot,
            channels=costs.depth,
            kv_dtype=kv_dtype,
            dtype=np.dtype(dtype).name,
        )
        self._log = LogWriter(log, head, lambda: self.loop.now, keep=keep_log)
        if keep_log or log is not None:
            self.executor.sums = {}
        telling = _Telling(self._log, self.executor)
        guesser = predictor(prefetch, self.options)
        self.accuracy = Accuracy(self.options.prefetch)
        executor: Executor = self.executor
        if guesser is not None:
            self.executor.ask_gates = self.options.prefetch if prefetch == "next-gate" else 0
            listener = CarefulListener(guesser, self.options, self.executor.tokens)
            executor = Predicting(self.executor, listener)
        self.loop = VirtualLoop(
            control, executor, expert_bytes, costs, telling,
            observer=Watched(self.accuracy) if guesser is not None else None,
        )  # fmt: skip
        self._next = 0
        self._lock = threading.RLock()
        self._closed = self._ticking = False
        self._failure: BaseException | None = None
        self._coming: dict[int, _Handle] = {}
        """Requests until they arrive, which is when they get their number: below 0 till then."""
        if self.options.warm:  # WARM-1
            self.loop.at(0.0, list)
            while self._tick():
                pass

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> ReferenceEngine:
        """Open a checkpoint directory; options as the class says."""
        return cls(path, **options)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The event log so far, head first (with keep_log)."""
        return [self._log.head, *self._log.records]

    @property
    def failure(self) -> BaseException | None:
        """Why the engine is dead, if it is: a bug, kept with its traceback."""
        return self._failure

    def totals(self) -> dict[str, Any]:
        """Virtual seconds, computing and transferring; loads, bytes, steps, and the bound."""
        t = self.loop.totals
        return {
            "seconds": t.seconds, "compute_s": t.compute_s, "channel_s": t.channel_s,
            "bound_s": t.bound_s, "loads": t.loads, "bytes": t.bytes, "steps": t.steps,
            "virtual": True,
            **({"prediction": self.accuracy.as_dict()} if self.options.prefetch else {}),
        }  # fmt: skip

    def heat(self) -> dict[tuple[int, int], int]:
        """How many visits have named each expert, by (layer, expert); see files/residency.py."""
        return dict(self.executor.heat)

    def submit(
        self,
        request: Request,
        *,
        logits: bool = False,
        on_logits: Callable[[int, np.ndarray], None] | None = None,
        stop_at: Callable[[int], bool] | None = None,
    ) -> RequestHandle:
        """Let a request of token ids arrive, at its arrival_s or now, whichever is later.

        `logits` keeps the logits of every position in its result; `on_logits(position, row)` is
        called with each (a row that cannot be written), `stop_at(token)` with each token: a true
        answer makes it the last one. Raises BadInput for a request that this model cannot take,
        CoveyError on a closed engine.
        """
        check_request(self.config, request)
        with self._lock:
            if self._failure is not None:
                raise CoveyError(f"the engine failed: {one_line(self._failure)}")
            if self._closed:
                raise CoveyError("the engine is closed")
            at = max(request.arrival_s, self.loop.now)
            waiting = min(self._coming, default=0) - 1
            handle = _Handle(request, waiting, at, self.cancel, logits, on_logits, stop_at)
            handle.drive = self._drive
            self._coming[waiting] = handle
            self.loop.at(at, lambda: [self._arrived(handle)])
            return handle

    def _arrived(self, handle: _Handle) -> Arrived:
        """The request is there; numbers go in order of arrival."""
        request = self._coming.pop(handle.number).request
        assert request.max_new_tokens is not None
        handle.number, self._next = self._next, self._next + 1
        self.executor.submitted(handle)
        return Arrived(handle.number, len(request.prompt), request.max_new_tokens)

    def submit_all(
        self,
        requests: Iterable[Request],
        *,
        logits: bool = False,
        on_logits: Callable[[int, np.ndarray], None] | None = None,
    ) -> list[RequestHandle]:
        """Like `submit`, for several."""
        return [self.submit(r, logits=logits, on_logits=on_logits) for r in requests]

    def why(self) -> str:
        """One line on what limited the run so far."""
        t = self.totals()
        limit = "computing" if t["compute_s"] >= t["channel_s"] else "reading experts"
        share = t["bound_s"] / t["seconds"] if t["seconds"] else 1.0
        return f"virtual time: {limit} was the bound; {share:.0%} of the time was at it"

    def cancel(self, number: int) -> None:
        """Cancel a request now, or as soon as it arrives."""
        with self._lock:
            if handle := self._coming.get(number) or self.executor.handles.get(number):
                at = max(self.loop.now, handle.request.arrival_s)
                self.loop.at(at, lambda: [Cancelled(handle.number)])

    def drain(self) -> None:
        """Refuse what waits; what runs goes on."""
        with self._lock:
            self.loop.at(self.loop.now, lambda: [Drain()])

    def _drive(self, true: Callable[[], bool], timeout_s: float | None) -> bool:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not true():
            with self._lock:
                if not true() and not self._tick():
                    raise AssertionError("the engine came to rest before the request ended")
            if end is not None and time.monotonic() > end:
                return true()
        return True

    def _tick(self) -> bool:
        """One moment of the loop, which is not to be entered from within it. When it breaks, all
        that is open ends with that reason (ENGINE-7)."""
        if self._ticking:
            raise CoveyError("called from a request's callback, which nothing can be waited for in")
        self._ticking = True
        try:
            return self.loop.tick()
        except BaseException as error:
            self._failure = error
            for handle in (*self.executor.handles.values(), *self._coming.values()):
                handle.end("error", f"the engine failed: {one_line(error)}")
            raise
        finally:
            self._ticking = False

    def close(self) -> None:
        """Cancel what has not ended, run until nothing is in flight, end the log.

        Raises CoveyError in a callback of a request, which would have to end first.
        """
        with self._lock:
            if self._ticking:
                raise CoveyError("close: called from a request's callback; call it outside")
            if self._closed:
                return
            self._closed = True
            for number in (*self.executor.handles, *self._coming):
                self.cancel(number)
            while self.failure is None and self._tick():
                pass
            if self.failure is None:
                self._log.end({**self.totals(), "by": self._log.now})  # in virtual time at once
            self._log.close()
            self.checkpoint.close()

    def __enter__(self) -> ReferenceEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
