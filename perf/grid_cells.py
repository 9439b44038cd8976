"""The cells of the grid: platforms x models x cache shares x requests, and those that make sense.

A model's experts are kept in the widest of its formats of which the largest share of the grid fits
the platform's memory beside the other weights and the KV of the requests; where none does, in the
narrowest, and shares that do not fit are left out with the reason (GRID-5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from reference.simulator import models, platforms
from reference.simulator.models import ModelShape
from reference.simulator.platforms import Platform

SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)
REQUESTS = (1, 2, 4, 8, 16, 32)
CONTEXT = 1024
"""Tokens of KV that must fit for each request."""


@dataclass(frozen=True, order=True)
class Cell:
    """One setting; all schedulers see the same."""

    platform: str
    model: str
    cache_share: float
    requests: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


_PAIRS = (
    ("jetson-thor", "qwen3-30b-a3b"), ("jetson-thor", "gpt-oss-120b"),
    ("jetson-thor", "deepseek-v2-lite"), ("macbook-m4-max", "qwen3-30b-a3b"),
    ("macbook-m4-max", "mixtral-8x7b"), ("macbook-m4-max", "olmoe-1b-7b"),
    ("mac-studio-m3-ultra", "gpt-oss-120b"), ("rtx-4090-pcie4", "qwen3-30b-a3b"),
    ("rtx-5090-pcie5", "mixtral-8x7b"), ("rtx-4090-pcie4", "deepseek-v2-lite"),
    ("h200-pcie5", "gpt-oss-20b"),
)  # fmt: skip
_SPREAD = (
    ((0.5, 8), (0.75, 16), (0.25, 4), (0.875, 32)),
    ((0.75, 8), (0.5, 16), (0.875, 2), (0.125, 8)),
    ((0.875, 8), (0.5, 32), (0.75, 4), (0.25, 16)),
    ((0.75, 32), (0.5, 4), (0.875, 16), (0.5, 1)),
)  # fmt: skip
SLICE = (
    Cell("jetson-thor", "deepseek-v2-lite", 0.5, 8),
    Cell("macbook-m4-max", "olmoe-1b-7b", 0.75, 8),
    Cell("rtx-4090-pcie4", "mixtral-8x7b", 0.5, 4),
    Cell("h200-pcie5", "gpt-oss-20b", 0.75, 16),
)
"""What continuous integration runs."""


_CURVES = (
    ("jetson-thor", "qwen3-30b-a3b", 0.5), ("jetson-thor", "qwen3-30b-a3b", 0.75),
    ("macbook-m4-max", "qwen3-30b-a3b", 0.75), ("jetson-thor", "deepseek-v2-lite", 0.75),
)  # fmt: skip


def chosen(name: str) -> list[Cell]:
    """The cells of a set: `ci`, a fixed spread over pairs of platform and model; `curves`, some
    over all numbers of requests; `all`; `slice`; a platform, a model, or PLATFORM/MODEL: all its
    shares and requests."""
    if name == "ci":
        return [Cell(p, m, *at) for i, (p, m) in enumerate(_PAIRS) for at in _SPREAD[i % 4]]
    if name == "curves":
        return [Cell(*at, n) for at in _CURVES for n in REQUESTS]
    if name == "slice":
        return list(SLICE)
    return list(_matching(name))


def _matching(name: str) -> Iterator[Cell]:
    first, _, second = name.partition("/")
    ps = [first] if first in platforms.names() else list(platforms.names())
    only = second or (first if first in models.names() else "")
    ms = [only] if only else list(models.names())
    known = first == "all" or first in (*platforms.names(), *models.names())
    if not known or only not in ("", *models.names()):
        raise SystemExit(f"cells: unknown {name!r}; ci, curves, slice, all, a platform "
                         f"({', '.join(platforms.names())}), a model ({', '.join(models.names())}) "
                         "or PLATFORM/MODEL expected")  # fmt: skip
    for p in ps:
        for m in ms:
            for share in SHARES:
                for requests in REQUESTS:
                    yield Cell(p, m, share, requests)


def needed(model: ModelShape, stored: str, share: float, requests: int) -> float:
    """Bytes of memory: weights beside the routed experts, the share of those, KV."""
    kv = requests * CONTEXT * model.kv_bytes
    return model.non_expert_bytes + share * model.all_experts * model.bytes_of(stored) + kv


def format_of(platform: Platform, model: ModelShape) -> str:
    """The format of the experts on that platform."""
    ordered = sorted(model.formats, key=model.bytes_of, reverse=True)
    if "mxfp4" in model.formats:
        ordered = ["mxfp4"]  # as published; nobody widens it
    for stored in ordered:
        if needed(model, stored, SHARES[-1], REQUESTS[-1]) <= platform.memory.capacity_bytes:
            return stored
    return ordered[-1]


def impossible(cell: Cell) -> str:
    """Why a cell cannot be, or ""."""
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    stored = format_of(platform, model)
    wants = needed(model, stored, cell.cache_share, cell.requests)
    if wants > platform.memory.capacity_bytes:
        return (f"memory: {wants / 1e9:.1f} GB of weights in {stored} and KV, "
                f"{platform.memory.capacity_bytes / 1e9:.0f} GB there")  # fmt: skip
    if round(cell.cache_share * model.all_experts) < model.top_k:
        return f"cache: fewer slots than the {model.top_k} experts of a token"
    return ""
