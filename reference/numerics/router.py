"""The router: which K experts a token uses, and with which weights.

Anatomy: score -> check -> choose -> weigh. One row at a time.
"""

from __future__ import annotations

import numpy as np

from reference.numerics.formats import Array
from reference.vocab.config import RouterSpec
from reference.vocab.errors import RequestFailed


def softmax(x: Array) -> Array:
    """exp(x - max) / sum for one row [E] -> [E]."""
    e = np.exp(x - x.max())
    return e / e.sum()


def choose(scores: Array, k: int) -> Array:
    """The k best of scores [E] -> [k] expert ids, best first.

    ROUTE-2: equal scores go to the lower index, and +0.0 equals -0.0: a stable sort of the negated
    scores, in which IEEE comparison sees the two zeros as one.
    """
    return np.argsort(-scores, kind="stable")[:k].astype(np.int32)


def route(logits: Array, spec: RouterSpec, k: int, layer: int) -> tuple[Array, Array]:
    """One token's router logits [E], bias included -> (experts [k] int32 in rank order, weights).

    Raises RequestFailed naming the layer when a score is NaN (ROUTE-4).
    """
    with np.errstate(invalid="ignore"):
        scores = softmax(logits)
    # ROUTE-4: an infinite logit has no softmax either, and ends here too.
    if np.isnan(scores).any():
        raise RequestFailed(f"layer {layer}: a router score is NaN")
    # ROUTE-2: chosen on the logits. Softmax keeps their order, but may round two of them together
    # or to zero, and then the choice would hang on the rounding of exp.
    experts = choose(logits, k)
    # ROUTE-1: the softmax is over all E experts, or over the chosen K.
    weights = softmax(logits[experts]) if spec.score == "topk_softmax" else scores[experts]
    # ROUTE-3: divide by the sum of the chosen K only if the description says so.
    if spec.renormalise:
        weights = weights / (ordered_sum(weights) + logits.dtype.type(spec.renorm_eps))
    return experts, weights * logits.dtype.type(spec.scale)


def ordered_sum(weights: Array) -> np.floating:
    """The K weights added in rank order (ROUTE-3)."""
    total = weights[0]
    for w in weights[1:]:
        total = total + w
    return total
