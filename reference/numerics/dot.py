"""Products with a fixed order: one row at a time, so that no sum knows who else is in the batch.

`np.einsum` without `optimize` is used on purpose. It never calls BLAS, whose kernels may change
with the number of rows and of threads; its order depends on nothing but the shape and memory order
of its two operands (NUM-3), and both are made contiguous here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reference.numerics.formats import Array


def matvec(w: Array, x: Array) -> Array:
    """w [O, I] times one row x [I] -> [O], in x's dtype (NUM-3). w as checkpoints store it."""
    assert w.ndim == 2 and x.ndim == 1 and w.shape[1] == x.shape[0], (w.shape, x.shape)
    assert w.dtype == x.dtype, (w.dtype, x.dtype)
    return np.einsum("oi,i->o", np.ascontiguousarray(w), np.ascontiguousarray(x))


def by_row(f: Callable[[Array], Array], rows: Array) -> Array:
    """f on each row of [T, ..] -> [T, ..]: the only way in which this engine makes a batch."""
    return np.stack([f(row) for row in rows])
