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
    latent   not 0: there are no values; they are the first `latent` entries of the keys (ATTN-8)
    window   as in the description: blocks that no later position can see are dropped (ATTN-9),
             and then are empty
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    block: int
    dtype: type[np.floating]
    latent: int = 0
    window: int | None = None
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    dropped: int = 0

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
        self._drop(position)

    def _drop(self, position: int) -> None:
        """ATTN-9: this and every later position see nothing before position - window + 1."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        while self.dropped < first // self.block:
            self.keys[self.dropped] = self.keys[self.dropped][:, :0].copy()
            self.values[self.dropped] = self.values[self.dropped][:, :0].copy()
            self.dropped += 1

    def value(self, b: int) -> Array:
        """The values of block b: [G, B, Dv], or [G, B, latent]."""
        return self.keys[b][:, :, : self.latent] if self.latent else self.values[b]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are held."""
        return sum(a.nbytes for a in (*self.keys, *self.values))


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


def head_past(
    q: Array, kv: LayerKV, group: int, position: int, window: int | None, scale: np.floating
) -> Partial | None:
    """The R = N/G query heads q [R, D] of KV head `group` over the visible positions before
    `position`; None when there are none. ATTN-4: key j is visible iff
    position - window < j <= position.
    """
    first = 0 if window is None else max(0, position - window + 1)
    done: Partial | None = None
    for b in range(first // kv.block, -(-position // kv.block)):  # ATTN-2
        lo = max(first - b * kv.block, 0)
        hi = min(position - b * kv.block, kv.block)
        if lo < hi:
            k, v = kv.keys[b][group, lo:hi], kv.value(b)[group, lo:hi]
            done = merge(done, part(q, k, v, scale))
    return done


def head_own(
    done: Partial | None,
    q: Array,
    kv: LayerKV,
    group: int,
    position: int,
    scale: np.floating,
    sinks: Array | None = None,
) -> Array:
    """Merge the row's own position, which has been written (ATTN-1), and divide: [R, Dv].

    sinks [R] come after it (ATTN-7).
    """
    b, offset = divmod(position, kv.block)
    own = slice(offset, offset + 1)
    done = merge(done, part(q, kv.keys[b][group, own], kv.value(b)[group, own], scale))
    if sinks is not None:
        done = merge(done, Partial(sinks, np.ones_like(sinks), np.zeros_like(done.acc)))
    return done.acc / done.total[:, None]


def head_attention(
    q: Array,
    kv: LayerKV,
    group: int,
    position: int,
    window: int | None,
    scale: np.floating,
    sinks: Array | None = None,
) -> Array:
    """One KV head, past and own position: [R, Dv]."""
    done = head_past(q, kv, group, position, window, scale)
    return head_own(done, q, kv, group, position, scale, sinks)


def attend_past(
    q: Array, kv: LayerKV, position: int, window: int | None, scale: float
) -> list[Partial | None]:
    """q [N, D] at `position`, one part a KV head: all that needs no key or value of its own."""
    factor = q.dtype.type(scale)
    return [
        head_past(q[rows], kv, g, position, window, factor)
        for g, rows in enumerate(_heads_of(q, kv))
    ]


def finish_with_own(
    parts: list[Partial | None], q: Array, kv: LayerKV, position: int, scale: float
) -> Array:
    """What `attend_past` gave and the row's own position: [N, Dv]."""
    factor = q.dtype.type(scale)
    out = [
        head_own(parts[g], q[rows], kv, g, position, factor)
        for g, rows in enumerate(_heads_of(q, kv))
    ]
    return np.concatenate(out)


def attend(
    q: Array,
    kv: LayerKV,
    position: int,
    window: int | None,
    scale: float,
    sinks: Array | None = None,
) -> Array:
    """q [N, D] at `position` -> [N, Dv], one KV head after another; sinks [N] or none."""
    factor = q.dtype.type(scale)
    out = [
        head_attention(
            q[rows], kv, g, position, window, factor, None if sinks is None else sinks[rows]
        )
        for g, rows in enumerate(_heads_of(q, kv))
    ]
    return np.concatenate(out)


def _heads_of(q: Array, kv: LayerKV) -> list[slice]:
    """ATTN-5: query head n belongs to KV head n // (N/G)."""
    rep = q.shape[0] // kv.kv_heads
    return [slice(g * rep, (g + 1) * rep) for g in range(kv.kv_heads)]
