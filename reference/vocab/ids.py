"""Small immutable names: which expert, which visit, which part of a step.

A request is known to the control plane by its arrival number (an `int`); the text id of a
request file lives with the engine. A *chunk* numbers the pieces of a request in order: prompt
chunks first, then one chunk for every generated token that is fed back.
"""

from __future__ import annotations

from typing import NamedTuple

ENTRY = -1
"""Layer number of the visit that opens a chunk: embedding and everything up to the first router."""


class ExpertKey(NamedTuple):
    """One routed expert: model layer and index within that layer."""

    layer: int
    expert: int


class Visit(NamedTuple):
    """One request at one layer with one chunk of tokens.

    `layer` is ENTRY or a model layer that has routed experts. A visit at a layer with experts
    begins with these experts and ends at the next router, or at the LM head (SCHED-1).
    """

    request: int
    chunk: int
    layer: int


class Part(NamedTuple):
    """A visit's share of a step: the experts to run now, and whether the visit ends with it.

    `experts` are distinct and ascending. With `last` the executor combines the expert outputs in
    the order of each token's ranks and goes on to the next router or the LM head.
    """

    visit: Visit
    experts: tuple[int, ...]
    last: bool
