"""Executables, compiled ahead of time, one for each distinct piece and set of shapes (JAX-1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_impl.kernels.experts import FeedForward, experts_v0, experts_v1
from jax_impl.layers import Layers, Piece
from jax_impl.stored import dtype_of, feed_forward_of, known_roles
from reference.vocab.config import ActivationSpec, ExpertStorage, ModelConfig, MoeSpec
from reference.vocab.errors import Unsupported

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExpertForm:
    """What the executable of an expert depends on, beside tile and bank: how it is stored and
    activated, and (shape, dtype) of each of its tensors, by role."""

    storage: ExpertStorage
    activation: ActivationSpec
    roles: tuple[str, ...]
    tensors: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @classmethod
    def of(cls, moe: MoeSpec, roles: Sequence[str], handle: Sequence[Any]) -> ExpertForm:
        """The form of an expert's arrays."""
        return cls(
            moe.storage, moe.activation, tuple(roles),
            tuple((tuple(a.shape), np.dtype(a.dtype)) for a in handle),
        )  # fmt: skip

    def weights(self, handle: Sequence[jax.Array]) -> FeedForward:
        """The arrays as the kernel takes them."""
        return feed_forward_of(self.storage, self.roles, handle)


def expert_forms(ckpt: Any) -> list[ExpertForm]:
    """Every form of expert in the checkpoint. Raises Unsupported for one without a kernel."""
    config: ModelConfig = ckpt.config
    found: dict[ExpertForm, None] = {}
    for layer in config.moe_layers:
        moe = config.layers[layer].feed_forward
        assert isinstance(moe, MoeSpec)
        known = known_roles(moe.storage)
        if not set(moe.storage.matrices) <= set(ckpt.expert_roles) <= known:
            raise Unsupported(
                str(ckpt.path), f"expert tensors {ckpt.expert_roles}", ", ".join(sorted(known))
            )
        for e in range(moe.experts):
            tensors = tuple(
                (tuple(r.shape), dtype_of(r.dtype, f"{r.file}: expert {layer}.{e}"))
                for r in ckpt.expert(layer, e)
            )
            found[ExpertForm(moe.storage, moe.activation, ckpt.expert_roles, tensors)] = None
    return list(found)


class Program:
    """A compiled function; `temporaries` are the bytes that a call takes from dispatch to end."""

    def __init__(self, run: Any) -> None:
        self._run = run
        try:
            self.temporaries = int(run.memory_analysis().temp_size_in_bytes)
        except (AttributeError, NotImplementedError, RuntimeError):
            self.temporaries = 0  # a backend that does not tell

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives; other shapes than it was compiled for are refused."""
        return self._run(*arguments)


def compiled(
    run: Callable[..., Any],
    donate: tuple[int, ...],
    shapes: tuple[Any, ...],
    name: str,
    progress: Progress | None,
) -> Program:
    """Compile ahead of time, so that no later call compiles again."""
    begun = time.monotonic()
    program = jax.jit(run, donate_argnums=donate).lower(*shapes).compile()
    if progress is not None:
        progress(f"compiled {name} in {time.monotonic() - begun:.1f} s")
    return Program(program)


class Programs:
    """The executables of one model; what is not there yet is compiled when asked for."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._by_layer: dict[tuple[int, str, int | None], Program] = {}
        self._pieces: dict[tuple[int, int, Piece, str], Program] = {}
        self._experts: dict[tuple[int, ExpertForm, int], Program] = {}

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
    ) -> Program:
        """The executable of a piece at a layer (None: the LM head), called as
        run(at [tile, width], *arguments). Layers of equal description and shapes share it."""
        found = self._by_layer.get((tile, piece.source, layer))
        if found is None:
            shapes = str(jax.tree.map(lambda a: (a.shape, str(a.dtype)), arguments))
            found = self._pieces.get((tile, width, piece, shapes))
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
                self._pieces[tile, width, piece, shapes] = found
            self._by_layer[tile, piece.source, layer] = found
        return found

    def experts(
        self,
        tile: int,
        form: ExpertForm,
        count: int,
        out: jax.Array,
        x: jax.Array,
        progress: Progress | None = None,
    ) -> Program:
        """The executable for `count` tiles of experts, called as
        run(out, x, where [count, 2, tile], handles) -> out; out is donated."""
        found = self._experts.get((tile, form, count))
        if found is None:
            compute, spec = self._layers.compute, form.activation

            def run(out: jax.Array, x: jax.Array, where: jax.Array, handles: Any) -> jax.Array:
                weights = tuple(form.weights(handle) for handle in handles)
                if count == 1:
                    return experts_v0(compute, spec, out, x, where[0], weights[0])
                return experts_v1(compute, spec, out, x, where, weights)

            where = jax.ShapeDtypeStruct((count, 2, tile), np.int32)
            one = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in form.tensors)
            name = f"{count} expert(s), {tile} rows each"
            found = compiled(run, (0,), (out, x, where, (one,) * count), name, progress)
            self._experts[tile, form, count] = found
        return found
