"""The pooled engine's event log: `Serving` that writes down what it is told and what it decides,
with what went over the wire meanwhile (LAMINA-27)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jax_impl.attention_pool.wire import Wire
from jax_impl.head import describe, versions
from reference.control.attention_serving import Serving, ServingAction, ServingOptions
from reference.control.attention_wire import WireBytes, plain_of
from reference.files.event_log import LogWriter
from reference.files.pools_log import ACTIONS, pools_head
from reference.vocab.actions import Reason


def log_of(
    ckpt: Any, options: ServingOptions, kv_dtype: str, path: str | Path | None, keep: bool,
    clock: Callable[[], float],
) -> LogWriter:  # fmt: skip
    """A log for these options. Raises BadInput where the file cannot be created."""
    layers = [s.attention for s in ckpt.config.layers]
    wire = WireBytes(layers, ckpt.config.hidden, kv_dtype)
    head = pools_head(
        asdict(options), describe(ckpt), versions(), [[b.q, b.kv, b.a] for b in wire.layers],
        [a.window for a in layers], wire.layers[0].context,
    )  # fmt: skip
    return LogWriter(path, head, clock, keep=keep)


class RecordedServing(Serving):
    """`Serving`, and each of its events and actions as a record of the log."""

    def __init__(self, options: ServingOptions, log: LogWriter, wire: Wire) -> None:
        super().__init__(options)
        self.log, self._wire = log, wire

    def _told(self, event: str, **fields: Any) -> None:
        self._note({"event": event, **fields})

    def _note(self, record: dict[str, Any]) -> None:
        """Messages stand beside the record that follows them."""
        messages = self._wire.taken()
        extra = {"wire": [plain_of(m) for m in messages]} if messages else {}
        self.log.note(record, **extra)

    def arrived(self, request: int, prompt: int, max_new: int) -> None:
        self._told("Arrived", request=request, prompt_len=prompt, max_new_tokens=max_new)
        super().arrived(request, prompt, max_new)

    def cancelled(self, request: int, reason: Reason = "cancelled", error: str = "") -> None:
        self._told("Cancelled", request=request, reason=reason, error=error)
        super().cancelled(request, reason, error)

    def slice_done(self, batch: int) -> None:
        self._told("SliceDone", batch=batch)
        super().slice_done(batch)

    def attention_done(self, batch: int) -> None:
        self._told("AttentionDone", batch=batch)
        super().attention_done(batch)

    def token_done(self, batch: int, stopped: frozenset[int] | set[int] = frozenset()) -> None:
        self._told("TokenDone", batch=batch, stopped=sorted(stopped))
        super().token_done(batch, stopped)

    def prefilled(self, worker: int, request: int, stopped: bool = False) -> None:
        self._told("Prefilled", worker=worker, request=request, stopped=stopped)
        super().prefilled(worker, request, stopped)

    def pulled(self, request: int) -> None:
        self._told("Pulled", request=request)
        super().pulled(request)

    def redo(self, batch: int) -> None:
        self._told("Redo", batch=batch)
        super().redo(batch)

    def lost(self, device: int) -> tuple[int, ...]:
        self._told("LostMemory", device=device)
        return super().lost(device)

    def lost_worker(self, worker: int) -> tuple[int, ...]:
        self._told("LostWorker", worker=worker)
        return super().lost_worker(worker)

    def next_actions(self) -> list[ServingAction]:
        self._note({"ask": [0, 0]})
        actions = super().next_actions()
        for action in actions:
            name = type(action).__name__
            self._note({"action": name} | {f: getattr(action, f) for f in ACTIONS[name]})
        return actions
