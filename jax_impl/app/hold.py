"""Stop texts in a stream: held back while one may be beginning, given out when it was not (TEXT-3).

The result depends on the characters alone, not on how they were cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class Hold:
    """Takes pieces of text, gives out what no stop can claim any more.

    `met` is the stop that was completed first, the longest of those completed by the same
    character; the text given out ends before it, and nothing comes after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.met: str | None = None
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that has become certain."""
        if self.met is not None or not self._stops:
            return "" if self.met is not None else piece
        text = self._held + piece
        for at in range(len(self._held), len(text)):
            complete = self._step(text[at])
            if complete:
                self.met = complete
                self._held = ""
                return text[: at + 1 - len(complete)]
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """What was held back for a stop that never came."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, character: str) -> str:
        """Moves every stop on by one character; the longest that it completes, or ''."""
        complete = ""
        for n, stop in enumerate(self._stops):
            matched, fallback = self._matched[n], self._fallbacks[n]
            while matched and stop[matched] != character:
                matched = fallback[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[n] = matched
            if matched == len(stop) and len(stop) > len(complete):
                complete = stop
        return complete


def _fallback(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its end."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        if stop[at] == stop[length]:
            length += 1
        table[at] = length
    return table
