"""What a long search keeps: the states seen, in some thirty bytes each, and the level in work.

`Seen` numbers 128-bit digests in order of appearance. `Level` holds the nodes of one depth; what
does not fit goes to a file in the folder for temporary files, so memory does not grow with it.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator
from struct import unpack
from tempfile import TemporaryFile
from typing import IO, Any

from oracle.scope import Scope

Entry = tuple[int, Any]
"""(number, oracle.transitions.Node)."""
CHUNK = 500
"""Nodes written at a time."""


class Seen:
    """Digests of 16 bytes -> 0, 1, 2, ...: open addressing over arrays of plain integers."""

    def __init__(self) -> None:
        self.low, self.high = array("Q"), array("Q")
        self._table = array("I", bytes(4 << 10))
        self._mask = (1 << 10) - 1

    def __len__(self) -> int:
        return len(self.low)

    def __iter__(self) -> Iterator[bytes]:
        """Digests in the order of their numbers."""
        for pair in zip(self.low, self.high, strict=True):
            yield b"".join(half.to_bytes(8, "little") for half in pair)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and (self.low, self.high) == (other.low, other.high)

    def find(self, digest: bytes) -> int:
        """Its number, or -1."""
        low, high = unpack("<QQ", digest)
        table, mask, lows = self._table, self._mask, self.low
        at = low & mask
        while number := table[at]:
            if lows[number - 1] == low and self.high[number - 1] == high:
                return number - 1
            at = at + 1 & mask
        return -1

    def add(self, digest: bytes) -> int:
        """The number of a digest that `find` does not find."""
        low, high = unpack("<QQ", digest)
        self.low.append(low)
        self.high.append(high)
        if 3 * len(self.low) > 2 * self._mask:
            self._grow()
        else:
            self._enter(low, len(self.low))
        return len(self.low) - 1

    def _enter(self, low: int, entry: int) -> None:
        table, mask = self._table, self._mask
        at = low & mask
        while table[at]:
            at = at + 1 & mask
        table[at] = entry

    def _grow(self) -> None:
        size = 2 * len(self._table)
        self._table, self._mask = array("I", bytes(4 * size)), size - 1
        for number, low in enumerate(self.low):
            self._enter(low, number + 1)


class Level:
    """Nodes in order: the first `most` stay in memory, the others wait in a file."""

    def __init__(self, scope: Scope, most: int) -> None:
        self.scope, self.most = scope, most
        self.held: list[Entry] = []
        self.late: list[Entry] = []
        self.file: IO[bytes] | None = None
        """Without a name, so it is gone when the level or the process ends."""
        self.written = 0

    def __len__(self) -> int:
        return len(self.held) + self.written + len(self.late)

    def append(self, entry: Entry) -> None:
        """Add the next one."""
        if len(self.held) < self.most:
            self.held.append(entry)
            return
        self.late.append(entry)
        if len(self.late) == CHUNK:
            self.file = self.file or TemporaryFile()  # noqa: SIM115
            pickle.dump(self.late, self.file, 5)
            self.written += CHUNK
            self.late = []

    def taken(self) -> Iterator[Entry]:
        """All of them in order, once: what was given out is not kept."""
        self.held.reverse()
        while self.held:
            yield self.held.pop()
        if self.file is not None:
            with self.file as file:
                file.seek(0)
                while self.written:
                    for number, node in pickle.load(file):
                        # What all nodes share is one object again.
                        node.w.scope, node.s.options = self.scope, self.scope.options
                        yield number, node
                    self.written -= CHUNK
        yield from self.late
