"""What a model is, as data: every choice that a forward pass has to make, spelled out.

A family file (`reference/vocab/families/*.toml`) and a checkpoint's config.json together give one
`ModelConfig`. Engines read only this; no engine asks for a family's name (MODEL-1). Values that no
shipped family uses yet are part of the description all the same, so that a family can be added as
data; an engine refuses a value it does not implement with `Unsupported`.

Axis letters, here and everywhere: T tokens (rows), H hidden, E routed experts a layer, K experts a
token, I expert intermediate, N query heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class NormSpec:
    """`rms`: x / sqrt(mean(x^2) + eps) * w. `layer`: mean and variance, weight and bias."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `dims` of each head's width.

    kind         default | linear | dynamic | yarn | llama3 | longrope
    theta        base
    interleaved  pairs are (0,1),(2,3).. instead of (i, i + dims/2)
    factor and the rest: parameters of the scaled kinds, as config.json names them
    """

    theta: float
    dims: int
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention.

    kind        gqa | mla
    heads       N;  kv_heads G;  head_dim D (query and key width);  v_head_dim value width
    window      None, or w: key j is visible to query i iff i - w < j <= i (ATTN-4)
    scale       factor on q.k before the softmax
    qk_norm     none | head (over D, per head) | flat (over all heads), before rope
    clip        None, or c: q, k, v are clamped to [-c, c] after the norm
    sinks       one more softmax logit a head, dropped after the softmax
    For MLA: q_rank (0: no query compression), kv_rank, rope_dim, nope_dim.
    """

    kind: Literal["gqa", "mla"]
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rope: RopeSpec | None
    scale: float
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "flat"] = "none"
    clip: float | None = None
    sinks: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0


@dataclass(frozen=True)
class ActivationSpec:
    """silu_gated: silu(gate) * up. clamped_gated: gpt-oss's clamped (up + 1) * gate * sigmoid."""

    kind: Literal["silu_gated", "clamped_gated"] = "silu_gated"
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses its K experts and their weights (ROUTE-1..).

    score          softmax over all E | sigmoid | softmax over the chosen K | sparsemixer
    renormalise    divide the K weights by their sum (+ renorm_eps)
    scale          factor on the weights, last
    bias           a linear bias on the router's logits
    selection_bias a bias added for choosing only (the weights come from the unbiased scores)
    groups, top_groups, group_score   grouped routing; groups = 1 for none
    """

    score: Literal["softmax", "sigmoid", "topk_softmax", "sparsemixer"] = "softmax"
    renormalise: bool = False
    renorm_eps: float = 0.0
    scale: float = 1.0
    bias: bool = False
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    jitter: float = 0.0


@dataclass(frozen=True)
class SharedExpertSpec:
    """An expert that every token uses and that is always resident; `gated`: times sigmoid(g.x)."""

    intermediate: int
    gated: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A layer of E routed experts, K of them a token."""

    experts: int
    top_k: int
    intermediate: int
    router: RouterSpec
    activation: ActivationSpec = ActivationSpec()
    expert_bias: bool = False
    shared: SharedExpertSpec | None = None


@dataclass(frozen=True)
class DenseSpec:
    """A layer with one feed-forward that is always resident."""

    intermediate: int
    activation: ActivationSpec = ActivationSpec()
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention, then a feed-forward that is routed or dense."""

    attention: AttentionSpec
    feed_forward: MoeSpec | DenseSpec


@dataclass(frozen=True)
class ModelConfig:
    """The whole model. `layers[i]` describes model layer i."""

    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied: bool
    max_position: int
    eos: tuple[int, ...] = ()
    bos: int | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    head_bias: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Model layers with routed experts, ascending."""
        return tuple(i for i, s in enumerate(self.layers) if isinstance(s.feed_forward, MoeSpec))

    @property
    def experts(self) -> int:
        """Routed experts a layer (0 for a dense model)."""
        return self.layers[self.moe_layers[0]].feed_forward.experts if self.moe_layers else 0  # type: ignore[union-attr]

    @property
    def top_k(self) -> int:
        """Experts a token (0 for a dense model)."""
        return self.layers[self.moe_layers[0]].feed_forward.top_k if self.moe_layers else 0  # type: ignore[union-attr]
