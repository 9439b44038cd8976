"""Which descriptions the NumPy engine can run. Everything else is refused, nothing is ignored."""

from __future__ import annotations

from reference.vocab.config import (
    ActivationSpec,
    AttentionSpec,
    ModelConfig,
    MoeSpec,
    RouterSpec,
)
from reference.vocab.errors import Unsupported

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
SCORES = ("softmax", "sigmoid", "topk_softmax", "sparsemixer")


def check_supported(config: ModelConfig) -> None:
    """Raise Unsupported, naming the layer and the field, for the first value without code here.

    NUM-8: an engine implements a value of the description or refuses the model.
    """
    _demand("model", "norm.kind", config.norm.kind, ("rms", "layer"))
    if config.packed is not None:
        _demand("model", "packed", config.packed.kind, ("fp8_block", "mxfp4"))
    for i, layer in enumerate(config.layers):
        where = f"layer {i}"
        _check_attention(where, layer.attention)
        if isinstance(layer.feed_forward, MoeSpec):
            _check_moe(where, layer.feed_forward)
        else:
            _check_activation(where, layer.feed_forward.activation)


def _demand(where: str, name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise Unsupported(where, f"{name} {value!r}", ", ".join(repr(v) for v in known))


def _check_attention(where: str, spec: AttentionSpec) -> None:
    _demand(where, "attention.kind", spec.kind, ("gqa", "mla"))
    _demand(where, "heads % kv_heads", spec.heads % spec.kv_heads, (0,))
    _demand(where, "qk_norm", spec.qk_norm, ("none", "head", "flat"))
    if spec.kind == "mla":
        # What these would mean for a compressed key is not defined.
        _demand(where, "qk_norm", spec.qk_norm, ("none",))
        _demand(where, "clip", spec.clip, (None,))
        _demand(where, "kv_heads", spec.kv_heads, (1,))
        _demand(where, "head_dim", spec.head_dim, (spec.nope_dim + spec.rope_dim,))
    if spec.rope is not None:
        _demand(where, "rope.kind", spec.rope.kind, KINDS)
        width = spec.rope_dim if spec.kind == "mla" else spec.head_dim
        if spec.rope.dims % 2 or not 0 < spec.rope.dims <= width:
            known = f"even numbers up to head_dim {width}"
            raise Unsupported(where, f"rope.dims {spec.rope.dims}", known)
    if spec.window is not None and spec.window < 1:
        raise Unsupported(where, f"window {spec.window}", "None, or at least 1")


def _check_activation(where: str, spec: ActivationSpec) -> None:
    _demand(where, "activation.kind", spec.kind, ("silu_gated", "clamped_gated"))


def _check_router(where: str, spec: RouterSpec, experts: int) -> None:
    _demand(
        where, "router.score", spec.score, ("softmax", "sigmoid", "topk_softmax", "sparsemixer")
    )
    _demand(where, "router.group_score", spec.group_score, ("max", "top2_sum"))
    _demand(where, "experts % groups", experts % spec.groups, (0,))
    if spec.score in ("topk_softmax", "sparsemixer"):
        _demand(where, "router.selection_bias", spec.selection_bias, (False,))
    if spec.score == "sparsemixer":
        _demand(where, "router.groups", spec.groups, (1,))


def _check_moe(where: str, spec: MoeSpec) -> None:
    _check_router(where, spec.router, spec.experts)
    _check_activation(where, spec.activation)
    _demand(where, "storage.gate_up", spec.storage.gate_up, ("split", "interleaved"))
    packed = spec.storage.packed
    if packed is not None:
        _demand(where, "storage.packed", packed.kind, ("fp8_block", "mxfp4"))
        _demand(where, "storage.transposed", spec.storage.transposed, (False,))
