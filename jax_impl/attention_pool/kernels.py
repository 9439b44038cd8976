"""What a memory device runs beside `kernels.attention`: a write into its pools.

past_v0, this and own_v0 together are what a layer of the whole model does, in bits (LAMINA-2):
whether the past comes before the write or after it makes no difference where all of it is there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_impl.kernels.attention import write


def store(
    keys: jax.Array,
    values: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    tables: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """The pools with the rows' keys and values; rows that are not live go to the last block."""
    size = keys.shape[2]
    entry = positions // size % tables.shape[1]
    block = jnp.take_along_axis(tables, entry[:, None], axis=1)[:, 0]
    keys = write(keys, block, positions % size, k, live)
    if values is not None and v is not None:
        values = write(values, block, positions % size, v, live)
    return keys, values
