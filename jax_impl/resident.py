"""The tensors that stay on the device for the whole run: everything but the routed experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels import rope
from jax_impl.layers import Weights, roles
from reference.vocab.config import ModelConfig, RopeSpec
from reference.vocab.errors import Unsupported

DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
"""Stored types a kernel takes, by their name in a checkpoint."""


def dtype_of(stored: str, where: str) -> Any:
    """The array type of a stored type. Raises Unsupported for packed ones."""
    if stored not in DTYPES:
        raise Unsupported(where, f"stored type {stored}", ", ".join(DTYPES))
    return DTYPES[stored]


class Resident:
    """Weights as held: matrices in their stored type, except float16 ones, which are widened once
    (bfloat16 ones cost nothing extra in a product, see dots.split_v1); in bf16 mode matrices are
    rounded once; norms and biases float32. A tied head is the embedding itself.

    layers   one dict a layer, by role; embed, final_norm, lm_head
    turns    for each layer its rope table [max_len, dims] or None (equal ones are one array)
    nbytes   bytes of all of it
    """

    def __init__(self, ckpt: Any, max_len: int, compute: str) -> None:
        config: ModelConfig = ckpt.config
        self._ckpt, self._compute = ckpt, compute
        self.layers: list[Weights] = []
        for i in range(len(config.layers)):
            matrices, vectors = roles(config, i)
            held = {r: self._matrix(f"layers.{i}.{r}") for r in matrices}
            held.update({r: self._vector(f"layers.{i}.{r}") for r in vectors})
            self.layers.append(held)
        self.final_norm = self._vector("final_norm")
        self.embed = self._matrix("embed", rounded=False)
        alone = ckpt.has("lm_head") and not config.tied
        self.lm_head = self._matrix("lm_head") if alone else self.embed
        tables: dict[RopeSpec, jax.Array] = {}
        self.turns: list[jax.Array | None] = []
        for spec in config.layers:
            r = spec.attention.rope
            if r is not None and r not in tables:
                tables[r] = jax.device_put(rope.table(r, max_len))
            self.turns.append(None if r is None else tables[r])
        held = jax.tree.leaves(
            (self.layers, self.final_norm, self.embed, [] if not alone else self.lm_head)
        )
        self.nbytes = sum(a.nbytes for a in held) + sum(a.nbytes for a in tables.values())

    def _read(self, role: str) -> np.ndarray:
        ref = self._ckpt.tensor(role)
        kind = dtype_of(ref.dtype, f"{ref.file}: {role}")
        return self._ckpt.read(ref).view(kind).reshape(ref.shape)

    def _matrix(self, role: str, rounded: bool = True) -> jax.Array:
        raw = self._read(role)
        if self._compute == "bf16" and rounded:
            raw = raw.astype(jnp.bfloat16)
        elif raw.dtype == np.float16:
            raw = raw.astype(np.float32)
        return jax.device_put(raw)

    def _vector(self, role: str) -> jax.Array:
        return jax.device_put(self._read(role).astype(np.float32))
