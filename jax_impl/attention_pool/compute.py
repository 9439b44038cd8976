"""A compute device: all weights, a bank of token rows, and no KV (LAMINA-11).

`Replica` is `JaxModel` with each layer parted at its attention: `open_layer` sends queries, then
keys and values; `close_layer` goes on with what came back. One dispatch thread calls a replica.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_impl.attention_pool.messages import Answer, Ask, Tell
from jax_impl.attention_pool.pieces import PooledLayers
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.wire import Wire
from jax_impl.layers import Bank, Piece
from jax_impl.model import JaxModel
from jax_impl.programs import Progress, compiled
from jax_impl.stages import padded
from reference.control.attention_partition import head_share
from reference.vocab.config import MoeSpec, RopeSpec
from reference.vocab.errors import RequestFailed
from reference.vocab.ids import ENTRY


@dataclass(frozen=True)
class Part:
    """The rows of a tile that one memory device attends to, and which share of the heads."""

    device: int
    rows: np.ndarray
    share: int


@dataclass(frozen=True)
class Tile:
    """The rows of one call. at: for each kind of KV int32 [T, 3 + W]; live: rows that are not
    padding; parts: who attends to what; turns: angles of rows that bring their own; more: another
    tile of the same turn follows."""

    number: int
    at: list[np.ndarray]
    live: int
    parts: tuple[Part, ...]
    turns: dict[RopeSpec, np.ndarray]
    more: bool = False


class Replica(JaxModel):
    """One copy of the weights on `device`. All else as JaxModel; there is no larger tile.

    moves  contexts go to and come from other replicas
    """

    def __init__(
        self, ckpt: Any, *, device: Any, pool: MemoryPool, wire: Wire, moves: bool = False,
        **sizes: Any,
    ) -> None:  # fmt: skip
        self.device, self.pool, self.wire, self.moves = device, pool, wire, moves
        with jax.default_device(device):
            super().__init__(ckpt, **sizes)
        self._parted = PooledLayers(self.config, sizes["compute"], sizes["kv_dtype"])
        self._parts: dict[tuple[Any, ...], Any] = {}
        self._angles: list[Any] = [None if t is None else np.asarray(t) for t in self._held.turns]

    def _make_pools(self, kv_dtype: Any) -> None:
        """KV is elsewhere."""
        self._keys, self._values = [], []
        self.kv_bytes = 0

    # -- programs

    def _compile(self, tile: int, progress: Progress) -> None:
        with jax.default_device(self.device):
            for plan in self._plan.values():
                for piece, i in plan.pieces:
                    for name in ("open", "kv", "close"):
                        self._part(name, piece, i, progress)
                if plan.head is not None:
                    self._piece(tile, plan.head, None, progress)
            self._compile_experts(tile, progress)
            for name in ("get", "put") if self.moves else ():
                self._move(name, progress)

    @property
    def programs(self) -> int:
        return super().programs + len(self._parts)

    def _part(self, name: str, piece: Piece, i: int, progress: Progress | None = None) -> Any:
        """The executable of a part of layer i. Equal layers share them."""
        spec, t = self.config.layers[i], self.tile
        a, held = spec.attention, self._held
        source = piece.source if name == "open" else None
        shapes = str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), held.layers[i]))
        key = name, source, spec, shapes
        if key in self._parts:
            return self._parts[key]
        of = jax.ShapeDtypeStruct
        at, x = of((t, 3), np.int32), of((t, self.config.hidden), np.float32)
        turn = None if a.rope is None else of((t, a.rope.dims), np.float32)
        if name == "open":
            run, donate = self._parted.opened(piece), (1,)
            out = self._out if piece.source == "combine" else None
            embed = held.embed if piece.source == "embed" else None
            given = (at, self._bank, out, held.layers[i], embed, turn)
        elif name == "kv":
            run, donate = self._parted.keys_values(spec), ()
            given = (x, held.layers[i], turn)
        else:
            run, donate = self._parted.closed(spec), (1,)
            m, value = a.heads // a.cache_heads, a.cache_value_dim or a.kv_rank
            y = of((t, a.cache_heads, m, value), np.float32)
            given = (at, self._bank, y, held.layers[i])
        title = f"{name} of {source or ''} layer {i} on {self.device}"
        self._parts[key] = compiled(run, donate, given, title, progress)
        return self._parts[key]

    # -- one layer of one tile

    def open_layer(self, piece: Piece, i: int, tile: Tile) -> None:
        """Send the tile's queries, then its keys and values (LAMINA-2)."""
        held = self._held
        at = tile.at[self._kind_of[i]]
        spec = self.config.layers[i]
        turn = tile.turns.get(spec.attention.rope)  # type: ignore[arg-type]
        if turn is None and self._angles[i] is not None:
            turn = self._angles[i][at[:, 2]]
        short = np.ascontiguousarray(at[:, :3])
        out = self._out if piece.source == "combine" else None
        embed = held.embed if piece.source == "embed" else None
        run = self._part("open", piece, i)
        self._bank, x, q = run(short, self._bank, out, held.layers[i], embed, turn)
        if self.pool.overlap:
            self._ask(i, tile, at, np.asarray(q))
        k, v = self._part("kv", piece, i)(x, held.layers[i], turn)
        if not self.pool.overlap:
            jax.block_until_ready(k)
            self._ask(i, tile, at, np.asarray(q))
        self._tell(i, tile, np.asarray(k), None if v is None else np.asarray(v))

    def _ask(self, i: int, tile: Tile, at: np.ndarray, q: np.ndarray) -> None:
        for part in tile.parts:
            share = head_share(part.share, self.pool.shares, q.shape[1])
            mine = q[part.rows, share.start : share.stop]
            where = at[part.rows, 2:]
            alone = len(np.unique(where[:, 1])) == len(where)
            self.wire.send("q", tile.number, i, part.device, mine)
            self.pool.devices[part.device].post(
                Ask(tile.number, i, mine, where, alone, time.monotonic(), tile.more)
            )

    def _tell(self, i: int, tile: Tile, k: np.ndarray, v: np.ndarray | None) -> None:
        for part in tile.parts:
            share = head_share(part.share, self.pool.shares, k.shape[1])
            rows = part.rows
            mine = k[rows, share.start : share.stop]
            values = None if v is None else v[rows, share.start : share.stop]
            self.wire.send("kv", tile.number, i, part.device, mine, values)
            self.pool.devices[part.device].post(
                Tell(tile.number, i, mine, values, time.monotonic())
            )

    def close_layer(self, piece: Piece, i: int, tile: Tile, answers: Sequence[Answer]) -> Any:
        """Go on behind the attention with what all of the tile's devices answered; what the
        layer's router told, or None."""
        a = self.config.layers[i].attention
        m, value = a.heads // a.cache_heads, a.cache_value_dim or a.kv_rank
        y = np.zeros((self.tile, a.cache_heads, m, value), np.float32)
        of_device = {answer.device: answer for answer in answers}
        for part in tile.parts:
            answer = of_device[part.device]
            if answer.error is not None:
                raise RequestFailed(f"memory device {part.device}: {answer.error}")
            share = head_share(part.share, self.pool.shares, a.cache_heads)
            y[part.rows, share.start : share.stop] = answer.y
        run = self._part("close", piece, i)
        short = np.ascontiguousarray(tile.at[self._kind_of[i]][:, :3])
        self._bank, told = run(short, self._bank, y, self._held.layers[i])
        return told

    # -- what a pipeline needs beside

    def piece_of(self, i: int) -> Piece:
        """Layer i, with where its rows come from."""
        layers = self.config.layers
        if i == 0:
            return Piece("embed", layers[0])
        routed = isinstance(layers[i - 1].feed_forward, MoeSpec)
        return Piece("combine" if routed else "load", layers[i])

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        """[len(rows), V] of rows that have passed the last layer."""
        head = self._plan[self.config.moe_layers[-1] if self.config.moe_layers else ENTRY].head
        assert head is not None
        found = []
        for first in range(0, len(rows), self.tile):
            at = padded(rows[first : first + self.tile], self.tile, self.rows)[:, None]
            found.append(self._piece(self.tile, head, None)(at, *self._arguments(head, None)))
        if not found:
            return np.zeros((0, self.config.vocab), np.float32)
        return np.concatenate(jax.device_get(found))[: len(rows)]

    def context(self, rows: Sequence[int]) -> np.ndarray:
        """The residual [len(rows), H] of rows, to be put on another replica (LAMINA-10)."""
        found = [
            self._move("get")(self._bank, padded(rows[n : n + self.tile], self.tile, self.rows))
            for n in range(0, len(rows), self.tile)
        ]
        return np.concatenate(jax.device_get(found))[: len(rows)]

    def put_context(self, rows: Sequence[int], values: np.ndarray) -> None:
        """Take over rows from another replica."""
        for n in range(0, len(rows), self.tile):
            some = np.zeros((self.tile, self.config.hidden), np.float32)
            mine = values[n : n + self.tile]
            some[: len(mine)] = mine
            where = padded(rows[n : n + self.tile], self.tile, self.rows)
            self._bank = self._move("put")(self._bank, where, some)

    def _move(self, name: str, progress: Progress | None = None) -> Any:
        """get(bank, rows [T]) -> [T, H]; put(bank, rows, values) -> bank, donated."""
        key = ("move", name)
        if key not in self._parts:
            rows = jax.ShapeDtypeStruct((self.tile,), np.int32)
            values = jax.ShapeDtypeStruct((self.tile, self.config.hidden), np.float32)

            def get(bank: Bank, rows: jax.Array) -> jax.Array:
                return bank.residual[rows]

            def put(bank: Bank, rows: jax.Array, values: jax.Array) -> Bank:
                return bank._replace(residual=bank.residual.at[rows].set(values))

            run, donate, given = (
                (get, (), (self._bank, rows))
                if name == "get"
                else (put, (0,), (self._bank, rows, values))
            )
            title = f"{name} of a context on {self.device}"
            self._parts[key] = compiled(run, donate, given, title, progress)
        return self._parts[key]

    def forget(self) -> None:
        """Lose all state, as a device does that is replaced: NaN in every row of the bank."""
        nan = jax.tree.map(lambda a: np.full(a.shape, np.nan, np.float32), self._bank)
        self._bank = Bank(*(jax.device_put(a, self.device) for a in nan))
