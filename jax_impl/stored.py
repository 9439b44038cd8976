"""Tensors as a checkpoint stores them: their types, and experts as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels.experts import FeedForward
from jax_impl.kernels.packed import Fp8Blocks, Mxfp4, Turned, Weight
from reference.vocab.config import ExpertStorage, PackedSpec
from reference.vocab.errors import Unsupported

STORED: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
"""The array type of each stored type, by its name in a checkpoint."""


def dtype_of(stored: str, where: str) -> np.dtype:
    """The array type of a stored type. Raises Unsupported for one without a kernel."""
    if stored not in STORED:
        raise Unsupported(where, f"stored type {stored}", ", ".join(STORED))
    return STORED[stored]


def packed_weight(spec: PackedSpec, values: Any, scales: Any) -> Weight:
    """A matrix with its scales beside it, in the form that `spec` tells."""
    if spec.kind == "fp8_block":
        return Fp8Blocks(values, scales, spec.block)
    return Mxfp4(values, scales)


def feed_forward_of(
    storage: ExpertStorage, roles: Sequence[str], handle: Sequence[jax.Array]
) -> FeedForward:
    """An expert's arrays, in the order of `roles`, as the kernel takes them: nothing is copied."""
    held = dict(zip(roles, handle, strict=True))

    def matrix(role: str) -> Weight:
        values = held[role]
        if storage.packed is not None and f"{role}_scale" in held:
            return packed_weight(storage.packed, values, held[f"{role}_scale"])
        return Turned(values) if storage.transposed else values

    if storage.gate_up == "interleaved":
        gate, up, bias = matrix("gate_up"), None, held.get("gate_up_bias")
    else:
        gate, up, bias = matrix("gate"), matrix("up"), held.get("gate_bias")
    return FeedForward(gate, up, matrix("down"), bias, held.get("up_bias"), held.get("down_bias"))


def known_roles(storage: ExpertStorage) -> frozenset[str]:
    """What an expert of this storage may consist of."""
    names = storage.matrices
    more = [f"{n}_{what}" for n in names for what in ("bias", "scale")]
    return frozenset([*names, *more])
