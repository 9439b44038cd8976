"""Blocked attention of single rows over a paged KV cache, in one fixed order (JAX-5).

A row at position p reduces the KV blocks that hold positions < p, in order, with a running
maximum, and merges its own position last as a part of one. Nothing depends on how the positions
came in: prompt, decode and re-scoring form the same sums.

Pools are [blocks + 1, G, B, D]; the last block takes the writes of padding rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.kernels.dots import inner

KV_BITS = {"f32": None, "bf16": (8, 7), "f16": (5, 10)}
"""Exponent and mantissa bits that K and V are rounded to; None keeps float32."""


def round_kv(kv_dtype: str, x: jax.Array) -> jax.Array:
    """The float32 value that the KV dtype can hold (nearest even)."""
    bits = KV_BITS[kv_dtype]
    return x if bits is None else lax.reduce_precision(x, *bits)


def write(
    pool: jax.Array, block: jax.Array, offset: jax.Array, rows: jax.Array, live: jax.Array
) -> jax.Array:
    """Store rows [T, G, D] at (block[t], offset[t]); rows that are not live store zeros (their
    block is the pool's last).

    What is not live is left out in the loop, not before it: there XLA would make the rows a second
    time, in a kernel with the choice, and round a rotation in another way than in the row's own
    sum. So the cached bits are those that were attended to.
    """

    def one(t: jax.Array, p: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(rows, t, 0, keepdims=True)
        part = jnp.where(live[t], row, 0.0).astype(pool.dtype)[:, :, None, :]
        return lax.dynamic_update_slice(p, part, (block[t], 0, offset[t], 0))

    return lax.fori_loop(0, rows.shape[0], one, pool)


class Partial(NamedTuple):
    """A part of a softmax sum: running maximum m and sum l [G, M], weighted values a [G, M, Dv].

    m = -inf, l = 0, a = 0 is the empty part.
    """

    m: jax.Array
    l: jax.Array  # noqa: E741  (the usual letter for the sum)
    a: jax.Array


def empty(groups: int, width: int, value_width: int) -> Partial:
    """The part of no positions."""
    m = jnp.full((groups, width), -jnp.inf, jnp.float32)
    return Partial(m, jnp.zeros_like(m), jnp.zeros((groups, width, value_width), jnp.float32))


def _weight(old: jax.Array, new: jax.Array) -> jax.Array:
    """exp(old - new), and 0 where old is the maximum of nothing."""
    return jnp.where(old == -jnp.inf, 0.0, jnp.exp(old - jnp.where(old == -jnp.inf, 0.0, new)))


def add_block(
    compute: str,
    part: Partial,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    scale: float,
) -> Partial:
    """Merge one block: q [G, M, D], k, v [G, B, D], seen [B] bool. A block in which nothing is
    seen leaves the part's bits as they are, whatever k and v hold."""
    score = inner(compute, q, k, (2, 2)) * scale
    score = jnp.where(seen, score, -jnp.inf)
    m = jnp.maximum(part.m, score.max(axis=-1))
    p = jnp.where(seen, jnp.exp(score - jnp.where(m == -jnp.inf, 0.0, m)[..., None]), 0.0)
    carry = _weight(part.m, m)
    value = inner(compute, p, jnp.where(seen[:, None], v, 0.0), (2, 1))
    new = Partial(m, part.l * carry + p.sum(axis=-1), part.a * carry[..., None] + value)
    return jax.tree.map(lambda n, o: jnp.where(seen.any(), n, o), new, part)


def add_own(
    compute: str, part: Partial, q: jax.Array, k: jax.Array, v: jax.Array, scale: float
) -> Partial:
    """Merge the row's own position: k [G, D], v [G, Dv]."""
    score = inner(compute, q, k[:, None, :], (2, 2))[..., 0] * scale
    m = jnp.maximum(part.m, score)
    carry, p = _weight(part.m, m), jnp.exp(score - m)
    value = inner(compute, p[..., None], v[:, None, :], (2, 1))
    return Partial(m, part.l * carry + p, part.a * carry[..., None] + value)


def add_sink(part: Partial, sink: jax.Array) -> Partial:
    """Merge a logit that has no value: sink [G, M] float32 (ATTN-7)."""
    m = jnp.maximum(part.m, sink)
    carry = _weight(part.m, m)
    return Partial(m, part.l * carry + jnp.exp(sink - m), part.a * carry[..., None])


def past_v0(
    compute: str,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    tables: jax.Array,
    positions: jax.Array,
    *,
    width: int,
    scale: float,
    window: int | None,
) -> Partial:
    """Parts of the rows q [T, G, M, D] over their positions before `positions` [T]; pools, tables
    [T, W]; `width` Dv of a value. Fields [T, G, M] and [T, G, M, Dv].

    The unit is one KV head of one row, in a loop of its own: its sum is the same program whatever
    rows and heads are in the call (JAX-5), and wherever its own position is merged (LAMINA-2).
    Block b of the text lies at table[b mod W]: a table of a layer with a window may be as short as
    the blocks that are still needed (JAX-13). values None: a value is the first Dv entries of its
    key (MLA's compressed form). With a window the loop starts at the first block that holds a
    visible position; the blocks before it would change nothing. A row at position 0 walks no block.
    """
    t, groups, m, _ = q.shape
    block = keys.shape[2]

    def unit(n: jax.Array) -> Partial:
        row, g = n // groups, n % groups
        rq, table, position = q[row, g][None], tables[row], positions[row]
        first = jnp.int32(0)
        if window is not None:
            first = jnp.maximum(position - window + 1, 0) // block

        def read(pool: jax.Array, there: jax.Array) -> jax.Array:
            size = (1, 1, block, pool.shape[3])
            return lax.dynamic_slice(pool, (there, g, 0, 0), size)[0].astype(jnp.float32)

        def body(b: jax.Array, part: Partial) -> Partial:
            at = b * block + jnp.arange(block, dtype=jnp.int32)
            seen = at < position
            if window is not None:
                seen = seen & (at > position - window)
            there = table[b % table.shape[0]]
            kb = read(keys, there)
            vb = kb[..., :width] if values is None else read(values, there)
            return add_block(compute, part, rq, kb, vb, seen, scale)

        return lax.fori_loop(first, (position + block - 1) // block, body, empty(1, m, width))

    parts = lax.map(unit, jnp.arange(t * groups, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(t, groups, *x.shape[2:]), parts)


def own_v0(
    compute: str,
    part: Partial,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink: jax.Array | None = None,
    *,
    scale: float,
) -> jax.Array:
    """Merge each row's own k [T, G, D] and v [T, G, Dv], and the sink [G, M], into its part, and
    divide: [T, G, M, Dv]. One KV head of one row at a time, as `past_v0`."""
    t, groups, m, _ = q.shape

    def unit(n: jax.Array) -> jax.Array:
        row, g = n // groups, n % groups
        mine = jax.tree.map(lambda x: x[row, g][None], part)
        total = add_own(compute, mine, q[row, g][None], k[row, g][None], v[row, g][None], scale)
        if sink is not None:
            total = add_sink(total, sink[g][None])
        return (total.a / total.l[..., None])[0]

    return lax.map(unit, jnp.arange(t * groups, dtype=jnp.int32)).reshape(t, groups, m, -1)


def attend_v0(
    compute: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None,
    sink: jax.Array | None = None,
) -> jax.Array:
    """A tile of rows: q [T, G, M, D], own k [T, G, D] and v [T, G, Dv] -> [T, G, M, Dv]. Each row
    walks only its own blocks. On CPU this reads the cache at memory speed; a form that walks all
    rows together was not faster and pays for the longest row of the tile."""
    part = past_v0(
        compute, q, keys, values, tables, positions,
        width=v.shape[-1], scale=scale, window=window,
    )  # fmt: skip
    return own_v0(compute, part, q, k, v, sink, scale=scale)


def attend_row_v0(
    compute: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    table: jax.Array,
    position: jax.Array,
    *,
    scale: float,
    window: int | None,
    sink: jax.Array | None = None,
) -> jax.Array:
    """One row alone: q [G, M, D], k [G, D], v [G, Dv], table [W], position () -> [G, M, Dv]."""
    return attend_v0(
        compute, q[None], k[None], v[None], keys, values, table[None], jnp.asarray(position)[None],
        scale=scale, window=window, sink=sink,
    )[0]  # fmt: skip
