"""A converted function over two devices: slices on one, attentions and cache on the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jax_impl.attention_pool.converter import Converted, MemorySide
from jax_impl.attention_pool.wire import Wire


class PooledFunction:
    """`run(*args)` gives the flat results of the function that was converted; those of its cache
    lie on the memory device, and may be given to the next run as they are.

    The marked attention is somebody else's program, so it starts when all three of its inputs have
    come; queries travel while keys and values are made. A context manager: it has a thread for the
    memory device.
    """

    def __init__(self, converted: Converted, compute: Any, memory: Any, wire: Wire | None = None):
        self.converted, self.compute, self.memory = converted, compute, memory
        self.wire = wire or Wire()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="covey-attention")

    def run(self, *args: Any) -> list[Any]:
        """Slices and attentions in turn, each on its device."""
        c = self.converted
        free, kept, side = c.start(*args)
        memory = MemorySide(c.flat, jax.device_put(side.known, self.memory))
        free, kept = jax.device_put((free, kept), self.compute)
        tile = self.wire.open([0], 0, len(c.attentions))
        attended, results = None, {}
        for i, part in enumerate(c.slices):
            q, between = part.queries(free, kept, attended)
            asked = None if part.q is None else self._pool.submit(self._put, "q", tile, i, q)
            k, v, kept, out = part.rest(free, kept, attended, between)
            results.update(out)
            if asked is not None:
                told = self._pool.submit(self._attend, tile, i, memory, asked.result, k, v)
                attended = jax.device_put(told.result(), self.compute)
        return c.results(results, memory)

    def _put(self, kind: Any, tile: int, i: int, *arrays: Any) -> list[Any]:
        """Over the wire to the memory device."""
        sent = [np.asarray(a) for a in arrays]
        self.wire.send(kind, tile, i, 0, *sent)
        return jax.device_put(sent, self.memory)

    def _attend(self, tile: int, i: int, memory: MemorySide, asked: Any, k: Any, v: Any) -> Any:
        k, v = self._put("kv", tile, i, k, v)
        y = np.asarray(memory.attend(self.converted.attentions[i], asked()[0], k, v))
        self.wire.send("a", tile, i, 0, y)
        return y

    def __enter__(self) -> PooledFunction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._pool.shutdown()
