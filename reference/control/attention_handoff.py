"""A prompt's keys and values on their way from a prefill worker to the memory pool (LAMINA-12).

Memory devices pull, and only in the gaps between what decoding sends them: `next_pull` is asked
when a device has nothing to receive, with the bytes that can move before the next message is due.
Layers come in order, so that pulling runs beside prefill.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.vocab.errors import BadInput, IllegalEvent


class Piece(NamedTuple):
    """Positions [first, first + tokens) of one request at one layer."""

    request: int
    layer: int
    first: int
    tokens: int
    bytes: int


class HandOff:
    """What there is to pull, in the order in which it was offered. Pure; one owner.

    layers       of the model;  piece_bytes  most bytes of a pull (at least one token)
    """

    def __init__(self, layers: int, piece_bytes: int) -> None:
        if layers < 1 or piece_bytes < 1:
            raise BadInput(f"layers {layers}, piece_bytes {piece_bytes}: at least 1 expected")
        self.layers, self.piece_bytes = layers, piece_bytes
        self._waiting: list[Piece] = []
        self._offered: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._moving: Piece | None = None
        self._dropped = False

    @property
    def backlog(self) -> int:
        """Bytes offered and not yet pulled."""
        moving = self._moving.bytes if self._moving else 0
        return moving + sum(p.bytes for p in self._waiting)

    def offer(self, request: int, layer: int, tokens: int, token_bytes: int) -> None:
        """Prefill has finished a layer of a request. Layers of a request come in order."""
        if layer != self._offered.get(request, 0) or not 0 <= layer < self.layers:
            raise IllegalEvent(f"request {request}: layer {layer} offered out of order")
        self._offered[request] = layer + 1
        each = max(1, self.piece_bytes // token_bytes)
        for first in range(0, tokens, each):
            n = min(each, tokens - first)
            self._waiting.append(Piece(request, layer, first, n, n * token_bytes))
            self._left[request] = self._left.get(request, 0) + 1

    def next_pull(self, room_bytes: int) -> Piece | None:
        """The next piece, if all of it fits into the gap. One is under way at a time."""
        if self._moving is not None or not self._waiting:
            return None
        if self._waiting[0].bytes > room_bytes:
            return None
        self._moving = self._waiting.pop(0)
        return self._moving

    def pulled(self) -> int | None:
        """The piece under way has come. The request, if that was its last: it may decode."""
        if self._moving is None:
            raise IllegalEvent("nothing is being pulled")
        request, self._moving = self._moving.request, None
        if self._dropped:
            self._dropped = False
            return None
        self._left[request] -= 1
        if self._left[request] or self._offered[request] < self.layers:
            return None
        del self._left[request], self._offered[request]
        return request

    def drop(self, request: int) -> None:
        """The request was given up; a piece of it that is under way still comes, for nothing."""
        self._waiting = [p for p in self._waiting if p.request != request]
        self._dropped |= self._moving is not None and self._moving.request == request
        self._left.pop(request, None)
        self._offered.pop(request, None)
