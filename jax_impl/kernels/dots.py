"""Matrix products of a tile of rows with a stored weight [out, in], or one of packed.py.

Ladder (all return float32 [T, out], every product and sum in float32, JAX-3):

    widen_v0    the weight is widened to float32 in the program, then one float32 product
    split_v1    bfloat16 weights only: the rows are cut into three bfloat16 parts whose sum is the
                row exactly, and the stored weight is used as it lies. Products of two bfloat16 are
                exact in float32, so this is widen_v0 with another order of summation: equal within
                a few units of float32 rounding, not in bits. Two to three times faster on CPU,
                where widening writes the weight to memory first. Needs |x| < 3.38e38; parts
                below 1e-38 are lost.
    round_bf16  `--compute bf16`: both inputs rounded to bfloat16, float32 accumulation
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.kernels.packed import Fp8Blocks, Mxfp4, Turned, Weight


def _contract(x: jax.Array, w: jax.Array, axis: int = 1) -> jax.Array:
    """x [T, in] . w [out, in] -> [T, out] float32; the inputs' own types go into the product.
    `axis` is that of w which is summed over."""
    return lax.dot_general(
        x,
        w,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def widen_v0(x: jax.Array, w: jax.Array, axis: int = 1) -> jax.Array:
    """The definition: float32 rows times the exactly widened weight."""
    return _contract(x, w.astype(jnp.float32), axis)


def split_v1(x: jax.Array, w: jax.Array, axis: int = 1) -> jax.Array:
    """x = high + middle + low, each a bfloat16; one product for all three, then the sum."""
    high = lax.reduce_precision(x, 8, 7)
    rest = x - high
    middle = lax.reduce_precision(rest, 8, 7)
    low = rest - middle
    parts = jnp.concatenate([high, middle, low]).astype(jnp.bfloat16)
    y = _contract(parts, w, axis)
    t = x.shape[0]
    return (y[2 * t :] + y[t : 2 * t]) + y[:t]


def round_bf16(x: jax.Array, w: jax.Array, axis: int = 1) -> jax.Array:
    """Both inputs rounded to bfloat16 (nearest even), accumulated in float32 (JAX-4)."""
    return _contract(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), axis)


def dot(compute: str, x: jax.Array, w: Weight) -> jax.Array:
    """The rung in use for this compute mode and the weight's stored type. A packed weight is
    widened to float32 here, in the program (JAX-15)."""
    axis = 1
    if isinstance(w, Turned):
        w, axis = w.values, 0
    elif isinstance(w, Fp8Blocks | Mxfp4):
        w = w.widened()
    if compute == "bf16":
        return round_bf16(x, w, axis)
    return split_v1(x, w, axis) if w.dtype == jnp.bfloat16 else widen_v0(x, w, axis)


def heads_dot(compute: str, x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """A product for each head: x [T, N, A] . w [N, ., .] over w's `axis` (1 or 2) -> [T, N, B],
    with w [N, A, B] or [N, B, A] float32."""
    return jnp.swapaxes(inner(compute, jnp.swapaxes(x, 0, 1), w, (2, axis)), 0, 1)


def inner(compute: str, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Attention's products: batch axis 0 (heads), `contract` names one axis of each. float32."""
    if compute == "bf16":
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
