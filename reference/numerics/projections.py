"""Around attention: what is made of a row's residual before it, and what is done with its result.

Two kinds share their methods: grouped heads (`Grouped`, ATTN-6) and compressed keys and values
(`Latent`, ATTN-8). Each sees one row at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reference.numerics.dot import matvec
from reference.numerics.formats import Array
from reference.numerics.norms import rms_norm
from reference.numerics.rope import rotate, turn
from reference.vocab.config import AttentionSpec


class Projections:
    """One layer's attention weights, by role; eps of the norms of heads."""

    def __init__(self, spec: AttentionSpec, weights: Mapping[str, Array], eps: float) -> None:
        self.spec, self.w, self.eps = spec, weights, eps
        self.sinks = weights["sinks"] if spec.sinks else None

    def query(self, x: Array, position: int, prompt: int) -> Array:
        """x [H], the normed row -> what meets cached keys: [N, cached key width]."""
        raise NotImplementedError

    def key_value(self, x: Array, position: int, prompt: int) -> tuple[Array, Array]:
        """x [H] -> what is cached of the row: [cached heads, key width] and [.., value width]."""
        raise NotImplementedError

    def output(self, out: Array) -> Array:
        """What attention adds to the residual [H], from what the heads attended to [N, ..]."""
        return self._project("o", out.reshape(-1), self.spec.o_bias)

    def _project(self, name: str, x: Array, bias: bool) -> Array:
        y = matvec(self.w[name], x)
        return y + self.w[f"{name}_bias"] if bias else y

    def _rotated(self, heads: Array, position: int, prompt: int) -> Array:
        rope = self.spec.rope
        if rope is None:
            return heads
        cos, sin = turn(rope, position, prompt, heads.dtype.type)
        return rotate(heads, cos, sin, rope.interleaved)


class Grouped(Projections):
    """q [N, D], k [G, D], v [G, Dv]."""

    def query(self, x: Array, position: int, prompt: int) -> Array:
        return self._rotated(self._heads("q", x, self.spec.heads), position, prompt)

    def key_value(self, x: Array, position: int, prompt: int) -> tuple[Array, Array]:
        k = self._rotated(self._heads("k", x, self.spec.kv_heads), position, prompt)
        return k, self._heads("v", x, self.spec.kv_heads)

    def _heads(self, name: str, x: Array, heads: int) -> Array:
        """q, k or v of one row, before rope: [heads, width]. ATTN-6: project, norm, clamp."""
        spec = self.spec
        y = self._project(name, x, spec.qkv_bias)
        normed = spec.qk_norm != "none" and name != "v"
        if normed and spec.qk_norm == "flat":
            y = rms_norm(y, self.w[f"{name}_norm"], self.eps)
        y = y.reshape(heads, -1)
        if normed and spec.qk_norm == "head":
            y = rms_norm(y, self.w[f"{name}_norm"], self.eps)
        return y if spec.clip is None else np.clip(y, -spec.clip, spec.clip)


class Latent(Projections):
    """ATTN-8: a query is turned into the space of the compressed key, and meets it there.

    kv_b [N * (nope + Dv), rank] has for each head `nope` rows that would make its key of the
    compressed one and Dv that would make its value. The first are applied to the query instead,
    the second to what was attended to, so that what is cached never has to be expanded.
    """

    def __init__(self, spec: AttentionSpec, weights: Mapping[str, Array], eps: float) -> None:
        super().__init__(spec, weights, eps)
        both = weights["kv_b"].reshape(spec.heads, spec.nope_dim + spec.v_head_dim, spec.kv_rank)
        self.to_key = np.ascontiguousarray(both[:, : spec.nope_dim])
        self.to_value = np.ascontiguousarray(both[:, spec.nope_dim :])

    def query(self, x: Array, position: int, prompt: int) -> Array:
        spec = self.spec
        if spec.q_rank:
            low = self._project("q_a", x, spec.qkv_bias)
            q = matvec(self.w["q_b"], rms_norm(low, self.w["q_a_norm"], spec.latent_eps))
        else:
            q = matvec(self.w["q"], x)
        q = q.reshape(spec.heads, -1)
        nope = np.ascontiguousarray(q[:, : spec.nope_dim])
        turned = self._rotated(np.ascontiguousarray(q[:, spec.nope_dim :]), position, prompt)
        return np.concatenate([np.einsum("nd,ndr->nr", nope, self.to_key), turned], axis=1)

    def key_value(self, x: Array, position: int, prompt: int) -> tuple[Array, Array]:
        spec = self.spec
        low = self._project("kv_a", x, spec.qkv_bias)
        c = rms_norm(low[: spec.kv_rank], self.w["kv_a_norm"], spec.latent_eps)
        turned = self._rotated(low[None, spec.kv_rank :], position, prompt)
        return np.concatenate([c[None], turned], axis=1), np.empty((1, 0), x.dtype)

    def output(self, out: Array) -> Array:
        values = np.einsum("nr,nvr->nv", np.ascontiguousarray(out), self.to_value)
        return super().output(values)


def projections(spec: AttentionSpec, weights: Mapping[str, Array], eps: float) -> Projections:
    """By the description's kind."""
    return (Latent if spec.kind == "mla" else Grouped)(spec, weights, eps)
