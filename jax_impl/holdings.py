"""What requests and slots hold: bank rows, KV blocks, texts, experts. Owned by the engine thread.

Admission and the scheduler promise that nothing here can run out (ADMIT-2, ENGINE-12); a broken
promise is a bug and ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jax_impl.kv import KvKind, Table
from reference.handle import RequestHandle
from reference.vocab.ids import ExpertKey


@dataclass(slots=True)
class Running:
    """A running request: its text so far and what it holds of the model's memory.

    tokens   prompt and generated tokens       table   its KV blocks of each kind (jax_impl.kv)
    part     of the blocks' numbers, in which they lie
    rows     bank rows of the chunk in work    topk    [rows, K] experts of the visit in work
    """

    number: int
    handle: RequestHandle
    tokens: list[int]
    table: Table
    part: int
    rows: list[int] = field(default_factory=list)
    topk: np.ndarray | None = None

    def span(self, chunk: int, size: int) -> tuple[int, int]:
        """Positions [start, end) of a chunk, for prompt chunks of `size` tokens."""
        prompt = len(self.handle.request.prompt)
        chunks = -(-prompt // size)
        if chunk < chunks:
            return chunk * size, min((chunk + 1) * size, prompt)
        start = prompt + chunk - chunks
        return start, start + 1


@dataclass(frozen=True, slots=True)
class Resident:
    """What a slot holds: the arrays over it, and the checksum taken when it was read (or None)."""

    key: ExpertKey
    handle: tuple[jax.Array, ...]
    sum: int | None


class Holdings:
    """Free lists, and who holds what. `rows` is a count, `kv_block` is in tokens."""

    def __init__(self, rows: int, kinds: Sequence[KvKind], kv_block: int) -> None:
        self.running: dict[int, Running] = {}
        self.residents: dict[int, Resident] = {}
        self._slot_of: dict[ExpertKey, int] = {}
        self._kv_block = kv_block
        self._all = rows, sum(kind.blocks for kind in kinds)
        self._rows = list(range(rows))
        self._kinds = tuple(kinds)
        self._widest = max(range(len(kinds)), key=lambda k: kinds[k].ring)
        self._blocks = [
            [list(range(n * each, (n + 1) * each)) for kind in kinds
             for each in [kind.blocks // kind.parts]]
            for n in range(kinds[0].parts)
        ]  # fmt: skip

    def admit(self, handle: RequestHandle) -> None:
        """KV blocks for the whole of prompt and max_new_tokens, from now until the end; in layers
        with a window, for as much as is needed at a time (JAX-13). All in the part with most room
        for whole texts."""
        request = handle.request
        size = len(request.prompt) + (request.max_new_tokens or 0)
        part = max(range(len(self._blocks)), key=lambda n: len(self._blocks[n][self._widest]))
        blocks = tuple(
            _take(free, kind.held(size, self._kv_block), "KV blocks")
            for free, kind in zip(self._blocks[part], self._kinds, strict=True)
        )
        tokens = [int(t) for t in request.prompt]
        table = Table(blocks, len(tokens))
        self.running[handle.number] = Running(handle.number, handle, tokens, table, part)

    def take_rows(self, running: Running, n: int) -> None:
        """Rows for a chunk that is about to enter."""
        assert not running.rows, "the last chunk's rows are still held"
        running.rows, running.topk = _take(self._rows, n, "rows"), None

    def give_rows(self, running: Running) -> None:
        """The chunk has left the model."""
        self._rows += running.rows
        running.rows, running.topk = [], None

    def end(self, number: int) -> None:
        """The request is over; one that never ran holds nothing."""
        running = self.running.pop(number, None)
        if running is not None:
            self.give_rows(running)
            mine = self._blocks[running.part]
            for free, blocks in zip(mine, running.table.blocks, strict=True):
                free += blocks

    def fill(self, slot: int, resident: Resident) -> None:
        """A load has ended."""
        self.residents[slot] = resident
        self._slot_of[resident.key] = slot

    def clear(self, slot: int) -> None:
        """A load begins to write the slot: nobody may read it, and its old arrays are let go."""
        old = self.residents.pop(slot, None)
        if old is not None and self._slot_of.get(old.key) == slot:
            del self._slot_of[old.key]

    def present(self, keys: set[ExpertKey]) -> int:
        """How many of `keys` could be read now."""
        return sum(key in self._slot_of for key in keys)

    def missing(self) -> dict[str, int]:
        """Rows, blocks and requests that did not come back; for leak checks when idle."""
        rows, blocks = self._all
        return {
            "rows": rows - len(set(self._rows)),
            "blocks": blocks - sum(len(set(free)) for part in self._blocks for free in part),
            "requests": len(self.running),
        }


def _take(free: list[int], n: int, what: str) -> list[int]:
    assert n <= len(free), f"{n} {what} were promised, there are {len(free)}"
    at = len(free) - n
    taken = free[at:]
    del free[at:]
    return taken


def distinct(layer: int, experts: Iterable[Iterable[int]]) -> set[ExpertKey]:
    """The experts that a visit's tokens name."""
    return {ExpertKey(layer, e) for row in experts for e in row}
