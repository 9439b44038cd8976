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


def _only_best_groups(spec: RouterSpec, ranked: jax.Array) -> jax.Array:
    """[T, E] with -inf outside the `top_groups` best of `groups` equal runs of experts (ROUTE-6).

    -inf and not 0: with a bias the scores of the groups that stay may be negative.
    """
    t, experts = ranked.shape
    grouped = ranked.reshape(t, spec.groups, experts // spec.groups)
    if spec.group_score == "max":
        score = grouped.max(axis=-1)
    else:
        score = lax.top_k(grouped, 2)[0].sum(axis=-1)
    best = top_k_v1(score, spec.top_groups)
    kept = (best[:, :, None] == jnp.arange(spec.groups)).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(t, experts)


def _sparsemixer(spec: RouterSpec, s: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """k rounds over the scores s [T, E]: take the greatest of those not taken; its weight is its
    share of the softmax over those near it, among those not taken (ROUTE-8)."""
    chosen, weights, left = [], [], s
    for _ in range(k):
        e = top_k_v1(left, 1)
        best = jnp.take_along_axis(left, e, axis=-1)
        far = (best - s) / jnp.maximum(jnp.abs(s), best) > 2 * spec.jitter
        share = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        chosen.append(e)
        weights.append(jnp.take_along_axis(share, e, axis=-1))
        left = jnp.where(jnp.arange(s.shape[-1]) == e, -jnp.inf, left)
    return jnp.concatenate(chosen, axis=-1), jnp.concatenate(weights, axis=-1)


def _choose(
    spec: RouterSpec, logits: jax.Array, scores: jax.Array, bias: jax.Array | None, k: int
) -> jax.Array:
    """The k experts, best first. Without a bias they are those of the greatest logits: softmax and
    sigmoid keep the order of the logits but may round two of them together (ROUTE-2)."""
    ranked = logits if bias is None else scores + bias
    if spec.groups > 1:
        by_sum = spec.group_score == "top2_sum" and bias is None
        ranked = _only_best_groups(spec, scores if by_sum else ranked)
    return top_k_v1(ranked, k)


def route(
    spec: RouterSpec, logits: jax.Array, k: int, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logits [T, E] float32 -> (experts [T, k] int32, weights [T, k] float32, bad [T] bool).

    bias [E] is added to the scores for the choice alone (ROUTE-7). A row is bad when a score is
    NaN: the request that owns it has failed (JAX-7); its other two results mean nothing.
    """
    sigmoid = spec.score == "sigmoid"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    bad = jnp.isnan(logits).any(axis=-1) | jnp.isnan(scores).any(axis=-1)
    if spec.score == "sparsemixer":
        chosen, weights = _sparsemixer(spec, logits, k)
    else:
        chosen = _choose(spec, logits, scores, bias, k)
        if spec.score == "topk_softmax":
            weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1), axis=-1)
        else:
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if spec.renormalise:
        total = weights[:, 0]
        for r in range(1, k):
            total = total + weights[:, r]
        if spec.renorm_min:
            total = jnp.maximum(total, spec.renorm_min)
        weights = weights / (total + spec.renorm_eps)[:, None]
    return chosen, weights * spec.scale, bad
