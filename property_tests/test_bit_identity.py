"""A request's tokens and logits are the same bits in any company (NUM-12).

Random tiny models and requests; each request is first run alone with every expert resident, then
together with others under budgets from the minimum up, with any scheduler, chunk size, order of
arrival and with cancelled neighbours. There are no retries and no tolerances.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.engine import JaxEngine
from oracle.tiny import tiny_config, write_checkpoint
from property_tests.witness import violations
from reference.engine import ReferenceEngine
from reference.files.requests import Request
from reference.handle import Result
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, READINESS, SCHEDULERS

ENGINES: dict[str, Any] = {"reference": ReferenceEngine, "jax": JaxEngine}
MODELS = {
    "mixtral": tiny_config("mixtral", sliding_window=9),
    "qwen3_moe": tiny_config("qwen3_moe", decoder_sparse_step=2, num_hidden_layers=4),
    "llama": tiny_config("llama", num_key_value_heads=1),
}
GAMES = {"reference": 12, "jax": 5}
"""Random settings tried for each engine and model; `python -m oracle` and `covey verify` go on."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    dtypes = {"mixtral": "BF16", "qwen3_moe": "F32", "llama": "F16"}
    return {
        name: write_checkpoint(root / name, config, seed=7, dtype=dtypes[name])
        for name, config in MODELS.items()
    }


def requests_of(rng: random.Random, vocab: int) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(vocab) for _ in range(rng.choice([1, 2, 7, 8, 9, 23]))),
            rng.choice([0, 1, 5, 9]),
            temperature=rng.choice([0.0, 0.0, 1.3]),
            top_p=rng.choice([1.0, 0.7]),
            seed=rng.randrange(1 << 60),
        )
        for i in range(rng.randint(3, 6))
    ]


def options_of(rng: random.Random) -> dict[str, Any]:
    return {
        "memory": rng.choice(["25%", "30%", "50%", "80%", "100%"]),
        "scheduler": rng.choice(SCHEDULERS),
        "readiness": rng.choice(READINESS),
        "fetch_order": rng.choice(FETCH_ORDERS),
        "cache": rng.choice(EVICTIONS),
        "chunk": rng.choice([1, 3, 8, 16]),
        "max_running": rng.choice([2, 4]),
        "kv_block": 16,
        "kv_tokens": 16 * 40,
    }


def opened(kind: str, path: Path, **options: Any) -> Any:
    return ENGINES[kind].open(path, keep_log=True, **options)


def alone(kind: str, path: Path, requests: list[Request]) -> dict[str, Result]:
    """Every request by itself: the next is submitted when the last has ended."""
    with opened(kind, path, memory="100%", kv_block=16, kv_tokens=16 * 40, max_running=1) as engine:
        alone = {r.id: engine.submit(r, logits=True).result(120) for r in requests}
    assert violations(engine.records) == []
    return alone


def same(a: Result, b: Result) -> bool:
    assert a.logits is not None
    assert b.logits is not None
    return (
        a.tokens == b.tokens
        and a.finish_reason == b.finish_reason
        and a.logits.tobytes() == b.logits.tobytes()
    )


@pytest.mark.rule("NUM-12")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ENGINES)
def test_the_same_bits_in_any_company(kind: str, model: str, models: dict[str, Path]) -> None:
    rng = random.Random(f"{kind}/{model}")
    requests = requests_of(rng, 96)
    expected = alone(kind, models[model], requests)
    compared, loads = 0, 0
    for _ in range(GAMES[kind]):
        options = options_of(rng)
        order = rng.sample(requests, len(requests))
        doomed = rng.sample(order, rng.randint(0, 2))
        with opened(kind, models[model], **options) as engine:
            handles = [engine.submit(r, logits=True) for r in order]
            for handle in handles:
                if handle.request in doomed:
                    for _ in range(rng.randint(0, 2)):
                        next(iter(handle), None)
                    handle.cancel()
            results = {h.id: h.result(120) for h in handles}
        for r in order:
            if r in doomed:
                full, cut = expected[r.id].tokens, results[r.id].tokens
                assert cut == full[: len(cut)]
            else:
                assert same(results[r.id], expected[r.id]), (r, options)
                compared += 1
        assert violations(engine.records, handles=handles) == []
        loads += sum(1 for x in engine.records if x.get("action") == "Load")
    assert compared >= 2 * GAMES[kind]
    assert loads > 0 or model == "llama"


@pytest.mark.rule("NUM-12")
@pytest.mark.parametrize("kind", ENGINES)
def test_the_minimum_budget_names_itself_and_gives_the_same_bits(
    kind: str, models: dict[str, Path]
) -> None:
    from reference.vocab.errors import BudgetTooSmall

    path = models["qwen3_moe"]
    requests = requests_of(random.Random(5), 96)
    expected = alone(kind, path, requests)
    with pytest.raises(BudgetTooSmall, match="at least") as refusal:
        ENGINES[kind].open(path, memory=1)
    least = str(refusal.value).rsplit("at least ", 1)[1].split()[0]
    for scheduler in SCHEDULERS:
        with opened(kind, path, memory=least, scheduler=scheduler, kv_block=16) as engine:
            for h in engine.submit_all(requests, logits=True):
                assert same(h.result(120), expected[h.id]), scheduler
        assert violations(engine.records) == []


@pytest.mark.rule("NUM-9")
@pytest.mark.parametrize("kind", ENGINES)
def test_generating_equals_scoring_the_text_again(kind: str, models: dict[str, Path]) -> None:
    for path in models.values():
        written = Request("w", (5, 6, 7), 12)
        with opened(kind, path, memory="50%", kv_block=16) as engine:
            first = engine.submit(written, logits=True).result(120)
            text = written.prompt + first.tokens
            again = engine.submit(Request("s", text, 0), logits=True).result(120)
        assert len(first.tokens) > 3
        assert first.logits is not None
        assert again.logits is not None
        # Generation has no logits for the last token that it made: nothing follows it.
        assert again.logits[:-1].tobytes() == first.logits.tobytes()
        assert again.logits.shape == (len(text), 96)


@pytest.mark.rule("NUM-12")
def test_a_kernel_whose_shape_follows_the_batch_would_be_caught() -> None:
    """The negative control: with shapes that depend on the batch, a row's bits do change."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.standard_normal((512, 1024), np.float32))
    rows = jnp.asarray(rng.standard_normal((64, 1024), np.float32))
    product = jax.jit(lambda x: x @ weights.T)
    bits = {np.asarray(product(rows[:n])[0]).tobytes() for n in (1, 2, 3, 5, 8, 17, 33, 64)}
    assert len(bits) > 1
