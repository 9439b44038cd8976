"""Prompts between prefill workers and the memory pool, on the loop's side (LAMINA-12).

A worker tells of each layer that it has made; every memory device of the request is offered it, and
says when it has pulled the whole prompt. All messages go through the loop's thread, so that nothing
of a request that is over reaches a device behind the word that it is over.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jax_impl.attention_pool.messages import Drop, Offer, Pulled
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.prefill import Made, PrefillWorker, Prompted, PromptJob
from jax_impl.attention_pool.puller import PromptKV
from jax_impl.attention_pool.seats import Seat
from reference.control.attention_serving import Prefill, Serving


@dataclass
class _Way:
    """A prompt on its way: its worker, the layers made so far, the devices that have not all, with
    the attempt that each is at."""

    seat: Seat
    worker: int
    left: dict[int, int]
    gone: threading.Event = field(default_factory=threading.Event)
    made: list[PromptKV] = field(default_factory=list)


class HandOvers:
    """Owned by the loop's thread. kind_of: of each layer, which list of a table's blocks it uses.
    failed(request, error): the request ends with it."""

    def __init__(
        self, serving: Serving, workers: Sequence[PrefillWorker], pool: MemoryPool,
        kind_of: Sequence[int], failed: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self._serving, self._pool, self._kind_of, self._failed = serving, pool, kind_of, failed
        self.workers = list(workers)
        self._epoch = [0] * len(self.workers)
        self._ways: dict[int, _Way] = {}
        self._attempts = itertools.count()

    def __len__(self) -> int:
        return len(self._ways)

    def start(self, action: Prefill, seat: Seat) -> None:
        """Have a worker run the prompt."""
        way = _Way(seat, action.worker, {d: next(self._attempts) for d in seat.devices})
        self._ways[action.request] = way
        job = PromptJob(self._epoch[action.worker], seat, way.gone)
        self.workers[action.worker].run(job)

    def made(self, m: Made) -> None:
        """A layer is there: the request's devices may pull it."""
        way = self._ways.get(m.request)
        if way is not None and m.epoch == self._epoch[m.worker]:
            way.made.append(m.kv)
            for device in way.seat.devices:
                self._offer(way, device, m.layer)

    def _offer(self, way: _Way, device: int, layer: int) -> None:
        blocks = tuple(way.seat.table.blocks[self._kind_of[layer]])
        number, attempt = way.seat.handle.number, way.left[device]
        offer = Offer(number, layer, way.made[layer], blocks, attempt)
        self._pool.devices[device].post(offer)

    def current(self, m: Prompted) -> bool:
        """The message is not of before a loss of its worker."""
        return m.epoch == self._epoch[m.worker]

    def pulled(self, p: Pulled) -> None:
        """A device has the whole prompt; when all have, the request may decode."""
        way = self._ways.get(p.request)
        if way is None or p.request not in self._serving.running:
            return  # it is over, which may have been heard just now
        if p.error is not None:
            self._failed(p.request, f"memory device {p.device}: {p.error}")
            return
        if way.left.get(p.device) != p.attempt:
            return  # of before a loss: the device is offered it again
        del way.left[p.device]
        if not way.left:
            self._serving.pulled(p.request)
            # Until the worker is through, a loss may still send it the same way again.
            if self._serving.running[p.request].joined:
                del self._ways[p.request]

    def through(self, request: int) -> None:
        """The worker is through with the prompt: forget it, if its devices have all."""
        seat = self._serving.running.get(request)
        if seat is not None and seat.joined:
            self._ways.pop(request, None)

    def ended(self, request: int) -> None:
        """The request is over: nothing of it is to be pulled any more."""
        way = self._ways.pop(request, None)
        if way is not None:
            way.gone.set()
            for device in way.seat.devices:
                self._pool.devices[device].post(Drop(request))

    # -- losses (LAMINA-25)

    def lose_worker(self, worker: int) -> None:
        """What the worker made is gone: its prompts begin again."""
        self.workers[worker].forget()
        self._epoch[worker] += 1
        for request in self._serving.lost_worker(worker):
            self.ended(request)

    def lost_memory(self, device: int) -> None:
        """The device has lost what it had pulled: it is offered all that was made once more."""
        for request, way in self._ways.items():
            if device in way.seat.devices:
                way.left[device] = next(self._attempts)
                self._pool.devices[device].post(Drop(request))
                for layer in range(len(way.made)):
                    self._offer(way, device, layer)
