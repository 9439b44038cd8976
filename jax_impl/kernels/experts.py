"""Gated feed-forwards and the combination of a row's experts.

Ladder of the routed experts, equal in bits (JAX-8):
    experts_v0  one expert a call
    experts_v1  several experts a call, each with its own tile of rows; for many small groups, where
                the call costs more than the products
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_impl.kernels.dots import dot
from jax_impl.kernels.packed import Weight
from reference.vocab.config import ActivationSpec


class FeedForward(NamedTuple):
    """The weights of one expert or dense feed-forward; gate, up [I, H], down [H, I].

    up None: gate holds both, [2I, H], gate in its even rows and up in the odd ones; so does
    gate_bias then. Biases are float or None.
    """

    gate: Weight
    up: Weight | None
    down: Weight
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def activate(spec: ActivationSpec, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What goes into the down projection (NUM-7): clamped_gated bounds the gate from above only."""
    if spec.kind == "clamped_gated":
        gate = jnp.minimum(gate, spec.limit)
        up = jnp.clip(up, -spec.limit, spec.limit)
        return (up + 1.0) * (gate * jax.nn.sigmoid(spec.alpha * gate))
    return jax.nn.silu(gate) * up


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.astype(jnp.float32)


def gated(compute: str, spec: ActivationSpec, x: jax.Array, w: FeedForward) -> jax.Array:
    """down(act(gate x, up x)) [T, H] with each product's bias; x [T, H] float32."""
    g = _plus(dot(compute, x, w.gate), w.gate_bias)
    if w.up is None:
        g, u = g[:, 0::2], g[:, 1::2]
    else:
        u = _plus(dot(compute, x, w.up), w.up_bias)
    return _plus(dot(compute, activate(spec, g, u), w.down), w.down_bias)


def experts_v0(
    compute: str,
    spec: ActivationSpec,
    out: jax.Array,
    x: jax.Array,
    where: jax.Array,
    weights: FeedForward,
) -> jax.Array:
    """out [R+1, K, H] with out[row, rank] = expert(x[row]); where [2, T]: rows, ranks."""
    y = gated(compute, spec, x[where[0]], weights)
    return out.at[where[0], where[1]].set(y)


def experts_v1(
    compute: str,
    spec: ActivationSpec,
    out: jax.Array,
    x: jax.Array,
    where: jax.Array,
    weights: tuple[FeedForward, ...],
) -> jax.Array:
    """experts_v0 for each expert in turn; where [J, 2, T]."""
    for j, w in enumerate(weights):
        out = experts_v0(compute, spec, out, x, where[j], w)
    return out


def combine(outputs: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of w_r * out_r in the order of the ranks: outputs [T, K, H], weights [T, K] (JAX-9)."""
    total = weights[:, 0, None] * outputs[:, 0]
    for r in range(1, outputs.shape[1]):
        total = total + weights[:, r, None] * outputs[:, r]
    return total
