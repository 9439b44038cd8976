"""Attention over a set of positions, put together from attention over its parts (LAMINA-9).

For positions I, with one query q and scores s_i = scale * q.k_i:

    m(I) = max s_i      S(I) = sum exp(s_i - m)      A(I) = sum exp(s_i - m) v_i / S(I)

and for disjoint I1, I2, with m = max(m1, m2) and w_i = S_i exp(m_i - m):

    A = (w1 A1 + w2 A2) / (w1 + w2)      S = w1 + w2

The empty set is (-inf, 0, 0). Without the maxima the same holds on paper and overflows in practice
(`unshifted`). The engines carry A(I) S(I) instead of A(I), which saves the divisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reference.numerics.formats import Array


@dataclass(frozen=True)
class Part:
    """m [R], S [R] and A [R, Dv] of R queries over one set of positions."""

    m: Array
    s: Array
    a: Array


def empty(rows: int, width: int, dtype: type[np.floating] = np.float64) -> Part:
    """The part of no positions."""
    return Part(
        np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, width), dtype)
    )


def part_of(q: Array, k: Array, v: Array, scale: float) -> Part:
    """q [R, D] over keys [n, D] and values [n, Dv]; n may be 0."""
    if len(k) == 0:
        return empty(len(q), v.shape[1], q.dtype.type)
    scores = q @ k.T * q.dtype.type(scale)
    m = scores.max(axis=1)
    p = np.exp(scores - m[:, None])
    s = p.sum(axis=1)
    return Part(m, s, p @ v / s[:, None])


def merge(one: Part, other: Part) -> Part:
    """The part of both sets together. Either may be empty."""
    m = np.maximum(one.m, other.m)
    w1, w2 = _weight(one, m), _weight(other, m)
    s = w1 + w2
    # Where both are empty s is 0, and so are the weighted values.
    a = (w1[:, None] * one.a + w2[:, None] * other.a) / np.where(s == 0, 1, s)[:, None]
    return Part(m, s, a)


def _weight(part: Part, m: Array) -> Array:
    """S exp(m_part - m); 0 for the empty part, also where m itself is that of nothing."""
    return part.s * np.exp(part.m - np.where(m == -np.inf, 0, m))


def merge_all(parts: Iterable[Part], rows: int, width: int) -> Part:
    """Any number of parts, from the left; none at all is the empty part."""
    total = empty(rows, width)
    for part in parts:
        total = merge(total, part)
    return total


def softmax_attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """The definition, all positions at once: [R, Dv]."""
    scores = q @ k.T * scale
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True)


def unshifted(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """(S, A) of the formula without a maximum: right only while exp(s_i) is a number."""
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(q @ k.T * scale)
        s = p.sum(axis=1)
        return s, p @ v / s[:, None]
