"""Storage formats: bits as a checkpoint holds them, widened exactly, and rounding back for KV.

Raw arrays have the dtypes that `Checkpoint.read` returns: float32 and float16 as themselves, BF16
as uint16 bits. Widening is exact (NUM-1): every F16 and BF16 number is a float32 number.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
KvDtype = Literal["f32", "bf16", "f16"]
KV_DTYPES: tuple[KvDtype, ...] = ("f32", "bf16", "f16")


def bf16_to_f32(bits: Array) -> Array:
    """uint16 BF16 bits -> float32, any shape. NUM-1: BF16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_to_f32(half: Array) -> Array:
    """float16 -> float32, any shape, by bit operations (NUM-1).

    F16 is sign 1, exponent 5 (bias 15), fraction 10. Normal numbers get the bias 127; subnormal
    ones are fraction * 2^-24, which float32 holds as normal numbers; exponent 31 becomes 255, so
    infinities and NaN payloads stay.
    """
    bits = np.ascontiguousarray(half).view(np.uint16).astype(np.uint32)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    exponent = (bits >> np.uint32(10)) & np.uint32(0x1F)
    fraction = bits & np.uint32(0x03FF)
    rebased = ((exponent + np.uint32(127 - 15)) << np.uint32(23)) | (fraction << np.uint32(13))
    special = np.uint32(0x7F800000) | (fraction << np.uint32(13))
    subnormal = (fraction.astype(np.float32) * np.float32(2.0**-24)).view(np.uint32)
    magnitude = np.where(exponent == 31, special, np.where(exponent == 0, subnormal, rebased))
    return (magnitude | sign).view(np.float32)


def widen(raw: Array, dtype: type[np.floating[Any]] = np.float32) -> Array:
    """Raw checkpoint array -> contiguous `dtype` (float32 or float64), same shape, same values.

    Returns the array itself when nothing has to be done. TypeError for a dtype that is not a
    storage format of this module.
    """
    if raw.dtype == np.uint16:
        raw = bf16_to_f32(raw)
    elif raw.dtype == np.float16:
        raw = f16_to_f32(raw)
    elif raw.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(f"no widening from {raw.dtype}")
    return np.ascontiguousarray(raw, dtype=dtype)


def f32_to_bf16(x: Array) -> Array:
    """float32 -> uint16 BF16 bits, to nearest, ties to even (NUM-2); a NaN stays a NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(x), nan, rounded).astype(np.uint16)


def round_kv(x: Array, kv_dtype: KvDtype) -> Array:
    """x rounded to the KV dtype and widened again to x's own dtype (NUM-2).

    `f32` keeps a float32 x as it is; in float64 mode it rounds to float32 too, so that both modes
    cache numbers of the same kind. F16 overflows to infinity beyond 65504, as a cast does.
    """
    single = x.astype(np.float32)
    if kv_dtype == "bf16":
        single = bf16_to_f32(f32_to_bf16(single))
    elif kv_dtype == "f16":
        with np.errstate(over="ignore"):
            single = f16_to_f32(single.astype(np.float16))
    return single.astype(x.dtype)
