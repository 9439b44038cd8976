"""Predictors: from what the routers have said, what the next ones will say.

base.py has the protocol and what all share, listener.py stands between an executor and control,
accuracy.py counts how good the guesses were. A predictor never changes what is computed, only what
is read ahead (PREDICT-1); specs/prediction.md has the rules, control/prefetch.py acts on them.
"""

from __future__ import annotations

from collections.abc import Callable

from reference.prediction.activation import ActivationMatrices
from reference.prediction.base import Named, Predictor
from reference.prediction.layer_table import LayerTable
from reference.prediction.next_gate import NextGate
from reference.prediction.noisy_oracle import ACCURACY, BY_TOKEN, NoisyOracle, accuracies
from reference.prediction.token_table import TokenTable
from reference.vocab.errors import BadInput, Unsupported
from reference.vocab.ids import Visit
from reference.vocab.options import PREFETCHERS, ControlOptions

__all__ = ["Predictor", "predictor", "simulated"]

_KINDS = {
    "next-gate": NextGate,
    "activation": ActivationMatrices,
    "layer": LayerTable,
    "token": TokenTable,
}


def predictor(name: str, options: ControlOptions) -> Predictor | None:
    """The predictor of that name for a model with these options; None for "none".

    Raises Unsupported for a name that there is not (PREDICT-3).
    """
    if name not in PREFETCHERS:
        raise Unsupported("prefetch", repr(name), ", ".join(PREFETCHERS))
    return _KINDS[name](options) if name in _KINDS and options.layers else None


def simulated(
    name: str, options: ControlOptions, truth: Callable[[Visit], Named], seed: int = 0
) -> Predictor | None:
    """A predictor for routes without a model: "activation" or "layer", which learn, or a noisy
    oracle by the name of its accuracy (noisy_oracle.ACCURACY) or as a number from 0 to 1.

    Raises BadInput for another name. None for "" and "none".
    """
    if name in ("", "none") or not options.layers:
        return None
    if name in ("activation", "layer"):
        return predictor(name, options)
    if name in ACCURACY:
        ahead = 2 if name in BY_TOKEN else 1
        return NoisyOracle(options, truth, accuracies(name, len(options.layers)), seed, ahead)
    try:
        share = float(name)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        known = ", ".join(("activation", "layer", *ACCURACY))
        raise BadInput(f"predict: {name!r}; {known}, or an accuracy from 0 to 1, expected")
    return NoisyOracle(options, truth, (0.0, *[share] * (len(options.layers) - 1)), seed)
