"""Token-id table: a token uses the experts that it used before, whatever stands around it
(PREDICT-7).

Learned while it runs. A token that was not seen is not spoken of; the tokens that were not seen for
longest are forgotten when the table is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from reference.prediction.base import Named, Predictor, Scores
from reference.vocab.events import Predicted
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions


class TokenTable(Predictor):
    """known  tokens kept, each with counts [L, E] of two bytes;  ahead  layers spoken of at a time.

    Needs an executor that tells the tokens.
    """

    def __init__(self, options: ControlOptions, known: int = 2048, ahead: int = 2) -> None:
        super().__init__(options)
        self.known, self.ahead = known, ahead
        self.counts: OrderedDict[int, np.ndarray] = OrderedDict()

    def opened(self, visit: Visit, tokens: Sequence[int]) -> list[Predicted]:
        return self._from(visit, tokens)

    def routed(
        self, visit: Visit, experts: Named, tokens: Sequence[int] = (), gates: Scores | None = None
    ) -> list[Predicted]:
        for token, named in zip(tokens, experts, strict=False):
            row = self._row(token)[self.place[visit.layer]]
            row[list(named)] += row[list(named)] < np.iinfo(row.dtype).max
        return self._from(visit, tokens)

    def _row(self, token: int) -> np.ndarray:
        if token not in self.counts:
            if len(self.counts) == self.known:
                self.counts.popitem(last=False)
            self.counts[token] = np.zeros((len(self.layers), self.experts), np.uint16)
        self.counts.move_to_end(token)
        return self.counts[token]

    def _from(self, visit: Visit, tokens: Sequence[int]) -> list[Predicted]:
        """Each token's counts, divided by how often it was seen, summed over the tokens."""
        at, out = self.place.get(visit.layer, -1) + 1, []
        known = [self.counts[t] for t in tokens if t in self.counts]
        for i, layer in enumerate(self.layers[at : at + self.ahead]):
            scores = np.zeros(self.experts)
            for counts in known:
                row = counts[at + i]
                scores += self.top_k * row / max(1, int(row.sum()))
            out += self.say(visit._replace(layer=layer), scores * (1.0 - i / (self.ahead + 1)))
        return out
