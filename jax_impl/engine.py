"""JaxEngine: a checkpoint on disk, a byte budget, many requests, each with the bits it has alone.

    with JaxEngine.open("model", memory="4GiB") as engine:
        handle = engine.submit(Request("a", (1, 2, 3), max_new_tokens=8))
        for token in handle: ...
        print(engine.why())

Everything is opened, sized and compiled before the first request; afterwards the memory that is
held does not grow. loop.py is what happens then. Nothing in it weighs one request's numbers with
another's, and no shape depends on how many there are: hence the same bits (ENGINE-6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import numpy as np

from jax_impl import compile_cache
from jax_impl.backend import backend
from jax_impl.head import describe, versions
from jax_impl.host_stage import host_stage
from jax_impl.loop import Loop
from jax_impl.model import JaxModel
from jax_impl.options import (
    EngineOptions,
    bank_rows,
    control_options,
    expert_keys,
    plan_sizes,
    wide_rows,
)
from jax_impl.slots import SlotPool
from jax_impl.totals import why
from jax_impl.transfer import Transferred, Transfers
from reference.control import Scheduler
from reference.files.budget import Sizes, show_size
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import LogWriter, head_of
from reference.files.requests import Request, check_request
from reference.handle import RequestHandle
from reference.prediction import predictor
from reference.vocab.errors import CoveyError
from reference.vocab.events import Cancelled, Drain
from reference.vocab.options import ControlOptions

OnLogits = Callable[[int, np.ndarray], None]
StopAt = Callable[[int], bool]


class JaxEngine:
    """Made by `open`. All methods may be called from any thread."""

    def __init__(
        self,
        ckpt: Checkpoint,
        options: EngineOptions,
        control: ControlOptions,
        sizes: Sizes,
        loop: Loop,
        log: LogWriter,
        model: JaxModel,
    ) -> None:
        self.options = options
        self.control = control
        self.sizes = sizes
        self.config = ckpt.config
        self.notes = ckpt.notes
        self._ckpt, self._loop, self._log, self._model = ckpt, loop, log, model
        self._closing = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: str | Path, memory: str | int = "auto", **options: Any) -> JaxEngine:
        """Open a checkpoint directory; see `EngineOptions` for the options.

        Raises BadInput, Unsupported or BudgetTooSmall, before anything large is allocated.
        """
        told = EngineOptions.of(memory=memory, **options)
        ckpt = Checkpoint.open(path)
        sizes, kv_tokens = plan_sizes(ckpt, told)
        control = control_options(ckpt, told, sizes, kv_tokens)
        scheduler = Scheduler(control)
        compile_cache.use(told.compile_cache)
        told.progress(f"reading {show_size(ckpt.non_expert_bytes)} of resident weights")
        model = told.model(
            ckpt,
            rows=bank_rows(told),
            kv_blocks=kv_tokens // told.kv_block,
            max_len=min(ckpt.config.max_position, kv_tokens),
            kv_block=told.kv_block,
            texts=told.max_running,
            tile=told.tile,
            wide=wide_rows(ckpt, told),
            compute=told.compute,
            kv_dtype=told.kv_dtype,
            **({"ahead": control.prefetch} if told.prefetch == "next-gate" else {}),
        )
        model.compile(told.progress)
        sizes, host = host_stage(sizes, told, len(ckpt.config.moe_layers))
        pool = SlotPool(sizes.slots, sizes.slot) if host is None else host.pool

        def start_transfers(post: Callable[[Transferred], None]) -> Transfers:
            return Transfers(
                pool, lambda key: ckpt.expert(*key), expert_keys(ckpt), post,
                threads=told.threads, io=told.io, reader=told.reader,
                deadline_s=told.deadline_s, check=told.check, host=host,
            )  # fmt: skip

        began = monotonic()
        head = head_of(
            control,
            engine="jax",
            model=describe(ckpt),
            versions=versions(),
            expert_bytes=sizes.expert,
            budget_bytes=sizes.budget,
            slot_bytes=sizes.slot,
            host_budget_bytes=sizes.host,
            host_slots=sizes.host_slots,
            channels=told.threads if sizes.experts else 0,
            host_way=host.way if host else None,
            compute=told.compute,
            kv_dtype=told.kv_dtype,
            predictor=told.prefetch,
            tile=told.tile,
            wide=model.wide,
            io=told.io,
            backend=backend().record(),
            notes=list(ckpt.notes),
        )
        log = LogWriter(
            told.log, head, lambda: monotonic() - began, keep=told.keep_log, warn=told.warn
        )
        eos = frozenset() if told.ignore_eos else frozenset(ckpt.config.eos)
        rate = told.rate or getattr(told.reader, "bytes_per_s", None)
        loop = None
        try:
            loop = Loop(
                scheduler, model, pool, start_transfers, log, eos, check=told.check,
                sums=told.check or told.keep_log, rate=rate,
                predictor=predictor(told.prefetch, control), warn=told.warn,
            )  # fmt: skip
            for file in ckpt.files:  # what the threads have opened is what the headers described
                ckpt.check_unchanged(file)
        except BaseException:
            log.close()
            if loop is not None:
                loop.transfers.close()
            elif host is not None:
                host.close()
            raise
        sizes = replace(
            sizes, resident=model.non_expert_bytes_held, kv=model.kv_bytes,
            rows=model.bank_bytes, bounce=loop.transfers.bounce_bytes,
        )  # fmt: skip
        told.progress(
            f"{sizes.slots} of {sizes.experts} experts fit into {show_size(sizes.budget)}; "
            f"{show_size(sizes.total)} held in all; reads are {loop.transfers.io}"
        )
        if host is not None:
            told.progress(f"{sizes.host_slots} fit into host memory; from there: {host.way}")
        loop.begin()
        if control.warm:
            told.progress(f"reading {len(control.warm)} experts that were hot before")
            loop.warmed.wait()  # WARM-1
        return cls(ckpt, told, control, sizes, loop, log, model)

    # -- requests

    def submit(
        self, request: Request, *, logits: bool = False, on_logits: OnLogits | None = None,
        stop_at: StopAt | None = None,
    ) -> RequestHandle:  # fmt: skip
        """Start a request. `logits` keeps the logits of every position in its result;
        `on_logits(position, row)` is called with each as it comes (a row that cannot be written),
        `stop_at(token)` with each token, a true answer making it the last one; both on the
        compute thread.

        Raises BadInput for a request that this model cannot take, CoveyError on a closed engine.
        """
        return self._submit([request], logits, on_logits, stop_at)[0]

    def submit_all(
        self,
        requests: Iterable[Request],
        *,
        logits: bool = False,
        on_logits: OnLogits | None = None,
    ) -> list[RequestHandle]:
        """Like `submit`, for requests that arrive at the same moment."""
        return self._submit(requests, logits, on_logits, None)

    def _submit(
        self, requests: Iterable[Request], logits: bool, on_logits: OnLogits | None,
        stop_at: StopAt | None,
    ) -> list[RequestHandle]:  # fmt: skip
        checked = list(requests)
        for request in checked:
            check_request(self.config, request)
        now = monotonic()

        def make(first: int) -> list[RequestHandle]:
            return [
                RequestHandle(r, first + i, now, self._cancel, logits, on_logits, stop_at)
                for i, r in enumerate(checked)
            ]

        handles = self._loop.submit(make)
        if handles is None:
            failure = self._loop.failure
            raise CoveyError(f"the engine failed: {failure}" if failure else "the engine is closed")
        return handles

    def _cancel(self, number: int) -> None:
        self._loop.post(Cancelled(number))

    def drain(self) -> None:
        """Finish what runs; refuse what is queued and what comes."""
        self._loop.post(Drain())

    # -- how it went

    @property
    def failure(self) -> BaseException | None:
        """Why the engine is dead, if it is: a bug, kept with its traceback."""
        return self._loop.failure

    @property
    def records(self) -> list[dict[str, Any]]:
        """The event log from its head on, when `keep_log` was asked for."""
        return [self._log.head, *self._log.records]

    @property
    def log_failed(self) -> str:
        """Why the event log on disk is incomplete, or "" (LOG-5)."""
        return self._log.failed

    def totals(self) -> dict[str, Any]:
        """Where the time went up to now; see `jax_impl.totals.Totals.as_dict`."""
        stats = self._loop.transfers.stats
        return self._loop.snapshot() | {
            "overdue_loads": stats.overdue,
            "io": self._loop.transfers.io,
            "slots": self.sizes.slots,
            "slot_bytes": self.sizes.slot,
            "budget_bytes": self.sizes.budget,
            "host_slots": self.sizes.host_slots,
            "host_budget_bytes": self.sizes.host,
            "held_bytes": self.sizes.total,
        }

    def heat(self) -> dict[tuple[int, int], int]:
        """How many visits have named each expert, by (layer, expert); see files/residency.py."""
        return {(key.layer, key.expert): n for key, n in self._loop.totals.heat.items()}

    def why(self) -> str:
        """One paragraph on what limited the run so far."""
        return why(self.totals())

    # -- the end

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what is open and stop the threads; returns within about `timeout_s` whatever
        hangs. May be called again, and from several threads: all return when it is over.

        Raises CoveyError in a callback of a request: those run on a thread that is to be stopped.
        """
        if self._loop.runs_here():
            raise CoveyError("close: called from a request's callback; call it from another thread")
        with self._closing:
            if not self._closed:
                self._closed = True
                self._loop.end(timeout_s)
                self._model.end()
                self._ckpt.close()

    def __enter__(self) -> JaxEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
