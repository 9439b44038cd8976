"""The forward pass, in stages that end where a router has spoken.

One chunk of a request goes: `enter` (embedding .. first router), then for each layer with experts
`expert` for every (token, rank) and `advance` (combine .. next router or LM head). A dense model is
`enter` alone. Everything is done for one row after another (NUM-3); a row sees other rows of its
own request only through the KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from reference.vocab.config import AttentionSpec, MoeSpec
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
        names += ["q_norm", "k_norm"] if spec.attention.qk_norm == "head" else []
        routed = isinstance(spec.feed_forward, MoeSpec)
        return names + (["router"] if routed else ["gate", "up", "down"])

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
        residual = self.weights["embed"][np.asarray(tokens, np.int64)]
        return self._from_layer(0, state, residual, position, logits)

    def advance(self, state: State, h: Hidden, outputs: Array, logits: Want = "all") -> Hidden:
        """Combine the experts' outputs [T, K, H] of h and run to the next router or the head."""
        assert h.layer is not None and outputs.shape[:2] == h.topk.shape
        residual = h.residual + np.stack(
            [combine(w, y) for w, y in zip(h.weights, outputs, strict=True)]
        )
        return self._from_layer(h.layer + 1, state, residual, h.position, logits)

    def _from_layer(
        self, first: int, state: State, residual: Array, position: int, logits: Want
    ) -> Hidden:
        eps = self.config.norm.eps
        for i in range(first, len(self.config.layers)):
            residual = np.stack(
                [
                    row + self._attention(i, state.layers[i], row, position + t)
                    for t, row in enumerate(residual)
                ]
            )
            norm = self.weights[f"layers.{i}.mlp_norm"]
            x = by_row(lambda row, norm=norm: rms_norm(row, norm, eps), residual)
            ff = self.config.layers[i].feed_forward
            if isinstance(ff, MoeSpec):
                return self._routed(i, ff, position, residual, x)
            gate, up, down = (self.weights[f"layers.{i}.{n}"] for n in ("gate", "up", "down"))
            residual = residual + by_row(
                lambda row, g=gate, u=up, d=down: feed_forward(g, u, d, row), x
            )
        return self._finished(position, residual, logits)

    def _routed(self, i: int, ff: MoeSpec, position: int, residual: Array, x: Array) -> Hidden:
        router = self.weights[f"layers.{i}.router"]
        experts, weights = zip(
            *(route(matvec(router, row), ff.router, ff.top_k, i) for row in x), strict=True
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
        x = rms_norm(row, self.weights[f"layers.{i}.attn_norm"], self.config.norm.eps)
        q = self._project(i, "q", x, spec.qkv_bias).reshape(spec.heads, spec.head_dim)
        k = self._project(i, "k", x, spec.qkv_bias).reshape(spec.kv_heads, spec.head_dim)
        v = self._project(i, "v", x, spec.qkv_bias).reshape(spec.kv_heads, spec.v_head_dim)
        if spec.qk_norm == "head":  # ATTN-6: before rope
            q = rms_norm(q, self.weights[f"layers.{i}.q_norm"], self.config.norm.eps)
            k = rms_norm(k, self.weights[f"layers.{i}.k_norm"], self.config.norm.eps)
        if spec.rope is not None:
            cos, sin = rotation(self._frequencies[spec.rope], position, self.dtype)
            q = rotate(q, cos, sin, spec.rope.interleaved)
            k = rotate(k, cos, sin, spec.rope.interleaved)
        # ATTN-1: written, rounded, before anything reads them, this row included.
        kv.write(position, round_kv(k, self.kv_dtype), round_kv(v, self.kv_dtype))
        out = attend(q, kv, position, spec.window, spec.scale)
        return self._project(i, "o", out.reshape(-1), spec.o_bias)

    def _project(self, i: int, name: str, x: Array, bias: bool) -> Array:
        y = matvec(self.weights[f"layers.{i}.{name}"], x)
        return y + self.weights[f"layers.{i}.{name}_bias"] if bias else y
