"""A layer's attention for one tile of rows: what is projected, cached, attended and given out.

Both kinds look the same from outside. `rows` gives q [T, G, M, D], k [T, G, D] and v [T, G, Dv],
of which k and v are cached; `attend` gives [T, G, M, Dv]; `output` what the residual gets.

gqa   G KV heads, each with M = N/G query heads.
mla   absorbed (ATTN-8): the cached key is the compressed row and the one rotated part, G = 1 and
      M = N; the value is the key's first kv_rank entries. A head's own key matrix goes into its
      query, its value matrix onto its result. The same for prompt and decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.kernels import attention, rope
from jax_impl.kernels.dots import dot, heads_dot
from jax_impl.kernels.packed import wide
from reference.vocab.config import AttentionSpec, NormSpec

Weights = dict[str, Any]
"""A layer's resident tensors by role: vectors float32, matrices as `Weight`s."""


@dataclass(frozen=True)
class Attend:
    """The attention of layers described by `a`, in a run with these options."""

    a: AttentionSpec
    norm: NormSpec
    compute: str
    kv_dtype: str

    # -- from rows to what is cached

    def rows(
        self, w: Weights, x: jax.Array, turn: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k, v of normed rows x [T, H], rotated by turn [T, dims], k and v rounded to the KV
        dtype (ATTN-1)."""
        if self.a.kind == "mla":
            return self._latent_rows(w, x, turn)
        a = self.a
        q = self._heads(w, "q", x, a.heads, turn)
        k = self._heads(w, "k", x, a.kv_heads, turn)
        v = self._heads(w, "v", x, a.kv_heads, None)
        q = q.reshape(q.shape[0], a.kv_heads, a.heads // a.kv_heads, a.head_dim)
        return q, attention.round_kv(self.kv_dtype, k), attention.round_kv(self.kv_dtype, v)

    def _project(self, w: Weights, name: str, x: jax.Array, bias: bool) -> jax.Array:
        y = dot(self.compute, x, w[name])
        return y + w[f"{name}_bias"] if bias else y

    def _heads(
        self, w: Weights, name: str, x: jax.Array, heads: int, turn: jax.Array | None
    ) -> jax.Array:
        """q, k or v [T, heads, width]: project, norm, clamp, turn (ATTN-6)."""
        a, norm = self.a, self.a.qk_norm if name != "v" else "none"
        y = self._project(w, name, x, a.qkv_bias)
        if norm == "flat":
            y = rope.norm(self.norm, y, w[f"{name}_norm"])
        y = y.reshape(x.shape[0], heads, -1)
        if norm == "head":
            y = rope.norm(self.norm, y, w[f"{name}_norm"])
        if a.clip is not None:
            y = jnp.clip(y, -a.clip, a.clip)
        return y if turn is None or a.rope is None else rope.rotate(a.rope, y, turn)

    def _latent_rows(
        self, w: Weights, x: jax.Array, turn: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        a = self.a
        assert a.rope is not None and turn is not None
        inner = replace(self.norm, kind="rms", eps=a.latent_eps)
        if a.q_rank:
            y = rope.norm(inner, self._project(w, "q_a", x, a.qkv_bias), w["q_a_norm"])
            q = dot(self.compute, y, w["q_b"])
        else:
            q = dot(self.compute, x, w["q"])
        q = q.reshape(x.shape[0], a.heads, a.head_dim)
        plain, turned = q[..., : a.nope_dim], rope.rotate(a.rope, q[..., a.nope_dim :], turn)
        plain = heads_dot(self.compute, plain, self._up(w)[:, : a.nope_dim], 1)
        q = jnp.concatenate([plain, turned], axis=-1)[:, None]
        y = self._project(w, "kv_a", x, a.qkv_bias)
        latent = rope.norm(inner, y[:, : a.kv_rank], w["kv_a_norm"])
        key = rope.rotate(a.rope, y[:, None, a.kv_rank :], turn)
        k = jnp.concatenate([latent[:, None], key], axis=-1)
        k = attention.round_kv(self.kv_dtype, k)
        return q, k, k[..., : a.kv_rank]

    def _up(self, w: Weights) -> jax.Array:
        """kv_b as float32 [N, nope_dim + v_head_dim, kv_rank]."""
        a = self.a
        return wide(w["kv_b"]).reshape(a.heads, a.nope_dim + a.v_head_dim, a.kv_rank)

    # -- the cache

    def write(
        self,
        keys: jax.Array,
        values: jax.Array | None,
        k: jax.Array,
        v: jax.Array,
        tables: jax.Array,
        position: jax.Array,
        live: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The pools with the rows' k and v stored; rows that are not live go to the last block."""
        size = keys.shape[2]
        entry = position // size % tables.shape[1]
        block = jnp.take_along_axis(tables, entry[:, None], axis=1)[:, 0]
        keys = attention.write(keys, block, position % size, k, live)
        if values is not None:
            values = attention.write(values, block, position % size, v, live)
        return keys, values

    def attend(
        self,
        w: Weights,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        keys: jax.Array,
        values: jax.Array | None,
        tables: jax.Array,
        position: jax.Array,
    ) -> jax.Array:
        """[T, G, M, Dv] of rows whose k and v have been written."""
        sink = w["sinks"].reshape(q.shape[1:3]) if self.a.sinks else None
        return attention.attend_v0(
            self.compute, q, k, v, keys, values, tables, position,
            scale=self.a.scale, window=self.a.window, sink=sink,
        )  # fmt: skip

    # -- and out again

    def output(self, w: Weights, y: jax.Array) -> jax.Array:
        """What attention adds to the residual [T, H], from y [T, G, M, Dv]."""
        a = self.a
        y = y.reshape(y.shape[0], a.heads, -1)
        if a.kind == "mla":
            y = heads_dot(self.compute, y, self._up(w)[:, a.nope_dim :], 2)
        return self._project(w, "o", y.reshape(y.shape[0], -1), a.o_bias)
