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

    def offer(
        self, request: int, layer: int, tokens: int, token_bytes: int, first: int = 0
    ) -> None:
        """Prefill has finished a layer of a request: positions [first, first + tokens), at least
        one. Layers of a request come in order."""
        if layer != self._offered.get(request, 0) or not 0 <= layer < self.layers or tokens < 1:
            raise IllegalEvent(f"request {request}: layer {layer} offered out of order")
        self._offered[request] = layer + 1
        each = max(1, self.piece_bytes // token_bytes)
        for at in range(first, first + tokens, each):
            n = min(each, first + tokens - at)
            self._waiting.append(Piece(request, layer, at, n, n * token_bytes))
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


UNLIMITED = 1 << 62
"""Room where nothing is due."""


class Gaps:
    """How much fits in before a device's next message is due, judged by the gaps of late. Times in
    seconds are told, not read.

    A gap lasts as the shortest of the last `kept` did. When that is over, the message is due, and
    there is no room; when four times their median is over, nobody seems to send, and there is.

    byte_s  seconds a pulled byte takes;  kept  gaps that are remembered
    """

    def __init__(self, byte_s: float, kept: int = 8) -> None:
        self.byte_s, self._kept = byte_s, kept
        self._begun: float | None = None
        self._sampled = True
        self._lengths: list[float] = []
        self._speeds: list[float] = []

    def empty(self, now: float, more: bool = False) -> None:
        """All is answered: a gap begins. more: what comes next belongs to the same turn, so that it
        is due at once, and tells nothing of gaps between turns."""
        self._begun, self._sampled = now, not more

    def message(self, now: float) -> None:
        """Something has come, at `now`: the gap is over."""
        if self._begun is not None and self._sampled and now > self._begun:
            self._lengths = [*self._lengths, now - self._begun][-self._kept :]
        self._begun = None

    def took(self, size: int, seconds: float) -> None:
        """A pull's bytes and its time: the slowest of late is what is reckoned with."""
        self._speeds = [*self._speeds, seconds / size][-self._kept :]
        self.byte_s = max(self._speeds)

    def _until(self) -> tuple[float, float]:
        """When the next message is due, and when nobody seems to send any more."""
        assert self._begun is not None
        middle = sorted(self._lengths)[len(self._lengths) // 2]
        due = min(self._lengths) if self._sampled else 0.0
        return self._begun + due, self._begun + 4 * middle

    def room(self, now: float) -> int:
        """Bytes that can move before the next message is due. To be asked when nothing is under
        way."""
        if self._begun is None or not self._lengths:
            return UNLIMITED
        due, rest = self._until()
        if now >= rest:
            return UNLIMITED
        return max(0, int((due - now) / self.byte_s)) if self.byte_s > 0 else UNLIMITED

    def wait_s(self, now: float) -> float:
        """How long to wait for a message before asking for room again."""
        if self._begun is None or not self._lengths:
            return 0.0
        return max(0.0, self._until()[1] - now)
