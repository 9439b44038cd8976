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


FIELDS: dict[str, FieldType] = {
    "hidden": _int(1, MAX_AXIS),
    "vocab": _int(1, MAX_AXIS),
    "layers": _int(1, 10_000),
    "heads": _int(1, 65_536),
    "kv_heads": _int(1, 65_536, None),
    "head_dim": _int(1, 65_536, None),
    "max_position": _int(1, 1 << 40),
    "tied": _flag(False),
    "eos": _ints("a token id or a list of them", lone=True),
    "bos": _int(0, 1 << 31, None),
    "norm.kind": _word("rms", default="rms"),
    "norm.eps": _real(0.0, 1.0),
    "rope.theta": _real(1e-6, 1e12),
    "attention.qkv_bias": _flag(False),
    "attention.o_bias": _flag(False),
    "attention.qk_norm": _word("none", "head", default="none"),
    "attention.window": _int(0, 1 << 40, None),
    "attention.window_used": _flag(True),
    "dense.intermediate": _int(1, MAX_AXIS, 0),
    "dense.bias": _flag(False),
    "moe.experts": _int(0, 65_535, 0),
    "moe.top_k": _int(1, 65_535, 0),
    "moe.intermediate": _int(1, MAX_AXIS, 0),
    "moe.step": _int(1, 10_000, 1),
    "moe.dense_layers": _ints("a list of layer numbers", lone=False),
    "router.score": _word("softmax", default="softmax"),
    "router.renormalise": _flag(False),
}
"""Every field that a family file may name."""
