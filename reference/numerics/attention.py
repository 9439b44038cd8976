"""Attention of one query row over its request's own blocked KV.

The order of the sum is the definition (ATTN-2, ATTN-3), the same for prompt, decode and scoring:
blocks at absolute multiples of the block size over strictly earlier positions, one after another,
then the row's own position as a part of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reference.numerics.formats import Array


@dataclass
class LayerKV:
    """One request's keys and values of one layer, in blocks that are made when first needed.

    keys[b] [G, B, D] and values[b] [G, B, Dv] hold positions b*B .. b*B + B - 1.
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    block: int
    dtype: type[np.floating]
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    def write(self, position: int, k: Array, v: Array) -> None:
        """Store k [G, D] and v [G, Dv], already rounded to the KV dtype, at a position (ATTN-1)."""
        b, offset = divmod(position, self.block)
        while len(self.keys) <= b:
            # NaN until written, so that reading ahead cannot pass unnoticed.
            shape = (self.kv_heads, self.block)
            self.keys.append(np.full((*shape, self.head_dim), np.nan, self.dtype))
            self.values.append(np.full((*shape, self.v_head_dim), np.nan, self.dtype))
        self.keys[b][:, offset] = k
        self.values[b][:, offset] = v


@dataclass
class Partial:
    """What is known of a softmax-weighted sum: running maximum [R], sum [R], weighted V [R, Dv]."""

    peak: Array
    total: Array
    acc: Array


def part(q: Array, k: Array, v: Array, scale: np.floating) -> Partial:
    """q [R, D] against n keys [n, D] and values [n, Dv] by themselves; n >= 1."""
    scores = np.einsum("rd,nd->rn", q, k) * scale
    peak = scores.max(axis=1)
    p = np.exp(scores - peak[:, None])
    return Partial(peak, np.einsum("rn->r", p), np.einsum("rn,nd->rd", p, v))


def merge(a: Partial | None, b: Partial) -> Partial:
    """ATTN-3: two parts as one, each scaled from its own maximum to the common one."""
    if a is None:
        return b
    peak = np.maximum(a.peak, b.peak)
    ca, cb = np.exp(a.peak - peak), np.exp(b.peak - peak)
    return Partial(peak, a.total * ca + b.total * cb, a.acc * ca[:, None] + b.acc * cb[:, None])


def head_attention(
    q: Array, kv: LayerKV, group: int, position: int, window: int | None, scale: np.floating
) -> Array:
    """The R = N/G query heads q [R, D] of KV head `group` at `position` -> [R, Dv].

    Position itself must have been written (ATTN-1). ATTN-4: key j is visible iff
    position - window < j <= position.
    """
    first = 0 if window is None else max(0, position - window + 1)
    done: Partial | None = None
    for b in range(first // kv.block, -(-position // kv.block)):  # ATTN-2
        lo = max(first - b * kv.block, 0)
        hi = min(position - b * kv.block, kv.block)
        if lo < hi:
            k, v = kv.keys[b][group, lo:hi], kv.values[b][group, lo:hi]
            done = merge(done, part(q, k, v, scale))
    b, offset = divmod(position, kv.block)
    own = slice(offset, offset + 1)
    done = merge(done, part(q, kv.keys[b][group, own], kv.values[b][group, own], scale))
    return done.acc / done.total[:, None]


def attend(q: Array, kv: LayerKV, position: int, window: int | None, scale: float) -> Array:
    """q [N, D] at `position` -> [N, Dv]. ATTN-5: query head n belongs to KV head n // (N/G)."""
    rep = q.shape[0] // kv.kv_heads
    factor = q.dtype.type(scale)
    out = [
        head_attention(q[g * rep : (g + 1) * rep], kv, g, position, window, factor)
        for g in range(kv.kv_heads)
    ]
    return np.concatenate(out)
