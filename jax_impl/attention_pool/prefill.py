"""A prefill worker: a device that runs whole prompts and keeps their keys and values until the
memory pool has pulled them (LAMINA-12).

It runs the monolithic model, all tiles of a prompt at a layer before the next layer: so the layers
are made in order, and are offered while later ones are in work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attention_pool.expert_slots import ExpertSlots
from jax_impl.attention_pool.puller import PromptKV
from jax_impl.attention_pool.seats import Seat
from jax_impl.attention_pool.worker import run_experts, tell
from jax_impl.compute import Broken
from jax_impl.kv import Table
from jax_impl.layers import Piece
from jax_impl.model import JaxModel, StageOut
from jax_impl.programs import Progress, compiled
from reference.vocab.config import RopeSpec
from reference.vocab.errors import RequestFailed, one_line
from reference.vocab.sampling import Choice


@dataclass(frozen=True)
class PromptJob:
    """A prompt to be run. epoch: of the worker, which a loss ends; gone: set when nobody wants it
    any more."""

    epoch: int
    seat: Seat
    gone: threading.Event


@dataclass(frozen=True)
class Made:
    """A layer's keys and values of a prompt, before its next layers are made."""

    worker: int
    epoch: int
    request: int
    layer: int
    kv: PromptKV


@dataclass(frozen=True)
class Prompted:
    """A worker is through with a prompt: the token that follows (None: none was wanted), or what
    went wrong."""

    worker: int
    epoch: int
    request: int
    choice: Choice | None = None
    error: str = ""


class _Gone(Exception):
    """Nobody wants the prompt any more."""


class PrefillModel(JaxModel):
    """The whole model on `device`, with KV for one prompt. `made` is called when a layer is
    dispatched for all rows of a prompt. All else as JaxModel."""

    made: Callable[[int], None]

    def __init__(self, ckpt: Any, *, device: Any, **sizes: Any) -> None:
        blocks = -(-sizes["max_len"] // sizes["kv_block"])
        mine = sizes | {"rows": sizes["max_len"], "kv_blocks": blocks, "texts": 1}
        self.device = device
        with jax.default_device(device):
            super().__init__(ckpt, **mine)
        self._copies: dict[tuple[Any, ...], Any] = {}

    def compile(self, progress: Progress = lambda text: None) -> None:
        with jax.default_device(self.device):
            super().compile(progress)
            for pool in (*self._keys, *self._values):
                self._copy(pool, progress)

    def _copy(self, pool: jax.Array | None, progress: Progress | None = None) -> Any:
        """A pool's bits in an array of their own: its next writes are made in place."""
        if pool is None:
            return None
        key = pool.shape, pool.dtype
        if key not in self._copies:
            title = f"a copy of a prompt's KV on {self.device}"
            self._copies[key] = compiled(jnp.copy, (), (pool,), title, progress)
        return self._copies[key](pool)

    def _layer(
        self, piece: Piece, i: int, at: np.ndarray, turns: dict[RopeSpec, np.ndarray],
        split: Sequence[tuple[int, int]],
    ) -> list[jax.Array]:  # fmt: skip
        told = super()._layer(piece, i, at, turns, split)
        self.made(i)
        return told

    def table(self, prompt: int) -> Table:
        """Where a prompt lies: from block 0 on, for it is the only one."""
        held = (kind.held(prompt, self.kv_block) for kind in self.kinds)
        return Table(tuple(tuple(range(n)) for n in held), prompt)

    def kv(self, i: int, prompt: int) -> PromptKV:
        """Layer i's keys and values of a prompt of so many tokens; waits until they are made."""
        kind = self.kinds[self._kind_of[i]]
        n = kind.held(prompt, self.kv_block)
        keys, values = (self._copy(p) for p in (self._keys[i], self._values[i]))
        first = 0 if kind.window is None else max(0, prompt - kind.window)
        return PromptKV(
            np.asarray(keys)[:n].copy(),
            None if values is None else np.asarray(values)[:n].copy(), first, prompt,
        )  # fmt: skip

    def forget(self) -> None:
        """Lose all KV, as a device does that is replaced: NaN everywhere."""
        for pools in (self._keys, self._values):
            for i, pool in enumerate(pools):
                if pool is not None:
                    pools[i] = jnp.full_like(pool, jnp.nan)


class PrefillWorker:
    """One prompt after another; `post` gets what comes of them, on the worker's thread."""

    def __init__(
        self, number: int, model: PrefillModel,
        experts: ExpertSlots, post: Callable[[Any], None],
    ) -> None:  # fmt: skip
        self.number, self.model, self.experts = number, model, experts
        self.prompts = 0
        self._post = post
        self._jobs: queue.SimpleQueue[PromptJob | Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._work, name=f"covey-prefill-{number}", daemon=True
        )

    def begin(self) -> None:
        self.thread.start()

    def run(self, job: PromptJob) -> None:
        self._jobs.put(job)

    def forget(self) -> None:
        """Lose the model's state, after what is queued."""
        self._jobs.put(self.model.forget)

    def end(self, timeout_s: float = 5.0) -> bool:
        """Stop after what is queued; False when it hangs."""
        self._jobs.put(None)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._post(Broken(error))

    def _serve(self) -> None:
        with jax.default_device(self.model.device):
            while (job := self._jobs.get()) is not None:
                if not isinstance(job, PromptJob):
                    job()
                    continue
                request, choice, error = job.seat.handle.number, None, ""
                try:
                    choice = self._prompt(job)
                except _Gone:
                    pass
                except Exception as failed:
                    error = one_line(failed)
                self._post(Prompted(self.number, job.epoch, request, choice, error))
                self.prompts += 1

    def _prompt(self, job: PromptJob) -> Choice | None:
        model, seat = self.model, job.seat
        handle, request = seat.handle, seat.handle.number
        n = len(handle.request.prompt)

        def made(layer: int) -> None:
            kv = model.kv(layer, n)
            if job.gone.is_set():
                raise _Gone
            self._post(Made(self.number, job.epoch, request, layer, kv))

        model.made = made
        rows, positions = list(range(n)), list(range(n))
        tables = [model.table(n)] * n
        want = [handle.want_logits and p >= seat.told for p in positions]
        want[-1] = want[-1] or handle.request.max_new_tokens != 0
        out: StageOut = model.enter(rows, seat.tokens[:n], positions, tables, want).get()
        while out.layer is not None:
            if out.bad.any():
                raise RequestFailed(f"NaN in the router's scores at layer {out.layer}")
            run_experts(model, self.experts, out.layer, out.topk, rows)
            out = model.advance(out.layer, rows, positions, tables, want).get()
        chosen: dict[int, Choice | None] = {}
        for p in sorted(out.logits):
            tell(seat, request, p, out.logits[p], chosen, seat.tokens[:n])
        return chosen.get(request)
