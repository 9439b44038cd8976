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

from jax_impl.kernels import attention, rope
from jax_impl.kernels.dots import dot
from jax_impl.kernels.experts import combine, gated
from jax_impl.kernels.router import route
from reference.vocab.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoeSpec
from reference.vocab.errors import Unsupported

Source = Literal["embed", "combine", "load"]
Weights = dict[str, jax.Array]


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


def require_supported(config: ModelConfig, where: str) -> None:
    """Raises Unsupported for the first value of the description that no kernel here implements."""

    def need(good: bool, what: str, supported: str) -> None:
        if not good:
            raise Unsupported(where, what, supported)

    need(config.norm.kind == "rms", f"norm {config.norm.kind}", "rms")
    need(not config.head_bias, "bias of the LM head", "none")
    need(config.logits_scale == 1.0, f"logits_scale {config.logits_scale}", "1.0")
    for i, spec in enumerate(config.layers):
        a, f = spec.attention, spec.feed_forward
        need(a.kind == "gqa", f"attention {a.kind} in layer {i}", "gqa")
        need(not a.sinks, f"attention sinks in layer {i}", "none")
        need(
            a.rope is None or a.rope.kind in rope.SUPPORTED,
            f"rope {a.rope and a.rope.kind} in layer {i}",
            ", ".join(rope.SUPPORTED),
        )
        need(
            f.activation.kind == "silu_gated",
            f"activation {f.activation.kind} in layer {i}",
            "silu_gated",
        )
        if isinstance(f, DenseSpec):
            continue
        r = f.router
        need(not f.expert_bias, f"expert biases in layer {i}", "none")
        need(f.shared is None, f"shared expert in layer {i}", "none")
        need(
            r.score in ("softmax", "topk_softmax"),
            f"router score {r.score} in layer {i}",
            "softmax, topk_softmax",
        )
        need(not r.selection_bias, f"selection bias in layer {i}", "none")
        need(r.groups == 1, f"grouped routing in layer {i}", "one group")


def roles(config: ModelConfig, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(matrices, vectors) that layer holds resident, named as the checkpoint's roles."""
    spec = config.layers[layer]
    a, f = spec.attention, spec.feed_forward
    matrices, vectors = ["q", "k", "v", "o"], ["attn_norm", "mlp_norm"]
    vectors += ["q_bias", "k_bias", "v_bias"] if a.qkv_bias else []
    vectors += ["o_bias"] if a.o_bias else []
    vectors += ["q_norm", "k_norm"] if a.qk_norm != "none" else []
    if isinstance(f, MoeSpec):
        matrices += ["router"]
        vectors += ["router_bias"] if f.router.bias else []
    else:
        matrices += ["gate", "up", "down"]
        vectors += ["gate_bias", "up_bias", "down_bias"] if f.bias else []
    return tuple(matrices), tuple(vectors)


class Layers:
    """Builds the functions to be compiled for one model and one set of options."""

    def __init__(self, config: ModelConfig, compute: str, kv_dtype: str) -> None:
        self.config, self.compute, self.kv_dtype = config, compute, kv_dtype

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
            return embed[at[:, 1]].astype(jnp.float32) * self.config.embed_scale
        residual = bank.residual[at[:, 0]]
        if piece.source == "load":
            return residual
        assert out is not None
        mixed = combine(out[at[:, 0]], bank.mix[at[:, 0]])
        return residual + mixed * self.config.residual_scale

    def _heads(
        self, a: AttentionSpec, w: Weights, x: jax.Array, turn: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, N, D], k [T, G, D], v [T, G, Dv] of normed rows, rotated, not yet rounded."""

        def one(name: str, heads: int, width: int, normed: bool) -> jax.Array:
            y = dot(self.compute, x, w[name])
            if a.qkv_bias:
                y = y + w[f"{name}_bias"]
            if normed and a.qk_norm == "flat":
                y = rope.norm(self.config.norm, y, w[f"{name}_norm"])
            y = y.reshape(x.shape[0], heads, width)
            if normed and a.qk_norm == "head":
                y = rope.norm(self.config.norm, y, w[f"{name}_norm"])
            if a.clip is not None:
                y = jnp.clip(y, -a.clip, a.clip)
            if normed and a.rope is not None:
                assert turn is not None
                y = rope.rotate(a.rope, y, turn)
            return y

        q = one("q", a.heads, a.head_dim, True)
        k = one("k", a.kv_heads, a.head_dim, True)
        return q, k, one("v", a.kv_heads, a.v_head_dim, False)

    def _attention(
        self,
        a: AttentionSpec,
        w: Weights,
        h: jax.Array,
        at: jax.Array,
        live: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        turns: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(attention's output [T, H], pools with the rows' K and V written)."""
        position, tables = at[:, 2], at[:, 3:]
        x = rope.norm(self.config.norm, h, w["attn_norm"])
        turn = None if turns is None else turns[position]
        q, k, v = self._heads(a, w, x, turn)
        k, v = (attention.round_kv(self.kv_dtype, y) for y in (k, v))
        size = keys.shape[2]
        block = jnp.take_along_axis(tables, (position // size)[:, None], axis=1)[:, 0]
        keys = attention.write(keys, block, position % size, k, live)
        values = attention.write(values, block, position % size, v, live)
        q = q.reshape(q.shape[0], a.kv_heads, a.heads // a.kv_heads, a.head_dim)
        y = attention.attend_v0(
            self.compute,
            q,
            k,
            v,
            keys,
            values,
            tables,
            position,
            scale=a.scale,
            window=a.window,
        )
        y = dot(self.compute, y.reshape(q.shape[0], -1), w["o"])
        return (y + w["o_bias"] if a.o_bias else y), keys, values

    def layer(self, piece: Piece) -> Callable[..., Any]:
        """f(at, bank, keys, values, out, w, embed, turns) -> (bank, keys, values, told).

        told [T, 2K + 1] int32: experts, the bits of their weights, 1 if a score is NaN; None
        behind a dense layer. bank, keys and values are donated.
        """
        spec = piece.layer
        assert spec is not None
        a, f = spec.attention, spec.feed_forward

        def run(
            at: jax.Array,
            bank: Bank,
            keys: jax.Array,
            values: jax.Array,
            out: jax.Array | None,
            w: Weights,
            embed: jax.Array | None,
            turns: jax.Array | None,
        ) -> tuple[Bank, jax.Array, jax.Array, jax.Array | None]:
            row = at[:, 0]
            live = row < bank.residual.shape[0] - 1
            h = self._source(piece, at, bank, out, embed)
            y, keys, values = self._attention(a, w, h, at, live, keys, values, turns)
            h = h + y * self.config.residual_scale
            x = rope.norm(self.config.norm, h, w["mlp_norm"])
            if isinstance(f, DenseSpec):
                biases = [w[f"{n}_bias"] for n in ("gate", "up", "down")] if f.bias else ()
                y = gated(self.compute, x, w["gate"], w["up"], w["down"], *biases)
                h = h + y * self.config.residual_scale
                return bank._replace(residual=bank.residual.at[row].set(h)), keys, values, None
            logits = dot(self.compute, x, w["router"])
            if f.router.bias:
                logits = logits + w["router_bias"]
            chosen, mix, bad = route(f.router, logits, f.top_k)
            bits = lax.bitcast_convert_type(mix, jnp.int32)
            told = jnp.concatenate([chosen, bits, bad[:, None].astype(jnp.int32)], axis=1)
            bank = Bank(
                bank.residual.at[row].set(h), bank.x.at[row].set(x), bank.mix.at[row].set(mix)
            )
            return bank, keys, values, told

        return run

    def head(self, piece: Piece) -> Callable[..., Any]:
        """f(at, bank, out, final_norm, lm_head) -> logits [T, V] float32; changes nothing."""

        def run(
            at: jax.Array,
            bank: Bank,
            out: jax.Array | None,
            final_norm: jax.Array,
            lm_head: jax.Array,
        ) -> jax.Array:
            h = self._source(piece, at, bank, out, None)
            return dot(self.compute, rope.norm(self.config.norm, h, final_norm), lm_head)

        return run
