"""The built-in model: it opens, fits, speaks, knows an unread book, and routes well."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import jax_impl.app
from jax_impl.app.text import Text
from perf.demo_model import mixture
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.numerics.model import Model
from reference.numerics.naive import naive_logits, remembering
from reference.vocab.ids import ExpertKey

MODEL = Path(jax_impl.app.__file__).parent / "demo_model"
CARD = (MODEL / "README.md").read_text(encoding="utf-8")
BYTES_MAX = 16_000_000
END = "<|endoftext|>"
EXCERPT = """\
Dorothy lived in the midst of the great Kansas prairies, with Uncle
Henry, who was a farmer, and Aunt Em, who was the farmer's wife.  Their
house was small, for the lumber to build it had to be carried by wagon
many miles.  There were four walls, a floor and a roof, which made one
room; and this room contained a rusty looking cookstove, a cupboard for
the dishes, a table, three or four chairs, and the beds.
"""
"""From the held-out book, The Wonderful Wizard of Oz (1900), in the public domain."""
EXCERPT_LOSS_MAX = 1.45
"""Nats a byte; the model has 1.443 on these lines, which open the book, and less further on."""
PROMPT = "Once upon a time there was a"
GREEDY = "\nservant of a man who had been able to be able to be able to be\n"
"""24 tokens after PROMPT, by the readable engine."""


@pytest.fixture(scope="module")
def ckpt() -> Checkpoint:
    return Checkpoint.open(MODEL)


@pytest.fixture(scope="module")
def text() -> Text:
    pytest.importorskip("tokenizers")
    found = Text(MODEL)
    assert found.why_not == ""
    return found


def test_opens_and_fits(ckpt: Checkpoint) -> None:
    config = ckpt.config
    assert (config.family, len(config.layers), config.experts, config.top_k) == (
        "qwen3_moe", 6, 32, 4,
    )  # fmt: skip
    assert len(config.moe_layers) == 6
    assert {ref.dtype for e in range(32) for ref in ckpt.expert(5, e)} == {"BF16"}
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sizes.keys() >= {"config.json", "generation_config.json", "model.safetensors",
                            "tokenizer.json", "README.md"}  # fmt: skip
    assert 8_000_000 < sum(sizes.values()) <= BYTES_MAX
    assert f"{sum(n for name, n in sizes.items() if name != 'README.md'):,} bytes" in CARD


def test_weights_are_trained_numbers(ckpt: Checkpoint) -> None:
    """Finite, and no two experts of a layer alike."""
    model = Model(ckpt)
    for layer in (0, 5):
        downs = [model.widen(ckpt_expert(ckpt, layer, e))[2] for e in range(ckpt.config.experts)]
        assert np.isfinite(downs).all()
        flat = np.array([d.ravel() for d in downs])
        flat /= np.linalg.norm(flat, axis=1, keepdims=True)
        assert np.abs(flat @ flat.T - np.eye(len(flat))).max() < 0.9


def ckpt_expert(ckpt: Checkpoint, layer: int, expert: int) -> tuple[np.ndarray, ...]:
    return tuple(ckpt.read(ref) for ref in ckpt.expert(layer, expert))


@given(st.text(max_size=60))
def test_every_text_comes_back(text: Text, words: str) -> None:
    assume(END not in words)
    ids = text.encode(words, "test")
    assert all(0 <= i < 1024 for i in ids)
    assert text.decode(ids) == words


@pytest.mark.parametrize(
    "words",
    [EXCERPT, "", " ", "\n\n", "\r\n\t\x00", "  two  spaces ", "naïve café", "한국어 문장", "🐝🇰🇷",
     "e\u0301 is not \u00e9", "don't we'll", "1234567890", "\ufeffmark"],
)  # fmt: skip
def test_texts_come_back(text: Text, words: str) -> None:
    assert text.decode(text.encode(words, "test")) == words


def test_the_end_of_a_text(ckpt: Checkpoint, text: Text) -> None:
    """The token that ends a text is one token, is in both configs, and is not shown."""
    (end,) = text.encode(END, "test")
    assert tuple(ckpt.config.eos) == (end,)
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == end
    assert text.decode([end]) == ""


def test_knows_a_book_that_it_has_not_read(ckpt: Checkpoint, text: Text) -> None:
    ids = [*text.encode(END, "test"), *text.encode(EXCERPT, "test")]
    assert len(EXCERPT) / len(ids) > 2.2, "the tokenizer is worth its vocabulary"
    logits = naive_logits(ckpt, ids[:-1]).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    loss = losses.sum() / len(EXCERPT.encode())
    assert 0.5 < loss < EXCERPT_LOSS_MAX
    stated = re.search(r"\*\*(\d\.\d+) nats a byte\*\*", CARD)
    assert stated
    assert float(stated[1]) < 1.6


@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_greedy_text(text: Text, memory: str) -> None:
    """The same words at a quarter of the experts' memory as with all of it."""
    prompt = text.encode(PROMPT, "test")
    with ReferenceEngine.open(MODEL, memory=memory, ignore_eos=True) as engine:
        result = engine.submit(Request("a", prompt, 24)).result()
    assert result.finish_reason == "length"
    assert text.decode(result.tokens) == GREEDY


def test_routers_are_neither_collapsed_nor_uniform(ckpt: Checkpoint, text: Text) -> None:
    """Over a prompt most experts are used, none by nearly all, and neighbours differ."""
    model = Model(ckpt)
    state, read = model.start(), remembering(model)
    h = model.enter(state, text.encode(EXCERPT, "test"), 0)
    layers = 0
    while h.layer is not None:
        layers += 1
        k = h.topk.shape[1]
        share = np.bincount(h.topk.ravel(), minlength=32) / h.topk.size
        used = share[share > 0]
        entropy = float(-(used * np.log(used)).sum() / math.log(32))
        assert 0.70 < entropy < 0.995, f"layer {h.layer}: {entropy:.3f} of log 32"
        assert share.max() * k < 0.8, f"layer {h.layer}: an expert that nearly every token takes"
        same = np.mean([
            len(set(a) & set(b)) / k
            for a, b in zip(h.topk[:-1].tolist(), h.topk[1:].tolist(), strict=True)
        ])  # fmt: skip
        assert 0.05 < same < 0.75, f"layer {h.layer}: neighbours share {same:.2f} of their experts"
        # A uniform router gives each chosen expert a quarter.
        assert np.mean(h.weights.max(1)) > 0.30, f"layer {h.layer}: all chosen weigh the same"
        outputs = [
            [model.expert(h.layer, read(ExpertKey(h.layer, int(e))), x) for e in chosen]
            for x, chosen in zip(h.x, h.topk, strict=True)
        ]
        h = model.advance(state, h, np.array(outputs), "last")
    assert layers == 6


# The training: its fast experts


def test_training_experts() -> None:
    """Sorted into a buffer, some rows dropped: NumPy's loop, and the slope along each argument."""
    rng = np.random.Generator(np.random.PCG64(5))
    n, hidden, experts, inner, k, capacity = 48, 8, 6, 5, 2, 18
    sizes = ((n, hidden), (experts, hidden), (experts, inner, hidden), (experts, inner, hidden),
             (experts, hidden, inner))  # fmt: skip
    args = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    every = tuple(range(len(args)))

    @jax.jit
    @partial(jax.value_and_grad, argnums=every, has_aux=True)
    def run(x, router, gate, up, down):
        routing = mixture.route(x, router, k)
        y, full = mixture.experts_forward(x, routing, gate, up, down, capacity)
        return (y * jnp.sin(y)).sum(), (y, full, routing)

    (_, (y, full, routing)), grads = run(*args)
    x, router, gate, up, down = (a.astype(np.float64) for a in args)
    scores = np.exp(x @ router.T)
    chosen = np.argsort(-scores, 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(routing.chosen, chosen)
    taken, want, left_out = [0] * experts, np.zeros((n, hidden)), 0
    for row in range(n):
        for e in chosen[row]:
            taken[e] += 1
            if taken[e] > capacity:
                left_out += 1
                continue
            a = gate[e] @ x[row]
            weight = scores[row, e] / scores[row, chosen[row]].sum()
            want[row] += weight * (down[e] @ (a / (1 + np.exp(-a)) * (up[e] @ x[row])))
    assert 0 < left_out < n * k // 3
    assert float(full) == pytest.approx(left_out / (n * k))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    for which, grad in enumerate(grads):
        # Half along the gradient, so that the slope is large, half anywhere.
        way = rng.standard_normal(sizes[which]).astype(np.float32)
        way = way / np.linalg.norm(way) + np.asarray(grad) / np.linalg.norm(grad)
        way /= np.linalg.norm(way)
        ends = []
        for sign in (1, -1):
            moved = list(args)
            moved[which] = args[which] + np.float32(sign * 2e-3) * way
            (value, (_, _, routing2)), _ = run(*moved)
            np.testing.assert_array_equal(routing2.chosen, chosen)
            ends.append(float(value))
        slope = (ends[0] - ends[1]) / 4e-3
        size = float(np.linalg.norm(grad))
        assert slope == pytest.approx(float(np.vdot(grad, way)), abs=0.01 * size)
