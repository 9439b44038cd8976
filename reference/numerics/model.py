"""The forward pass, in stages that end where a router has spoken.

One chunk of a request goes: `enter` (embedding .. first router), then for each layer with experts
`expert` for every (token, rank) and `advance` (combine .. next router or LM head). A dense model is
`enter` alone. Everything is done for one row after another (NUM-3); a row sees other rows of its
own request only through the KV blocks, which are cut at absolute positions. So neither the chunks
(NUM-9) nor the company (NUM-12) of a row can show in its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reference.numerics.attention import LayerKV, attend
from reference.numerics.dot import by_row, matvec
from reference.numerics.experts import combine, feed_forward
from reference.numerics.formats import Array, KvDtype, round_kv, widen
from reference.numerics.norms import rms_norm
from reference.numerics.rope import inverse_frequencies, rotate, rotation
from reference.numerics.router import route
from reference.numerics.support import check_supported
from reference.vocab.config import AttentionSpec, DenseSpec, MoeSpec
from reference.vocab.ids import ExpertKey

Want = Literal["all", "last", "none"]
Reads = dict[ExpertKey, tuple[Array, ...]]


@dataclass
class State:
    """A request's memory between chunks: its KV and nothing else. Drop it to forget the request."""

    layers: list[LayerKV]
    length: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks made so far."""
        return sum(a.nbytes for kv in self.layers for a in (*kv.keys, *kv.values))


@dataclass(frozen=True)
class Hidden:
    """Where a chunk of T rows stands.

    layer is the layer whose router has just spoken, and then
      residual [T, H]; x [T, H] the experts' input; topk [T, K] int32 experts in rank order;
      weights [T, K]; logits is None.
    layer is None after the last layer, and then logits is [T, V], [1, V] (the last row's) or None,
    as asked; x, topk and weights are empty.
    """

    position: int
    layer: int | None
    residual: Array
    x: Array
    topk: Array
    weights: Array
    logits: Array | None


class Model:
    """One checkpoint, its non-expert weights widened and held.

    ckpt      a `reference.files.checkpoint.Checkpoint`, or anything with its config, tensor,
              expert, expert_roles and read
    dtype     np.float32, or np.float64 for the oracle
    kv_block  positions a KV block: part of the definition of a sum (ATTN-2)
    kv_dtype  what K and V are rounded to when written (ATTN-1)

    Raises Unsupported for a description without code here (NUM-8).
    """

    def __init__(
        self,
        ckpt: Any,
        dtype: type[np.floating] = np.float32,
        kv_block: int = 64,
        kv_dtype: KvDtype = "f32",
    ) -> None:
        check_supported(ckpt.config)
        self.ckpt = ckpt
        self.config = ckpt.config
        self.dtype = dtype
        self.kv_block = kv_block
        self.kv_dtype: KvDtype = kv_dtype
        roles = ["embed", "final_norm"] + ([] if self.config.tied else ["lm_head"])
        for i in range(len(self.config.layers)):
            roles += [f"layers.{i}.{name}" for name in self._layer_roles(i)]
        self.weights = {role: self._read(role) for role in roles}
        # A tied head is the embedding itself, not a copy.
        self.head = self.weights["embed" if self.config.tied else "lm_head"]
        ropes = {s.attention.rope for s in self.config.layers if s.attention.rope is not None}
        self._frequencies = {spec: inverse_frequencies(spec) for spec in ropes}

    def _layer_roles(self, i: int) -> list[str]:
        spec = self.config.layers[i]
        names = ["attn_norm", "q", "k", "v", "o", "mlp_norm"]
        names += ["q_bias", "k_bias", "v_bias"] if spec.attention.qkv_bias else []
        names += ["o_bias"] if spec.attention.o_bias else []
        names += ["q_norm", "k_norm"] if spec.attention.qk_norm != "none" else []
        if isinstance(spec.feed_forward, MoeSpec):
            return names + ["router"] + (["router_bias"] if spec.feed_forward.router.bias else [])
        biases = ["gate_bias", "up_bias", "down_bias"] if spec.feed_forward.bias else []
        return names + ["gate", "up", "down"] + biases

    def _read(self, role: str) -> Array:
        return widen(self.ckpt.read(self.ckpt.tensor(role)), self.dtype)

    # -- experts ------------------------------------------------------------------------------

    def read_expert(self, key: ExpertKey) -> tuple[Array, ...]:
        """An expert's raw tensors straight from the checkpoint, in the order of a slot."""
        return tuple(self.ckpt.read(ref) for ref in self.ckpt.expert(key.layer, key.expert))

    def widen(self, tensors: Sequence[Array]) -> tuple[Array, ...]:
        """Raw tensors -> this model's dtype; what is wide already is not copied (NUM-1)."""
        return tuple(widen(t, self.dtype) for t in tensors)

    def expert(self, layer: int, tensors: Sequence[Array], x: Array) -> Array:
        """One routed expert on one row x [H] -> [H]; tensors as `ckpt.expert_roles` orders them.

        They may be raw or widened; widening once for many rows is the caller's saving.
        """
        assert isinstance(self.config.layers[layer].feed_forward, MoeSpec)
        w = dict(zip(self.ckpt.expert_roles, self.widen(tensors), strict=True))
        return feed_forward(w["gate"], w["up"], w["down"], x)

    # -- stages -------------------------------------------------------------------------------

    def start(self) -> State:
        """A new request's empty state."""
        specs = (s.attention for s in self.config.layers)
        return State(
            [
                LayerKV(a.kv_heads, a.head_dim, a.v_head_dim, self.kv_block, self.dtype)
                for a in specs
            ]
        )

    def enter(
        self, state: State, tokens: Sequence[int], position: int, logits: Want = "all"
    ) -> Hidden:
        """Embed a chunk of T >= 1 tokens at `position`.. and run to the first router or the head.

        `position` is how many tokens the state has seen; token ids are in range. `logits` counts
        only when no router follows. Raises RequestFailed for a NaN router score (ROUTE-4).
        """
        assert position == state.length and len(tokens) > 0, (position, state.length, len(tokens))
        assert all(0 <= t < self.config.vocab for t in tokens)
        state.length += len(tokens)
        residual = self._scaled(
            self.weights["embed"][np.asarray(tokens, np.int64)], self.config.embed_scale
        )
        return self._from_layer(0, state, residual, position, logits)

    def advance(self, state: State, h: Hidden, outputs: Array, logits: Want = "all") -> Hidden:
        """Combine the experts' outputs [T, K, H] of h and run to the next router or the head."""
        assert h.layer is not None and outputs.shape[:2] == h.topk.shape
        mixed = np.stack([combine(w, y) for w, y in zip(h.weights, outputs, strict=True)])
        residual = h.residual + self._scaled(mixed, self.config.residual_scale)
        return self._from_layer(h.layer + 1, state, residual, h.position, logits)

    def _from_layer(
        self, first: int, state: State, residual: Array, position: int, logits: Want
    ) -> Hidden:
        eps, branch = self.config.norm.eps, self.config.residual_scale
        for i in range(first, len(self.config.layers)):
            residual = np.stack(
                [
                    row
                    + self._scaled(self._attention(i, state.layers[i], row, position + t), branch)
                    for t, row in enumerate(residual)
                ]
            )
            norm = self.weights[f"layers.{i}.mlp_norm"]
            x = by_row(lambda row, norm=norm: rms_norm(row, norm, eps), residual)
            ff = self.config.layers[i].feed_forward
            if isinstance(ff, MoeSpec):
                return self._routed(i, ff, position, residual, x)
            residual = residual + self._scaled(by_row(self._dense(i, ff), x), branch)
        return self._finished(position, residual, logits)

    def _scaled(self, x: Array, factor: float) -> Array:
        """NUM-11: a factor of 1 is no operation at all."""
        return x if factor == 1.0 else x * self.dtype(factor)

    def _dense(self, i: int, ff: DenseSpec) -> Callable[[Array], Array]:
        """The feed-forward of a dense layer, as a function of one row."""
        w = [self.weights[f"layers.{i}.{n}"] for n in ("gate", "up", "down")]
        names = ("gate_bias", "up_bias", "down_bias") if ff.bias else ()
        biases = [self.weights[f"layers.{i}.{n}"] for n in names]
        return lambda row: feed_forward(*w, row, *biases)

    def _routed(self, i: int, ff: MoeSpec, position: int, residual: Array, x: Array) -> Hidden:
        experts, weights = zip(
            *(
                route(self._project(i, "router", row, ff.router.bias), ff.router, ff.top_k, i)
                for row in x
            ),
            strict=True,
        )
        return Hidden(position, i, residual, x, np.stack(experts), np.stack(weights), None)

    def _finished(self, position: int, residual: Array, want: Want) -> Hidden:
        rows = {"all": residual, "last": residual[-1:], "none": residual[:0]}[want]
        norm, eps = self.weights["final_norm"], self.config.norm.eps
        logits = None
        if len(rows):
            logits = by_row(lambda row: matvec(self.head, rms_norm(row, norm, eps)), rows)
        t = len(residual)
        none = np.empty((t, 0), self.dtype)
        return Hidden(position, None, residual, none, none.astype(np.int32), none, logits)

    # -- attention ----------------------------------------------------------------------------

    def _attention(self, i: int, kv: LayerKV, row: Array, position: int) -> Array:
        """One row's residual [H] -> what attention adds to it [H]; writes its K and V first."""
        spec: AttentionSpec = self.config.layers[i].attention
        x = self.attention_input(i, row)
        q = self.query(i, x, position)
        # ATTN-1: written, rounded, before anything reads them, this row included.
        kv.write(position, *self.key_value(i, x, position))
        return self.attention_output(i, attend(q, kv, position, spec.window, spec.scale))

    def attention_input(self, i: int, row: Array) -> Array:
        """What layer i's projections read, from the residual [H] of one row."""
        return rms_norm(row, self.weights[f"layers.{i}.attn_norm"], self.config.norm.eps)

    def query(self, i: int, x: Array, position: int) -> Array:
        """q [N, D] of one row, rotated."""
        spec = self.config.layers[i].attention
        return self._rotated(spec, self._heads(i, "q", x, spec, spec.heads), position)

    def key_value(self, i: int, x: Array, position: int) -> tuple[Array, Array]:
        """k [G, D], rotated, and v [G, Dv] of one row, both rounded to the KV dtype."""
        spec = self.config.layers[i].attention
        k = self._rotated(spec, self._heads(i, "k", x, spec, spec.kv_heads), position)
        v = self._heads(i, "v", x, spec, spec.kv_heads)
        return round_kv(k, self.kv_dtype), round_kv(v, self.kv_dtype)

    def attention_output(self, i: int, out: Array) -> Array:
        """What attention adds to the residual [H], from its heads' values [N, Dv]."""
        return self._project(i, "o", out.reshape(-1), self.config.layers[i].attention.o_bias)

    def _rotated(self, spec: AttentionSpec, heads: Array, position: int) -> Array:
        if spec.rope is None:
            return heads
        cos, sin = rotation(self._frequencies[spec.rope], position, self.dtype)
        return rotate(heads, cos, sin, spec.rope.interleaved)

    def _heads(self, i: int, name: str, x: Array, spec: AttentionSpec, heads: int) -> Array:
        """q, k or v of one row, before rope: [heads, width]. ATTN-6: project, norm, clamp."""
        y = self._project(i, name, x, spec.qkv_bias)
        normed = spec.qk_norm != "none" and name != "v"
        if normed and spec.qk_norm == "flat":
            y = rms_norm(y, self.weights[f"layers.{i}.{name}_norm"], self.config.norm.eps)
        y = y.reshape(heads, -1)
        if normed and spec.qk_norm == "head":
            y = rms_norm(y, self.weights[f"layers.{i}.{name}_norm"], self.config.norm.eps)
        return y if spec.clip is None else np.clip(y, -spec.clip, spec.clip)

    def _project(self, i: int, name: str, x: Array, bias: bool) -> Array:
        y = matvec(self.weights[f"layers.{i}.{name}"], x)
        return y + self.weights[f"layers.{i}.{name}_bias"] if bias else y
