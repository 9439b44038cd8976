"""A compute device: all weights, a bank of token rows, and no KV (LAMINA-11).

`Replica` is `JaxModel` with each layer parted at its attention: `open_layer` sends queries, then
keys and values; `close_layer` goes on with what came back. One dispatch thread calls a replica.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_impl.attention_pool.memory import Answer, Ask, Tell
from jax_impl.attention_pool.pieces import PooledLayers
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.wire import Wire
from jax_impl.kv import Table
from jax_impl.layers import Piece
from jax_impl.model import JaxModel
from jax_impl.programs import Progress, compiled
from jax_impl.stages import Pending
from reference.control.attention_partition import head_share
from reference.control.attention_wire import plain_of
from reference.vocab.config import RopeSpec
from reference.vocab.errors import RequestFailed

ANSWER_S = 120.0
"""How long the memory pool may take over one tile and layer before it counts as lost."""


@dataclass(frozen=True)
class Part:
    """The rows of a tile that one memory device attends to, and which share of the heads."""

    device: int
    rows: np.ndarray
    share: int


@dataclass(frozen=True)
class Tile:
    """The rows of one call. at: for each kind of KV int32 [T, 3 + W]; live: rows that are not
    padding; parts: who attends to what; turns: angles of rows that bring their own."""

    number: int
    at: list[np.ndarray]
    live: int
    parts: tuple[Part, ...]
    turns: dict[RopeSpec, np.ndarray]


class Replica(JaxModel):
    """One copy of the weights on `device`. All else as JaxModel; there is no larger tile."""

    def __init__(
        self, ckpt: Any, *, device: Any, pool: MemoryPool, wire: Wire, **sizes: Any
    ) -> None:
        self.device, self.pool, self.wire = device, pool, wire
        with jax.default_device(device):
            super().__init__(ckpt, **sizes)
        self._parted = PooledLayers(self.config, sizes["compute"], sizes["kv_dtype"])
        self._parts: dict[tuple[Any, ...], Any] = {}

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
        turns: Any = held.turns[i]
        if a.rope is not None and a.rope.by_prompt:
            turns = of((t, a.rope.dims), np.float32)
        if name == "open":
            run, donate = self._parted.opened(piece), (1,)
            out = self._out if piece.source == "combine" else None
            embed = held.embed if piece.source == "embed" else None
            given = (at, self._bank, out, held.layers[i], embed, turns)
        elif name == "kv":
            run, donate = self._parted.keys_values(spec), ()
            given = (at, x, held.layers[i], turns)
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
        mine = tile.turns.get(spec.attention.rope)  # type: ignore[arg-type]
        turns = held.turns[i] if mine is None else mine
        short = np.ascontiguousarray(at[:, :3])
        out = self._out if piece.source == "combine" else None
        embed = held.embed if piece.source == "embed" else None
        run = self._part("open", piece, i)
        self._bank, x, q = run(short, self._bank, out, held.layers[i], embed, turns)
        if self.pool.overlap:
            self._ask(i, tile, at, np.asarray(q))
        k, v = self._part("kv", piece, i)(short, x, held.layers[i], turns)
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
            self.pool.devices[part.device].post(Ask(tile.number, i, mine, where, alone))

    def _tell(self, i: int, tile: Tile, k: np.ndarray, v: np.ndarray | None) -> None:
        for part in tile.parts:
            share = head_share(part.share, self.pool.shares, k.shape[1])
            rows = part.rows
            mine = k[rows, share.start : share.stop]
            values = None if v is None else v[rows, share.start : share.stop]
            self.wire.send("kv", tile.number, i, part.device, mine, values)
            self.pool.devices[part.device].post(Tell(tile.number, i, mine, values))

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


class PooledModel(Replica):
    """One replica and the memory pool behind it, in the place of a JaxModel under an engine: the
    engine's scheduler runs the compute pool, the memory pool holds all KV (LAMINA-21)."""

    def __init__(self, ckpt: Any, *, device: Any, pool: MemoryPool, wire: Wire, **sizes: Any):
        super().__init__(ckpt, device=device, pool=pool, wire=wire, **sizes)
        self.kv_bytes = pool.kv_bytes
        self._numbers: list[int] = []
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        pool.begin(self._answers.put)

    def compile(self, progress: Progress = lambda text: None) -> None:
        self.pool.compile(progress)
        super().compile(progress)

    def _stage(
        self,
        start: int,
        rows: Sequence[int],
        tokens: Sequence[int] | None,
        positions: Sequence[int],
        tables: Sequence[Table],
        want_logits: Sequence[bool],
    ) -> Pending:
        pieces = self._plan[start].pieces
        devices = range(len(self.pool.devices))
        if pieces:
            first, end = pieces[0][1], pieces[-1][1] + 1
            count = -(-len(rows) // self.tile)
            self._numbers = [self.wire.open(devices, first, end) for _ in range(count)]
        with jax.default_device(self.device):
            return super()._stage(start, rows, tokens, positions, tables, want_logits)

    def _layer(
        self,
        piece: Piece,
        i: int,
        at: np.ndarray,
        turns: dict[RopeSpec, np.ndarray],
        split: Sequence[tuple[int, int]],
    ) -> list[jax.Array]:
        """All tiles are opened, so that the pool works on one while the next is made."""
        tiles = []
        for number, (first, size) in zip(self._numbers, split, strict=True):
            part = slice(first, first + size)
            live = int((at[part, 0] < self.rows).sum())
            parts = tuple(
                Part(d, np.arange(live), d % self.pool.shares)
                for d in range(len(self.pool.devices))
            )
            mine = {rope: angles[part] for rope, angles in turns.items()}
            kinds = [at[part]] * len(self.kinds)
            tiles.append(Tile(number, kinds, live, parts, mine))
            self.open_layer(piece, i, tiles[-1])
        answers = self._collect(i, tiles)
        told = [self.close_layer(piece, i, tile, answers[tile.number]) for tile in tiles]
        return [t for t in told if t is not None]

    def _collect(self, i: int, tiles: Sequence[Tile]) -> dict[int, list[Answer]]:
        """Wait for every device's answer to every tile."""
        found: dict[int, list[Answer]] = {tile.number: [] for tile in tiles}
        left, end = sum(len(tile.parts) for tile in tiles), time.monotonic() + ANSWER_S
        while left:
            try:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the memory pool did not answer at layer {i}") from None
            if answer.layer == i and answer.tile in found:  # a late one of a failed step is not
                found[answer.tile].append(answer)
                left -= 1
        return found

    def wait(self) -> None:
        jax.block_until_ready((self._bank, self._out))

    def told(self) -> dict[str, Any]:
        """The messages of the step, where they are recorded: the protocol in the engine's log."""
        messages = self.wire.taken()
        return {"wire": [plain_of(m) for m in messages]} if messages else {}

    def end(self) -> None:
        """Stop the memory pool's threads."""
        self.pool.end()
