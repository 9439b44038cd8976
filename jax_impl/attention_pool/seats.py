"""What running requests hold of the two pools: KV blocks on memory devices, rows of a token.

Owned by the engine thread. Admission promises that nothing here runs out (LAMINA-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_impl.attention_pool.compute import Part, Tile
from jax_impl.attention_pool.wire import Wire
from jax_impl.kv import KvKind, Table
from jax_impl.stages import PlaceShape, places, row_turns, tiles
from reference.control.attention_serving import Span
from reference.handle import RequestHandle
from reference.vocab.config import ModelConfig


@dataclass(slots=True)
class Seat:
    """A running request. tokens: its text so far; devices: who holds its KV, in `table`; told: how
    many positions' logits were handed out."""

    handle: RequestHandle
    tokens: list[int]
    devices: tuple[int, ...]
    table: Table
    told: int = 0


@dataclass
class Aboard:
    """A batch's token under way: its rows (bank numbers, and whose position each is) in tiles."""

    epoch: int
    spans: tuple[Span, ...]
    rows: list[int]
    owners: list[tuple[int, int]]
    tiles: list[Tile] = field(default_factory=list)


class Seats:
    """kinds: of each memory device's KV; rows: of the banks; head: heads are shared out, so that a
    request has the same blocks on all devices."""

    def __init__(
        self, config: ModelConfig, kinds: Sequence[KvKind], kv_block: int, rows: int, tile: int,
        devices: int, head: bool,
    ) -> None:  # fmt: skip
        self._config, self._kinds, self._kv_block = config, tuple(kinds), kv_block
        self._tile, self._head, self._bank_rows = tile, head, rows
        self._shapes = [PlaceShape(3 + kind.ring, rows, kind.blocks) for kind in kinds]
        domains = 1 if head else devices
        self._free = [[list(range(kind.blocks)) for kind in kinds] for _ in range(domains)]
        self._rows = list(range(rows))
        self._devices = devices
        self.kind_of = [
            next(k for k, kind in enumerate(kinds) if i in kind.layers)
            for i in range(len(config.layers))
        ]
        self.running: dict[int, Seat] = {}

    def admit(self, handle: RequestHandle, devices: tuple[int, ...]) -> None:
        """Take the request's blocks on its devices."""
        request = handle.request
        size = len(request.prompt) + (request.max_new_tokens or 0)
        free = self._free[0 if self._head else devices[0]]
        blocks = []
        for mine, kind in zip(free, self._kinds, strict=True):
            n = kind.held(size, self._kv_block)
            assert n <= len(mine), "KV blocks were promised that there are not"
            blocks.append(mine[len(mine) - n :])
            del mine[len(mine) - n :]
        tokens = [int(t) for t in request.prompt]
        table = Table(tuple(blocks), len(tokens))
        self.running[handle.number] = Seat(handle, tokens, devices, table)

    def end(self, number: int) -> None:
        """The request is over; one that never ran holds nothing."""
        seat = self.running.pop(number, None)
        if seat is not None:
            free = self._free[0 if self._head else seat.devices[0]]
            for mine, blocks in zip(free, seat.table.blocks, strict=True):
                mine += blocks

    def board(self, spans: tuple[Span, ...], epoch: int, wire: Wire) -> Aboard:
        """Rows and tiles for a batch's token."""
        owners = [(s.request, p) for s in spans for p in range(s.start, s.end)]
        n = len(owners)
        assert n <= len(self._rows), "rows were promised that there are not"
        rows = self._rows[len(self._rows) - n :]
        del self._rows[len(self._rows) - n :]
        seats = [self.running[r] for r, _ in owners]
        positions = [p for _, p in owners]
        tables = [seat.table for seat in seats]
        tokens = [seat.tokens[p] for seat, p in zip(seats, positions, strict=True)]
        split = tiles(n, self._tile, 0)
        at = places(rows, tokens, positions, tables, self._shapes, split)
        ropes = {s.attention.rope for s in self._config.layers}
        turns = {
            r: row_turns(r, positions, tables, len(at[0]))
            for r in ropes
            if r is not None and r.by_prompt
        }
        aboard = Aboard(epoch, spans, rows, owners)
        for first, size in split:
            live = min(size, n - first)
            parts = self._parts(seats[first : first + live])
            number = wire.open([p.device for p in parts], 0, len(self._config.layers))
            part = slice(first, first + size)
            mine = {r: angles[part] for r, angles in turns.items()}
            more = first + size < n
            aboard.tiles.append(Tile(number, [a[part] for a in at], live, parts, mine, more))
        return aboard

    def _parts(self, seats: Sequence[Seat]) -> tuple[Part, ...]:
        """Who attends to which rows of a tile."""
        if self._head:
            every = np.arange(len(seats))
            return tuple(Part(d, every, d) for d in range(self._devices))
        owner = np.array([seat.devices[0] for seat in seats])
        return tuple(Part(int(d), np.flatnonzero(owner == d), 0) for d in np.unique(owner))

    def leave(self, aboard: Aboard) -> None:
        """The token is over: its rows are free."""
        self._rows += aboard.rows

    def missing(self) -> dict[str, int]:
        """What did not come back; all 0 when nothing runs."""
        blocks = sum(kind.blocks for kind in self._kinds) * len(self._free)
        return {
            "rows": self._bank_rows - len(set(self._rows)),
            "blocks": blocks - sum(len(set(mine)) for free in self._free for mine in free),
            "requests": len(self.running),
        }
