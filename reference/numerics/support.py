"""Which descriptions the NumPy engine can run. Everything else is refused, nothing is ignored."""

from __future__ import annotations

from reference.vocab.config import (
    ActivationSpec,
    AttentionSpec,
    DenseSpec,
    ModelConfig,
    MoeSpec,
    RouterSpec,
)
from reference.vocab.errors import Unsupported


def check_supported(config: ModelConfig) -> None:
    """Raise Unsupported, naming the layer and the field, for the first value without code here.

    NUM-8: an engine implements a value of the description or refuses the model.
    """
    _demand("model", "norm.kind", config.norm.kind, ("rms",))
    _demand("model", "head_bias", config.head_bias, (False,))
    _demand("model", "logits_scale", config.logits_scale, (1.0,))
    for i, layer in enumerate(config.layers):
        where = f"layer {i}"
        _check_attention(where, layer.attention)
        if isinstance(layer.feed_forward, MoeSpec):
            _check_moe(where, layer.feed_forward)
        else:
            _check_dense(where, layer.feed_forward)


def _demand(where: str, name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise Unsupported(where, f"{name} {value!r}", ", ".join(repr(v) for v in known))


def _check_attention(where: str, spec: AttentionSpec) -> None:
    _demand(where, "attention.kind", spec.kind, ("gqa",))
    _demand(where, "sinks", spec.sinks, (False,))
    _demand(where, "heads % kv_heads", spec.heads % spec.kv_heads, (0,))
    if spec.rope is not None:
        _demand(where, "rope.kind", spec.rope.kind, ("default",))
        _demand(where, "rope.attention_factor", spec.rope.attention_factor, (None, 1.0))
        if spec.rope.dims % 2 or not 0 < spec.rope.dims <= spec.head_dim:
            known = f"even numbers up to head_dim {spec.head_dim}"
            raise Unsupported(where, f"rope.dims {spec.rope.dims}", known)
    if spec.window is not None and spec.window < 1:
        raise Unsupported(where, f"window {spec.window}", "None, or at least 1")


def _check_activation(where: str, spec: ActivationSpec) -> None:
    _demand(where, "activation.kind", spec.kind, ("silu_gated",))


def _check_router(where: str, spec: RouterSpec) -> None:
    _demand(where, "router.score", spec.score, ("softmax", "topk_softmax"))
    _demand(where, "router.selection_bias", spec.selection_bias, (False,))
    _demand(where, "router.groups", spec.groups, (1,))
    _demand(where, "router.jitter", spec.jitter, (0.0,))


def _check_moe(where: str, spec: MoeSpec) -> None:
    _check_router(where, spec.router)
    _check_activation(where, spec.activation)
    _demand(where, "expert_bias", spec.expert_bias, (False,))
    _demand(where, "shared", spec.shared, (None,))


def _check_dense(where: str, spec: DenseSpec) -> None:
    _check_activation(where, spec.activation)
