"""Norms of one row or of each head of one row."""

from __future__ import annotations

import numpy as np

from reference.numerics.formats import Array
from reference.vocab.config import NormSpec


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [.., D] -> x / sqrt(mean(x^2) + eps) * weight [D], over the last axis (NUM-4).

    Given one row [D], or the heads of one row [N, D]: never rows of different tokens.
    """
    kind = x.dtype.type
    flat = x.reshape(-1, x.shape[-1])
    mean = np.einsum("nd,nd->n", flat, flat) / kind(x.shape[-1])
    scale = kind(1.0) / np.sqrt(mean + kind(eps))
    return (flat * scale[:, None] * weight).reshape(x.shape)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """One row x [D] -> (x - mean) / sqrt(variance + eps) * weight + bias (NUM-14)."""
    kind = x.dtype.type
    centred = x - np.einsum("d->", x) / kind(x.shape[0])
    variance = np.einsum("d,d->", centred, centred) / kind(x.shape[0])
    return centred * (kind(1.0) / np.sqrt(variance + kind(eps))) * weight + bias


def norm(spec: NormSpec, x: Array, weight: Array, bias: Array | None) -> Array:
    """One row [D], by the description."""
    if spec.kind == "rms":
        return rms_norm(x, weight, spec.eps)
    assert bias is not None
    return layer_norm(x, weight, bias, spec.eps)
