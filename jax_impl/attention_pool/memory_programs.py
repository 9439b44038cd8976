"""What a memory device runs, compiled for it ahead of time; and what it is told of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attention_pool.kernels import store
from jax_impl.kernels.attention import Partial, own_v0, past_v0
from jax_impl.kv import KV_DTYPES, KvDtype, KvKind
from jax_impl.programs import Progress, compiled
from reference.vocab.config import AttentionSpec


@dataclass(frozen=True)
class PoolOptions:
    """kinds, kv_block, tile, compute, kv_dtype as in the model; kinds hold a device's own blocks.

    shares   devices that a layer's heads are shared out over: all, or 1 (whole requests)
    overlap  attend over the past before the own keys have come
    timed    wait for each piece of attention, to measure when it ended
    pull_bytes  most bytes of one pull from a prefill worker (0: there is none)
    """

    kinds: tuple[KvKind, ...]
    kv_block: int
    tile: int
    compute: str = "f32"
    kv_dtype: KvDtype = "f32"
    shares: int = 1
    overlap: bool = True
    timed: bool = False
    pull_bytes: int = 0


class MemoryPrograms:
    """past(q, keys, values, tables, positions); own(part, q, k, v, sink); and, donating the pools,
    store and pull(keys, values, k, v, tables, positions, live), of a tile's and of a block's rows.
    Equal layers share them."""

    def __init__(
        self, specs: Sequence[AttentionSpec], options: PoolOptions, keys: Sequence[Any],
        values: Sequence[Any], sinks: Sequence[Any], device: Any,
    ) -> None:  # fmt: skip
        self._specs, self._options, self._device = specs, options, device
        self._kind = {i: kind for kind in options.kinds for i in kind.layers}
        of = jax.ShapeDtypeStruct
        self._pools = [
            (of(k.shape, k.dtype), None if v is None else of(v.shape, v.dtype))
            for k, v in zip(keys, values, strict=True)
        ]
        self._sinks = sinks
        self._found: dict[tuple[Any, ...], Any] = {}

    def compile(self, progress: Progress = lambda text: None) -> None:
        """Every program of every layer."""
        names = ("past", "store", "own", *(["pull"] if self._options.pull_bytes else []))
        with jax.default_device(self._device):
            for i in range(len(self._specs)):
                for name in names:
                    self.get(name, i, progress)

    def get(self, name: str, i: int, progress: Progress | None = None) -> Any:
        """The program of layer i; compiled now if it is not there yet."""
        a, o = self._specs[i], self._options
        width, (keys, values) = self._kind[i].ring, self._pools[i]
        key = (name, replace(a, rope=None), keys.shape, width)
        if key in self._found:
            return self._found[key]
        t, heads = o.kv_block if name == "pull" else o.tile, keys.shape[1]
        dim, value = a.cache_key_dim, a.cache_value_dim or a.kv_rank
        of = jax.ShapeDtypeStruct
        m = a.heads // a.cache_heads
        q = of((t, heads, m, dim), np.float32)
        k = of((t, heads, dim), KV_DTYPES[o.kv_dtype])
        v = of((t, heads, value), KV_DTYPES[o.kv_dtype]) if a.cache_value_dim else None
        sums, sum_of_values = of((t, heads, m), np.float32), of((t, heads, m, value), np.float32)
        part: Any = Partial(sums, sums, sum_of_values)  # type: ignore[arg-type]
        tables, positions = of((t, width), np.int32), of((t,), np.int32)

        def run_past(q: Any, keys: Any, values: Any, tables: Any, positions: Any) -> Any:
            return past_v0(
                o.compute, q, keys, values, tables, positions,
                width=value, scale=a.scale, window=a.window,
            )  # fmt: skip

        def run_own(part: Any, q: Any, k: Any, v: Any, sink: Any) -> jax.Array:
            k = k.astype(jnp.float32)
            v = k[..., :value] if v is None else v.astype(jnp.float32)
            return own_v0(o.compute, part, q, k, v, sink, scale=a.scale)

        if name == "past":
            run, donate, shapes = run_past, (), (q, keys, values, tables, positions)
        elif name == "own":
            run, donate, shapes = run_own, (), (part, q, k, v, self._sinks[i])
        else:
            run, donate = store, (0, 1)
            shapes = (keys, values, k, v, tables, positions, of((t,), np.bool_))
        title = f"{name} of layer {i} on {self._device}"
        self._found[key] = compiled(run, donate, shapes, title, progress)
        return self._found[key]
