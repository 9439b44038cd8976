"""The tensors that stay on the device for the whole run: everything but the routed experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attend import Weights
from jax_impl.kernels import rope
from jax_impl.kernels.packed import Weight
from jax_impl.stored import dtype_of, packed_weight
from reference.files.layout import SCALE, Shape, layer_roles, top_roles
from reference.vocab.config import ModelConfig, RopeSpec
from reference.vocab.errors import Unsupported


class Resident:
    """Weights as held: matrices in their stored type, except float16 ones, which are widened once
    (bfloat16 ones cost nothing extra in a product, see dots.split_v1); in bf16 mode matrices are
    rounded once. Packed matrices stay packed (JAX-15); norms and biases are float32. A tied head is
    the embedding itself.

    layers   one dict a layer, by role; embed; top: final_norm, lm_head and their biases
    turns    for each layer its rope table [max_len, dims], equal ones being one array, or None:
             without rope, or where angles follow the prompt's length
    nbytes   bytes of all of it
    """

    def __init__(self, ckpt: Any, max_len: int, compute: str) -> None:
        config: ModelConfig = ckpt.config
        self._ckpt, self._compute = ckpt, compute
        self.layers: list[Weights] = [
            {
                role: self._held(f"layers.{i}.{role}", shape)
                for role, shape in layer_roles(config, spec)
            }
            for i, spec in enumerate(config.layers)
        ]
        self.top: Weights = {
            role: self._held(role, shape) for role, shape in top_roles(config) if role != "embed"
        }
        self.embed = self._plain("embed")
        self.top.setdefault("lm_head", self.embed)
        tables: dict[RopeSpec, jax.Array] = {}
        self.turns: list[jax.Array | None] = []
        for spec in config.layers:
            r = spec.attention.rope
            if r is not None and not r.by_prompt and r not in tables:
                tables[r] = jax.device_put(rope.turns(r, np.arange(max_len)))
            self.turns.append(None if r is None else tables.get(r))
        held = jax.tree.leaves((self.layers, self.top, self.embed, list(tables.values())))
        self.nbytes = sum({id(a): a.nbytes for a in held}.values())

    def _held(self, role: str, shape: Shape) -> Weight:
        """A tensor as held, of the described shape (a file may store a vector as one row)."""
        if len(shape) == 1:
            return jax.device_put(self._read(role).astype(np.float32).reshape(shape))
        if self._ckpt.has(role + SCALE):
            assert self._ckpt.config.packed is not None
            both = jax.device_put((self._read(role), self._read(role + SCALE)))
            return packed_weight(self._ckpt.config.packed, *both)
        raw = self._read(role)
        if self._compute == "bf16":
            raw = raw.astype(jnp.bfloat16)
        elif raw.dtype == np.float16:
            raw = raw.astype(np.float32)
        return jax.device_put(raw)

    def _plain(self, role: str) -> jax.Array:
        """The embedding: rows are taken from it, so it is never rounded, and never packed."""
        if self._ckpt.has(role + SCALE):
            raise Unsupported(str(self._ckpt.path), f"packed {role}", "unpacked")
        raw = self._read(role)
        return jax.device_put(raw.astype(np.float32) if raw.dtype == np.float16 else raw)

    def _read(self, role: str) -> np.ndarray:
        ref = self._ckpt.tensor(role)
        kind = dtype_of(ref.dtype, f"{ref.file}: {role}")
        return self._ckpt.read(ref).view(kind).reshape(ref.shape)
