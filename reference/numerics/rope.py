"""Rotary position embedding of one position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from reference.numerics.formats import Array
from reference.vocab.config import RopeSpec


def plain_frequencies(spec: RopeSpec, theta: float | None = None) -> Array:
    """theta^(-2i / dims) for i < dims/2 -> [dims/2] float64."""
    exponent = np.arange(0, spec.dims, 2, dtype=np.float64) / spec.dims
    return 1.0 / (spec.theta if theta is None else theta) ** exponent


def inverse_frequencies(spec: RopeSpec, prompt: int = 0) -> Array:
    """Radians a position -> [dims/2] float32 (NUM-5, NUM-13), for a prompt of so many tokens.

    Worked out in float64 and rounded once; these float32 numbers are then the definition in every
    mode, as checkpoints of the time stored them.
    """
    return _KINDS[spec.kind](spec, prompt).astype(np.float32)


def amplitude(spec: RopeSpec, prompt: int = 0) -> float:
    """The factor on cosine and sine (NUM-13)."""
    if spec.kind == "longrope":
        return spec.long_mscale if prompt > spec.original_max_position else spec.short_mscale
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor

    def m(x: float) -> float:
        return 0.1 * x * math.log(spec.factor) + 1.0 if spec.factor > 1.0 else 1.0

    if spec.mscale and spec.mscale_all_dim:
        return m(spec.mscale) / m(spec.mscale_all_dim)
    return m(1.0)


def _linear(spec: RopeSpec, prompt: int) -> Array:
    return plain_frequencies(spec) / spec.factor


def _dynamic(spec: RopeSpec, prompt: int) -> Array:
    """A base that grows with the prompt, once it is longer than the original length."""
    limit, factor = spec.original_max_position, spec.factor
    stretch = factor * max(prompt, limit) / limit - (factor - 1.0)
    return plain_frequencies(spec, spec.theta * stretch ** (spec.dims / (spec.dims - 2)))


def _llama3(spec: RopeSpec, prompt: int) -> Array:
    """Long waves are slowed down by the factor, short ones left, those between blended."""
    f = plain_frequencies(spec)
    wavelength = 2 * math.pi / f
    low, high = spec.low_freq_factor, spec.high_freq_factor
    kept = (spec.original_max_position / wavelength - low) / (high - low)
    blend = kept * f + (1.0 - kept) * f / spec.factor
    blend = np.where(wavelength > spec.original_max_position / low, f / spec.factor, blend)
    return np.where(wavelength < spec.original_max_position / high, f, blend)


def _yarn(spec: RopeSpec, prompt: int) -> Array:
    """Dimensions that turn often within the original length are left, slow ones slowed down."""

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return spec.dims * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(spec.dims // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    f = plain_frequencies(spec)
    return f / spec.factor * slowed + f * (1.0 - slowed)


def _longrope(spec: RopeSpec, prompt: int) -> Array:
    long = spec.long_factor and prompt > spec.original_max_position
    return plain_frequencies(spec) / np.array(spec.long_factor if long else spec.short_factor)


_KINDS: dict[str, Callable[[RopeSpec, int], Array]] = {
    "default": lambda spec, prompt: plain_frequencies(spec),
    "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip


@lru_cache(maxsize=64)
def _table(spec: RopeSpec, prompt: int) -> tuple[Array, float]:
    return inverse_frequencies(spec, prompt), amplitude(spec, prompt)


def turn(
    spec: RopeSpec, position: int, prompt: int, dtype: type[np.floating]
) -> tuple[Array, Array]:
    """(cos, sin) [dims/2] at an absolute position of a text whose prompt has `prompt` tokens."""
    frequencies, factor = _table(spec, prompt if spec.by_prompt else 0)
    return rotation(frequencies, position, dtype, factor)


def rotation(
    frequencies: Array, position: int, dtype: type[np.floating], factor: float = 1.0
) -> tuple[Array, Array]:
    """(cos, sin) [dims/2] of the angles at an absolute position, times `factor`.

    NUM-5: the angle is one float32 product, whatever the mode; its cosine and sine are taken in
    float64, multiplied and rounded to `dtype`.
    """
    angle = (np.float32(position) * frequencies).astype(np.float64)
    return (np.cos(angle) * factor).astype(dtype), (np.sin(angle) * factor).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate the first dims = 2 * len(cos) entries of each head x [heads, D] -> [heads, D].

    NUM-6: pairs are (i, i + dims/2), or (2i, 2i + 1) when interleaved; the rest passes through.
    """
    half = cos.shape[0]
    out = x.copy()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[:, first], x[:, second]
    out[:, first] = a * cos - b * sin
    out[:, second] = b * cos + a * sin
    return out
