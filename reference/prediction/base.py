"""What every predictor is: it hears what happens, and answers with what it expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reference.vocab.events import Predicted
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions

Named = tuple[tuple[int, ...], ...]
"""Experts a token, as in Routed."""
Scores = Mapping[int, Sequence[tuple[int, float]]]
"""Model layer -> (expert, score) pairs, the likeliest first."""


class Predictor:
    """The protocol, and a predictor that expects nothing. Not thread-safe: one owner.

    All scores estimate how many tokens of the visit will use the expert: 1.0 is a use that is
    certain. `most` is how many experts are told of a visit at most.
    """

    def __init__(self, options: ControlOptions) -> None:
        self.layers = options.layers
        self.place = {layer: i for i, layer in enumerate(options.layers)}
        self.experts = options.experts
        self.top_k = options.top_k
        self.most = options.prefetch or options.top_k

    def opened(self, visit: Visit, tokens: Sequence[int]) -> list[Predicted]:
        """A chunk begins: `visit` is at ENTRY, `tokens` are the chunk's ids (maybe unknown: ())."""
        return []

    def routed(
        self, visit: Visit, experts: Named, tokens: Sequence[int] = (), gates: Scores | None = None
    ) -> list[Predicted]:
        """The router before `visit` chose `experts`. `gates`: what later layers' routers would say
        to the hidden state of now, where the executor has asked them."""
        return []

    def ended(self, request: int) -> None:
        """The request has ended."""

    def say(self, visit: Visit, scores: np.ndarray) -> list[Predicted]:
        """The `most` greatest of scores [E] that are above 0, of equals the lowest; as an event."""
        order = np.argsort(-scores, kind="stable")[: self.most]
        pairs = tuple([(int(e), float(s)) for e in order if (s := scores[e]) > 0])
        return [Predicted(visit, pairs)] if pairs else []

    def next_layer(self, layer: int) -> int | None:
        """The next layer with experts (after ENTRY the first), None after the last."""
        at = self.place.get(layer, -1) + 1
        return self.layers[at] if at < len(self.layers) else None
