"""Next gate (Mixtral-offloading; Fate, AdapMoE and HOBBIT in like manner): the router of the next
layer with experts is asked now, with the hidden state that stands before this layer's experts.

The residual changes little from layer to layer, so it is mostly right, least so in the first
layers. The executor asks the router (PREDICT-4), this only passes on what it said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.prediction.base import Named, Predictor, Scores
from reference.vocab.events import Predicted
from reference.vocab.ids import Visit

LAST_RANK = 0.5
"""The first choice counts as certain, the last of those told as even; between them by rank. A
gate's own weights say how much an expert counts, which is not how sure its choice is."""


class NextGate(Predictor):
    """Needs an executor that fills `gates`."""

    def routed(
        self, visit: Visit, experts: Named, tokens: Sequence[int] = (), gates: Scores | None = None
    ) -> list[Predicted]:
        return [
            Predicted(visit._replace(layer=layer), tuple(pairs[: self.most]))
            for layer, pairs in (gates or {}).items()
        ]


def votes(ranked: np.ndarray, most: int) -> list[tuple[int, float]]:
    """What the routers said to the rows of one visit: experts int [T, m] in rank order -> the
    `most` that got most, summed over the rows, of equals the lowest."""
    rows, m = ranked.shape
    weights = [1.0 - (1.0 - LAST_RANK) * i / max(1, m - 1) for i in range(m)]
    if rows == 1:  # a token: the router's own order
        return list(zip(ranked[0].tolist(), weights, strict=True))[:most]
    found, index = np.unique(ranked, return_inverse=True)
    total = np.zeros(len(found))
    np.add.at(total, index.reshape(-1), np.tile(weights, rows))
    order = np.argsort(-total, kind="stable")[:most]
    return [(int(found[i]), round(float(total[i]), 6)) for i in order]
