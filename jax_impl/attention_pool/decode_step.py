"""One decode step of a checkpoint as one function of arrays, its attentions marked.

It is built from the engine's own pieces of a layer, without a row bank and with every expert at
hand: each runs on all rows, and a row takes the outputs that its router chose. So any family can be
converted, and a slice can be held against the engine's piece (LAMINA-24).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.attend import Attend
from jax_impl.attention_pool.converter import attention
from jax_impl.attention_pool.expert_slots import experts_on
from jax_impl.attention_pool.pieces import PooledLayers
from jax_impl.kernels.dots import dot
from jax_impl.kernels.experts import combine, gated
from jax_impl.layers import feed_forward
from jax_impl.programs import ExpertForm
from jax_impl.resident import Resident
from reference.vocab.config import DenseSpec, LayerSpec, MoeSpec

Caches = list[tuple[jax.Array, jax.Array | None]]


def marked_attention(attend: Attend) -> Callable[..., Any]:
    """write and attend as one marked operator: f(q, k, v, keys, values, tables, positions, live,
    sinks) -> (attended, keys, values)."""

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: Any, tables: jax.Array,
        positions: jax.Array, live: jax.Array, w: Any,
    ) -> Any:  # fmt: skip
        keys, values = attend.write(keys, values, k, v, tables, positions, live)
        y = attend.attend(w, q, k, v, keys, values, tables, positions)
        return (y, keys) if values is None else (y, keys, values)

    return attention(run)


class DecodeStep:
    """The function and its weights. `step(weights, places, caches, tokens)` -> (logits, caches);
    places: {"tables" [T, W], "positions" [T], "live" [T] bool, "turns" a list of [T, dims]}."""

    def __init__(self, ckpt: Any, max_len: int, compute: str = "f32", kv_dtype: str = "f32"):
        self.config = ckpt.config
        self.layers = PooledLayers(ckpt.config, compute, kv_dtype)
        held = self.held = Resident(ckpt, max_len, compute)
        experts = experts_on(ckpt, jax.devices()[0])
        self._roles = tuple(ckpt.expert_roles)
        self.weights: dict[str, Any] = {
            "embed": held.embed, "top": held.top, "layers": held.layers,
            "experts": {
                layer: [experts[layer, e] for e in range(ckpt.config.experts)]
                for layer in ckpt.config.moe_layers
            },
        }  # fmt: skip

    def turns(self, positions: Any) -> list[Any]:
        """Each layer's angles of rows at these positions (None without rope)."""
        return [None if t is None else t[positions] for t in self.held.turns]

    def step(
        self, weights: dict[str, Any], places: dict[str, Any], caches: Caches, tokens: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """One token for every row."""
        config, layers = self.config, self.layers
        h = layers._scaled(weights["embed"][tokens].astype(jnp.float32), config.embed_scale)
        new: Caches = []
        for i, spec in enumerate(config.layers):
            w = weights["layers"][i]
            attend = layers._attend(spec)
            q, k, v = attend.rows(w, layers._norm(w, "attn_norm", h), places["turns"][i])
            keys, values = caches[i]
            sinks = {"sinks": w["sinks"]} if spec.attention.sinks else {}
            where = (places["tables"], places["positions"], places["live"])
            y, *cache = marked_attention(attend)(q, k, v, keys, values, *where, sinks)
            new.append((cache[0], cache[1] if len(cache) > 1 else None))
            h = h + layers._scaled(attend.output(w, y), config.residual_scale)
            h = h + self._fed(i, spec, w, weights["experts"].get(i, ()), h)
        top = weights["top"]
        logits = dot(layers.compute, layers._norm(top, "final_norm", h), top["lm_head"])
        logits = logits + top["lm_head_bias"] if config.head_bias else logits
        return (logits if config.logits_scale == 1.0 else logits / config.logits_scale), new

    def _fed(self, i: int, spec: LayerSpec, w: Any, experts: Any, h: jax.Array) -> jax.Array:
        """What the feed-forward adds to the residual."""
        layers, f = self.layers, spec.feed_forward
        x, scale = layers._norm(w, "mlp_norm", h), self.config.residual_scale
        if isinstance(f, DenseSpec):
            return layers._scaled(gated(layers.compute, f.activation, x, feed_forward(w)), scale)
        assert isinstance(f, MoeSpec)
        told, mix = layers._routed(f, w, x)
        every = jnp.stack([
            gated(layers.compute, f.activation, x, ExpertForm.of(f, self._roles, e).weights(e))
            for e in experts
        ])  # fmt: skip
        chosen = told[:, : f.top_k]
        out = every[chosen, jnp.arange(len(x))[:, None]]
        y = layers._scaled(combine(out, mix), scale)
        return y if f.shared is None else y + layers._scaled(layers._shared(f, w, x), scale)
