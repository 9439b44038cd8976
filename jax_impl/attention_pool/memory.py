"""The memory pool: devices that keep all KV and run attention, a dispatch thread each.

A device is told queries (`Ask`) and then keys and values (`Tell`) of a tile at a layer, and answers
with attended values (`Answer`). With `overlap` it attends over the past as soon as it has the
queries; the compute pool makes keys and values meanwhile. It knows no weights, but for a layer's
sinks, which belong to the operator (LAMINA-11).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attention_pool.kernels import store
from jax_impl.attention_pool.messages import Answer, Ask, Tell
from jax_impl.attention_pool.wire import Wire
from jax_impl.kernels.attention import Partial, own_v0, past_v0
from jax_impl.kv import KV_DTYPES, KvDtype, KvKind, block_shapes
from jax_impl.programs import Progress, compiled
from reference.control.attention_partition import head_share
from reference.vocab.config import AttentionSpec, ModelConfig


@dataclass
class Busy:
    """Seconds of attention on one device, and of them those before the tile's own keys and values
    were sent, during which the compute pool made them. Exact only with `timed`."""

    attend_s: float = 0.0
    hidden_s: float = 0.0
    asks: int = 0
    early: int = 0


@dataclass
class _Open:
    """An Ask under way."""

    ask: Ask
    q: np.ndarray
    at: np.ndarray
    part: Any = None
    began: float = 0.0
    done: float = 0.0


@dataclass(frozen=True)
class PoolOptions:
    """kinds, kv_block, tile, compute, kv_dtype as in the model; kinds hold a device's own blocks.

    shares   devices that a layer's heads are shared out over: all, or 1 (whole requests)
    overlap  attend over the past before the own keys have come
    timed    wait for each piece of attention, to measure when it ended
    """

    kinds: tuple[KvKind, ...]
    kv_block: int
    tile: int
    compute: str = "f32"
    kv_dtype: KvDtype = "f32"
    shares: int = 1
    overlap: bool = True
    timed: bool = False


class MemoryDevice:
    """One device of the pool, and its thread. `answer` is called on that thread."""

    def __init__(
        self,
        number: int,
        device: Any,
        config: ModelConfig,
        options: PoolOptions,
        sinks: Sequence[np.ndarray | None],
        wire: Wire,
    ) -> None:
        self.number, self.device, self.options, self.wire = number, device, options, wire
        self.busy = Busy()
        self.history: list[tuple[int, int, float, float]] = []
        """With `timed`: (tile, layer, began, ended) of every piece of attention."""
        self._specs = [s.attention for s in config.layers]
        self._kind = {i: k for kind in options.kinds for i in kind.layers for k in [kind]}
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open: dict[tuple[int, int], _Open] = {}
        share = number % options.shares
        with jax.default_device(device):
            self.keys: list[jax.Array] = []
            self.values: list[jax.Array | None] = []
            self._sinks: list[jax.Array | None] = []
            for i, a in enumerate(self._specs):
                self._make_pools(i, a)
                sink = sinks[i]
                if sink is not None:
                    mine = head_share(share, options.shares, a.heads)
                    sink = sink[mine.start : mine.stop].reshape(self.heads(i), -1)
                    self._sinks.append(jax.device_put(sink.astype(np.float32)))
                else:
                    self._sinks.append(None)
        self._thread = threading.Thread(
            target=self._work, name=f"covey-memory-{number}", daemon=True
        )
        self._answer: Callable[[Answer], None] = lambda answer: None

    def heads(self, layer: int) -> int:
        """KV heads of a layer that lie here."""
        return self._specs[layer].cache_heads // self.options.shares

    def _make_pools(self, i: int, a: AttentionSpec) -> None:
        o, blocks = self.options, self._kind[i].blocks + 1
        for shape, pools in zip(block_shapes(a, o.kv_block), (self.keys, self.values), strict=True):
            if shape is None:
                pools.append(None)  # type: ignore[arg-type]
            else:
                full = (blocks, self.heads(i), *shape[1:])
                pools.append(jnp.zeros(full, KV_DTYPES[o.kv_dtype]))

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV held here, padding blocks included."""
        return sum(a.nbytes for a in (*self.keys, *self.values) if a is not None)

    # -- programs

    def compile(self, progress: Progress = lambda text: None) -> None:
        """Compile every program of every layer, for this device."""
        with jax.default_device(self.device):
            for i in range(len(self._specs)):
                for name in ("past", "store", "own"):
                    self._program(name, i, progress)

    def _program(self, name: str, i: int, progress: Progress | None = None) -> Any:
        """past(q, keys, values, tables, positions); store(keys, values, k, v, tables, positions,
        live), donating the pools; own(part, q, k, v, sink). Equal layers share them."""
        a, o = self._specs[i], self.options
        width = self._kind[i].ring
        key = (name, replace(a, rope=None), self.keys[i].shape, width)
        if key in self._programs:
            return self._programs[key]
        t, heads = o.tile, self.heads(i)
        dim, value = a.cache_key_dim, a.cache_value_dim or a.kv_rank
        of = jax.ShapeDtypeStruct
        m = a.heads // a.cache_heads
        q = of((t, heads, m, dim), np.float32)
        k = of((t, heads, dim), KV_DTYPES[o.kv_dtype])
        v = of((t, heads, value), KV_DTYPES[o.kv_dtype]) if a.cache_value_dim else None
        sums, sum_of_values = of((t, heads, m), np.float32), of((t, heads, m, value), np.float32)
        part: Any = Partial(sums, sums, sum_of_values)  # type: ignore[arg-type]
        tables, positions = of((t, width), np.int32), of((t,), np.int32)
        keys, values = (None if p is None else of(p.shape, p.dtype)
                        for p in (self.keys[i], self.values[i]))  # fmt: skip

        def run_past(q: Any, keys: Any, values: Any, tables: Any, positions: Any) -> Any:
            return past_v0(
                o.compute, q, keys, values, tables, positions,
                width=value, scale=a.scale, window=a.window,
            )  # fmt: skip

        def run_own(part: Any, q: Any, k: Any, v: Any, sink: Any) -> jax.Array:
            k = k.astype(jnp.float32)
            v = k[..., :value] if v is None else v.astype(jnp.float32)
            return own_v0(o.compute, part, q, k, v, sink, scale=a.scale)

        if name == "past":
            run, donate, shapes = run_past, (), (q, keys, values, tables, positions)
        elif name == "own":
            run, donate, shapes = run_own, (), (part, q, k, v, self._sinks[i])
        else:
            run, donate = store, (0, 1)
            shapes = (keys, values, k, v, tables, positions, of((t,), np.bool_))
        title = f"{name} of layer {i} on {self.device}"
        self._programs[key] = compiled(run, donate, shapes, title, progress)
        return self._programs[key]

    # -- the thread

    def begin(self, answer: Callable[[Answer], None]) -> None:
        """Start the thread."""
        self._answer = answer
        self._thread.start()

    def post(self, message: Ask | Tell) -> None:
        """Give it a message; they are worked on in this order."""
        self._inbox.put(message)

    def forget(self) -> None:
        """Lose all KV, after what is queued, as a device does that is replaced: NaN everywhere."""

        def poison() -> None:
            for pools in (self.keys, self.values):
                for i, pool in enumerate(pools):
                    if pool is not None:
                        pools[i] = jnp.full_like(pool, jnp.nan)

        self._inbox.put(poison)

    def end(self, timeout_s: float = 5.0) -> bool:
        """Stop after what is queued; False when it hangs."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with jax.default_device(self.device):
            while (message := self._inbox.get()) is not None:
                if callable(message):
                    message()
                    continue
                try:
                    self._take(message)
                except Exception as error:
                    self._open.pop((message.tile, message.layer), None)
                    answer = Answer(message.tile, message.layer, self.number, None, error)
                    self._answer(answer)

    def _take(self, message: Ask | Tell) -> None:
        key = message.tile, message.layer
        if isinstance(message, Ask):
            i, o = message.layer, self.options
            at = self._padded_at(i, message.at)
            opened = _Open(message, _padded(message.q, o.tile), at)
            self._open[key] = opened
            self.busy.asks += 1
            if o.overlap and message.alone:
                self.busy.early += 1
                self._attend_past(opened)
        else:
            self._finish(self._open.pop(key), message)

    def _attend_past(self, opened: _Open) -> None:
        i = opened.ask.layer
        opened.began = time.monotonic()
        run = self._program("past", i)
        opened.part = run(opened.q, self.keys[i], self.values[i], opened.at[:, 1:], opened.at[:, 0])
        if self.options.timed:
            jax.block_until_ready(opened.part)
            opened.done = time.monotonic()
            self.history.append((opened.ask.tile, i, opened.began, opened.done))

    def _finish(self, opened: _Open, tell: Tell) -> None:
        """LAMINA-2: store the own keys and values, merge the own position last, answer."""
        i, n, taken = tell.layer, len(tell.k), time.monotonic()
        k = _padded(tell.k, self.options.tile)
        v = None if tell.v is None else _padded(tell.v, self.options.tile)
        tables, positions = opened.at[:, 1:], opened.at[:, 0]
        live = np.arange(self.options.tile) < n
        run = self._program("store", i)
        self.keys[i], self.values[i] = run(
            self.keys[i], self.values[i], k, v, tables, positions, live
        )
        early = opened.part is not None
        if not early:
            self._attend_past(opened)
        run = self._program("own", i)
        y = np.asarray(run(opened.part, opened.q, k, v, self._sinks[i]))[:n]
        if early and self.options.timed:
            self.busy.hidden_s += max(0.0, min(opened.done, tell.sent) - opened.began)
            self.busy.attend_s += opened.done - opened.began + time.monotonic() - taken
        else:
            self.busy.attend_s += time.monotonic() - taken
        if self.options.timed:
            self.history.append((tell.tile, i, taken, time.monotonic()))
        self.wire.send("a", tell.tile, i, self.number, y)
        self._answer(Answer(tell.tile, i, self.number, y))

    def _padded_at(self, i: int, at: np.ndarray) -> np.ndarray:
        """int32 [T, 1 + W]; padding rows read nothing and write to the last block."""
        out = np.full((self.options.tile, 1 + self._kind[i].ring), self._kind[i].blocks, np.int32)
        out[:, 0] = 0
        out[: len(at), : at.shape[1]] = at
        return out


def _padded(rows: np.ndarray, tile: int) -> np.ndarray:
    """The rows, then zeros up to a tile; a fresh array, which the device may read in place."""
    out = np.zeros((tile, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out
