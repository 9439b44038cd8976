"""One compute device and the memory pool as one model, for the engine to run."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_impl.attention_pool.compute import Part, Replica, Tile
from jax_impl.attention_pool.messages import Answer
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.wire import Wire
from jax_impl.compute import Broken
from jax_impl.kv import Table
from jax_impl.layers import Piece
from jax_impl.programs import Progress
from jax_impl.stages import Pending, PlaceShape
from reference.control.attention_wire import plain_of
from reference.vocab.config import RopeSpec

ANSWER_S = 120.0
"""How long the memory pool may take over one tile and layer before it counts as lost."""


class PooledModel(Replica):
    """One replica and the memory pool behind it, in the place of a JaxModel under an engine: the
    engine's scheduler runs the compute pool, the memory pool holds all KV (LAMINA-21)."""

    def __init__(self, ckpt: Any, *, device: Any, pool: MemoryPool, wire: Wire, **sizes: Any):
        super().__init__(ckpt, device=device, pool=pool, wire=wire, **sizes)
        self.kv_bytes = pool.kv_bytes
        self._each = [kind.blocks for kind in pool.kinds]
        """For each kind of KV, the blocks of one memory device."""
        if pool.shares < len(pool.devices):  # whole requests: block n lies on device n // each
            b = len(pool.devices)
            self.kinds = tuple(replace(k, blocks=b * k.blocks, parts=b) for k in pool.kinds)
            self._shapes = [PlaceShape(3 + k.ring, self.rows, k.blocks) for k in self.kinds]
        self._tiles: list[tuple[int, tuple[Part, ...]]] = []
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
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
        if pieces:
            first, end = pieces[0][1], pieces[-1][1] + 1
            self._tiles = []
            for n in range(0, len(rows), self.tile):
                parts = self._who(tables[n : n + self.tile])
                number = self.wire.open([p.device for p in parts], first, end)
                self._tiles.append((number, parts))
        with jax.default_device(self.device):
            return super()._stage(start, rows, tokens, positions, tables, want_logits)

    def _who(self, tables: Sequence[Table]) -> tuple[Part, ...]:
        """Which memory devices attend to which rows of a tile."""
        devices = range(len(self.pool.devices))
        if self.pool.shares == len(devices):
            return tuple(Part(d, np.arange(len(tables)), d) for d in devices)
        owner = np.array([t.blocks[0][0] // self._each[0] for t in tables])
        return tuple(Part(int(d), np.flatnonzero(owner == d), 0) for d in np.unique(owner))

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
        each, kind = self._each[self._kind_of[i]], self.kinds[self._kind_of[i]]
        if kind.parts > 1:  # as the owner counts its blocks, padding behind the last one
            at = at.copy()
            at[:, 3:] = np.where(at[:, 3:] == kind.blocks, each, at[:, 3:] % each)
        for (number, parts), (first, size) in zip(self._tiles, split, strict=True):
            part = slice(first, first + size)
            live = int((at[part, 0] < self.rows).sum())
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
            if isinstance(answer, Broken):  # the device's thread has ended
                raise answer.error
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
