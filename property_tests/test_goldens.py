"""NUM-10: the NumPy engine against what transformers said, and a comparison that can fail."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_impl.engine import JaxEngine
from oracle import golden
from oracle.golden import NEW_TOKENS, TOLERANCE, Answer, compare, judge, through
from oracle.variants import VARIANTS, by_name
from property_tests.engines import COMPILED
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.numerics import attention, model, projections
from reference.numerics.naive import naive_greedy, naive_logits
from reference.vocab.config import LayerSpec, ModelConfig, MoeSpec

NAMES = [v.name for v in VARIANTS]
BLOCK = 16  # several KV blocks in the longest prompt


def numpy_engine(path: Path, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    ckpt = Checkpoint.open(path)
    return [
        Answer(
            naive_logits(ckpt, p, kv_block=BLOCK), naive_greedy(ckpt, p, new_tokens, kv_block=BLOCK)
        )
        for p in prompts
    ]


def test_every_variant_has_stored_answers() -> None:
    assert golden.names() == NAMES
    assert len(NAMES) >= 20


@pytest.mark.rule("NUM-10", "NUM-1", "NUM-4", "NUM-5", "NUM-6", "NUM-7", "ATTN-4", "ATTN-5",
                  "ATTN-6", "ROUTE-1", "ROUTE-3")  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_numpy_says_what_transformers_said(name: str, tmp_path: Path) -> None:
    verdict = compare(name, by_name(name).write(tmp_path), numpy_engine)
    assert verdict.good, verdict
    assert verdict.error < TOLERANCE / 10, verdict  # measured: at most 3.4e-6


OPTIONS: dict[str, Any] = {
    "memory": "40%", "ignore_eos": True, "kv_block": BLOCK, "chunk": 8, "max_running": 4,
    "max_rows": 16,
}  # fmt: skip
# Their one respect is also that of another variant; each is a compilation of its own.
COVERED = {
    "mixtral-window", "mixtral-head-dim", "mixtral-mha-top1", "llama-biases", "llama-mha-f16",
    "llama-head-dim", "qwen3_moe-tied-bf16", "mixtral-mqa-top4-of-16", "llama-tied-bf16",
}  # fmt: skip


def jax_engine(path: Path) -> JaxEngine:
    return JaxEngine.open(path, compile_cache=COMPILED, **OPTIONS)


@pytest.mark.rule("NUM-10")
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_engine_says_so(name: str, tmp_path: Path) -> None:
    """Three requests at once under a budget, in prompt chunks."""
    engine = through(lambda path: ReferenceEngine.open(path, **OPTIONS))
    path = by_name(name).write(tmp_path)
    verdict = compare(name, path, engine)
    assert verdict.good, verdict
    # To the bit what the model gives without any engine: other chunks, no budget.
    prompts = golden.golden(name).prompts
    for a, b in zip(engine(path, prompts, 1), numpy_engine(path, prompts, 1), strict=True):
        assert a.logits.tobytes() == b.logits.tobytes()


@pytest.mark.rule("NUM-10")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in COVERED else []) for n in NAMES]
)
def test_the_jax_engine_says_so(name: str, tmp_path: Path) -> None:
    """The same, compiled. Measured: at most 3.9e-6."""
    path = by_name(name).write(tmp_path)
    verdict = compare(name, path, through(jax_engine))
    assert verdict.good, verdict
    assert verdict.error < TOLERANCE / 10, verdict


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="transformers or torch is not installed: the stored answers are used",
)
@pytest.mark.rule("NUM-10")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")
def test_transformers_still_says_so(name: str, tmp_path: Path) -> None:
    from oracle.make_goldens import transformers_engine

    path = by_name(name).write(tmp_path)
    prompts = golden.golden(name).prompts
    live = transformers_engine(path, prompts, NEW_TOKENS)
    assert judge(golden.golden(name).answers, live).error < TOLERANCE / 10
    assert judge(live, numpy_engine(path, prompts, NEW_TOKENS)).good


# The comparison must be able to fail


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = replace(by_name("llama-plain"), stored={"seed": 8}).write(tmp_path)
    with pytest.raises(ValueError, match="other weights"):
        compare("llama-plain", path, numpy_engine)


def test_a_verdict_sees_nan_tokens_and_shapes() -> None:
    good = golden.golden("llama-plain").answers
    assert judge(good, good).good
    nan = [replace(a, logits=np.full_like(a.logits, np.nan)) for a in good]
    assert not judge(good, nan).good
    assert not judge(good, [replace(a, tokens=[0, *a.tokens[1:]]) for a in good]).good
    with pytest.raises(ValueError, match="logits"):
        judge(good, [replace(a, logits=a.logits[:, :-1]) for a in good])


Mutate = Callable[[ModelConfig], ModelConfig]


def layers(change: Callable[[LayerSpec], LayerSpec]) -> Mutate:
    return lambda c: replace(c, layers=tuple(change(s) for s in c.layers))


def attn(**changes: Any) -> Mutate:
    return layers(lambda s: replace(s, attention=replace(s.attention, **changes)))


def rope(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        assert s.attention.rope is not None
        return replace(s, attention=replace(s.attention, rope=replace(s.attention.rope, **changes)))

    return layers(change)


def moe(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        ff = s.feed_forward
        return replace(s, feed_forward=replace(ff, **changes)) if isinstance(ff, MoeSpec) else s

    return layers(change)


def router(**changes: Any) -> Mutate:
    def change(s: LayerSpec) -> LayerSpec:
        ff = s.feed_forward
        if not isinstance(ff, MoeSpec):
            return s
        return replace(s, feed_forward=replace(ff, router=replace(ff.router, **changes)))

    return layers(change)


WRONG: list[tuple[str, str, Mutate]] = [
    ("mixtral-window", "window one longer", attn(window=6)),
    ("mixtral-window", "window one shorter", attn(window=4)),
    ("mixtral-window", "no window", attn(window=None)),
    ("qwen3_moe-window", "window one longer", attn(window=7)),
    ("qwen3_moe-window", "no window", attn(window=None)),
    ("qwen3_moe-window-unused", "window used", attn(window=6)),
    ("mixtral-plain", "not renormalised", router(renormalise=False)),
    ("qwen3_moe-plain", "not renormalised", router(renormalise=False)),
    ("qwen3_moe-not-renormalised", "renormalised", router(renormalise=True)),
    ("qwen3_moe-renormalise-absent", "renormalised", router(renormalise=True)),
    ("mixtral-plain", "weights scaled", router(scale=1.01)),
    ("mixtral-plain", "one expert fewer", moe(top_k=1)),
    ("mixtral-mqa-top4-of-16", "one expert more", moe(top_k=5)),
    ("mixtral-old-spelling", "usual theta", rope(theta=1e4)),
    ("mixtral-all-defaults", "usual theta", rope(theta=1e4)),
    ("llama-old-theta-sharded", "usual theta", rope(theta=1e4)),
    ("llama-plain", "adjacent pairs", rope(interleaved=True)),
    ("llama-plain", "half of the head turned", rope(dims=4)),
    ("llama-head-dim", "scale of hidden / heads", attn(scale=8**-0.5)),
    ("llama-biases", "no bias on q, k, v", attn(qkv_bias=False)),
    ("llama-biases", "no bias on o", attn(o_bias=False)),
    ("qwen3_moe-plain", "no q/k norm", attn(qk_norm="none")),
    ("mixtral-small-values", "other eps", lambda c: replace(c, norm=replace(c.norm, eps=1e-6))),
    ("mixtral-plain", "tied", lambda c: replace(c, tied=True)),
]


def error_of(name: str, path: Path, mutate: Mutate) -> float:
    """The error of the NumPy logits of the longest prompt under a changed description."""
    ckpt = Checkpoint.open(by_name(name).write(path))
    ckpt.config = mutate(ckpt.config)
    want = golden.golden(name)
    got = Answer(naive_logits(ckpt, want.prompts[-1], kv_block=BLOCK), want.answers[-1].tokens)
    return judge(want.answers[-1:], [got]).error


@pytest.mark.parametrize(("name", "what", "mutate"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_a_wrong_description_is_caught(
    name: str, what: str, mutate: Mutate, tmp_path: Path
) -> None:
    assert error_of(name, tmp_path / "same", lambda c: c) < TOLERANCE / 10
    assert error_of(name, tmp_path / "wrong", mutate) > 10 * TOLERANCE, what


def heads_by_remainder(q: Any, kv: Any, position: int, window: Any, scale: float, _: Any) -> Any:
    """Wrong on purpose: query head n takes KV head n % G."""
    g, out = kv.kv_heads, np.empty_like(q)
    for i in range(g):
        out[i::g] = attention.head_attention(q[i::g], kv, i, position, window, q.dtype.type(scale))
    return out


@pytest.mark.rule("ATTN-5", "ATTN-2", "NUM-7")
@pytest.mark.parametrize(
    ("module", "function", "wrong"),
    [
        (model, "attend", heads_by_remainder),
        (attention, "merge", lambda a, b: b if a is None else a),
        (model, "feed_forward", lambda w, x, _: model.matvec(w.down, model.matvec(w.gate, x))),
        (projections, "rotate", lambda x, c, s, i: x),
        (model, "combine", lambda w, y: y.mean(axis=0)),
    ],
    ids=["heads-by-remainder", "first-part-only", "no-activation", "no-rope", "equal-weights"],
)
def test_wrong_code_is_caught(
    module: Any, function: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, function, wrong)
    assert error_of("mixtral-plain", tmp_path, lambda c: c) > 10 * TOLERANCE
