"""A replica's experts where they do not all fit: as many as there are slots, the least recently
used goes first (LAMINA-20).

A turn waits until every expert that any of its rows chose has been read, over one channel that all
replicas share. That is what makes slices uneven, and rotation wait; the engine that does not wait
is `JaxEngine` with `Offloaded`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jax_impl.stored import dtype_of
from reference.vocab.config import ModelConfig
from reference.vocab.errors import BadInput


class Channel:
    """One read at a time, of at most `rate` bytes/s (None: as fast as it goes)."""

    def __init__(self, ckpt: Any, rate: float | None = None) -> None:
        self._ckpt, self._rate = ckpt, rate
        self._lock = threading.Lock()
        self.bytes = self.reads = 0

    def read(self, layer: int, expert: int, device: Any) -> tuple[Any, ...]:
        """The expert's tensors on a device."""
        with self._lock:
            began = time.monotonic()
            refs = self._ckpt.expert(layer, expert)
            name = f"expert {layer}.{expert}"
            arrays = tuple(
                jax.device_put(
                    self._ckpt.read(r).view(dtype_of(r.dtype, name)).reshape(r.shape), device
                )
                for r in refs
            )
            size = sum(r.nbytes for r in refs)
            self.bytes, self.reads = self.bytes + size, self.reads + 1
            if self._rate is not None:
                left = began + size / self._rate - time.monotonic()
                time.sleep(max(0.0, left))
            return arrays


def experts_on(ckpt: Any, device: Any) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Every routed expert as arrays on a device; nothing for a dense model."""
    channel, config = Channel(ckpt), ckpt.config
    return {
        (layer, e): channel.read(layer, e, device)
        for layer in config.moe_layers
        for e in range(config.experts)
    }


def check_slots(config: ModelConfig, slots: int) -> None:
    """Raises BadInput for fewer slots than a token needs; 0 is enough, it stands for all."""
    layers = len(config.moe_layers)
    if slots and slots < layers * config.top_k:
        raise BadInput(
            f"expert_slots: {slots}; at least {layers * config.top_k}, a token's experts "
            f"in each of {layers} layers, expected"
        )


class ExpertSlots:
    """Experts on one device, at most `slots` of them, each layer with an even share: over all
    layers together a pass would flush what the next one needs. Owned by a replica's thread.

    slots 0: all of them, read here and now; else as many as `check_slots` takes.
    """

    def __init__(self, ckpt: Any, device: Any, channel: Channel, slots: int = 0) -> None:
        config = ckpt.config
        layers = config.moe_layers
        self._device, self._channel = device, channel
        self.count = config.experts
        self._each = slots // len(layers) if slots and layers else max(1, config.experts)
        self._held = {m: OrderedDict[int, tuple[Any, ...]]() for m in layers}
        if not slots:
            for layer in layers:
                for e in range(config.experts):
                    self._held[layer][e] = channel.read(layer, e, device)

    def waves(self, layer: int, wanted: Iterable[int]) -> Iterator[dict[int, tuple[Any, ...]]]:
        """The wanted experts, as many at a time as there are slots for; those that are there
        first. What an earlier wave gave is to be used up before the next is asked for."""
        held = self._held[layer]
        left = sorted(wanted, key=lambda e: (e not in held, e))
        while left:
            now, left = left[: self._each], left[self._each :]
            for e in now:
                if e in held:
                    held.move_to_end(e)
            for e in now:
                if e not in held:
                    while len(held) >= self._each:
                        held.popitem(last=False)
                    held[e] = self._channel.read(layer, e, self._device)
            yield {e: held[e] for e in now}

    @property
    def resident(self) -> int:
        """Experts held now."""
        return sum(map(len, self._held.values()))
