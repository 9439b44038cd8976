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
    oracle by the name of its accuracy (noisy_oracle.ACCURACY) or as a number from 0 to 1; with
    "@n" behind, of the next n layers at a time, as right about each of them.

    Raises BadInput for another name. None for "" and "none".
    """
    if name in ("", "none") or not options.layers:
        return None
    if name in ("activation", "layer"):
        return predictor(name, options)
    known, at, layers = name.partition("@")
    ahead = 2 if known in BY_TOKEN else 1
    if at:
        ahead = int(layers) if layers.isascii() and layers.isdigit() else 0
    if known in ACCURACY:
        told = accuracies(known, len(options.layers))
    else:
        told = (0.0, *[_share(known)] * (len(options.layers) - 1))
    if ahead < 1 or not all(0 <= a <= 1 for a in told):
        names = ", ".join(("activation", "layer", *ACCURACY))
        raise BadInput(
            f"predict: {name!r}; {names}, or an accuracy from 0 to 1, expected; behind all but "
            "activation and layer perhaps @ and a number of layers at a time, 1 or more: 0.94@3"
        )
    return NoisyOracle(options, truth, told, seed, ahead)


def _share(text: str) -> float:
    """A number, or one that is no share."""
    try:
        return float(text)
    except ValueError:
        return -1.0
