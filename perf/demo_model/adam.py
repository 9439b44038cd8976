"""Adam with decoupled weight decay, a clipped gradient and a schedule that may be cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from perf.demo_model.network import Params

Moments = dict[str, Any]


@dataclass(frozen=True)
class Adam:
    """`peak` is reached after `warm_up` steps, held, and falls as a cosine to 0 at the end.

    The fall takes the last `1 - hold` of the steps. Until then nothing depends on their
    number: a run can be given its length while it runs, and still is the run of that length.
    """

    peak: float
    steps: int
    warm_up: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    hold: float = 0.6

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        held = self.hold * self.steps
        fall = max(0.0, (step - held) / (self.steps - held))
        return self.peak * 0.5 * (1 + math.cos(math.pi * fall))


def start(params: Params) -> Moments:
    """First and second moments, all zero."""
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
    return {"m": zeros, "v": {name: jnp.zeros_like(v) for name, v in params.items()}}


def update(
    adam: Adam, params: Params, grads: Params, moments: Moments, rate: jax.Array, step: jax.Array
) -> tuple[Params, Moments, jax.Array]:
    """(parameters, moments, norm of the gradient) after one step; `step` counts from 0."""
    size = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads.values()))
    scale = jnp.minimum(1.0, adam.clip / (size + 1e-6))
    count = step + 1
    fix1, fix2 = 1 - adam.beta1**count, 1 - adam.beta2**count
    new, m1, v1 = {}, {}, {}
    for name, value in params.items():
        g = grads[name] * scale
        m = m1[name] = adam.beta1 * moments["m"][name] + (1 - adam.beta1) * g
        v = v1[name] = adam.beta2 * moments["v"][name] + (1 - adam.beta2) * g * g
        change = (m / fix1) / (jnp.sqrt(v / fix2) + adam.eps)
        if value.ndim > 1:
            change = change + adam.decay * value
        new[name] = value - rate * change
    return new, {"m": m1, "v": v1}, size
