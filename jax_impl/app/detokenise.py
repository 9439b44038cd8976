"""Text from tokens as they come: no character is split, and nothing is taken back (TEXT-1).

equivalent to: decoding all tokens at once, at the end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
WINDOW_MAX = 64
"""Tokens of undecided bytes that are decoded again with each new one, before they are cut."""

Decode = Callable[[list[int]], str]
Kind = Literal["silent", "byte", "text"]


class Detokeniser:
    """One answer. `push` each token, `end` once; the pieces put together are `decode` of all.

    decode   the tokenizer's own
    kind     "silent" gives no text (special tokens); "byte" is one byte of a tokenizer that
             decides about a run of them only when the run is over ("<0xE2>")

    A window of the last tokens is decoded again with each new one, as the text of a token depends
    on its neighbours: it may be a part of a character, and a space before the first is dropped.
    """

    def __init__(self, decode: Decode, kind: Callable[[int], Kind] = lambda token: "text") -> None:
        self._decode, self._kind = decode, kind
        self._tokens: list[int] = []
        self._window: list[int] = []
        self._said = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What has been given out so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        kind = self._kind(token)
        if kind == "silent":
            return ""
        self._tokens.append(token)
        if self._window is not self._tokens:
            self._window.append(token)
        if kind == "byte":
            return ""
        text = self._decode(self._window)
        if not text.startswith(self._said):
            # A decoder that looks further than the window: from here on everything is decoded.
            self._window, self._said = self._tokens, self.text
            text = self._decode(self._window)
        # A character that is not yet complete decodes to one replacement character at the end.
        sure = text[: len(text) - text.endswith(UNKNOWN)]
        piece = sure[len(self._said) :] if sure.startswith(self._said) else ""
        self._said += piece
        if self._window is not self._tokens:
            self._narrow(text)
        return self._out(piece)

    def end(self) -> str:
        """The rest: an incomplete character becomes a replacement character."""
        text, said = self._decode(self._tokens), self.text
        return self._out(text[len(said) :] if text.startswith(said) else "")

    def _out(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _narrow(self, text: str) -> None:
        """Begin the window anew where what came before can no longer matter."""
        last = self._window[-1:]
        alone = self._decode(last)
        if text == self._said and alone and UNKNOWN not in alone and text.endswith(alone):
            # A token of whole characters, given out, and not emptied by being the first.
            self._window, self._said = last, alone
        elif len(self._window) > WINDOW_MAX:
            half = len(self._window) // 2
            first, rest = self._decode(self._window[:half]), self._decode(self._window[half:])
            if first + rest == text and self._said.startswith(first):
                self._window, self._said = self._window[half:], self._said[len(first) :]


def pieces(detokeniser: Detokeniser, tokens: Sequence[int]) -> list[str]:
    """What a reader of the stream gets for `tokens`, one for each and one at the end."""
    return [*(detokeniser.push(token) for token in tokens), detokeniser.end()]
