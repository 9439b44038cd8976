"""Where a memory device keeps what it has yet to pull from prefill workers (LAMINA-12).

A worker's keys and values of one prompt at one layer are offered as they were made. The device
takes them piece by piece, of the heads that are its own, in the gaps between what decoding sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.control.attention_handoff import Gaps, HandOff, Piece


@dataclass(frozen=True)
class PromptKV:
    """Keys [blocks, G, B, D] and values [blocks, G, B, Dv] (None: they are in the keys) of one
    prompt at one layer, as they are cached; block b of the text at b mod blocks. Of its positions
    those in [first, end) are still needed."""

    keys: np.ndarray
    values: np.ndarray | None
    first: int
    end: int

    def rows(self, first: int, count: int, heads: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """k [count, G', D] and v [count, G', Dv] of positions from `first` on."""
        at = np.arange(first, first + count)
        blocks, _, size, _ = self.keys.shape
        where = at // size % blocks, heads, at % size
        return tuple(None if a is None else a[where] for a in (self.keys, self.values))  # type: ignore[return-value]


@dataclass(frozen=True)
class Pull:
    """A piece to be pulled: rows of keys and values, the request's blocks at that layer, and the
    attempt that it belongs to."""

    piece: Piece
    k: np.ndarray
    v: np.ndarray | None
    blocks: tuple[int, ...]
    attempt: int


@dataclass
class Pulls:
    """What a device has pulled. late: messages that came while a piece was under way, and for how
    long they waited for it, in seconds."""

    pieces: int = 0
    bytes: int = 0
    seconds: float = 0.0
    late: int = 0
    late_s: float = 0.0


class Puller:
    """For one device's thread. byte_s: seconds that a pulled byte takes, until some were pulled."""

    def __init__(self, layers: int, piece_bytes: int, byte_s: float) -> None:
        self.gaps = Gaps(byte_s)
        self.told = Pulls()
        self._handoff = HandOff(layers, piece_bytes)
        self._from: dict[tuple[int, int], tuple[PromptKV, slice, tuple[int, ...], int]] = {}
        self._last = (0.0, 0.0)

    @property
    def backlog(self) -> int:
        """Bytes offered and not yet pulled."""
        return self._handoff.backlog

    def offered(
        self, request: int, layer: int, kv: PromptKV, heads: slice, blocks: tuple[int, ...],
        attempt: int,
    ) -> None:  # fmt: skip
        """A layer's keys and values of a prompt are there; `heads` of them are this device's."""
        sizes = [a[0, heads, 0].nbytes for a in (kv.keys, kv.values) if a is not None]
        self._handoff.offer(request, layer, kv.end - kv.first, sum(sizes), kv.first)
        self._from[request, layer] = kv, heads, blocks, attempt

    def drop(self, request: int) -> None:
        """Nothing more of it is wanted."""
        self._handoff.drop(request)
        for key in [k for k in self._from if k[0] == request]:
            del self._from[key]

    def next(self, now: float) -> Pull | None:
        """What to pull now; None where nothing waits or nothing fits."""
        piece = self._handoff.next_pull(self.gaps.room(now))
        if piece is None:
            return None
        kv, heads, blocks, attempt = self._from[piece.request, piece.layer]
        k, v = kv.rows(piece.first, piece.tokens, heads)
        return Pull(piece, k, v, blocks, attempt)

    def pulled(self, pull: Pull, began: float, ended: float) -> int | None:
        """The piece has come; the request, if all of its prompt has."""
        told, size = self.told, pull.piece.bytes
        told.pieces, told.bytes = told.pieces + 1, told.bytes + size
        told.seconds += ended - began
        self.gaps.took(size, ended - began)
        self._last = began, ended
        request = self._handoff.pulled()
        if request is not None:
            self.drop(request)
        return request

    def message(self, sent: float) -> None:
        """Queries have come."""
        began, ended = self._last
        if began < sent < ended:
            self.told.late += 1
            self.told.late_s += ended - sent
        self.gaps.message(sent)
