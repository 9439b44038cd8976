"""Executables, compiled ahead of time, one for each distinct piece and set of shapes (JAX-1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_impl.kernels.experts import experts_v0, experts_v1
from jax_impl.layers import Layers, Piece
from jax_impl.resident import dtype_of
from reference.vocab.config import ModelConfig
from reference.vocab.errors import Unsupported

Progress = Callable[[str], None]
Signature = tuple[tuple[tuple[int, ...], Any], ...]
"""(shape, dtype) of each tensor of an expert."""


def signature_of(handle: Sequence[Any]) -> Signature:
    """The signature of an expert's arrays."""
    return tuple((a.shape, a.dtype) for a in handle)


def signatures(ckpt: Any) -> list[Signature]:
    """Every kind of expert in the checkpoint. Raises Unsupported for one without a kernel."""
    config: ModelConfig = ckpt.config
    if config.moe_layers and tuple(ckpt.expert_roles) != ("gate", "up", "down"):
        raise Unsupported(str(ckpt.path), f"expert tensors {ckpt.expert_roles}", "gate, up, down")
    found: dict[Signature, None] = {}
    for layer in config.moe_layers:
        for e in range(config.experts):
            where = f"expert {layer}.{e}"
            found[
                tuple(
                    (tuple(r.shape), np.dtype(dtype_of(r.dtype, f"{r.file}: {where}")))
                    for r in ckpt.expert(layer, e)
                )
            ] = None
    return list(found)


def compiled(
    run: Callable[..., Any],
    donate: tuple[int, ...],
    shapes: tuple[Any, ...],
    name: str,
    progress: Progress | None,
) -> Any:
    """Compile ahead of time; the result refuses any other shape instead of compiling again."""
    begun = time.monotonic()
    program = jax.jit(run, donate_argnums=donate).lower(*shapes).compile()
    if progress is not None:
        progress(f"compiled {name} in {time.monotonic() - begun:.1f} s")
    return program


class Programs:
    """The executables of one model; what is not there yet is compiled when asked for."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._by_layer: dict[tuple[int, str, int | None], Any] = {}
        self._pieces: dict[tuple[int, Piece, str], Any] = {}
        self._experts: dict[tuple[int, Signature, int], Any] = {}

    @property
    def count(self) -> int:
        """Distinct executables so far."""
        return len(self._pieces) + len(self._experts)

    def piece(
        self,
        tile: int,
        piece: Piece,
        layer: int | None,
        width: int,
        arguments: tuple[Any, ...],
        progress: Progress | None = None,
    ) -> Any:
        """The executable of a piece at a layer (None: the LM head), called as
        run(at [tile, width], *arguments). Layers of equal description and shapes share it."""
        found = self._by_layer.get((tile, piece.source, layer))
        if found is None:
            shapes = str(jax.tree.map(lambda a: (a.shape, str(a.dtype)), arguments))
            found = self._pieces.get((tile, piece, shapes))
            if found is None:
                at = jax.ShapeDtypeStruct((tile, width), np.int32)
                if layer is None:
                    run, donate, name = (
                        self._layers.head(piece),
                        (),
                        f"{piece.source} + head, {tile} rows",
                    )
                else:
                    run, donate = self._layers.layer(piece), (1, 2, 3)
                    name = f"{piece.source} + layer {layer}, {tile} rows"
                found = compiled(run, donate, (at, *arguments), name, progress)
                self._pieces[tile, piece, shapes] = found
            self._by_layer[tile, piece.source, layer] = found
        return found

    def experts(
        self,
        tile: int,
        signature: Signature,
        count: int,
        out: jax.Array,
        x: jax.Array,
        progress: Progress | None = None,
    ) -> Any:
        """The executable for `count` tiles of experts, called as
        run(out, x, where [count, 2, tile], handles) -> out; out is donated."""
        found = self._experts.get((tile, signature, count))
        if found is None:
            compute = self._layers.compute

            def run(out: jax.Array, x: jax.Array, where: jax.Array, handles: Any) -> jax.Array:
                if count == 1:
                    return experts_v0(compute, out, x, where[0], handles[0])
                return experts_v1(compute, out, x, where, handles)

            where = jax.ShapeDtypeStruct((count, 2, tile), np.int32)
            one = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature)
            name = f"{count} expert(s), {tile} rows each"
            found = compiled(run, (0,), (out, x, where, (one,) * count), name, progress)
            self._experts[tile, signature, count] = found
        return found
