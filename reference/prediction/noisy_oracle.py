"""A predictor of known accuracy, for simulation: it is told the truth and spoils some of it
(PREDICT-8).

Each true expert of the next layer is kept with the probability a of that layer, else another is put
in its place, drawn evenly from those not yet in the set. The draws hang on (seed, request, chunk,
layer, row, rank) alone, so every scheduler is told the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from reference.prediction.base import Named, Predictor, Scores
from reference.vocab.errors import BadInput
from reference.vocab.events import Predicted
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions

MIXTRAL = (
    .0, .566, .721, .789, .866, .859, .830, .840, .849, .801, .898, .898, .893, .910, .925, .881,
    .915, .939, .905, .879, .876, .893, .879, .876, .888, .884, .922, .913, .886, .900, .903, .850,
)  # fmt: skip
"""Next gate, Mixtral-8x7B, first choice right, by layer: the table in AdapMoE's repository."""

ACCURACY: dict[str, float | tuple[float, ...]] = {
    "next-gate-mixtral": MIXTRAL,
    "next-gate-dsv2-lite": 0.79,  # Fate, 2502.12224
    "next-gate-qwen3": 0.886,  # BigMoeOnEdge
    "trace": 0.6,  # what trace-matching methods reach
    "perfect": 1.0,
    "token-olmoe": 0.625,
    "token-mixtral": 0.584,
}
"""Published accuracies by name. A single number holds for every layer but the first, which no gate
comes before; `perfect` and tables by token id know that one too.

token-olmoe, token-mixtral: of the experts that a token id uses in one half of its occurrences, how
many are among the top_k that it uses most in the other half, of the same domain; from the counts by
token id in OLMoE's repository (allenai/OLMoE, scripts/routing_output), occurrences halved by lot,
mean over domains and three layers. Neighbours in a text fall into both halves, and half is 105,000
tokens: in favour of the table. Its own counts would name 0.676 and 0.630, those of the other
domains 0.299 and 0.420 (test_prediction.py works all of these out)."""

BY_TOKEN = ("token-olmoe", "token-mixtral")
"""Tables by token id: known before the first layer, and two layers are spoken of at a time, as the
engines' own does (PREDICT-7)."""


def accuracies(name: str, layers: int) -> tuple[float, ...]:
    """The accuracy at each of `layers` layers with experts.

    Raises BadInput for a name that there is not, or a table of another depth.
    """
    if name not in ACCURACY:
        raise BadInput(f"accuracy: {name!r}; known: {', '.join(ACCURACY)}")
    told = ACCURACY[name]
    if not isinstance(told, tuple):
        first = told if name == "perfect" or name in BY_TOKEN else 0.0
        return (first, *[told] * (layers - 1))
    if len(told) != layers:
        raise BadInput(f"accuracy: {name!r} is of {len(told)} layers; the model has {layers}")
    return told


class NoisyOracle(Predictor):
    """truth      the experts that a visit will name, a tuple a token
    accuracy   a at each layer with experts, 0 to 1; a layer at 0 is not spoken of
    ahead      layers spoken of at a time; the i-th from here scores 1 - (i - 1) / (ahead + 1)
    """

    def __init__(
        self,
        options: ControlOptions,
        truth: Callable[[Visit], Named],
        accuracy: Sequence[float],
        seed: int = 0,
        ahead: int = 1,
    ) -> None:
        super().__init__(options)
        if len(accuracy) != len(self.layers) or not all(0 <= a <= 1 for a in accuracy):
            raise BadInput(f"accuracy: {len(accuracy)} numbers from 0 to 1, one a layer, expected")
        self.truth, self.accuracy, self.seed, self.ahead = truth, tuple(accuracy), seed, ahead

    def opened(self, visit: Visit, tokens: Sequence[int]) -> list[Predicted]:
        return self._from(visit)

    def routed(
        self, visit: Visit, experts: Named, tokens: Sequence[int] = (), gates: Scores | None = None
    ) -> list[Predicted]:
        return self._from(visit)

    def _from(self, visit: Visit) -> list[Predicted]:
        out: list[Predicted] = []
        at = self.place.get(visit.layer, -1) + 1
        for i, layer in enumerate(self.layers[at : at + self.ahead]):
            if self.accuracy[at + i]:
                there = visit._replace(layer=layer)
                scores = self._spoiled(there, self.accuracy[at + i])
                out += self.say(there, scores * (1.0 - i / (self.ahead + 1)))
        return out

    def _spoiled(self, visit: Visit, accuracy: float) -> np.ndarray:
        """Votes [E] of the rows' sets, each spoiled for itself."""
        votes = np.zeros(self.experts)
        for row, named in enumerate(self.truth(visit)):
            votes[list(spoiled((self.seed, *visit, row), named, accuracy, self.experts))] += 1.0
        return votes


@lru_cache(maxsize=1 << 16)
def spoiled(
    seed: tuple[int, ...], named: tuple[int, ...], accuracy: float, experts: int
) -> tuple[int, ...]:
    """A row's experts, some replaced; kept, since compared schedulers are told the same."""
    taken, out = set(named), []
    for rank, expert in enumerate(named):
        draw = mixed(*seed, rank)
        if draw >= accuracy * 2**64 and len(taken) < experts:
            others = [e for e in range(experts) if e not in taken]
            expert = others[mixed(draw) % len(others)]
            taken.add(expert)
        out.append(expert)
    return tuple(out)


def mixed(*words: int) -> int:
    """64 well-mixed bits of the words: the finaliser of splitmix64, word after word."""
    x = 0
    for word in words:
        x = (x ^ word) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 31
    return x
