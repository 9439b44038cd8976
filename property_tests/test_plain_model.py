"""The stages against a forward pass written plainly: whole matrices, float64, a mask, no blocks.

The plain version shares nothing with reference.numerics, and covers the values of the description
that no family in reach uses yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from reference.files.layout import expert_shapes, layer_roles, top_roles
from reference.numerics.naive import naive_logits
from reference.vocab.config import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)

ROPE = RopeSpec(theta=500.0, dims=8)
ATTENTION = AttentionSpec("gqa", 4, 2, 8, 8, ROPE, 8**-0.5)
MOE = MoeSpec(6, 2, 12, RouterSpec(renormalise=True))
BASE = ModelConfig(
    "none", 24, 40, (LayerSpec(ATTENTION, MOE), LayerSpec(ATTENTION, DenseSpec(20))),
    NormSpec(eps=1e-4), False, 128,
)  # fmt: skip


@dataclass
class Weights:
    """Random float32 tensors for a description, with the methods of a checkpoint."""

    config: ModelConfig
    expert_roles = ("up", "down", "gate")  # not the usual order

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        shapes = dict(top_roles(self.config))
        for i, layer in enumerate(self.config.layers):
            shapes |= {f"layers.{i}.{r}": s for r, s in layer_roles(self.config, layer)}
            if isinstance(layer.feed_forward, MoeSpec):
                for e in range(layer.feed_forward.experts):
                    for r, s in expert_shapes(self.config, layer.feed_forward).items():
                        shapes[f"experts.{i}.{e}.{r}"] = s
        self.tensors = {
            role: (rng.standard_normal(s) / np.sqrt(s[-1]) + role.endswith("norm")).astype("f4")
            for role, s in shapes.items()
        }

    def tensor(self, role: str) -> str:
        return role

    def expert(self, layer: int, expert: int) -> list[str]:
        return [f"experts.{layer}.{expert}.{role}" for role in self.expert_roles]

    def read(self, role: str) -> np.ndarray:
        return self.tensors[role]


def rms(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def turned(x: np.ndarray, r: RopeSpec) -> np.ndarray:
    """[T, heads, D] as complex numbers times e^(i angle)."""
    inv = (1 / r.theta ** (np.arange(0, r.dims, 2) / r.dims)).astype("f4")
    angle = (np.arange(len(x), dtype="f4")[:, None] * inv).astype("f8")
    spin = np.exp(1j * angle)[:, None, :]
    x, half = x.copy(), r.dims // 2
    if r.interleaved:
        z = (x[..., 0 : r.dims : 2] + 1j * x[..., 1 : r.dims : 2]) * spin
        x[..., 0 : r.dims : 2], x[..., 1 : r.dims : 2] = z.real, z.imag
    else:
        z = (x[..., :half] + 1j * x[..., half : r.dims]) * spin
        x[..., :half], x[..., half : r.dims] = z.real, z.imag
    return x


def plain(weights: Weights, tokens: list[int]) -> np.ndarray:
    c = weights.config
    w = {k: v.astype(np.float64) for k, v in weights.tensors.items()}
    h = w["embed"][tokens] * c.embed_scale
    for i, layer in enumerate(c.layers):
        p = {
            k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")
        }
        h = h + attention(layer.attention, p, rms(h, p["attn_norm"], c.norm.eps), c.norm.eps) * (
            c.residual_scale
        )
        x = rms(h, p["mlp_norm"], c.norm.eps)
        h = h + feed_forward(layer.feed_forward, p, w, i, x) * c.residual_scale
    return rms(h, w["final_norm"], c.norm.eps) @ (w["embed"] if c.tied else w["lm_head"]).T


def attention(a: AttentionSpec, p: dict[str, Any], x: np.ndarray, eps: float) -> np.ndarray:
    parts = {}
    for name, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
        y = x @ p[name].T + (p[f"{name}_bias"] if a.qkv_bias else 0)
        if name != "v" and a.qk_norm == "flat":
            y = rms(y, p[f"{name}_norm"], eps)
        y = y.reshape(len(x), heads, -1)
        if name != "v" and a.qk_norm == "head":
            y = rms(y, p[f"{name}_norm"], eps)
        if a.clip is not None:
            y = np.minimum(np.maximum(y, -a.clip), a.clip)
        parts[name] = y if name == "v" or a.rope is None else turned(y, a.rope)
    k, v = (np.repeat(parts[n], a.heads // a.kv_heads, axis=1) for n in "kv")
    s = np.einsum("ind,jnd->nij", parts["q"], k) * a.scale
    i, j = np.ogrid[: len(x), : len(x)]
    seen = (j <= i) & ((j > i - a.window) if a.window else True)
    s = np.exp(np.where(seen, s, -np.inf))
    y = np.einsum("nij,jnd->ind", s / s.sum(-1, keepdims=True), v).reshape(len(x), -1)
    return y @ p["o"].T + (p["o_bias"] if a.o_bias else 0)


def feed_forward(f: Any, p: dict[str, Any], w: dict[str, Any], i: int, x: np.ndarray) -> np.ndarray:
    def gated(g: Any, u: Any, d: Any, b: Any = (0, 0, 0)) -> np.ndarray:
        a = x @ g.T + b[0]
        return (a / (1 + np.exp(-a)) * (x @ u.T + b[1])) @ d.T + b[2]

    if isinstance(f, DenseSpec):
        names = ("gate", "up", "down")
        biases = [p[f"{n}_bias"] for n in names] if f.bias else (0, 0, 0)
        return gated(*(p[n] for n in names), b=biases)
    logits = x @ p["router"].T + (p["router_bias"] if f.router.bias else 0)
    rank = (-logits).argsort(axis=1, kind="stable").argsort(axis=1)
    chosen = rank < f.top_k
    e = np.exp(logits)
    share = e / e.sum(1, keepdims=True)
    if f.router.renormalise or f.router.score == "topk_softmax":
        share = np.where(chosen, e, 0) / np.where(chosen, e, 0).sum(1, keepdims=True)
    share = np.where(chosen, share, 0) * f.router.scale
    outs = [
        gated(*(w[f"experts.{i}.{n}.{r}"] for r in ("gate", "up", "down")))
        for n in range(f.experts)
    ]
    return sum(share[:, n, None] * y for n, y in enumerate(outs))


def attn(**changes: Any) -> Any:
    return {"attention": replace(ATTENTION, **changes)}


def router(**changes: Any) -> Any:
    return {"feed_forward": replace(MOE, router=RouterSpec(**changes))}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "tied": ({"tied": True}, {}),
    "embedding scaled": ({"embed_scale": 3.0}, {}),
    "branches scaled": ({"residual_scale": 0.4}, {}),
    "norm over all heads": ({}, attn(qk_norm="flat")),
    "norm of each head": ({}, attn(qk_norm="head")),
    "clamped": ({}, attn(clip=0.7)),
    "clamped after the norm": ({}, attn(clip=0.7, qk_norm="flat")),
    "biases": ({}, attn(qkv_bias=True, o_bias=True)),
    "bias on q, k, v only": ({}, attn(qkv_bias=True)),
    "values of another width": ({}, attn(v_head_dim=5)),
    "adjacent pairs, half the head": ({}, attn(rope=RopeSpec(300.0, 4, interleaved=True))),
    "half the head": ({}, attn(rope=RopeSpec(300.0, 4))),
    "no rope": ({}, attn(rope=None)),
    "window": ({}, attn(window=7)),
    "not renormalised": ({}, router()),
    "softmax over the chosen": ({}, router(score="topk_softmax")),
    "router bias": ({}, router(renormalise=True, bias=True)),
    "weights scaled": ({}, router(renormalise=True, scale=2.5)),
    "all experts": ({}, {"feed_forward": replace(MOE, top_k=6)}),
    "dense biases": ({}, {"feed_forward": DenseSpec(20, bias=True)}),
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 40, 21)]


def config_of(case: str) -> ModelConfig:
    top, layer = CASES[case]
    first = replace(BASE.layers[0], **layer)
    return replace(BASE, layers=(first, *BASE.layers[1:], first), **top)


@pytest.mark.rule("NUM-6", "NUM-7", "NUM-11", "ATTN-4", "ATTN-5", "ATTN-6", "ROUTE-1", "ROUTE-3")
@pytest.mark.parametrize("case", CASES)
def test_the_stages_equal_the_plain_version(case: str) -> None:
    weights = Weights(config_of(case))
    want = plain(weights, TOKENS)
    exact = naive_logits(weights, TOKENS, np.float64, kv_block=8)
    assert np.abs(exact - want).max() < 1e-6 * want.std()  # K and V are float32 numbers
    single = naive_logits(weights, TOKENS, np.float32, kv_block=8)
    assert np.abs(single - want).max() < 2e-5 * want.std()


def test_the_cases_are_different_functions() -> None:
    """A value that changed nothing would not be tested by its case.

    Softmax over the chosen is base itself up to rounding: renormalising divides the rest away.
    """
    seen: dict[bytes, str] = {}
    for case in CASES.keys() - {"softmax over the chosen"}:
        logits = plain(Weights(config_of(case)), TOKENS).round(5).tobytes()
        assert logits not in seen, (case, seen.get(logits))
        seen[logits] = case
