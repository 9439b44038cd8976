"""Rotary position embedding of one position."""

from __future__ import annotations

import numpy as np

from reference.numerics.formats import Array
from reference.vocab.config import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> Array:
    """theta^(-2i / dims) for i < dims/2 -> [dims/2] float32 (NUM-5).

    Worked out in float64 and rounded once; these float32 numbers are then the definition in every
    mode, as checkpoints of the time stored them.
    """
    exponent = np.arange(0, spec.dims, 2, dtype=np.float64) / spec.dims
    return (1.0 / spec.theta**exponent).astype(np.float32)


def rotation(frequencies: Array, position: int, dtype: type[np.floating]) -> tuple[Array, Array]:
    """(cos, sin) [dims/2] of the angles at an absolute position.

    NUM-5: the angle is one float32 product, whatever the mode; its cosine and sine are taken in
    float64 and rounded to `dtype`.
    """
    angle = (np.float32(position) * frequencies).astype(np.float64)
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


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
