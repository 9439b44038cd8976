"""The fields that a family file may name: type, bounds, and what silence means (MODEL-4).

A field that has no default here must be found in config.json, or the family file states what its
absence means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_AXIS = 1 << 24
REQUIRED = object()


@dataclass(frozen=True)
class FieldType:
    """How a value is checked (`check` returns it, or None if it is wrong) and what is right."""

    check: Callable[[Any], Any]
    right: str
    default: Any = REQUIRED


def _int(low: int, high: int, default: Any = REQUIRED) -> FieldType:
    def check(v: Any) -> Any:
        return v if type(v) is int and low <= v <= high else None

    return FieldType(check, f"an integer from {low} to {high}", default)


def _real(low: float, high: float, default: Any = REQUIRED) -> FieldType:
    def check(v: Any) -> Any:
        return float(v) if type(v) in (int, float) and low <= v <= high else None

    return FieldType(check, f"a number from {low:g} to {high:g}", default)


def _flag(default: Any = REQUIRED) -> FieldType:
    return FieldType(lambda v: v if type(v) is bool else None, "true or false", default)


def _word(*words: str, default: Any = REQUIRED) -> FieldType:
    return FieldType(lambda v: v if v in words else None, " or ".join(words), default)


def _ints(right: str, lone: bool) -> FieldType:
    """A list of non-negative integers; with `lone`, one integer stands for a list of one."""

    def check(v: Any) -> Any:
        if lone and type(v) is int:
            v = [v]
        good = type(v) is list and all(type(x) is int and 0 <= x < 1 << 31 for x in v)
        return tuple(v) if good else None

    return FieldType(check, right, ())


def _reals() -> FieldType:
    def check(v: Any) -> Any:
        good = type(v) is list and all(type(x) in (int, float) and 1e-6 <= x <= 1e6 for x in v)
        return tuple(map(float, v)) if good else None

    return FieldType(check, "a list of positive numbers", ())


def _texts(v: Any) -> Any:
    return tuple(v) if type(v) is list and all(type(x) is str for x in v) else None


FIELDS: dict[str, FieldType] = {
    "hidden": _int(1, MAX_AXIS),
    "vocab": _int(1, MAX_AXIS),
    "layers": _int(1, 10_000),
    "heads": _int(1, 65_536),
    "kv_heads": _int(1, 65_536, None),
    "head_dim": _int(1, 65_536, None),
    "max_position": _int(1, 1 << 40),
    "tied": _flag(False),
    "head_bias": _flag(False),
    "eos": _ints("a token id or a list of them", lone=True),
    "bos": _int(0, 1 << 31, None),
    "embed_scale": _real(-1e6, 1e6, 1.0),
    "residual_scale": _real(-1e6, 1e6, 1.0),
    "logits_scale": _real(1e-6, 1e6, 1.0),
    "norm.kind": _word("rms", "layer", default="rms"),
    "norm.eps": _real(0.0, 1.0),
    "rope.theta": _real(1e-6, 1e12),
    "rope.interleaved": _flag(False),
    "rope.share": _real(1e-3, 1.0, None),
    "rope.dims": _int(2, 65_536, None),
    "rope.original": _int(1, 1 << 40, None),
    "rope.longrope": _word("factors", "mscales", default="factors"),
    "attention.kind": _word("gqa", "mla", default="gqa"),
    "attention.scale": _real(1e-6, 1e6, None),
    "attention.qkv_bias": _flag(False),
    "attention.o_bias": _flag(False),
    "attention.qk_norm": _word("none", "head", "flat", default="none"),
    "attention.clip": _real(1e-6, 1e9, None),
    "attention.sinks": _flag(False),
    "attention.window": _int(0, 1 << 40, None),
    "attention.window_used": _flag(True),
    "attention.window_layers": _word("all", "from", "even_below", default="all"),
    "attention.window_bound": _int(0, 1 << 31, None),
    "attention.layer_types": FieldType(_texts, "a list of words", None),
    "mla.q_rank": _int(1, MAX_AXIS, None),
    "mla.kv_rank": _int(1, MAX_AXIS, 0),
    "mla.rope_dim": _int(2, 65_536, 0),
    "mla.nope_dim": _int(1, 65_536, 0),
    "mla.value_dim": _int(1, 65_536, 0),
    "dense.intermediate": _int(1, MAX_AXIS, 0),
    "dense.bias": _flag(False),
    "activation.kind": _word("silu_gated", "clamped_gated", default="silu_gated"),
    "activation.limit": _real(0.0, 1e6, 0.0),
    "activation.alpha": _real(0.0, 1e6, 0.0),
    "moe.experts": _int(0, 65_535, 0),
    "moe.top_k": _int(1, 65_535, 0),
    "moe.intermediate": _int(1, MAX_AXIS, 0),
    "moe.bias": _flag(False),
    "moe.step": _int(1, 10_000, 1),
    "moe.first": _int(0, 1 << 31, 0),
    "moe.last": _int(-1, 1 << 31, -1),
    "moe.dense_layers": _ints("a list of layer numbers", lone=False),
    "shared.count": _int(0, 65_535, 0),
    "shared.intermediate": _int(0, MAX_AXIS, 0),
    "shared.gated": _flag(False),
    "shared.bias": _flag(False),
    "router.score": _word("softmax", "sigmoid", "topk_softmax", "sparsemixer", default="softmax"),
    "router.renormalise": _flag(False),
    "router.renorm_eps": _real(0.0, 1.0, 0.0),
    "router.renorm_min": _real(0.0, 1.0, 0.0),
    "router.scale": _real(-1e6, 1e6, 1.0),
    "router.bias": _flag(False),
    "router.selection_bias": _flag(False),
    "router.grouped": _flag(True),
    "router.groups": _int(1, 65_535, 1),
    "router.top_groups": _int(1, 65_535, 1),
    "router.group_score": _word("max", "top2_sum", default="max"),
    "router.jitter": _real(0.0, 1.0, 0.0),
}
"""Every field that a family file may name."""

ROPE_FIELDS: dict[str, FieldType] = {
    "factor": _real(1e-3, 1e6, None),
    "original_max_position_embeddings": _int(1, 1 << 40, None),
    "attention_factor": _real(1e-3, 1e6, None),
    "beta_fast": _real(1e-6, 1e6, None),
    "beta_slow": _real(1e-6, 1e6, None),
    "truncate": _flag(True),
    "mscale": _real(0.0, 1e6, None),
    "mscale_all_dim": _real(0.0, 1e6, None),
    "low_freq_factor": _real(1e-6, 1e6, None),
    "high_freq_factor": _real(1e-6, 1e6, None),
    "short_factor": _reals(),
    "long_factor": _reals(),
    "short_mscale": _real(1e-3, 1e6, None),
    "long_mscale": _real(1e-3, 1e6, None),
}
"""What a rope table may say beside its kind, theta and the share of a head that it turns."""
