"""Packed weights, kept as they are stored and widened to float32 where they are used (JAX-15).

    Fp8Blocks  float8 e4m3, times one scale for each block of the matrix
    Mxfp4      32 four-bit numbers with a common power of two
    Turned     not packed: a matrix stored [in, out]

Each is a pytree, so a layer's weights and an expert's handle may hold them like arrays. Widening is
exact but for numbers below 1.2e-38, which XLA takes for zero on CPU; the product is then float32.

Ladder of the four-bit numbers, equal in bits:
    nibbles_v0  a table of sixteen
    nibbles_v1  the exponent and fraction of a float32 from shifts; never by way of a denormal
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a four-bit number: two bits of exponent, one of fraction; the fourth bit is
the sign."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Blocks:
    """values [out, in] float8_e4m3fn; scales [ceil(out / B0), ceil(in / B1)] float32 or bfloat16,
    each for a block of B0 x B1 values; the last block of an axis may be cut off."""

    values: jax.Array
    scales: jax.Array
    block: tuple[int, int] = field(metadata={"static": True})

    def widened(self) -> jax.Array:
        """float32 [out, in]: value times scale, one multiplication."""
        out, inner = self.values.shape
        s = self.scales.astype(jnp.float32)
        s = jnp.repeat(s, self.block[0], axis=0)[:out]
        s = jnp.repeat(s, self.block[1], axis=1)[:, :inner]
        return self.values.astype(jnp.float32) * s


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """blocks uint8 [out, in/32, 16], two numbers a byte, the low half first; scales uint8
    [out, in/32], an exponent with bias 127 for the 32 numbers of a block."""

    blocks: jax.Array
    scales: jax.Array

    def widened(self) -> jax.Array:
        """float32 [out, in]."""
        out, groups, half = self.blocks.shape
        low, high = nibbles_v1(self.blocks & 15), nibbles_v1(self.blocks >> 4)
        values = jnp.stack([low, high], axis=-1).reshape(out, groups, 2 * half)
        power = lax.bitcast_convert_type(self.scales.astype(jnp.uint32) << 23, jnp.float32)
        return (values * power[:, :, None]).reshape(out, groups * 2 * half)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turned:
    """values [in, out], a stored matrix that multiplies rows from the right."""

    values: jax.Array


Weight = jax.Array | Fp8Blocks | Mxfp4 | Turned


def wide(w: Weight) -> jax.Array:
    """Any weight as float32 [out, in]."""
    if isinstance(w, Fp8Blocks | Mxfp4):
        return w.widened()
    return w.values.T.astype(jnp.float32) if isinstance(w, Turned) else w.astype(jnp.float32)


def nibbles_v0(codes: jax.Array) -> jax.Array:
    """uint8 codes 0..15 -> float32."""
    return jnp.asarray(np.array([*E2M1, *(-m for m in E2M1)], np.float32))[codes]


def nibbles_v1(codes: jax.Array) -> jax.Array:
    """As nibbles_v0. A magnitude m >= 2 is 2^(m div 2 - 1) (1 + (m mod 2) / 2); 0 and 1 are m/2."""
    code = codes.astype(jnp.uint32)
    m = code & 7
    small = jnp.where(m == 0, 0, 126 << 23).astype(jnp.uint32)
    bits = jnp.where(m < 2, small, ((m >> 1) + 126 << 23) | ((m & 1) << 22))
    return lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)
