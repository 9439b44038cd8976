"""Feed-forward networks and the sum over a token's experts, one row at a time."""

from __future__ import annotations

import numpy as np

from reference.numerics.dot import matvec
from reference.numerics.formats import Array


def silu(x: Array) -> Array:
    """x * sigmoid(x), as x / (1 + exp(-x)); far below zero exp overflows and the result is -0."""
    with np.errstate(over="ignore"):
        return x / (x.dtype.type(1.0) + np.exp(-x))


def feed_forward(gate: Array, up: Array, down: Array, x: Array, *biases: Array) -> Array:
    """silu_gated: x [H] -> down(silu(gate x) * (up x)) [H] (NUM-7).

    gate, up [I, H] and down [H, I] as checkpoints store them; biases, if any, are those of gate,
    up [I] and down [H]. The same for a routed expert and for a dense layer's feed-forward.
    """
    if not biases:
        return matvec(down, silu(matvec(gate, x)) * matvec(up, x))
    gate_bias, up_bias, down_bias = biases
    inner = silu(matvec(gate, x) + gate_bias) * (matvec(up, x) + up_bias)
    return matvec(down, inner) + down_bias


def combine(weights: Array, outputs: Array) -> Array:
    """weights [K], outputs [K, H] -> [H]: sum of weight * output in rank order (ROUTE-5).

    Experts come in and run in any order; their outputs are kept apart until the last is there, so
    the sum is always the same one.
    """
    total = weights[0] * outputs[0]
    for w, y in zip(weights[1:], outputs[1:], strict=True):
        total = total + w * y
    return total
