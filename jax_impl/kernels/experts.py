"""Gated feed-forwards and the combination of a row's experts.

Ladder of the routed experts, equal in bits (JAX-8):
    experts_v0  one expert a call
    experts_v1  several experts a call, each with its own tile of rows; for many small groups, where
                the call costs more than the products
"""

from __future__ import annotations

import jax

from jax_impl.kernels.dots import dot


def gated(
    compute: str,
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *biases: jax.Array,
) -> jax.Array:
    """down(silu(gate x) * up x) [T, H]; x [T, H] float32, gate, up [I, H], down [H, I].

    biases: none, or float32 ones of gate, up and down, each added to its product.
    """
    g, u = dot(compute, x, gate), dot(compute, x, up)
    if biases:
        g, u = g + biases[0], u + biases[1]
    y = dot(compute, jax.nn.silu(g) * u, down)
    return y + biases[2] if biases else y


def experts_v0(
    compute: str, out: jax.Array, x: jax.Array, where: jax.Array, weights: tuple[jax.Array, ...]
) -> jax.Array:
    """out [R+1, K, H] with out[row, rank] = expert(x[row]); where [2, T]: rows, ranks."""
    y = gated(compute, x[where[0]], *weights)
    return out.at[where[0], where[1]].set(y)


def experts_v1(
    compute: str,
    out: jax.Array,
    x: jax.Array,
    where: jax.Array,
    weights: tuple[tuple[jax.Array, ...], ...],
) -> jax.Array:
    """experts_v0 for each expert in turn; where [J, 2, T], weights J tuples."""
    for j, w in enumerate(weights):
        out = experts_v0(compute, out, x, where[j], w)
    return out


def combine(outputs: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of w_r * out_r in the order of the ranks: outputs [T, K, H], weights [T, K] (JAX-9)."""
    total = weights[:, 0, None] * outputs[:, 0]
    for r in range(1, outputs.shape[1]):
        total = total + weights[:, r, None] * outputs[:, r]
    return total
