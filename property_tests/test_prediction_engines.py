"""Predictors at work: the same bits with each of them, logs that replay, what they are worth."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import CROWD, SMALL, alone, checkpoint, events, opened, request, results_of, same

from jax_impl.app.main import main
from oracle.checkers import check_log
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import Log
from reference.numerics.model import Model
from reference.prediction.accuracy import of_log
from reference.simulator import models
from reference.simulator.costs import CostModel
from reference.simulator.run import Result, control, routes_for, simulate
from reference.vocab.config import MoeSpec
from reference.vocab.errors import BadInput

DEEP = {"layers": 4}


def guessed(records: Iterable[dict[str, Any]]) -> int:
    return sum(bool(r.get("guess")) for r in records)


# -- the JAX engine ------------------------------------------------------------------------------


@pytest.mark.rule("PREDICT-1", "PREDICT-2", "PREDICT-9", "PREFETCH-1")
@pytest.mark.parametrize(
    ("predictor", "scheduler", "readiness"),
    [
        ("next-gate", "lockstep", "visit"), ("next-gate", "interleaved", "expert"),
        ("activation", "lockstep", "expert"), ("layer", "interleaved", "visit"),
        ("token", "lockstep", "visit"),
    ],
)  # fmt: skip
def test_same_bits_with_every_predictor(predictor: str, scheduler: str, readiness: str) -> None:
    """Every checker and the replay of the log have no objection either (`opened` judges)."""
    with opened(
        memory="40%", scheduler=scheduler, readiness=readiness, prefetch=predictor, threads=2
    ) as engine:
        for _ in range(2):  # the second time there is something to remember
            got = results_of(engine, CROWD)
            for asked, result in zip(CROWD, got, strict=True):
                assert same(result, alone(asked)), asked.id
        totals = engine.totals()
    head, *records = engine.records
    told = totals["prediction"]
    assert events(engine, "Predicted") and guessed(records) == told["guesses"] > 0
    assert told["used"] <= told["guesses"] <= totals["loads"]
    assert of_log(head, records).as_dict() == told
    assert f"{told['guesses']} of the loads were guesses" in engine.why()


@pytest.mark.rule("PREDICT-4")
def test_both_engines_ask_the_next_router_the_same() -> None:
    """The routers of both numerics choose the same experts, in the same order, nearly always;
    qwen2_moe has a shared expert."""
    path = checkpoint("qwen2_moe", **DEEP)
    asked = request("x", 5, 6)
    with opened(path, "100%", prefetch="next-gate", prefetch_experts=3) as engine:
        engine.submit(asked).result(60.0)
    mine = {tuple(r["visit"]): r["scores"] for r in events(engine, "Predicted")}
    options = {k: SMALL[k] for k in ("chunk", "kv_block", "ignore_eos", "keep_log")}
    with ReferenceEngine.open(path, prefetch="next-gate", prefetch_experts=3, **options) as other:
        other.submit(asked).result()
    theirs = {
        tuple(r["visit"]): r["scores"] for r in other.records if r.get("event") == "Predicted"
    }
    assert mine.keys() == theirs.keys() and len(mine) >= 5
    assert sum(mine[v] == theirs[v] for v in mine) >= 0.9 * len(mine)


@pytest.mark.rule("PREDICT-4")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_next_gate_is_the_next_router_on_the_residual_of_now(family: str) -> None:
    """By hand: norm, router matrix, the greatest; with the shared expert where there is one."""
    model = Model(Checkpoint.open(checkpoint(family, **DEEP)), np.float64)
    ids = [5, 9, 2]
    h = model.enter(model.start(len(ids)), ids, 0)
    said = model.next_gate(h, 3)
    assert said is not None and h.layer is not None
    at, ranked = said
    spec = model.config.layers[at].feed_forward
    assert isinstance(spec, MoeSpec)
    weights = model.weights
    for row, told in enumerate(ranked):
        x = h.residual[row]
        now = model.config.layers[h.layer].feed_forward
        assert isinstance(now, MoeSpec) and (now.shared is not None) == (family == "deepseek_v3")
        if now.shared is not None:
            shared = model._with_shared(h.layer, np.zeros_like(h.x), h.x)
            x = x + shared[row] * model.config.residual_scale
        x = x / np.sqrt(np.mean(x * x) + model.config.norm.eps)
        logits = weights[f"layers.{at}.router"] @ (x * weights[f"layers.{at}.mlp_norm"])
        if spec.router.score == "sigmoid":
            logits = 1 / (1 + np.exp(-logits))
        if spec.router.selection_bias:
            logits = logits + weights[f"layers.{at}.selection_bias"]
        if spec.router.groups == 1:
            assert told.tolist() == np.argsort(-logits, kind="stable")[: len(told)].tolist()
        else:  # within the groups that may be chosen: in order of score, and the best of all
            assert (np.diff(logits[told]) <= 0).all() and int(np.argmax(logits)) in told
    last = model.config.moe_layers[-1]
    assert model.next_gate(h.__class__(**{**h.__dict__, "layer": last}), 3) is None


@pytest.mark.rule("PREFETCH-1", "PREDICT-3")
def test_what_is_refused() -> None:
    with pytest.raises(BadInput, match="lockstep-blocking reads nothing ahead"):
        with opened(prefetch="layer", scheduler="lockstep-blocking"):
            pass


# -- the NumPy engine and the command --------------------------------------------------------------


@pytest.mark.rule("PREDICT-1", "PREDICT-2")
@pytest.mark.parametrize("scheduler", ["lockstep", "interleaved"])
def test_the_readable_engine_predicts_without_changing_a_bit(scheduler: str) -> None:
    options = {k: SMALL[k] for k in ("chunk", "kv_block", "ignore_eos", "keep_log")}
    asked = [request(i, 3 + i, 4) for i in range(3)]
    found = []
    results: list[Any] = []
    for predictor in ("none", "next-gate", "activation", "layer", "token"):
        with ReferenceEngine.open(
            checkpoint(), memory="40%", scheduler=scheduler, prefetch=predictor, **options
        ) as engine:
            for _ in range(2):
                results = [h.result() for h in engine.submit_all(asked, logits=True)]
        head, *records = engine.records
        assert not check_log(Log(head, records, True))
        assert bool(guessed(records)) == (predictor != "none")
        found.append([(r.tokens, r.logits.tobytes()) for r in results if r.logits is not None])
        assert len(found[-1]) == 3 and found[-1] == found[0], predictor


@pytest.mark.rule("PREDICT-2")
def test_a_log_with_predictions_replays_from_the_command(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [4, 5]}\n')
    log = tmp_path / "log"
    assert main([
        "run", str(checkpoint()), "--requests", str(path), "--engine", "reference", "--memory",
        "40%", "--scheduler", "lockstep", "--predict", "layer", "--prefetch-experts", "3",
        "--log", str(log), "--check", "--max-new-tokens", "6", "--ignore-eos",
    ]) == 0  # fmt: skip
    text = log.read_text()
    assert '"event":"Predicted"' in text and '"guess":true' in text and '"prefetch":3' in text
    assert main(["replay", str(log)]) == 0
    assert main(["check", str(log)]) == 0
    # A guess that control would not make, in the place of one that it made, is seen.
    at = text.index('"guess":true')
    log.write_text(text[:at] + '"guess":false' + text[at + len('"guess":true') :])
    assert main(["replay", str(log)]) == 1
    capsys.readouterr()


# -- what it is worth, in virtual time -------------------------------------------------------------


def gain(fetch_s: float, grouping: str, predict: str) -> float:
    """Tokens/s with a predictor over without, four requests of OLMoE's shape at half the cache."""
    model = models.load("olmoe-1b-7b")
    costs = CostModel(model.bytes_of() / fetch_s, 0.0, 2, 150e-6, 5e-6, 20e-6)

    def run(name: str) -> Result:
        options = control(model, 0.5, 4, grouping=grouping, prefetch=8 if name else 0)
        return simulate(
            None, model, routes_for(model), options, requests=4, tokens=40, warm_up=20,
            costs=costs, predict=name,
        )  # fmt: skip

    return run(predict).tokens_per_s / run("").tokens_per_s


@pytest.mark.rule("PREDICT-8")
def test_prediction_helps_where_both_sides_are_near_and_not_where_fetching_is_the_bound() -> None:
    near, bound = 100e-6, 1e-3
    assert gain(near, "lockstep", "perfect") > 1.15
    assert 0.99 < gain(bound, "lockstep", "perfect") < 1.08
    assert gain(bound, "lockstep", "trace") < 0.97  # wrong guesses take the channel
    assert 0.98 < gain(bound, "interleaved", "trace") < 1.02  # the channel has no time for guesses
