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


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) of each."""
    with np.errstate(over="ignore"):
        return x.dtype.type(1.0) / (x.dtype.type(1.0) + np.exp(-x))


def route(
    logits: Array, spec: RouterSpec, k: int, layer: int, selection_bias: Array | None = None
) -> tuple[Array, Array]:
    """One token's router logits [E], bias included -> (experts [k] int32 in rank order, weights).

    selection_bias [E] is there iff the description says so (ROUTE-7). Raises RequestFailed naming
    the layer when a score is NaN (ROUTE-4).
    """
    with np.errstate(invalid="ignore"):
        scores = sigmoid(logits) if spec.score == "sigmoid" else softmax(logits)
    # ROUTE-4: an infinite logit has no softmax either, and ends here too.
    if np.isnan(scores).any():
        raise RequestFailed(f"layer {layer}: a router score is NaN")
    if spec.score == "sparsemixer":
        experts, weights = sparsemixer(logits, k, spec.jitter)
    else:
        experts = choose(_chosen_by(logits, scores, spec, selection_bias), k)
        # ROUTE-1: the softmax is over all E experts, or over the chosen K.
        weights = softmax(logits[experts]) if spec.score == "topk_softmax" else scores[experts]
    # ROUTE-3: divide by the sum of the chosen K only if the description says so.
    if spec.renormalise:
        kind = logits.dtype.type
        total = max(ordered_sum(weights), kind(spec.renorm_min))
        weights = weights / (total + kind(spec.renorm_eps))
    return experts, weights * logits.dtype.type(spec.scale)


def _chosen_by(logits: Array, scores: Array, spec: RouterSpec, bias: Array | None) -> Array:
    """What the experts are ranked by [E], -inf for those that cannot be chosen.

    ROUTE-2: the logits. Softmax and sigmoid keep their order, but may round two of them together
    or to zero, and then the choice would hang on the rounding of exp. ROUTE-7: with a selection
    bias the scores; ROUTE-6: also where a group's score is a sum.
    """
    by = logits if bias is None else scores + bias
    if spec.groups == 1:
        return by
    if bias is None and spec.group_score == "top2_sum":
        by = scores
    grouped = by.reshape(spec.groups, -1)
    if spec.group_score == "max":
        best = choose(grouped.max(axis=1), spec.top_groups)
    else:
        top = -np.sort(-grouped, axis=1)
        best = choose(top[:, 0] + top[:, 1], spec.top_groups)
    # ROUTE-6: -inf and not 0: with a bias, scores that stay may be negative.
    kept = np.full_like(grouped, -np.inf)
    kept[best] = grouped[best]
    return kept.reshape(-1)


def sparsemixer(logits: Array, k: int, jitter: float) -> tuple[Array, Array]:
    """ROUTE-8: k rounds of an argmax -> (experts [k] int32, weights [k])."""
    left = logits.copy()
    experts, weights = [], []
    for _ in range(k):
        best = int(choose(left, 1)[0])
        with np.errstate(invalid="ignore", divide="ignore"):
            behind = (left[best] - logits) / np.maximum(np.abs(logits), left[best])
        near = np.where(behind > logits.dtype.type(2 * jitter), logits.dtype.type(-np.inf), left)
        experts.append(best)
        weights.append(softmax(near)[best])
        left[best] = -np.inf
    return np.array(experts, np.int32), np.array(weights, logits.dtype)


def ordered_sum(weights: Array) -> np.floating:
    """The K weights added in rank order (ROUTE-3)."""
    total = weights[0]
    for w in weights[1:]:
        total = total + w
    return total
