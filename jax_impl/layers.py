"""The jit-compiled pieces of the forward pass: one decoder layer, or the LM head, for one tile.

A piece begins with a *source* of its rows' residual: `embed` (tokens), `combine` (the bank's
residual plus the expert outputs of the layer before) or `load` (the bank's residual). It ends at
the layer's router, behind its dense feed-forward, or at the logits. Layers of equal description and
shapes share one executable, for weights are arguments (JAX-1).

Every piece takes `at` int32 [T, 3 + W]: bank row, token, position, then W KV block numbers. Padding
rows carry the bank's last row and the pools' last block and are stored nowhere else (JAX-2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.attend import Attend, Weights
from jax_impl.kernels import rope
from jax_impl.kernels.dots import dot
from jax_impl.kernels.experts import FeedForward, combine, gated
from jax_impl.kernels.router import route
from reference.vocab.config import DenseSpec, LayerSpec, ModelConfig, MoeSpec

Source = Literal["embed", "combine", "load"]


class Bank(NamedTuple):
    """State of the token rows: residual [R+1, H], x [R+1, H] (normed input of the experts),
    mix [R+1, K] (combining weights). Float32. The expert outputs [R+1, K, H] are kept beside it."""

    residual: jax.Array
    x: jax.Array
    mix: jax.Array


@dataclass(frozen=True)
class Piece:
    """What a piece's program depends on, beside the shapes of its arguments.

    layer is None for the LM head."""

    source: Source
    layer: LayerSpec | None


def feed_forward(w: Weights, prefix: str = "") -> FeedForward:
    """The resident feed-forward of a layer: its dense one, or its shared expert's."""
    matrices = (w[prefix + name] for name in ("gate", "up", "down"))
    biases = (w.get(f"{prefix}{name}_bias") for name in ("gate", "up", "down"))
    return FeedForward(*matrices, *biases)


class Layers:
    """Builds the functions to be compiled for one model and one set of options."""

    def __init__(self, config: ModelConfig, compute: str, kv_dtype: str) -> None:
        self.config, self.compute, self.kv_dtype = config, compute, kv_dtype

    def _scaled(self, x: jax.Array, factor: float) -> jax.Array:
        """NUM-11: a factor of 1 is no operation at all."""
        return x if factor == 1.0 else x * factor

    def _norm(self, w: Weights, name: str, x: jax.Array) -> jax.Array:
        return rope.norm(self.config.norm, x, w[name], w.get(f"{name}_bias"))

    def _source(
        self,
        piece: Piece,
        at: jax.Array,
        bank: Bank,
        out: jax.Array | None,
        embed: jax.Array | None,
    ) -> jax.Array:
        """The rows' residual [T, H]."""
        if piece.source == "embed":
            assert embed is not None
            return self._scaled(embed[at[:, 1]].astype(jnp.float32), self.config.embed_scale)
        residual = bank.residual[at[:, 0]]
        if piece.source == "load":
            return residual
        assert out is not None
        mixed = combine(out[at[:, 0]], bank.mix[at[:, 0]])
        return residual + self._scaled(mixed, self.config.residual_scale)

    def _shared(self, f: MoeSpec, w: Weights, x: jax.Array) -> jax.Array:
        """The output of the expert that every row uses [T, H]."""
        assert f.shared is not None
        y = gated(self.compute, f.activation, x, feed_forward(w, "shared_"))
        if f.shared.gated:
            y = y * jax.nn.sigmoid(dot(self.compute, x, w["shared_router"]))
        return y

    def layer(self, piece: Piece) -> Callable[..., Any]:
        """f(at, bank, keys, values, out, w, embed, turns) -> (bank, keys, values, told).

        turns: a table [positions, dims] of the layer's rope, or the rows' own [T, dims] where they
        follow the prompt's length; None without rope. told [T, 2K + 1] int32: experts, the bits of
        their weights, 1 if a score is NaN; None behind a dense layer. bank, keys and values are
        donated; values is None where the keys hold them too.
        """
        spec = piece.layer
        assert spec is not None
        a, f = spec.attention, spec.feed_forward
        attend = Attend(a, self.config.norm, self.compute, self.kv_dtype)
        scale = self.config.residual_scale

        def run(
            at: jax.Array,
            bank: Bank,
            keys: jax.Array,
            values: jax.Array | None,
            out: jax.Array | None,
            w: Weights,
            embed: jax.Array | None,
            turns: jax.Array | None,
        ) -> tuple[Bank, jax.Array, jax.Array | None, jax.Array | None]:
            row, position, tables = at[:, 0], at[:, 2], at[:, 3:]
            live = row < bank.residual.shape[0] - 1
            h = self._source(piece, at, bank, out, embed)
            turn = turns
            if turns is not None and a.rope is not None and not a.rope.by_prompt:
                turn = turns[position]
            q, k, v = attend.rows(w, self._norm(w, "attn_norm", h), turn)
            keys, values = attend.write(keys, values, k, v, tables, position, live)
            y = attend.attend(w, q, k, v, keys, values, tables, position)
            h = h + self._scaled(attend.output(w, y), scale)
            x = self._norm(w, "mlp_norm", h)
            if isinstance(f, DenseSpec):
                h = h + self._scaled(gated(self.compute, f.activation, x, feed_forward(w)), scale)
                return bank._replace(residual=bank.residual.at[row].set(h)), keys, values, None
            told, mix = self._routed(f, w, x)
            if f.shared is not None:  # JAX-16: before the routed experts are there
                h = h + self._scaled(self._shared(f, w, x), scale)
            bank = Bank(
                bank.residual.at[row].set(h), bank.x.at[row].set(x), bank.mix.at[row].set(mix)
            )
            return bank, keys, values, told

        return run

    def _routed(self, f: MoeSpec, w: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(told, combining weights [T, K]) of the experts' input x [T, H]."""
        logits = dot(self.compute, x, w["router"])
        if f.router.bias:
            logits = logits + w["router_bias"]
        bias = w["selection_bias"] if f.router.selection_bias else None
        chosen, mix, bad = route(f.router, logits, f.top_k, bias)
        bits = lax.bitcast_convert_type(mix, jnp.int32)
        return jnp.concatenate([chosen, bits, bad[:, None].astype(jnp.int32)], axis=1), mix

    def head(self, piece: Piece) -> Callable[..., Any]:
        """f(at, bank, out, w) -> logits [T, V] float32; changes nothing. w holds final_norm and
        lm_head, and their biases if they have any."""

        def run(at: jax.Array, bank: Bank, out: jax.Array | None, w: Weights) -> jax.Array:
            h = self._source(piece, at, bank, out, None)
            logits = dot(self.compute, self._norm(w, "final_norm", h), w["lm_head"])
            if self.config.head_bias:
                logits = logits + w["lm_head_bias"]
            scale = self.config.logits_scale
            return logits if scale == 1.0 else logits / scale

        return run
