"""Who runs where when attention is in another pool: admission, batches, turns. Pure.

A request is admitted when the memory pool has room for all of it, joins one of n batches, and from
then on takes part in that batch's tokens: with a piece of its prompt, or with its last token. A
token of a batch is `layers` attentions and `layers` + 1 slices; slice 0 begins it, slice k opens
with attention k - 1, slice `layers` ends it. What runs where is `Rotation`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from reference.control.attention_batches import Batches
from reference.control.attention_partition import HeadPool, Partition, Pool, RequestPool
from reference.control.attention_prompts import Prompts
from reference.control.attention_rotation import Order, Rotation
from reference.vocab.actions import Finish, Reason, Reject
from reference.vocab.errors import BadInput, IllegalEvent


@dataclass(frozen=True)
class ServingOptions:
    """layers     of the model;  kv_heads  of each layer
    batches    in flight (n);  order  rotation | queue;  max_batch  requests of a batch
    chunk      prompt tokens of a request in one token of its batch
    devices, partition, blocks   memory devices, head | request, KV blocks of each
    kv_block   tokens a block
    prefill    workers that run prompts; 0: the batches do
    """

    layers: int
    kv_heads: tuple[int, ...]
    batches: int = 1
    order: Order = "rotation"
    max_batch: int = 32
    chunk: int = 64
    devices: int = 1
    partition: Partition = "head"
    blocks: int = 1024
    kv_block: int = 64
    prefill: int = 0


class Span(NamedTuple):
    """A request's share of a token: positions [start, end) of its text."""

    request: int
    start: int
    end: int


class Place(NamedTuple):
    """The request is admitted: these devices hold its KV from now on."""

    request: int
    devices: tuple[int, ...]


class Prefill(NamedTuple):
    """Run the request's prompt on a prefill worker; its memory devices pull what comes of it."""

    request: int
    worker: int


class Turn(NamedTuple):
    """Run slice `slice` of a batch on `replica`; its context lies on `held` (-1: nowhere)."""

    batch: int
    slice: int
    replica: int
    held: int
    spans: tuple[Span, ...]


ServingAction = Place | Prefill | Turn | Finish | Reject


class _Seat:
    """A running request: its text's length so far, and how much of it has been run. made: a worker
    is through with its prompt; whole: all of that was pulled; joined: it is in a batch."""

    __slots__ = (
        "blocks", "done", "doomed", "joined", "length", "made", "max_new", "prompt", "whole",
    )  # fmt: skip

    def __init__(self, prompt: int, max_new: int, blocks: int) -> None:
        self.prompt, self.max_new, self.blocks = prompt, max_new, blocks
        self.length, self.done = prompt, 0
        self.made = self.whole = self.joined = False
        self.doomed: tuple[Reason, str] | None = None


class Serving:
    """`arrived`, `cancelled`, `prefilled`, `pulled`, `slice_done`, `attention_done`, `token_done`
    tell it what happened; `next_actions` says what to do, in order. Not thread-safe."""

    def __init__(self, options: ServingOptions) -> None:
        """Raises BadInput for a bad option or an illegal partition (LAMINA-3)."""
        o = self.options = options
        for name in ("layers", "max_batch", "chunk", "blocks", "kv_block"):
            if getattr(o, name) < 1:
                raise BadInput(f"{name}: {getattr(o, name)}; at least 1 expected")
        self.pool: Pool = (
            HeadPool(o.devices, o.blocks, o.kv_heads)
            if o.partition == "head"
            else RequestPool(o.devices, o.blocks)
        )
        self.rotation = Rotation(o.batches, o.order)
        self.batches = Batches(o.batches)
        self.prompts = Prompts(o.prefill)
        self.queue: list[tuple[int, _Seat]] = []
        self.running: dict[int, _Seat] = {}
        self.slice = [0] * o.batches
        self.aboard: list[tuple[Span, ...]] = [()] * o.batches
        self.terminal: list[ServingAction] = []

    # -- what happened

    def arrived(self, request: int, prompt: int, max_new: int) -> None:
        """LAMINA-4: queued, or refused at once where the pool could never hold it."""
        blocks = -(-(prompt + max_new) // self.options.kv_block)
        if self.pool.fits(blocks):
            self.queue.append((request, _Seat(prompt, max_new, blocks)))
        else:
            self.terminal.append(
                Reject(request, f"{blocks} KV blocks needed, a device has {self.pool.blocks}")
            )

    def cancelled(self, request: int, reason: Reason = "cancelled", error: str = "") -> None:
        """Ends a waiting request now, a running one at the end of its batch's token."""
        for i, (number, _) in enumerate(self.queue):
            if number == request:
                del self.queue[i]
                self.terminal.append(Finish(request, reason, error))
                return
        seat = self.running.get(request)
        if seat is None:
            return
        if any(span.request == request for spans in self.aboard for span in spans):
            seat.doomed = seat.doomed or (reason, error)
        else:
            self._end(request, reason, error)

    def slice_done(self, batch: int) -> None:
        """Queries, keys and values of the next attention have been sent."""
        if self.slice[batch] >= self.options.layers:
            raise IllegalEvent(f"slice_done({batch}): the token's last slice ends with token_done")
        self.rotation.slice_done(batch)
        self.slice[batch] += 1

    def attention_done(self, batch: int) -> None:
        """What was attended has come back."""
        self.rotation.attention_done(batch)

    def token_done(self, batch: int, stopped: frozenset[int] | set[int] = frozenset()) -> None:
        """The last slice of a token is done; `stopped`: requests whose new token ends them."""
        if self.slice[batch] != self.options.layers:
            raise IllegalEvent(f"token_done({batch}): at slice {self.slice[batch]}")
        self.rotation.token_done(batch)
        self.slice[batch] = 0
        spans, self.aboard[batch] = self.aboard[batch], ()
        for request, _, end in spans:
            seat = self.running[request]
            seat.done = end
            if seat.doomed is not None:
                self._end(request, *seat.doomed)
            elif end == seat.length and (request in stopped or seat.max_new == 0):
                self._end(request, "stop")
            elif end == seat.length:
                seat.length += 1
                self.batches.grow(request)
                if seat.length - seat.prompt >= seat.max_new:
                    self._end(request, "length")
        self.batches.level(batch)

    def prefilled(self, worker: int, request: int, stopped: bool = False) -> None:
        """The worker is through with a prompt; `stopped`: the token that it gave ends the request.
        Of a request that is over, or whose token is there already, only the worker is heard."""
        self.prompts.made(worker, request)
        seat = self.running.get(request)
        if seat is None:
            return
        seat.made = True
        if seat.length == seat.prompt:
            if stopped or seat.max_new == 0:
                return self._end(request, "stop")
            seat.length += 1
            if seat.max_new == 1:
                return self._end(request, "length")
        self._join(request, seat)

    def pulled(self, request: int) -> None:
        """The memory pool has all keys and values of the prompt."""
        seat = self.running.get(request)
        if seat is None or seat.joined:
            raise IllegalEvent(f"pulled({request}): no prompt of it is on its way")
        seat.whole = True
        self._join(request, seat)

    def _join(self, request: int, seat: _Seat) -> None:
        """Into a batch, once its prompt is run and is where it belongs."""
        if seat.made and seat.whole:
            self.prompts.drop(request)
            seat.done, seat.joined = seat.prompt, True
            self.batches.join(request, seat.length)

    # -- what went wrong (LAMINA-25)

    def lost_worker(self, worker: int) -> tuple[int, ...]:
        """A prefill worker was lost and replaced: the prompts that it ran, or held, begin again
        there. Returns these requests."""
        again = self.prompts.lost(worker)
        for request in again:
            self.running[request].made = self.running[request].whole = False
        return again

    def redo(self, batch: int) -> None:
        """A replica was lost with this batch's token on it. Nothing but the token is: it starts
        again, and writes the same keys and values once more."""
        self._begin_again(batch)

    def _begin_again(self, batch: int) -> None:
        self.rotation.restart(batch)
        self.slice[batch], self.aboard[batch] = 0, ()

    def lost(self, device: int) -> tuple[int, ...]:
        """A memory device was lost and replaced by an empty one. The requests that had KV there
        run their text again, prompt and generated tokens, and then go on; batches that have one of
        them aboard begin their token again. Of a prompt on its way from a prefill worker all is to
        be pulled again. Returns these requests."""
        gone = set(self.pool.lost(device))
        for batch, spans in enumerate(self.aboard):
            if gone & {span.request for span in spans}:
                self._begin_again(batch)
        for request in gone:
            self.running[request].done, self.running[request].whole = 0, False
        return tuple(sorted(gone))

    # -- what to do

    def next_actions(self) -> list[ServingAction]:
        """Ends first, then admissions in order of arrival, then the turns that can start."""
        actions, self.terminal = self.terminal, []
        room = self.options.batches * self.options.max_batch
        while self.queue and len(self.running) < room:
            request, seat = self.queue[0]
            devices = self.pool.place(request, seat.blocks)
            if devices is None:
                break  # nobody passes the head of the queue
            del self.queue[0]
            self.running[request] = seat
            actions.append(Place(request, devices))
            if self.options.prefill:
                self.prompts.wait(request)
            else:
                seat.joined = True
                self.batches.join(request, seat.length)
        actions += [Prefill(*begun) for begun in self.prompts.start()]
        self._board()
        for run in self.rotation.next_runs():
            at = self.slice[run.batch]
            # At the start of a token nothing is kept anywhere.
            held = -1 if at == 0 else run.held
            actions.append(Turn(run.batch, at, run.replica, held, self.aboard[run.batch]))
        return actions

    @property
    def idle(self) -> bool:
        """Nothing queued, running or left to say."""
        return not (self.queue or self.running or self.terminal)

    def _board(self) -> None:
        """Batches between two tokens take their members aboard; empty ones rest."""
        flying = {s.request for spans in self.aboard for s in spans}
        for batch in range(self.options.batches):
            resting = self.rotation.resting(batch)
            if self.aboard[batch] or not (resting or self.rotation.between(batch)):
                continue
            if self.slice[batch] != 0:
                continue
            spans = []
            for request in self.batches.members[batch]:
                seat = self.running[request]
                if request not in flying:
                    end = min(seat.done + self.options.chunk, seat.length)
                    spans.append(Span(request, seat.done, end))
            self.aboard[batch] = tuple(spans)
            flying |= {s.request for s in spans}
            if spans and resting:
                self.rotation.opened(batch)
            elif not spans and not resting:
                self.rotation.emptied(batch)

    def _end(self, request: int, reason: Reason, error: str = "") -> None:
        if self.running.pop(request).joined:
            self.batches.leave(request)
        self.prompts.drop(request)
        self.pool.drop(request)
        self.terminal.append(Finish(request, reason, error))
