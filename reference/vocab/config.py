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

    kind         default | linear | dynamic | yarn | llama3 | longrope (NUM-13)
    theta        base
    interleaved  pairs are (0,1),(2,3).. instead of (i, i + dims/2)
    factor and the rest: parameters of the scaled kinds, as config.json names them
    original_max_position   dynamic: the length up to which it is `default`; longrope: that up to
                 which a prompt is short; yarn, llama3: as config.json names it
    attention_factor        yarn: factor on cos and sin; None: from `factor` and the mscales
    short_mscale, long_mscale, short_factor, long_factor   longrope: factor on cos and sin, and
                 divisors of the frequencies [dims/2], for a short and for a long prompt; with an
                 empty long_factor, short_factor serves both
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
    short_mscale: float = 1.0
    long_mscale: float = 1.0

    @property
    def by_prompt(self) -> bool:
        """The angles depend on the length of the request's prompt (NUM-13)."""
        return self.kind in ("dynamic", "longrope")


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
    For MLA (ATTN-8): q_rank (0: no query compression), kv_rank, rope_dim, nope_dim; head_dim is
    nope_dim + rope_dim, kv_heads 1; qkv_bias says that q_a and kv_a have biases; the norms of q_a
    and kv_a have an eps of their own, latent_eps.
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
    latent_eps: float = 1e-6

    @property
    def cache_heads(self) -> int:
        """Heads of what is cached of a token: G, or 1 for MLA."""
        return 1 if self.kind == "mla" else self.kv_heads

    @property
    def cache_key_dim(self) -> int:
        """Width of a cached key: D, or kv_rank + rope_dim for MLA."""
        return self.kv_rank + self.rope_dim if self.kind == "mla" else self.head_dim

    @property
    def cache_value_dim(self) -> int:
        """Width of a value cached beside the key: Dv, or 0 for MLA (the key's first kv_rank)."""
        return 0 if self.kind == "mla" else self.v_head_dim


@dataclass(frozen=True)
class ActivationSpec:
    """silu_gated: silu(gate) * up (NUM-7).

    clamped_gated: (up + 1) * gate * sigmoid(alpha * gate), gate clamped to at most `limit`, up to
    [-limit, limit] (NUM-15).
    """

    kind: Literal["silu_gated", "clamped_gated"] = "silu_gated"
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses its K experts and their weights (ROUTE-1..).

    score          softmax over all E | sigmoid | softmax over the chosen K | sparsemixer
    renormalise    divide the K weights by their sum (+ renorm_eps), which is at least renorm_min
    scale          factor on the weights, last
    bias           a linear bias on the router's logits
    selection_bias a bias added for choosing only (the weights come from the unbiased scores)
    groups, top_groups, group_score   grouped routing; groups = 1 for none
    jitter         of sparsemixer
    """

    score: Literal["softmax", "sigmoid", "topk_softmax", "sparsemixer"] = "softmax"
    renormalise: bool = False
    renorm_eps: float = 0.0
    renorm_min: float = 0.0
    scale: float = 1.0
    bias: bool = False
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    jitter: float = 0.0

    def reach(self, experts: int) -> int:
        """The most experts, of so many, that one token can be given."""
        return experts // self.groups * self.top_groups if self.groups > 1 else experts


@dataclass(frozen=True)
class SharedExpertSpec:
    """An expert that every token uses and that is always resident; `gated`: times sigmoid(g.x)."""

    intermediate: int
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True)
class PackedSpec:
    """How a matrix that has a scale beside it is packed; one without a scale is not packed.

    kind   fp8_block: e4m3 [out, in], scale [ceil(out / rows), ceil(in / cols)] (NUM-18)
           mxfp4: two 4-bit numbers a byte [out, in / 32, 16], scale [out, in / 32] (NUM-19)
    block  (rows, cols) that share one scale
    """

    kind: Literal["fp8_block", "mxfp4"]
    block: tuple[int, int]


@dataclass(frozen=True)
class ExpertStorage:
    """How a routed expert lies in the checkpoint and in its slot (MODEL-13).

    gate_up     split: matrices gate, up [I, H]; interleaved: one matrix gate_up [2I, H] (and one
                bias) whose even rows are gate's and odd ones up's
    transposed  matrices are [in, out] instead of [out, in]
    packed      None, or how every matrix of the expert is packed
    """

    gate_up: Literal["split", "interleaved"] = "split"
    transposed: bool = False
    packed: PackedSpec | None = None

    @property
    def matrices(self) -> tuple[str, ...]:
        """The roles of the matrices."""
        return ("gate", "up", "down") if self.gate_up == "split" else ("gate_up", "down")


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
    storage: ExpertStorage = ExpertStorage()


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
    """The whole model. `layers[i]` describes model layer i.

    embed_scale, residual_scale   factors on the embedding and on what each branch adds (NUM-11)
    logits_scale   the logits are divided by it
    head_bias      the head has a bias
    packed         how non-expert matrices with a scale are packed
    stored         dtype of most weights as config.json states it, if it does: for estimates
    """

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
    packed: PackedSpec | None = None
    stored: str | None = field(default=None, compare=False)
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
