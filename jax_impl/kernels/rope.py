"""Norms and rotary embedding. The angle tables are made once on the host, in float64 where it
matters, so that no kernel has to reduce a large angle."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from reference.vocab.config import NormSpec, RopeSpec


def norm(
    spec: NormSpec, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Norm over the last axis: x [..., H] float32; weight and bias [H] float32 (NUM-4).

    `layer` subtracts the mean first and takes the variance about it.
    """
    if spec.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    y = x * (1.0 / jnp.sqrt(mean + spec.eps)) * weight
    return y if bias is None else y + bias


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(spec: RopeSpec, inv: np.ndarray) -> np.ndarray:
    """Blend of interpolated and plain frequencies over the corrected range of dimensions."""

    def turn(rotations: float) -> float:
        length = spec.original_max_position / (rotations * 2 * math.pi)
        return spec.dims * math.log(length) / (2 * math.log(spec.theta))

    low, high = turn(spec.beta_fast), turn(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(spec.dims // 2) - low) / (high - low), 0.0, 1.0)
    return inv / spec.factor * ramp + inv * (1.0 - ramp)


def _llama3(spec: RopeSpec, inv: np.ndarray) -> np.ndarray:
    wave = 2 * math.pi / inv
    smooth = (spec.original_max_position / wave - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 - smooth) * inv / spec.factor + smooth * inv


def _dynamic(spec: RopeSpec, length: int) -> np.ndarray:
    """Default frequencies over a base that grows with what the prompt exceeds the limit by."""
    limit = spec.original_max_position
    excess = spec.factor * max(length, limit) / limit - (spec.factor - 1.0)
    base = spec.theta * excess ** (spec.dims / (spec.dims - 2))
    return 1.0 / base ** (np.arange(0, spec.dims, 2, dtype=np.float64) / spec.dims)


def _longrope(spec: RopeSpec, inv: np.ndarray, length: int) -> tuple[np.ndarray, float]:
    """Frequencies divided one by one, and an amplitude, for a short or for a long prompt."""
    long = length > spec.original_max_position
    factors = spec.long_factor if long and spec.long_factor else spec.short_factor
    return inv / np.array(factors), spec.long_mscale if long else spec.short_mscale


@lru_cache(maxsize=256)
def frequencies(spec: RopeSpec, length: int = 0) -> tuple[np.ndarray, float]:
    """(float32 [dims/2] radians a position, factor on cos and sin) for a prompt of `length`
    tokens, which matters where `spec.by_prompt`. Kinds: see SUPPORTED."""
    inv = 1.0 / spec.theta ** (np.arange(0, spec.dims, 2, dtype=np.float64) / spec.dims)
    amplitude = 1.0
    if spec.kind == "linear":
        inv = inv / spec.factor
    elif spec.kind == "dynamic":
        inv = _dynamic(spec, length)
    elif spec.kind == "llama3":
        inv = _llama3(spec, inv)
    elif spec.kind == "longrope":
        inv, amplitude = _longrope(spec, inv, length)
    elif spec.kind == "yarn":
        inv = _yarn(spec, inv)
        if spec.attention_factor is not None:
            amplitude = spec.attention_factor
        elif spec.mscale and spec.mscale_all_dim:
            amplitude = _magnitude(spec.factor, spec.mscale) / _magnitude(
                spec.factor, spec.mscale_all_dim
            )
        else:
            amplitude = _magnitude(spec.factor)
    return inv.astype(np.float32), amplitude


SUPPORTED = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


def turns(spec: RopeSpec, positions: np.ndarray, length: int = 0) -> np.ndarray:
    """float32 [n, dims]: cosines, then sines, of the float32 angles of positions int [n] of a
    text whose prompt has `length` tokens."""
    inv, amplitude = frequencies(spec, length)
    angle = (positions.astype(np.float32)[:, None] * inv[None, :]).astype(np.float64)
    both = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * amplitude
    return both.astype(np.float32)


def rotate(spec: RopeSpec, x: jax.Array, turn: jax.Array) -> jax.Array:
    """Rotate the first `dims` of x [T, heads, D] by its rows' angles; turn [T, dims]."""
    half = spec.dims // 2
    cos, sin = turn[:, None, :half], turn[:, None, half:]
    head, tail = x[..., : spec.dims], x[..., spec.dims :]
    if spec.interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(head.shape)
    else:
        a, b = head[..., :half], head[..., half:]
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([y, tail], axis=-1) if tail.shape[-1] else y
