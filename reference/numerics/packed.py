"""Packed matrices, unpacked to float32 by bit operations and one multiplication."""

from __future__ import annotations

import numpy as np

from reference.numerics.formats import Array, widen
from reference.vocab.config import PackedSpec


def e4m3_to_f32(codes: Array) -> Array:
    """uint8 E4M3 codes -> float32, any shape, exactly (NUM-18).

    Sign 1, exponent 4 (bias 7), fraction 3. Exponent 0 is fraction * 2^-9; there are no
    infinities, and only 0x7F and 0xFF are NaN.
    """
    bits = codes.astype(np.uint32)
    exponent, fraction = (bits >> np.uint32(3)) & np.uint32(15), bits & np.uint32(7)
    normal = ((exponent + np.uint32(127 - 7)) << np.uint32(23)) | (fraction << np.uint32(20))
    small = fraction.astype(np.float32) * np.float32(2.0**-9)
    size = np.where(exponent == 0, small, normal.view(np.float32))
    size = np.where((bits & np.uint32(0x7F)) == 0x7F, np.float32(np.nan), size)
    return np.where(bits & np.uint32(0x80), -size, size).astype(np.float32)


def unpack_fp8(codes: Array, scale: Array, block: tuple[int, int]) -> Array:
    """codes uint8 [out, in], scale float32 or BF16 bits [ceil(out/rows), ceil(in/cols)] ->
    float32 [out, in] (NUM-18). The block is the stated one: the grid alone does not tell it."""
    rows, cols = codes.shape
    each = np.repeat(np.repeat(widen(scale), block[0], axis=0)[:rows], block[1], axis=1)[:, :cols]
    with np.errstate(over="ignore", invalid="ignore"):
        return e4m3_to_f32(codes) * each


FP4_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def unpack_mxfp4(codes: Array, scale: Array) -> Array:
    """codes uint8 [out, in/32, 16], scale uint8 [out, in/32] -> float32 [out, in] (NUM-19)."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)  # the low four bits first
    values = FP4_VALUES[pairs & 7] * np.where(pairs & 8, np.float32(-1.0), np.float32(1.0))
    out, groups = scale.shape
    with np.errstate(over="ignore"):
        wide = np.ldexp(values.reshape(out, groups, 32), scale.astype(np.int32)[:, :, None] - 127)
    return wide.reshape(out, groups * 32)


def unpack(spec: PackedSpec, codes: Array, scale: Array) -> Array:
    """A packed matrix -> float32 [out, in]."""
    if spec.kind == "mxfp4":
        return unpack_mxfp4(codes, scale)
    return unpack_fp8(codes, scale, spec.block)
