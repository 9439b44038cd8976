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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attention_pool.memory_programs import MemoryPrograms, PoolOptions
from jax_impl.attention_pool.messages import Answer, Ask, Drop, Offer, Pulled, Tell, Void
from jax_impl.attention_pool.puller import Pull, Puller, Pulls
from jax_impl.attention_pool.wire import Wire
from jax_impl.compute import Broken
from jax_impl.kv import KV_DTYPES, block_shapes
from jax_impl.programs import Progress
from reference.control.attention_partition import head_share
from reference.vocab.config import AttentionSpec, ModelConfig

Message = Ask | Tell | Offer | Drop | Void


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
        self.pulls: list[tuple[int, int, float, float]] = []
        """With `timed`: (request, layer, began, ended) of every pull."""
        self.asked: list[float] = []
        self.answered: list[float] = []
        """With `timed`: when queries lay in the inbox; when attended values were made."""
        self._specs = [s.attention for s in config.layers]
        self._kind = {i: k for kind in options.kinds for i in kind.layers for k in [kind]}
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
        self._programs = MemoryPrograms(
            self._specs, options, self.keys, self.values, self._sinks, device
        )
        self._puller = Puller(len(self._specs), max(1, options.pull_bytes), 0.0)
        self._thread = threading.Thread(
            target=self._work, name=f"covey-memory-{number}", daemon=True
        )
        self._answer: Callable[[Answer | Pulled | Broken], None] = lambda answer: None

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
    def backlog(self) -> int:
        """Bytes that were offered to it and that it has not pulled."""
        return self._puller.backlog

    @property
    def told(self) -> Pulls:
        """What was pulled from prefill workers."""
        return self._puller.told

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV held here, padding blocks included."""
        return sum(a.nbytes for a in (*self.keys, *self.values) if a is not None)

    def compile(self, progress: Progress = lambda text: None) -> None:
        """Compile every program of every layer, for this device; try what a pull takes."""
        self._programs.compile(progress)
        if self.options.pull_bytes:
            with jax.default_device(self.device):
                self._puller = Puller(len(self._specs), self.options.pull_bytes, self._pull_speed())

    def _pull_speed(self) -> float:
        """Seconds a byte of a pull, from rows that go to the padding block."""
        t = self.options.kv_block
        k = np.zeros((t, self.heads(0), self.keys[0].shape[3]), self.keys[0].dtype)
        values = self.values[0]
        v = None if values is None else np.zeros((t, self.heads(0), values.shape[3]), values.dtype)
        none = np.zeros(0, np.int32)
        self._put(0, k, v, none, np.zeros(t, np.int32), live=0)  # the first one is slower
        began = time.monotonic()
        self._put(0, k, v, none, np.zeros(t, np.int32), live=0)
        return (time.monotonic() - began) / (k.nbytes + (0 if v is None else v.nbytes))

    # -- the thread

    def begin(self, answer: Callable[[Answer | Pulled | Broken], None]) -> None:
        """Start the thread."""
        self._answer = answer
        self._thread.start()

    def post(self, message: Message) -> None:
        """Give it a message; they are worked on in this order."""
        self._inbox.put(message)
        if self.options.timed and isinstance(message, Ask):
            self.asked.append(time.monotonic())

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
        try:
            self._serve()
        except BaseException as error:
            self._answer(Broken(error))

    def _serve(self) -> None:
        with jax.default_device(self.device):
            while (message := self._next()) is not None:
                if callable(message):
                    message()
                    continue
                try:
                    self._take(message)
                except Exception as error:
                    self._answer(self._failed(message, error))

    def _next(self) -> Any:
        """The next message. Where there is none, and nothing is under way, prompts' keys and values
        are pulled meanwhile (LAMINA-12)."""
        puller = self._puller
        while puller.backlog and not self._open:
            began = time.monotonic()
            try:
                return self._inbox.get_nowait()
            except queue.Empty:
                pull = puller.next(began)
            if pull is not None:
                self._pull(pull, began)
                continue
            try:
                return self._inbox.get(timeout=puller.gaps.wait_s(began))
            except queue.Empty:
                pass
        return self._inbox.get()

    def _failed(self, message: Message, error: Exception) -> Answer | Pulled:
        if isinstance(message, Ask | Tell):
            self._open.pop((message.tile, message.layer), None)
            return Answer(message.tile, message.layer, self.number, None, error)
        if isinstance(message, Offer):
            self._puller.drop(message.request)
        return Pulled(getattr(message, "request", -1), self.number, -1, error)

    def _take(self, message: Message) -> None:
        match message:
            case Ask():
                self._puller.message(message.sent)
                at = self._padded_at(message.layer, message.at)
                opened = _Open(message, _padded(message.q, self.options.tile), at)
                self._open[message.tile, message.layer] = opened
                self.busy.asks += 1
                if self.options.overlap and message.alone:
                    self.busy.early += 1
                    self._attend_past(opened)
            case Tell():
                opened = self._open.pop((message.tile, message.layer))
                self._finish(opened, message)
                if not self._open:
                    self._puller.gaps.empty(time.monotonic(), opened.ask.more)
            case Offer(request, layer, kv, blocks, attempt):
                share = head_share(
                    self.number % self.options.shares, self.options.shares, kv.keys.shape[1]
                )
                mine = slice(share.start, share.stop)
                self._puller.offered(request, layer, kv, mine, blocks, attempt)
            case Drop(request):
                self._puller.drop(request)
            case Void(tile):
                self._open = {key: v for key, v in self._open.items() if key[0] != tile}

    def _pull(self, pull: Pull, began: float) -> None:
        """Take a piece of a prompt's keys and values over."""
        piece, size = pull.piece, self.options.kv_block
        error: Exception | None = None
        try:
            self.wire.send("pull", piece.request, piece.layer, self.number, pull.k, pull.v)
            positions = np.arange(piece.first, piece.first + piece.tokens, dtype=np.int32)
            blocks = np.array(pull.blocks, np.int32)
            for n in range(0, piece.tokens, size):
                part = slice(n, n + size)
                v = None if pull.v is None else pull.v[part]
                live = min(size, piece.tokens - n)
                self._put(piece.layer, pull.k[part], v, blocks, positions[part], live)
        except Exception as failed:
            error = failed
        ended = time.monotonic()
        done = self._puller.pulled(pull, began, ended)
        if self.options.timed:
            self.pulls.append((piece.request, piece.layer, began, ended))
        if error is not None:
            self._puller.drop(piece.request)
        if done is not None or error is not None:
            self._answer(Pulled(piece.request, self.number, pull.attempt, error))

    def _put(
        self, i: int, k: np.ndarray, v: np.ndarray | None, blocks: np.ndarray,
        positions: np.ndarray, live: int,
    ) -> None:  # fmt: skip
        """Write `live` rows into the blocks of one request, and wait until they are there."""
        t, kind = self.options.kv_block, self._kind[i]
        table = np.full((t, kind.ring), kind.blocks, np.int32)
        table[:live, : len(blocks)] = blocks
        where = np.zeros(t, np.int32)
        where[: len(positions)] = positions
        run = self._programs.get("pull", i)
        self.keys[i], self.values[i] = run(
            self.keys[i], self.values[i], _padded(k, t), None if v is None else _padded(v, t),
            table, where, np.arange(t) < live,
        )  # fmt: skip
        jax.block_until_ready(self.keys[i])

    def _attend_past(self, opened: _Open) -> None:
        i = opened.ask.layer
        opened.began = time.monotonic()
        run = self._programs.get("past", i)
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
        run = self._programs.get("store", i)
        self.keys[i], self.values[i] = run(
            self.keys[i], self.values[i], k, v, tables, positions, live
        )
        early = opened.part is not None
        if not early:
            self._attend_past(opened)
        run = self._programs.get("own", i)
        y = np.asarray(run(opened.part, opened.q, k, v, self._sinks[i]))[:n]
        if early and self.options.timed:
            self.busy.hidden_s += max(0.0, min(opened.done, tell.sent) - opened.began)
            self.busy.attend_s += opened.done - opened.began + time.monotonic() - taken
        else:
            self.busy.attend_s += time.monotonic() - taken
        if self.options.timed:
            self.history.append((tell.tile, i, taken, time.monotonic()))
            self.answered.append(time.monotonic())
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
