"""Asking the next layer's router early, for a guess of what it will say (PREDICT-4).

A small executable of its own, behind the layer's: it only reads the bank, so whether it runs or not
shows in no bit of the pass (PREDICT-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attend import Weights
from jax_impl.kernels import rope
from jax_impl.kernels.dots import dot
from jax_impl.kernels.router import route
from jax_impl.programs import Program, Progress, compiled
from reference.vocab.config import ModelConfig, MoeSpec

ROLES = ("mlp_norm", "mlp_norm_bias", "router", "router_bias", "selection_bias")


class NextGates:
    """The routers of a model as seen from the layer with experts before each of them.

    held   resident weights of each layer;  most  experts asked for (fewer where a router can give
    a token no more);  bank_rows  rows of the residual that the executables read
    """

    def __init__(
        self, config: ModelConfig, compute: str, held: Sequence[Weights], most: int, bank_rows: int
    ) -> None:
        self._config, self._compute, self._most = config, compute, most
        self._residual = jax.ShapeDtypeStruct((bank_rows, config.hidden), jnp.float32)
        layers = config.moe_layers
        self.next = dict(pairwise(layers))
        self._weights = {
            i: {role: held[i][role] for role in ROLES if role in held[i]} for i in layers[1:]
        }
        self._programs: dict[tuple[int, MoeSpec, str], Program] = {}

    @property
    def count(self) -> int:
        """Executables so far (JAX-1)."""
        return len(self._programs)

    def compile(self, tile: int, progress: Progress) -> None:
        """Every executable for tiles of so many rows."""
        for layer in self.next:
            self.program(layer, tile, progress)

    def program(
        self, layer: int, tile: int, progress: Progress | None = None
    ) -> tuple[Program, Weights]:
        """What asks the router behind `layer`, called as run(rows int32 [tile], residual, weights)
        -> experts int32 [tile, m] in rank order, -1 in a row with a NaN; and those weights."""
        weights = self._weights[self.next[layer]]
        spec = self._config.layers[self.next[layer]].feed_forward
        assert isinstance(spec, MoeSpec)
        shapes = str(jax.tree.map(lambda a: (a.shape, str(a.dtype)), weights))
        found = self._programs.get((tile, spec, shapes))
        if found is None:
            rows = jax.ShapeDtypeStruct((tile,), np.int32)
            name = f"next router, {tile} rows"
            found = compiled(self._asked(spec), (), (rows, self._residual, weights), name, progress)
            self._programs[tile, spec, shapes] = found
        return found, weights

    def _asked(self, spec: MoeSpec) -> Any:
        most = min(self._most, spec.router.reach(spec.experts))

        def run(rows: jax.Array, residual: jax.Array, w: Weights) -> jax.Array:
            x = rope.norm(self._config.norm, residual[rows], w["mlp_norm"], w.get("mlp_norm_bias"))
            logits = dot(self._compute, x, w["router"])
            if spec.router.bias:
                logits = logits + w["router_bias"]
            bias = w["selection_bias"] if spec.router.selection_bias else None
            chosen, _, bad = route(spec.router, logits, most, bias)
            return jnp.where(bad[:, None], -1, chosen)

        return run
