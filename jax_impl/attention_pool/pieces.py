"""The compute pool's pieces of a layer: what `layers.Layers.layer` does, parted at its attention.

    opened       residual of the rows, their normed input, queries
    keys_values  keys and values of the same input, in the type in which they are cached
    closed       attention's output, feed-forward or router

`at` is int32 [T, 3]: bank row, token, position. `turn` [T, dims] are the rows' angles: an argument,
not looked up in the program, for that would be fused with the rotation where only one of queries
and keys is made, and rounded in another way. So the bits of a row are those of the whole layer
(LAMINA-13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_impl.attend import Attend, Weights
from jax_impl.kernels.experts import gated
from jax_impl.kv import KV_DTYPES
from jax_impl.layers import Bank, Layers, Piece, feed_forward
from reference.vocab.config import DenseSpec, LayerSpec


class PooledLayers(Layers):
    """Builds the functions to be compiled."""

    def _attend(self, spec: LayerSpec) -> Attend:
        return Attend(spec.attention, self.config.norm, self.compute, self.kv_dtype)

    def opened(self, piece: Piece) -> Callable[..., Any]:
        """f(at, bank, out, w, embed, turn) -> (bank, x [T, H], q [T, G, M, D]); bank donated.

        Keys and values are not made here: what only they need is not part of the program.
        """
        spec = piece.layer
        assert spec is not None

        def run(
            at: jax.Array, bank: Bank, out: jax.Array | None, w: Weights,
            embed: jax.Array | None, turn: jax.Array | None,
        ) -> tuple[Bank, jax.Array, jax.Array]:  # fmt: skip
            h = self._source(piece, at, bank, out, embed)
            x = self._norm(w, "attn_norm", h)
            q, _, _ = self._attend(spec).rows(w, x, turn)
            return bank._replace(residual=bank.residual.at[at[:, 0]].set(h)), x, q

        return run

    def keys_values(self, spec: LayerSpec) -> Callable[..., Any]:
        """f(x, w, turn) -> (k [T, G, D], v [T, G, Dv] or None) as they are cached."""

        def run(
            x: jax.Array, w: Weights, turn: jax.Array | None
        ) -> tuple[jax.Array, jax.Array | None]:
            _, k, v = self._attend(spec).rows(w, x, turn)
            kept: Any = KV_DTYPES[self.kv_dtype]
            return k.astype(kept), v.astype(kept) if spec.attention.cache_value_dim else None

        return run

    def closed(self, spec: LayerSpec) -> Callable[..., Any]:
        """f(at, bank, y [T, G, M, Dv], w) -> (bank, told); bank donated, told as of a layer."""
        f, scale = spec.feed_forward, self.config.residual_scale

        def run(
            at: jax.Array, bank: Bank, y: jax.Array, w: Weights
        ) -> tuple[Bank, jax.Array | None]:
            row = at[:, 0]
            h = bank.residual[row] + self._scaled(self._attend(spec).output(w, y), scale)
            x = self._norm(w, "mlp_norm", h)
            if isinstance(f, DenseSpec):
                h = h + self._scaled(gated(self.compute, f.activation, x, feed_forward(w)), scale)
                return bank._replace(residual=bank.residual.at[row].set(h)), None
            told, mix = self._routed(f, w, x)
            if f.shared is not None:
                h = h + self._scaled(self._shared(f, w, x), scale)
            bank = Bank(
                bank.residual.at[row].set(h), bank.x.at[row].set(x), bank.mix.at[row].set(mix)
            )
            return bank, told

        return run
