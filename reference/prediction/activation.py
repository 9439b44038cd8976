"""Activation matrices (MoE-Infinity, 2401.14361): a request uses experts as an earlier one did
(PREDICT-5).

Each request has a matrix A[L, E] of how often it used each expert. Those of requests that have
ended are stored. At layer l the request's rows 0..l are compared with those of each stored matrix
(mean cosine); the nearest one's later rows, each divided by its sum, are what is expected there,
weighted 1 - distance / (L + 1). A full store drops the matrix that was nearest least often.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.prediction.base import Named, Predictor, Scores
from reference.vocab.events import Predicted
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions


class ActivationMatrices(Predictor):
    """stored  matrices kept;  ahead  layers spoken of at a time (0: all that are left)."""

    def __init__(self, options: ControlOptions, stored: int = 300, ahead: int = 4) -> None:
        super().__init__(options)
        shape = stored, len(self.layers), self.experts
        self.counts = np.zeros(shape, np.float32)
        self.units = np.zeros(shape, np.float32)
        """The same, each row of length 1."""
        self.nearest = [0] * stored
        """How often each was the nearest."""
        self.filled = 0
        self.ahead = ahead or len(self.layers)
        self.running: dict[int, np.ndarray] = {}
        self.cosines: dict[int, np.ndarray] = {}
        """Request -> [L, stored], the cosine of its row with that of each stored matrix."""

    def opened(self, visit: Visit, tokens: Sequence[int]) -> list[Predicted]:
        """All rows are of earlier tokens."""
        return self._from(visit, len(self.layers)) if visit.request in self.running else []

    def routed(
        self, visit: Visit, experts: Named, tokens: Sequence[int] = (), gates: Scores | None = None
    ) -> list[Predicted]:
        number, at = visit.request, self.place[visit.layer]
        if number not in self.running:
            self.running[number] = np.zeros(self.counts.shape[1:], np.float32)
            self.cosines[number] = np.zeros((len(self.layers), len(self.nearest)), np.float32)
        row = self.running[number][at]
        np.add.at(row, [e for named in experts for e in named], 1.0)
        self.cosines[number][at] = self.units[:, at] @ _unit(row)
        return self._from(visit, at + 1)

    def _from(self, visit: Visit, rows: int) -> list[Predicted]:
        """What the stored matrix that is nearest in the first `rows` rows says of what follows."""
        if not self.filled:
            return []
        mean = self.cosines[visit.request][:rows, : self.filled].mean(axis=0)
        best = int(mean.argmax())
        self.nearest[best] += 1
        at, out = self.place.get(visit.layer, -1), []
        for i in range(at + 1, min(at + 1 + self.ahead, len(self.layers))):
            row = self.counts[best, i]
            share = np.minimum(1.0, self.top_k * row / max(1.0, float(row.sum())))
            decay = 1.0 - (i - at) / (len(self.layers) + 1)
            out += self.say(visit._replace(layer=self.layers[i]), share * decay)
        return out

    def ended(self, request: int) -> None:
        """Store its matrix."""
        counts = self.running.pop(request, None)
        if counts is None:
            return
        del self.cosines[request]
        if self.filled < len(self.nearest):
            j, self.filled = self.filled, self.filled + 1
        else:
            j = min(range(self.filled), key=self.nearest.__getitem__)
        self.counts[j], self.units[j], self.nearest[j] = counts, _unit(counts), 0
        for number, other in self.running.items():
            self.cosines[number][:, j] = (self.units[j] * _unit(other)).sum(axis=-1)


def _unit(rows: np.ndarray) -> np.ndarray:
    """Each row [..., E] divided by its length; a row of zeros stays so."""
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
