"""The routed experts of one layer, for training on a CPU.

Rows are sorted by expert into a buffer of fixed capacity, [E, C, H], so that all experts run as one
batched product; a dense pass over all experts would cost E/K times as much. The moves into and
out of the buffer are row gathers in both directions: the backward pass of a gather is a scatter,
which is slow on a CPU, but where each row comes from is known, so it is a gather here too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


class Routing(NamedTuple):
    """chosen [N, K] int32 by falling score; weight [N, K] sums to 1; probs [N, E]."""

    chosen: Array
    weight: Array
    probs: Array


def route(x: Array, router: Array, k: int) -> Routing:
    """Softmax over all experts, the best k, their weights made to sum to 1 (norm_topk_prob)."""
    probs = jax.nn.softmax(x @ router.T, axis=-1)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(probs), k)
    # The chosen probabilities by a one-hot product: its gradient needs no scatter.
    picked = jnp.einsum("ne,nke->nk", probs, jax.nn.one_hot(chosen, probs.shape[-1]))
    return Routing(chosen, picked / picked.sum(-1, keepdims=True), probs)


def balance(routing: Routing) -> Array:
    """E * sum_e share_e * mean probability_e: 1 when even, E when all goes to one expert."""
    experts = routing.probs.shape[-1]
    share = jax.nn.one_hot(routing.chosen, experts).mean((0, 1))
    return experts * (jax.lax.stop_gradient(share) * routing.probs.mean(0)).sum()


@jax.custom_vjp
def spread(x: Array, token: Array, slot: Array) -> Array:
    """x [N, H] -> rows x[token] [P, H]; slot [N, K] says where each went, P for nowhere.

    Places that nothing went to hold some row; their gradient is ignored.
    """
    del slot
    return x[token]


@jax.custom_vjp
def collect(y: Array, token: Array, slot: Array) -> Array:
    """y [P, H] -> the sum over k of y[slot[:, k]] [N, H], zero for slot P: `spread` turned round.

    Rows of y that no slot names must be zero.
    """
    del token
    places = y.shape[0]
    rows = y[jnp.minimum(slot, places - 1)]
    return jnp.where((slot < places)[..., None], rows, 0).sum(1)


def _spread_backward(kept: tuple[Array, Array], d: Array) -> tuple[Array, np.ndarray, np.ndarray]:
    return collect(d, *kept), _no_gradient(kept[0]), _no_gradient(kept[1])


def _collect_backward(kept: tuple[Array, Array], d: Array) -> tuple[Array, np.ndarray, np.ndarray]:
    return spread(d, *kept), _no_gradient(kept[0]), _no_gradient(kept[1])


def _no_gradient(index: Array) -> np.ndarray:
    return np.zeros(index.shape, jax.dtypes.float0)


spread.defvjp(lambda x, token, slot: (spread(x, token, slot), (token, slot)), _spread_backward)
collect.defvjp(lambda y, token, slot: (collect(y, token, slot), (token, slot)), _collect_backward)


def plan(chosen: Array, experts: int, capacity: int) -> tuple[Array, Array]:
    """Where each assignment goes.

    chosen [N, K] -> (slot [N, K]: place e * C + c of each assignment, E * C where the expert is
    full; source [E * C]: the assignment n * K + rank in each place, N * K for none).
    """
    n, k = chosen.shape
    total = n * k
    flat = jnp.arange(total, dtype=jnp.int32)
    # One sort of plain integers (expert, assignment) is much faster than an argsort.
    order = jnp.sort(chosen.reshape(-1) * total + flat) % total
    place = jnp.sort(order * total + flat) % total
    counts = jax.nn.one_hot(chosen.reshape(-1), experts, dtype=jnp.int32).sum(0)
    start = jnp.cumsum(counts) - counts
    rank = place - start[chosen.reshape(-1)]
    slot = jnp.where(rank < capacity, chosen.reshape(-1) * capacity + rank, experts * capacity)
    column = jnp.arange(capacity, dtype=jnp.int32)
    taken = order[jnp.minimum(start[:, None] + column, total - 1)]
    source = jnp.where(column < counts[:, None], taken, total)
    return slot.reshape(n, k), source.reshape(-1)


def experts_forward(
    x: Array, routing: Routing, gate: Array, up: Array, down: Array, capacity: int
) -> tuple[Array, Array]:
    """Rows x [N, H] -> (their mixed outputs [N, H], share of assignments that found no place).

    gate, up [E, I, H], down [E, H, I], as stored.
    """
    n, k = routing.chosen.shape
    experts = gate.shape[0]
    slot, source = plan(routing.chosen, experts, capacity)
    token = jnp.minimum(source, n * k - 1) // k
    rows = spread(x, token, slot).reshape(experts, capacity, -1)
    # Weighted before the last product, where rows are short; places without a row weigh 0.
    weight = spread(routing.weight.reshape(-1, 1), jnp.minimum(source, n * k - 1),
                    slot.reshape(-1, 1))  # fmt: skip
    weight = jnp.where(source[:, None] < n * k, weight, 0).reshape(experts, capacity, 1)
    inner = jax.nn.silu(jnp.einsum("ech,eih->eci", rows, gate))
    inner = inner * jnp.einsum("ech,eih->eci", rows, up) * weight
    outputs = jnp.einsum("eci,ehi->ech", inner, down).reshape(experts * capacity, -1)
    return collect(outputs, token, slot), (slot == experts * capacity).mean()
