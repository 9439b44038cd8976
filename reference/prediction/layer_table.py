"""A statistical layer predictor, learned while it runs: what ProMoE and LayerScope train a network
for, this counts (PREDICT-6).

For every pair of neighbouring layers a table holds how often expert e of the one and expert f of
the other served the same token, and each request remembers what its last token used. The chance of
f is the naive Bayes product of its frequency, of one factor for each expert of the layer before,
and of one for "the last token used it here" (or not). Nothing is trained beforehand, and nothing
but the choices of routers is looked at: no hidden state, no token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.prediction.base import Named, Predictor, Scores
from reference.vocab.events import Predicted
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions

PRIOR = 4.0
"""Tokens' worth of belief that experts are alike, and that layers tell nothing of each other."""
STAY = 0.4
"""What is believed at first of the share of a token's experts that the next token keeps."""


class LayerTable(Predictor):
    """pairs [L, E, E]: tokens that used e at a layer and f at the next; used [L, E]; tokens [L];
    kept [L]: experts that the token before had used too, of those that `compared` [L] counts."""

    def __init__(self, options: ControlOptions) -> None:
        super().__init__(options)
        n, e = len(self.layers), self.experts
        self.pairs = np.zeros((n, e, e), np.float32)
        self.used = np.zeros((n, e), np.float32)
        self.tokens = np.zeros(n)
        self.kept = np.full(n, STAY * PRIOR)
        self.compared = np.full(n, PRIOR)
        self.last: dict[int, dict[int, tuple[int, ...]]] = {}
        """Request -> place of a layer -> what its newest token used there."""
        self.chunk: dict[int, tuple[Visit, Named]] = {}
        """Request -> the last visit that was Routed."""

    def opened(self, visit: Visit, tokens: Sequence[int]) -> list[Predicted]:
        """The first layer, from frequency and the last token alone."""
        if visit.request not in self.last:
            return []
        return self._say(visit, 0, [()])

    def routed(
        self, visit: Visit, experts: Named, tokens: Sequence[int] = (), gates: Scores | None = None
    ) -> list[Predicted]:
        at = self.place[visit.layer]
        self._learn(visit, at, experts)
        if at + 1 == len(self.layers):
            return []
        return self._say(visit, at + 1, experts)

    def ended(self, request: int) -> None:
        self.last.pop(request, None)
        self.chunk.pop(request, None)

    def _learn(self, visit: Visit, at: int, experts: Named) -> None:
        last = self.last.setdefault(visit.request, {})
        before, of_before = self.chunk.get(visit.request, (None, ()))
        follows = at > 0 and before == visit._replace(layer=self.layers[at - 1])
        for row, named in enumerate(experts):
            chosen = list(named)
            self.used[at, chosen] += 1
            self.tokens[at] += 1
            if follows:
                self.pairs[at - 1][np.ix_(of_before[row], chosen)] += 1
            if at in last:
                self.kept[at] += len(set(chosen) & set(last[at]))
                self.compared[at] += len(chosen)
            last[at] = named
        self.chunk[visit.request] = visit, experts

    def _say(self, visit: Visit, at: int, rows: Named | list[tuple[()]]) -> list[Predicted]:
        """What is expected at the layer of place `at`: summed over the chunk's rows."""
        base = (self.used[at] + PRIOR * self.top_k / self.experts) / (self.tokens[at] + PRIOR)
        prior = np.log(base) + self._stays(visit.request, at)
        scores = np.zeros(self.experts)
        for named in rows:
            log = prior.copy()
            for e in named:
                seen = self.used[at - 1, e]
                log += np.log((self.pairs[at - 1, e] + PRIOR * base) / ((seen + PRIOR) * base))
            scores += 1.0 / (1.0 + np.exp(-log))
        return self.say(visit._replace(layer=self.layers[at]), scores)

    def _stays(self, request: int, at: int) -> np.ndarray | float:
        """Log of how much likelier an expert is for having been used by the last token, or not."""
        last = self.last.get(request, {}).get(at)
        if last is None:
            return 0.0
        even = self.top_k / self.experts
        kept = self.kept[at] / self.compared[at]
        others = self.top_k * (1.0 - kept) / max(1, self.experts - self.top_k)
        log = np.full(self.experts, np.log(max(others, 1e-6) / even))
        log[list(last)] = np.log(max(kept, 1e-6) / even)
        return log
