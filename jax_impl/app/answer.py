"""An answer as it grows: its text without split characters, up to a stop (TEXT-1 to TEXT-4).

The one path from tokens to text: what is streamed and what is reported are the same (TEXT-2).
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_impl.app.hold import Hold
from jax_impl.app.text import Text


class Answer:
    """Push tokens until `stopped`; then call `end`.

    tokens   those that count: up to the one that completed a stop
    text     what has been given out; None where the model has no tokenizer
    """

    def __init__(self, text: Text, stops: Sequence[str | int] = ()) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._stream = text.stream()
        self._ids = frozenset(stop for stop in stops if isinstance(stop, int))
        self._hold = Hold([stop for stop in stops if isinstance(stop, str)])
        self._pieces: list[str] = []
        self._ended = False

    @property
    def text(self) -> str | None:
        return None if self._stream is None else "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that this token made certain. Once stopped, tokens change nothing (TEXT-4)."""
        if self.stopped:
            return ""
        self.tokens.append(token)
        piece = "" if self._stream is None else self._hold.push(self._stream.push(token))
        self.stopped = token in self._ids or self._hold.met is not None
        return self._out(piece)

    def end(self) -> str:
        """What was held back; a stop text that was not completed belongs to the answer."""
        if self._stream is None or self._hold.met is not None or self._ended:
            return ""
        self._ended = True
        piece = self._hold.push(self._stream.end())
        self.stopped = self.stopped or self._hold.met is not None
        return self._out(piece + self._hold.end())

    def _out(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
