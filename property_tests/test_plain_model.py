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
    ActivationSpec,
    AttentionSpec,
    DenseSpec,
    ExpertStorage,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
    SharedExpertSpec,
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

    def __post_init__(self) -> None:
        moe = self.config.layers[0].feed_forward
        assert isinstance(moe, MoeSpec)
        self.expert_roles = tuple(expert_shapes(self.config, moe))[::-1]  # not the usual order
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


def normed(x: np.ndarray, w: dict[str, Any], role: str, spec: NormSpec) -> np.ndarray:
    if spec.kind == "rms":
        return rms(x, w[role], spec.eps)
    centred = x - x.mean(-1, keepdims=True)
    return rms(centred, w[role], spec.eps) + w[role + "_bias"]


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


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
        a = layer.attention
        attend = compressed if a.kind == "mla" else attention
        h = h + attend(a, p, normed(h, p, "attn_norm", c.norm), c.norm.eps) * c.residual_scale
        x = normed(h, p, "mlp_norm", c.norm)
        h = h + feed_forward(layer.feed_forward, p, w, i, x) * c.residual_scale
    y = normed(h, w, "final_norm", c.norm) @ (w["embed"] if c.tied else w["lm_head"]).T
    return (y + (w["lm_head_bias"] if c.head_bias else 0)) / c.logits_scale


def shares(a: AttentionSpec, q: np.ndarray, k: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    """q, k [T, N, D] -> how much of each value each head takes [N, T, T]."""
    s = np.einsum("ind,jnd->nij", q, k) * a.scale
    i, j = np.ogrid[: len(q), : len(q)]
    seen = (j <= i) & ((j > i - a.window) if a.window else True)
    s = np.exp(np.where(seen, s, -np.inf))
    drained = np.exp(p["sinks"])[:, None, None] if a.sinks else 0.0
    return s / (s.sum(-1, keepdims=True) + drained)


def compressed(a: AttentionSpec, p: dict[str, Any], x: np.ndarray, eps: float) -> np.ndarray:
    """Keys and values expanded for every head, as the model was trained."""
    t, n = len(x), a.heads
    bias = {k: p[f"{k}_bias"] if a.qkv_bias else 0 for k in ("q_a", "kv_a")}
    if a.q_rank:
        q = rms(x @ p["q_a"].T + bias["q_a"], p["q_a_norm"], a.latent_eps) @ p["q_b"].T
    else:
        q = x @ p["q"].T
    q = q.reshape(t, n, -1)
    low = x @ p["kv_a"].T + bias["kv_a"]
    c = rms(low[:, : a.kv_rank], p["kv_a_norm"], a.latent_eps)
    both = (c @ p["kv_b"].T).reshape(t, n, -1)
    shared = np.repeat(low[:, None, a.kv_rank :], n, axis=1)
    assert a.rope is not None
    q = np.concatenate([q[..., : a.nope_dim], turned(q[..., a.nope_dim :], a.rope)], -1)
    k = np.concatenate([both[..., : a.nope_dim], turned(shared, a.rope)], -1)
    y = np.einsum("nij,jnd->ind", shares(a, q, k, p), both[..., a.nope_dim :])
    return y.reshape(t, -1) @ p["o"].T + (p["o_bias"] if a.o_bias else 0)


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
    y = np.einsum("nij,jnd->ind", shares(a, parts["q"], k, p), v).reshape(len(x), -1)
    return y @ p["o"].T + (p["o_bias"] if a.o_bias else 0)


def gated(x: np.ndarray, m: dict[str, Any], spec: ActivationSpec, of: str = "") -> np.ndarray:
    """One feed-forward of the roles of `m`, whichever of them there are."""
    g, u = (x @ m[of + r].T + m.get(f"{of}{r}_bias", 0) for r in ("gate", "up"))
    if spec.kind == "clamped_gated":
        g, u = np.minimum(g, spec.limit), np.clip(u, -spec.limit, spec.limit)
        inner = g * logistic(spec.alpha * g) * (u + 1)
    else:
        inner = g * logistic(g) * u
    return inner @ m[of + "down"].T + m.get(f"{of}down_bias", 0)


def expert(f: MoeSpec, w: dict[str, Any], i: int, n: int) -> dict[str, Any]:
    """An expert's tensors as gate, up and down [out, in], and their biases."""
    prefix = f"experts.{i}.{n}."
    m = {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}
    if f.storage.transposed:
        m = {k: v.T for k, v in m.items()}
    for k in [k for k in m if k.startswith("gate_up")]:
        m[k.replace("gate_up", "gate")], m[k.replace("gate_up", "up")] = m[k][0::2], m[k][1::2]
    return m


def shares_of_experts(f: MoeSpec, p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Each row's weight of each expert [T, E]; zero for those not chosen."""
    r = f.router
    logits = x @ p["router"].T + (p["router_bias"] if r.bias else 0)
    out = np.zeros_like(logits)
    for row, s in zip(out, logits, strict=True):
        score = logistic(s) if r.score == "sigmoid" else np.exp(s) / np.exp(s).sum()
        if r.score == "sparsemixer":
            left = set(range(f.experts))
            for _ in range(f.top_k):
                best = max(left, key=lambda e: s[e])
                near = [s[e] for e in left
                        if (s[best] - s[e]) / max(abs(s[e]), s[best]) <= 2 * r.jitter]  # fmt: skip
                row[best] = np.exp(s[best]) / np.exp(near).sum()
                left.remove(best)
            continue
        by = score + (p["selection_bias"] if r.selection_bias else 0)
        size, groups = f.experts // r.groups, []
        for g in range(r.groups):
            inside = sorted(by[g * size : (g + 1) * size])[::-1]
            groups.append(inside[0] if r.group_score == "max" else inside[0] + inside[1])
        kept = np.argsort(groups)[::-1][: r.top_groups] if r.groups > 1 else [0]
        can = [e for e in range(f.experts) if r.groups == 1 or e // size in kept]
        chosen = sorted(can, key=lambda e: -by[e])[: f.top_k]
        row[chosen] = score[chosen]
        if r.score == "topk_softmax":
            row[chosen] = np.exp(s[chosen]) / np.exp(s[chosen]).sum()
        if r.renormalise:
            row /= max(row.sum(), r.renorm_min) + r.renorm_eps
    return out * r.scale


def feed_forward(f: Any, p: dict[str, Any], w: dict[str, Any], i: int, x: np.ndarray) -> np.ndarray:
    if isinstance(f, DenseSpec):
        return gated(x, p, f.activation)
    share = shares_of_experts(f, p, x)
    outs = [gated(x, expert(f, w, i, n), f.activation) for n in range(f.experts)]
    total = np.sum([share[:, n, None] * y for n, y in enumerate(outs)], axis=0)
    if f.shared is not None:
        gate = logistic(x @ p["shared_router"].T) if f.shared.gated else 1.0
        total = total + gate * gated(x, p, f.activation, "shared_")
    return total


def attn(**changes: Any) -> Any:
    return {"attention": replace(ATTENTION, **changes)}


MLA = AttentionSpec(
    "mla", 4, 1, 9, 6, replace(ROPE, dims=4, interleaved=True), 9**-0.5,
    q_rank=10, kv_rank=11, rope_dim=4, nope_dim=5, latent_eps=1e-3,
)  # fmt: skip


def mla(**changes: Any) -> Any:
    return {"attention": replace(MLA, **changes)}


def moe(**changes: Any) -> Any:
    return {"feed_forward": replace(MOE, **changes)}


CLAMPED = ActivationSpec("clamped_gated", 0.6, 1.3)
INTERLEAVED = ExpertStorage("interleaved", True)


def router(**changes: Any) -> Any:
    return {"feed_forward": replace(MOE, router=RouterSpec(**changes))}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "tied": ({"tied": True}, {}),
    "embedding scaled": ({"embed_scale": 3.0}, {}),
    "branches scaled": ({"residual_scale": 0.4}, {}),
    "norm over all heads": ({}, attn(qk_norm="flat")),
    "norm of each head": ({}, attn(qk_norm="head")),
    "q, k, v clamped": ({}, attn(clip=0.7)),
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
    "layer norms": ({"norm": NormSpec("layer", 1e-3)}, {}),
    "layer norms of a tied head with a bias": (
        {"norm": NormSpec("layer", 1e-3), "tied": True, "head_bias": True},
        {},
    ),
    "logits divided": ({"logits_scale": 3.0, "head_bias": True}, {}),
    "sinks": ({}, attn(sinks=True)),
    "sinks within a window": ({}, attn(sinks=True, window=4, kv_heads=1)),
    "compressed": ({}, mla()),
    "compressed, queries whole": ({}, mla(q_rank=0)),
    "compressed, biases, half-split, window": (
        {},
        mla(qkv_bias=True, o_bias=True, rope=replace(ROPE, dims=4), window=6),
    ),
    "compressed, one head, another scale": ({}, mla(heads=1, scale=0.2)),
    "sigmoid": ({}, router(score="sigmoid")),
    "sigmoid, biased choice": (
        {},
        router(score="sigmoid", selection_bias=True, renormalise=True, renorm_eps=0.01),
    ),
    "softmax, biased choice, least sum": (
        {},
        router(selection_bias=True, renormalise=True, renorm_min=0.7),
    ),
    "groups by their best": ({}, router(groups=3, top_groups=1)),
    "groups by two": ({}, router(score="sigmoid", groups=2, top_groups=1, group_score="top2_sum")),
    "groups by two, biased": (
        {},
        router(
            score="sigmoid", groups=2, top_groups=1, group_score="top2_sum", selection_bias=True
        ),
    ),
    "sparsemixer": ({}, router(score="sparsemixer", jitter=0.2)),
    "shared expert": ({}, moe(shared=SharedExpertSpec(7))),
    "shared expert, gated, biases": ({}, moe(shared=SharedExpertSpec(7, True, True))),
    "clamped": ({}, moe(activation=CLAMPED)),
    "clamped with biases": ({}, moe(activation=CLAMPED, expert_bias=True)),
    "interleaved": ({}, moe(activation=CLAMPED, expert_bias=True, storage=INTERLEAVED)),
    "clamped shared expert, branches scaled": (
        {"residual_scale": 0.3},
        moe(activation=CLAMPED, shared=SharedExpertSpec(5, True)),
    ),
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 40, 21)]


def config_of(case: str) -> ModelConfig:
    top, layer = CASES[case]
    first = replace(BASE.layers[0], **layer)
    return replace(BASE, layers=(first, *BASE.layers[1:], first), **top)


@pytest.mark.rule(
    "NUM-6", "NUM-7", "NUM-11", "NUM-14", "NUM-15", "NUM-16", "NUM-17", "ATTN-4", "ATTN-5",
    "ATTN-6", "ATTN-7", "ATTN-8", "ROUTE-1", "ROUTE-3", "ROUTE-6", "ROUTE-7", "ROUTE-8", "MODEL-13",
)  # fmt: skip
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
