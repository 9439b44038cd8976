"""Who is in which batch: n batches kept equal in size and in total length (LAMINA-8).

Attention takes time with the total length of a batch, a slice with its size; a rotation without
bubbles needs both alike in all batches. The KV of all batches lies in one pool and a replica keeps
nothing of a request between tokens, so a request changes its batch for nothing, at the end of a
token.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.vocab.errors import BadInput


class Move(NamedTuple):
    """A request leaves batch `source`, which is at the end of a token, and joins `target` when
    that is."""

    request: int
    source: int
    target: int


class Batches:
    """Members and their lengths in tokens (prompt and generated so far)."""

    def __init__(self, batches: int) -> None:
        if batches < 1:
            raise BadInput(f"batches: {batches}; at least 1 expected")
        self.members: list[dict[int, int]] = [{} for _ in range(batches)]

    def sizes(self) -> list[int]:
        """Requests of each batch."""
        return [len(m) for m in self.members]

    def totals(self) -> list[int]:
        """Tokens of each batch."""
        return [sum(m.values()) for m in self.members]

    def join(self, request: int, length: int) -> int:
        """A new request goes where fewest are; among these where least is to be read."""
        sizes, totals = self.sizes(), self.totals()
        batch = min(range(len(sizes)), key=lambda j: (sizes[j], totals[j], j))
        self.members[batch][request] = length
        return batch

    def grow(self, request: int, tokens: int = 1) -> None:
        """The request's text got longer."""
        self.members[self.batch_of(request)][request] += tokens

    def leave(self, request: int) -> int:
        """The request has ended; the batch it was in."""
        batch = self.batch_of(request)
        del self.members[batch][request]
        return batch

    def batch_of(self, request: int) -> int:
        """Where the request is. Raises KeyError for one that is nowhere."""
        for j, members in enumerate(self.members):
            if request in members:
                return j
        raise KeyError(request)

    def level(self, batch: int) -> list[Move]:
        """`batch` is at the end of a token: give members away while that evens things out.

        First by size, until it has at most one more than the smallest; what goes is what brings
        the totals closest. Then by length: with one request more than another batch, it gives one
        away when the two totals come closer by that. Ends: each move lessens the spread.
        """
        moves: list[Move] = []
        while True:
            sizes, totals = self.sizes(), self.totals()
            others = [j for j in range(len(sizes)) if j != batch and sizes[j] < sizes[batch]]
            if not others:
                return moves
            target = min(others, key=lambda j: (sizes[j], totals[j], j))
            gap = totals[batch] - totals[target]
            request, length = min(
                self.members[batch].items(), key=lambda item: (abs(gap - 2 * item[1]), item[0])
            )
            if sizes[batch] - sizes[target] < 2 and abs(gap - 2 * length) >= abs(gap):
                return moves
            del self.members[batch][request]
            self.members[target][request] = length
            moves.append(Move(request, batch, target))
