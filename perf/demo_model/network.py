"""A qwen3_moe network in plain JAX: parameters, forward pass, loss.

Parameters are a flat dict: "embed" [V, H], "final_norm" [H], and for each layer i "i.q" [N*D, H],
"i.k", "i.v", "i.o" [H, N*D], "i.q_norm" [D], "i.k_norm" [D], "i.attn_norm" [H], "i.mlp_norm" [H],
"i.router" [E, H], "i.gate" and "i.up" [E, I, H], "i.down" [E, H, I]. The output head is the
embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from perf.demo_model.mixture import Routing, balance, experts_forward, route

Array = jax.Array
Params = dict[str, Array]


@dataclass(frozen=True)
class Shape:
    """The sizes of a network."""

    vocab: int = 1024
    hidden: int = 160
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    intermediate: int = 64
    theta: float = 10000.0
    eps: float = 1e-6


class Result(NamedTuple):
    """logits [B, S, V]; for each layer its routing, balance loss and share of dropped rows."""

    logits: Array
    routing: list[Routing]
    balance: Array
    dropped: Array


def init(shape: Shape, seed: int) -> Params:
    """Normal weights of deviation 1/sqrt(fan in); what is added to the residual starts small."""
    rng = np.random.Generator(np.random.PCG64(seed))
    s = shape

    def normal(*size: int, scale: float = 1.0) -> Array:
        values = rng.standard_normal(size) * scale / math.sqrt(size[-1])
        return jnp.asarray(values, jnp.float32)

    small = 1 / math.sqrt(2 * s.layers)
    params = {
        "embed": normal(s.vocab, s.hidden, scale=0.5),
        "final_norm": jnp.ones(s.hidden),
    }
    for i in range(s.layers):
        params |= {
            f"{i}.attn_norm": jnp.ones(s.hidden),
            f"{i}.q": normal(s.heads * s.head_dim, s.hidden),
            f"{i}.k": normal(s.kv_heads * s.head_dim, s.hidden),
            f"{i}.v": normal(s.kv_heads * s.head_dim, s.hidden),
            f"{i}.o": normal(s.hidden, s.heads * s.head_dim, scale=small),
            f"{i}.q_norm": jnp.ones(s.head_dim),
            f"{i}.k_norm": jnp.ones(s.head_dim),
            f"{i}.mlp_norm": jnp.ones(s.hidden),
            f"{i}.router": normal(s.experts, s.hidden, scale=0.5),
            f"{i}.gate": normal(s.experts, s.intermediate, s.hidden),
            f"{i}.up": normal(s.experts, s.intermediate, s.hidden),
            # Mixing k independent outputs shrinks them: hence the root of k.
            f"{i}.down": normal(s.experts, s.hidden, s.intermediate,
                                scale=small * math.sqrt(s.top_k)),
        }  # fmt: skip
    return params


def norm(x: Array, weight: Array, eps: float) -> Array:
    """Root mean square norm over the last axis."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: Array, theta: float) -> Array:
    """Rotary embedding of x [B, S, N, D], halves rotated against each other."""
    half = x.shape[-1] // 2
    frequency = theta ** (-np.arange(half, dtype=np.float32) / half)
    angle = np.arange(x.shape[1], dtype=np.float32)[:, None] * frequency
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x: Array, p: Params, i: int, s: Shape) -> Array:
    """Causal attention of x [B, S, H], query heads in groups that share a key/value head."""
    b, t, _ = x.shape
    group = s.heads // s.kv_heads
    q = (x @ p[f"{i}.q"].T).reshape(b, t, s.heads, s.head_dim)
    k = (x @ p[f"{i}.k"].T).reshape(b, t, s.kv_heads, s.head_dim)
    v = (x @ p[f"{i}.v"].T).reshape(b, t, s.kv_heads, s.head_dim)
    q = rotate(norm(q, p[f"{i}.q_norm"], s.eps), s.theta)
    k = rotate(norm(k, p[f"{i}.k_norm"], s.eps), s.theta)
    q = q.reshape(b, t, s.kv_heads, group, s.head_dim)
    scores = jnp.einsum("bqngd,bknd->bngqk", q, k) / math.sqrt(s.head_dim)
    mask = np.where(np.tri(t, dtype=bool), 0.0, -1e9).astype(np.float32)
    weights = jax.nn.softmax(scores + mask, axis=-1)
    y = jnp.einsum("bngqk,bknd->bqngd", weights, v)
    return y.reshape(b, t, s.heads * s.head_dim) @ p[f"{i}.o"].T


def forward(
    p: Params, tokens: Array, s: Shape, room: float, drop: float = 0.0, key: Array | None = None
) -> Result:
    """tokens [B, S] int32 -> Result.

    room   places an expert gets, as a multiple of its even share; E/K leaves none without one
    drop   probability of zeroing what a layer adds to the residual, value by value
    """
    b, t = tokens.shape
    n = b * t
    capacity = min(n, math.ceil(n * s.top_k / s.experts * room))
    keys = None if key is None else jax.random.split(key, 2 * s.layers)

    def kept(y: Array, number: int) -> Array:
        if keys is None or drop == 0:
            return y
        bits = jax.random.bits(keys[number], y.shape, jnp.uint8)
        return jnp.where(bits >= round(drop * 256), y / (1 - drop), 0)

    h = p["embed"][tokens]
    routings, losses, dropped = [], [], []
    for i in range(s.layers):
        h = h + kept(attention(norm(h, p[f"{i}.attn_norm"], s.eps), p, i, s), 2 * i)
        x = norm(h, p[f"{i}.mlp_norm"], s.eps).reshape(n, -1)
        routing = route(x, p[f"{i}.router"], s.top_k)
        y, full = experts_forward(
            x, routing, p[f"{i}.gate"], p[f"{i}.up"], p[f"{i}.down"], capacity
        )
        h = h + kept(y.reshape(h.shape), 2 * i + 1)
        routings.append(routing)
        losses.append(balance(routing))
        dropped.append(full)
    logits = norm(h, p["final_norm"], s.eps) @ p["embed"].T
    return Result(logits, routings, jnp.stack(losses), jnp.stack(dropped))


def token_losses(logits: Array, targets: Array) -> Array:
    """-log p of each target, in nats. Logits [..., V], targets [...]."""
    top = jax.nn.logsumexp(logits, axis=-1)
    hot = jax.nn.one_hot(targets, logits.shape[-1])
    return top - (logits * hot).sum(-1)
