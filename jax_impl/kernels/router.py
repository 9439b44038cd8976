"""Which experts a row takes, and with what weights.

Top-k ladder, equal in bits for rows without NaN (JAX-6): ties to the lower index, +0.0 == -0.0.
    top_k_v0  counts, for every expert, those that come before it
    top_k_v1  lax.top_k, which ranks +0.0 above -0.0, over scores whose zeros are all +0.0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from reference.vocab.config import RouterSpec


def top_k_v0(scores: jax.Array, k: int) -> jax.Array:
    """[T, E] -> [T, k] int32: expert e has rank #(s_j > s_e) + #(s_j == s_e and j < e)."""
    e = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None, :]
    before = (other > mine) | ((other == mine) & (e[None, :] < e[:, None]))
    rank = before.sum(axis=-1, dtype=jnp.int32)
    at = rank[:, None, :] == jnp.arange(k, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(at, e, 0), axis=-1, dtype=jnp.int32)


def top_k_v1(scores: jax.Array, k: int) -> jax.Array:
    """As top_k_v0."""
    return lax.top_k(jnp.where(scores == 0.0, 0.0, scores), k)[1].astype(jnp.int32)


def route(spec: RouterSpec, logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logits [T, E] float32 -> (experts [T, k] int32, weights [T, k] float32, bad [T] bool).

    A row is bad when a score is NaN: the request that owns it has failed (JAX-7); its other two
    results mean nothing.
    """
    scores = jax.nn.softmax(logits, axis=-1)
    bad = jnp.isnan(logits).any(axis=-1) | jnp.isnan(scores).any(axis=-1)
    # ROUTE-2: chosen on the logits, for softmax keeps their order but may round two together.
    chosen = top_k_v1(logits, k)
    if spec.score == "topk_softmax":
        weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1), axis=-1)
    else:
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if spec.renormalise:
        total = weights[:, 0]
        for r in range(1, k):
            total = total + weights[:, r]
        weights = weights / (total + spec.renorm_eps)[:, None]
    return chosen, weights * spec.scale, bad
