"""Held-out loss and routing statistics."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perf.demo_model.network import Params, Shape, forward, token_losses


def windows(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """(start, first target scored) of windows over `length` targets, each scored once."""
    out = [(0, 0)]
    while out[-1][0] + window < length:
        last = out[-1][0] + window
        start = min(out[-1][0] + stride, length - window)
        out.append((start, last))
    return out


def held_out_loss(
    params: Params, ids: np.ndarray, size: int, shape: Shape, window: int = 512, rows: int = 4
) -> float:
    """Nats a byte over a whole text of `size` bytes.

    ids: the text's tokens after the token that opens it. Every token is scored once, with at least
    half a window of context behind it (less only at the beginning); no row is dropped.
    """
    run = jax.jit(
        lambda p, x, y: token_losses(forward(p, x, shape, shape.experts / shape.top_k).logits, y)
    )
    places = windows(len(ids) - 1, window, window // 2)
    total = 0.0
    for n in range(0, len(places), rows):
        some = places[n : n + rows]
        padded = some + [some[-1]] * (rows - len(some))
        batch = np.stack([ids[a : a + window + 1] for a, _ in padded])
        losses = np.asarray(run(params, batch[:, :-1], batch[:, 1:]), np.float64)
        total += sum(losses[row, first - a :].sum() for row, (a, first) in enumerate(some))
    return total / size


def routing_statistics(params: Params, ids: np.ndarray, shape: Shape) -> list[dict[str, Any]]:
    """What the routers do on windows `ids` [B, S], layer by layer.

    entropy      of the experts' shares of all choices, over log E: 1 when all are used alike
    busiest      the busiest expert's share over the even share
    unused       experts never chosen
    sureness     1 - entropy of a token's router probabilities / log E, mean: 0 for a uniform router
    top_mass     probability of the chosen k together, mean
    overlap      experts that a token shares with the token before it, over k, mean
    chance       that overlap if each token drew its experts from the shares alone, independently
    """
    run = jax.jit(lambda p, x: forward(p, x, shape, shape.experts / shape.top_k).routing)
    out = []
    for layer, routing in enumerate(run(params, jnp.asarray(ids))):
        chosen = np.asarray(routing.chosen).reshape(*ids.shape, shape.top_k)
        probs = np.asarray(routing.probs, np.float64)
        counts = np.bincount(chosen.reshape(-1), minlength=shape.experts)
        share = counts / counts.sum()
        log_e = math.log(shape.experts)
        same = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).sum((-1, -2))
        inclusion = share * shape.top_k
        out.append({
            "layer": layer,
            "entropy": _entropy(share) / log_e,
            "busiest": float(share.max() * shape.experts),
            "unused": int((counts == 0).sum()),
            "sureness": 1 - float(np.mean([_entropy(p) for p in probs])) / log_e,
            "top_mass": float(np.sort(probs, -1)[:, -shape.top_k :].sum(-1).mean()),
            "overlap": float(same.mean() / shape.top_k),
            "chance": float((inclusion**2).sum() / shape.top_k),
        })  # fmt: skip
    return out


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())
