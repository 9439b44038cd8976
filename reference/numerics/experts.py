"""Feed-forward networks and the sum over a token's experts, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reference.files.layout import SCALE
from reference.numerics.dot import matvec
from reference.numerics.formats import Array, widen
from reference.numerics.packed import unpack
from reference.numerics.router import sigmoid
from reference.vocab.config import ActivationSpec, ExpertStorage


def silu(x: Array) -> Array:
    """x * sigmoid(x), as x / (1 + exp(-x)); far below zero exp overflows and the result is -0."""
    with np.errstate(over="ignore"):
        return x / (x.dtype.type(1.0) + np.exp(-x))


class FeedForward(NamedTuple):
    """One feed-forward, unpacked: gate, up [I, H] and down [H, I]; biases [I], [I], [H] or none.

    The same for a routed expert, a shared one and a dense layer.
    """

    gate: Array
    up: Array
    down: Array
    biases: tuple[Array, Array, Array] | None = None


SILU = ActivationSpec()


def feed_forward(w: FeedForward, x: Array, activation: ActivationSpec = SILU) -> Array:
    """x [H] -> [H]: down(activation(gate x, up x)), each product with its bias (NUM-7, NUM-15)."""
    gate, up = matvec(w.gate, x), matvec(w.up, x)
    if w.biases is not None:
        gate, up = gate + w.biases[0], up + w.biases[1]
    if activation.kind == "silu_gated":
        inner = silu(gate) * up
    else:
        inner = clamped(gate, up, activation)
    out = matvec(w.down, inner)
    return out if w.biases is None else out + w.biases[2]


def clamped(gate: Array, up: Array, spec: ActivationSpec) -> Array:
    """(up + 1) * gate * sigmoid(alpha * gate), after clamping (NUM-15): gate from above only."""
    kind = gate.dtype.type
    limit = kind(spec.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + kind(1.0)) * (gate * sigmoid(gate * kind(spec.alpha)))


def unpack_expert(
    storage: ExpertStorage, roles: Sequence[str], tensors: Sequence[Array], dtype: type[np.floating]
) -> FeedForward:
    """An expert's raw tensors, named by `roles`, as a feed-forward of `dtype` (NUM-18, NUM-19)."""
    raw = dict(zip(roles, tensors, strict=True))

    def matrix(role: str) -> Array:
        if storage.packed is not None:
            return widen(unpack(storage.packed, raw[role], raw[role + SCALE]), dtype)
        return widen(raw[role].T if storage.transposed else raw[role], dtype)

    if storage.gate_up == "interleaved":
        both = matrix("gate_up")
        gate, up = np.ascontiguousarray(both[0::2]), np.ascontiguousarray(both[1::2])
    else:
        gate, up = matrix("gate"), matrix("up")
    return FeedForward(gate, up, matrix("down"), _biases(raw, dtype))


def _biases(raw: dict[str, Array], dtype: type[np.floating]) -> tuple[Array, Array, Array] | None:
    """Of gate, up and down; gate's and up's may be interleaved in one."""
    if "down_bias" not in raw:
        return None
    if "gate_up_bias" in raw:
        both = widen(raw["gate_up_bias"], dtype)
        gate, up = np.ascontiguousarray(both[0::2]), np.ascontiguousarray(both[1::2])
    else:
        gate, up = widen(raw["gate_bias"], dtype), widen(raw["up_bias"], dtype)
    return gate, up, widen(raw["down_bias"], dtype)


def combine(weights: Array, outputs: Array) -> Array:
    """weights [K], outputs [K, H] -> [H]: sum of weight * output in rank order (ROUTE-5).

    Experts come in and run in any order; their outputs are kept apart until the last is there, so
    the sum is always the same one.
    """
    total = weights[0] * outputs[0]
    for w, y in zip(weights[1:], outputs[1:], strict=True):
        total = total + w * y
    return total
