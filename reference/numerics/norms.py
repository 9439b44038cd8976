"""Root-mean-square norm of one row or of each head of one row."""

from __future__ import annotations

import numpy as np

from reference.numerics.formats import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [.., D] -> x / sqrt(mean(x^2) + eps) * weight [D], over the last axis (NUM-4).

    Given one row [D], or the heads of one row [N, D]: never rows of different tokens.
    """
    kind = x.dtype.type
    flat = x.reshape(-1, x.shape[-1])
    mean = np.einsum("nd,nd->n", flat, flat) / kind(x.shape[-1])
    scale = kind(1.0) / np.sqrt(mean + kind(eps))
    return (flat * scale[:, None] * weight).reshape(x.shape)
