"""The forward pass, in stages that end where a router has spoken.

One chunk of a request goes: `enter` (embedding .. first router), then for each layer with experts
`expert` for every (token, rank) and `advance` (combine .. next router or LM head). A dense model is
`enter` alone. Everything is done for one row after another (NUM-3); a row sees other rows of its
own request only through the KV blocks, which are cut at absolute positions. So neither the chunks
(NUM-9) nor the company (NUM-12) of a row can show in its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from reference.numerics.attention import LayerKV, attend
from reference.numerics.dot import by_row, matvec
from reference.numerics.experts import FeedForward, combine, feed_forward, unpack_expert
from reference.numerics.formats import Array, KvDtype, round_kv
from reference.numerics.norms import norm
from reference.numerics.projections import projections
from reference.numerics.router import route, sigmoid
from reference.numerics.support import check_supported
from reference.numerics.weights import dense, of_layer, resident
from reference.vocab.config import AttentionSpec, MoeSpec
from reference.vocab.errors import RequestFailed
from reference.vocab.ids import ExpertKey

Want = Literal["all", "last", "none"]
Reads = dict[ExpertKey, tuple[Array, ...]]


@dataclass
class State:
    """A request's memory between chunks: its KV and nothing else. Drop it to forget the request.

    prompt   tokens of the request's prompt; only ropes that follow it ask (NUM-13)
    """

    layers: list[LayerKV]
    length: int = 0
    prompt: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are held."""
        return sum(kv.nbytes for kv in self.layers)


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
              expert, expert_roles and read (with packed weights: has)
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
        self.weights = resident(ckpt, dtype)
        # A tied head is the embedding itself, not a copy.
        self.head = self.weights["embed" if self.config.tied else "lm_head"]
        self._layers = [of_layer(self.weights, i) for i in range(len(self.config.layers))]
        self._attention_of = [
            projections(s.attention, w, self.config.norm.eps)
            for s, w in zip(self.config.layers, self._layers, strict=True)
        ]

    # -- experts ------------------------------------------------------------------------------

    def read_expert(self, key: ExpertKey) -> tuple[Array, ...]:
        """An expert's raw tensors straight from the checkpoint, in the order of a slot."""
        return tuple(self.ckpt.read(ref) for ref in self.ckpt.expert(key.layer, key.expert))

    def widen(self, tensors: Sequence[Array]) -> FeedForward:
        """Raw tensors of a routed expert -> this model's dtype (NUM-1, NUM-18, NUM-19).

        What is wide already is not copied. What this gives is as large as unpacked weights are; the
        slot keeps the raw tensors (NUM-20).
        """
        moe = self.config.layers[self.config.moe_layers[0]].feed_forward
        assert isinstance(moe, MoeSpec)
        return unpack_expert(moe.storage, self.ckpt.expert_roles, tensors, self.dtype)

    def expert(self, layer: int, tensors: Sequence[Array] | FeedForward, x: Array) -> Array:
        """One routed expert on one row x [H] -> [H]; tensors as `ckpt.expert_roles` orders them.

        They may be raw or widened; widening once for many rows is the caller's saving.
        """
        moe = self.config.layers[layer].feed_forward
        assert isinstance(moe, MoeSpec)
        w = tensors if isinstance(tensors, FeedForward) else self.widen(tensors)
        return feed_forward(w, x, moe.activation)

    # -- stages -------------------------------------------------------------------------------

    def start(self, prompt: int = 0, drop: bool = True) -> State:
        """A new request's empty state.

        prompt   the length of its prompt, which ropes of some kinds follow (NUM-13)
        drop     whether blocks out of every later window go (ATTN-9); else all are kept
        """
        return State([self._kv(s.attention, drop) for s in self.config.layers], 0, prompt)

    def _kv(self, a: AttentionSpec, drop: bool) -> LayerKV:
        latent = a.kv_rank if a.kind == "mla" else 0
        window = a.window if drop else None
        widths = a.cache_heads, a.cache_key_dim, a.cache_value_dim
        return LayerKV(*widths, self.kv_block, self.dtype, latent, window)

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
        mixed = self._with_shared(h.layer, mixed, h.x)
        residual = h.residual + self._scaled(mixed, self.config.residual_scale)
        return self._from_layer(h.layer + 1, state, residual, h.position, logits)

    def _from_layer(
        self, first: int, state: State, residual: Array, position: int, logits: Want
    ) -> Hidden:
        branch = self.config.residual_scale
        for i in range(first, len(self.config.layers)):
            kv = state.layers[i]
            rows = [
                row + self._scaled(self._attention(i, kv, row, position + t, state.prompt), branch)
                for t, row in enumerate(residual)
            ]
            residual = np.stack(rows)
            x = by_row(lambda row, i=i: self._normed(f"layers.{i}.mlp_norm", row), residual)
            ff = self.config.layers[i].feed_forward
            if isinstance(ff, MoeSpec):
                return self._routed(i, ff, position, residual, x)
            w = dense(self._layers[i], ff)
            out = by_row(lambda row, w=w, ff=ff: feed_forward(w, row, ff.activation), x)
            residual = residual + self._scaled(out, branch)
        return self._finished(position, residual, logits)

    def _normed(self, role: str, row: Array) -> Array:
        bias = self.weights.get(role + "_bias")
        return norm(self.config.norm, row, self.weights[role], bias)

    def _scaled(self, x: Array, factor: float) -> Array:
        """NUM-11: a factor of 1 is no operation at all."""
        return x if factor == 1.0 else x * self.dtype(factor)

    def _with_shared(self, i: int, mixed: Array, x: Array) -> Array:
        """NUM-17: what the routed experts gave [T, H], and the shared one on x [T, H], gated."""
        spec = self.config.layers[i].feed_forward
        assert isinstance(spec, MoeSpec)
        if spec.shared is None:
            return mixed
        w = dense(self._layers[i], spec.shared, "shared_")
        out = by_row(lambda row: feed_forward(w, row, spec.activation), x)
        if spec.shared.gated:
            gate = self._layers[i]["shared_router"]
            out = out * by_row(lambda row: sigmoid(matvec(gate, row)), x)
        return mixed + out

    def _routed(self, i: int, ff: MoeSpec, position: int, residual: Array, x: Array) -> Hidden:
        w = self._layers[i]
        bias = w.get("selection_bias")

        def one(row: Array) -> tuple[Array, Array]:
            logits = matvec(w["router"], row)
            logits = logits + w["router_bias"] if ff.router.bias else logits
            return route(logits, ff.router, ff.top_k, i, bias)

        experts, weights = zip(*map(one, x), strict=True)
        return Hidden(position, i, residual, x, np.stack(experts), np.stack(weights), None)

    def next_gate(self, h: Hidden, most: int) -> tuple[int, Array] | None:
        """PREDICT-4: the next router's choice, were it asked now: (layer, experts int32 [T, m], m
        at most `most`), from the residual before the routed experts of h.layer. None where no
        router follows or a score is NaN. Changes nothing.
        """
        later = [i for i in self.config.moe_layers if h.layer is not None and i > h.layer]
        if not later:
            return None
        at, residual = later[0], h.residual
        ff = self.config.layers[at].feed_forward
        assert h.layer is not None and isinstance(ff, MoeSpec)
        now = self.config.layers[h.layer].feed_forward
        if isinstance(now, MoeSpec) and now.shared is not None:
            shared = self._with_shared(h.layer, np.zeros_like(h.x), h.x)
            residual = residual + self._scaled(shared, self.config.residual_scale)
        asked = replace(ff, top_k=min(most, ff.router.reach(ff.experts)))
        x = by_row(lambda row: self._normed(f"layers.{at}.mlp_norm", row), residual)
        try:
            return at, self._routed(at, asked, h.position, residual, x).topk
        except RequestFailed:
            return None

    def _finished(self, position: int, residual: Array, want: Want) -> Hidden:
        rows = {"all": residual, "last": residual[-1:], "none": residual[:0]}[want]
        logits = by_row(self._head, rows) if len(rows) else None
        t = len(residual)
        none = np.empty((t, 0), self.dtype)
        return Hidden(position, None, residual, none, none.astype(np.int32), none, logits)

    def _head(self, row: Array) -> Array:
        """The logits [V] of one row (NUM-16)."""
        logits = matvec(self.head, self._normed("final_norm", row))
        if self.config.head_bias:
            logits = logits + self.weights["lm_head_bias"]
        scale = self.config.logits_scale
        return logits if scale == 1.0 else logits / self.dtype(scale)

    # -- attention ----------------------------------------------------------------------------

    def _attention(self, i: int, kv: LayerKV, row: Array, position: int, prompt: int) -> Array:
        """One row's residual [H] -> what attention adds to it [H]; writes its K and V first."""
        spec: AttentionSpec = self.config.layers[i].attention
        x = self.attention_input(i, row)
        q = self.query(i, x, position, prompt)
        # ATTN-1: written, rounded, before anything reads them, this row included.
        kv.write(position, *self.key_value(i, x, position, prompt))
        sinks = self._attention_of[i].sinks
        return self.attention_output(i, attend(q, kv, position, spec.window, spec.scale, sinks))

    def attention_input(self, i: int, row: Array) -> Array:
        """What layer i's projections read, from the residual [H] of one row."""
        return self._normed(f"layers.{i}.attn_norm", row)

    def query(self, i: int, x: Array, position: int, prompt: int = 0) -> Array:
        """q [N, cached key width] of one row, rotated."""
        return self._attention_of[i].query(x, position, prompt)

    def key_value(self, i: int, x: Array, position: int, prompt: int = 0) -> tuple[Array, Array]:
        """What is cached of one row, [G, D], rotated, and [G, Dv], rounded to the KV dtype."""
        k, v = self._attention_of[i].key_value(x, position, prompt)
        return round_kv(k, self.kv_dtype), round_kv(v, self.kv_dtype)

    def attention_output(self, i: int, out: Array) -> Array:
        """What attention adds to the residual [H], from its heads' values [N, Dv]."""
        return self._attention_of[i].output(out)
