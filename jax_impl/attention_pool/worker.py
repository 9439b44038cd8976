"""A replica's dispatch thread: one turn of one batch after another.

A turn closes the layer whose attention came back, runs its feed-forward (a mixture's experts, which
lie on the replica or are read for it, included), and opens the next layer; the last one ends in
logits and tokens.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jax_impl.attention_pool.compute import Replica
from jax_impl.attention_pool.expert_slots import ExpertSlots
from jax_impl.attention_pool.messages import Answer
from jax_impl.attention_pool.seats import Aboard, Seat
from jax_impl.compute import Broken
from jax_impl.model import ExpertTask, JaxModel
from reference.control.attention_serving import Turn
from reference.sampling import choose
from reference.vocab.config import MoeSpec
from reference.vocab.errors import CoveyError, one_line
from reference.vocab.sampling import Choice


@dataclass(frozen=True)
class Job:
    """A turn, with all it needs: what came back from the pool for each tile, and, if it comes from
    another replica, the rows' residual [rows, H]."""

    turn: Turn
    aboard: Aboard
    answers: Mapping[int, list[Answer]]
    context: np.ndarray | None
    seats: Mapping[int, Seat]
    last: bool


@dataclass(frozen=True)
class Done:
    """How it went. context: the residual, where there are other replicas; chosen, failed: of a
    token's last slice; error: the turn as a whole failed."""

    batch: int
    epoch: int
    replica: int
    last: bool
    context: np.ndarray | None = None
    chosen: dict[int, Choice | None] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    error: str = ""


class Worker:
    """Runs jobs in order and posts what came of them."""

    def __init__(
        self, number: int, replica: Replica, experts: ExpertSlots,
        alone: bool, post: Callable[[Done | Broken], None],
    ) -> None:  # fmt: skip
        self.number, self.replica, self.experts = number, replica, experts
        self.history: list[tuple[int, int, float, float]] = []
        """(batch, slice, began, ended) of every turn."""
        self._alone, self._post = alone, post
        self._jobs: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._work, name=f"covey-replica-{number}", daemon=True
        )

    def begin(self) -> None:
        self.thread.start()

    def run(self, job: Job) -> None:
        self._jobs.put(job)

    def forget(self) -> None:
        """Lose the replica's state, after what is queued."""
        self._jobs.put(self.replica.forget)

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
        with jax.default_device(self.replica.device):
            while (job := self._jobs.get()) is not None:
                if not isinstance(job, Job):
                    job()
                    continue
                began, turn = time.monotonic(), job.turn
                try:
                    done = self._turn(job)
                except Exception as error:
                    done = Done(
                        turn.batch, job.aboard.epoch, self.number, job.last, error=one_line(error)
                    )
                self.history.append((turn.batch, turn.slice, began, time.monotonic()))
                self._post(done)

    def _turn(self, job: Job) -> Done:
        turn, aboard, model = job.turn, job.aboard, self.replica
        failed: dict[int, str] = {}
        if job.context is not None:
            model.put_context(aboard.rows, job.context)
        if turn.slice > 0:
            failed = self._close(turn.slice - 1, job)
        if not job.last:
            for tile in aboard.tiles:
                model.open_layer(model.piece_of(turn.slice), turn.slice, tile)
            context = None if self._alone else model.context(aboard.rows)
            return Done(
                turn.batch, aboard.epoch, self.number, False, context=context, failed=failed
            )
        chosen: dict[int, Choice | None] = {}
        self._sample(job, chosen, failed)
        return Done(turn.batch, aboard.epoch, self.number, True, chosen=chosen, failed=failed)

    def _close(self, i: int, job: Job) -> dict[int, str]:
        """Close layer i for all tiles and run its experts; requests that failed."""
        model, told = self.replica, []
        for tile in job.aboard.tiles:
            spoken = model.close_layer(model.piece_of(i), i, tile, job.answers[tile.number])
            if spoken is not None:
                told.append(spoken)
        f = model.config.layers[i].feed_forward
        if not isinstance(f, MoeSpec):
            return {}
        rows, owners = job.aboard.rows, job.aboard.owners
        all_ = np.concatenate(jax.device_get(told))[: len(rows)]
        k = all_.shape[1] // 2
        bad = {owners[n][0]: f"NaN in the router's scores at layer {i}"
               for n in np.flatnonzero(all_[:, 2 * k])}  # fmt: skip
        run_experts(model, self.experts, i, all_[:, :k], rows)
        return bad

    def _sample(self, job: Job, chosen: dict[int, Choice | None], failed: dict[int, str]) -> None:
        """Logits of the rows that want them; the next token of every text that is at its end."""
        rows, owners = job.aboard.rows, job.aboard.owners
        wanted = []
        for n, (request, position) in enumerate(owners):
            seat = job.seats[request]
            ends = position == len(seat.tokens) - 1
            sampled = ends and seat.handle.request.max_new_tokens != 0
            if sampled or (seat.handle.want_logits and position >= seat.told):
                wanted.append(n)
            elif ends:
                chosen[request] = None
        logits = self.replica.logits([rows[n] for n in wanted])
        for n, row in zip(wanted, logits, strict=True):
            request, position = owners[n]
            seat = job.seats[request]
            try:
                tell(seat, request, position, row, chosen, seat.tokens)
            except Exception as error:
                text = str(error) if isinstance(error, CoveyError) else one_line(error)
                failed.setdefault(request, text)


def run_experts(
    model: JaxModel, experts: ExpertSlots, layer: int, topk: np.ndarray, rows: Sequence[int]
) -> None:
    """The experts of a layer for bank rows that chose topk [rows, K]: as many at a time as there
    are slots for, read first where they are missing."""
    wanted = [int(e) for e in np.unique(topk) if 0 <= e < experts.count]  # a NaN's may be none
    for wave, handles in enumerate(experts.waves(layer, wanted)):
        if wave:
            model.wait()
        tasks = []
        for e, handle in handles.items():
            where, ranks = np.nonzero(topk == e)
            tasks.append(ExpertTask(handle, [rows[int(n)] for n in where], [int(r) for r in ranks]))
        model.experts(layer, tasks)


def tell(
    seat: Seat, request: int, position: int, row: np.ndarray, chosen: dict[int, Choice | None],
    text: Sequence[int],
) -> None:  # fmt: skip
    """Hand out a position's logits; at the end of the `text` choose the token that follows."""
    handle = seat.handle
    if handle.want_logits and position >= seat.told:
        handle.put_logits(position, row)
        seat.told = position + 1
    if position != len(text) - 1:
        return
    if handle.request.max_new_tokens == 0:
        chosen[request] = None
    else:
        chosen[request] = choose(row, handle.sampling, text, len(handle.request.prompt))
