"""Warm start: hot experts first, through the scheduler like everything else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import SMALL
from hypothesis import given
from hypothesis import strategies as st

from jax_impl.app.main import main
from jax_impl.app.replay import replay
from jax_impl.engine import JaxEngine
from jax_impl.fault_readers import FaultyReader
from oracle.checkers import check_log
from oracle.explorer import Explorer
from oracle.scopes import Scope
from oracle.tiny import tiny_config, write_checkpoint
from reference.control import Scheduler
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import Log
from reference.files.requests import Request
from reference.files.residency import document, fingerprint, read_residency, warm_order
from reference.vocab.actions import Load
from reference.vocab.errors import BadInput
from reference.vocab.events import Arrived, Drain, Loaded, LoadFailed
from reference.vocab.options import SCHEDULERS, ControlOptions

OPTIONS = ControlOptions(layers=(1, 3), experts=4, top_k=2, slots=3, kv_tokens=400)
WARM = ((3, 1), (1, 0), (1, 2), (3, 3))


def loads(actions: list) -> list[tuple[int, int]]:
    assert all(a.guess for a in actions if isinstance(a, Load))
    return [tuple(a.key) for a in actions if isinstance(a, Load)]


@pytest.mark.rule("FETCH-8", "FETCH-2")
def test_in_order_into_free_slots_while_nobody_runs() -> None:
    s = Scheduler(OPTIONS.with_(warm=WARM))
    assert s.key() != Scheduler(OPTIONS).key() and s.copy().key() == s.key()
    assert loads(s.next_actions(2, 1)) == [(3, 1), (1, 0)]
    s.handle(Loaded(2))
    assert loads(s.next_actions(1, 1)) == [(1, 2)]
    s.handle(Loaded(1))
    assert loads(s.next_actions(5, 1)) == [], "three slots are full or promised"
    s.handle(Loaded(3))
    assert s.idle and not s.next_actions(5, 1)
    assert {s.key_of(code) for code in s.cache.code} == {(3, 1), (1, 0), (1, 2)}


@pytest.mark.rule("FETCH-8")
@pytest.mark.parametrize("end", [Arrived(0, 1, 1), Drain()])
def test_a_request_or_drain_ends_it(end: Any) -> None:
    s = Scheduler(OPTIONS.with_(warm=WARM, slots=4))
    assert loads(s.next_actions(1, 1)) == [(3, 1)]
    s.handle(end)
    s.next_actions(1, 1)
    s.handle(Loaded(1))
    assert not any(isinstance(a, Load) for a in s.next_actions(4, 1))
    other = Scheduler(OPTIONS.with_(slots=4))
    assert not s.warming and not other.warming


@pytest.mark.rule("FETCH-8")
def test_a_failed_one_is_let_be() -> None:
    s = Scheduler(OPTIONS.with_(warm=WARM[:2]))
    assert loads(s.next_actions(1, 1)) == [(3, 1)]
    s.handle(LoadFailed(1, "EIO"))
    assert loads(s.next_actions(1, 1)) == [(1, 0)]
    s.handle(LoadFailed(2, "EIO", drained=False))
    assert loads(s.next_actions(1, 1)) == [] and not s.fails and not s.idle
    s.handle(LoadFailed(2, "EIO", drained=True))
    assert s.idle and len(s.cache.free) == 3


@pytest.mark.parametrize("warm", [((1, 4),), ((2, 0),), ((1, 0), (1, 0)), ((1, -1),)])
def test_only_experts_of_the_model(warm: Any) -> None:
    with pytest.raises(BadInput, match="warm: experts of this model expected"):
        Scheduler(OPTIONS.with_(warm=warm))


@pytest.mark.rule("FETCH-8", "LIVE-1", "LIVE-3")
@pytest.mark.parametrize("grouping", SCHEDULERS)
def test_every_state_of_a_small_world(grouping: Any) -> None:
    """Two requests come at any time while two of three slots are being warmed; a load may fail."""
    options = ControlOptions(
        layers=(0, 1), experts=2, top_k=1, slots=2, chunk=2, max_rows=4, kv_block=1, kv_tokens=64,
        grouping=grouping, warm=((1, 1), (0, 0)),
    )  # fmt: skip
    scope = Scope("warm", "", options, ((1, 1), (1, 1)), initial=0, load_faults=1, undrained=True)
    report = Explorer(scope).run()
    assert not report.violations and not report.truncated
    cold = Explorer(Scope("cold", "", options.with_(warm=()), scope.requests, initial=0,
                          load_faults=1, undrained=True)).run()
    assert report.canonical_states > cold.canonical_states > 300


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), unique=True),
       st.integers(0, 40))
@pytest.mark.rule("WARM-2")
def test_layers_share_alike_and_the_hottest_come_last(
    keys: list[tuple[int, int]], slots: int
) -> None:
    order = warm_order(keys, slots)
    assert len(order) == min(slots, len(keys)) and set(order) <= set(keys)
    there = Counter(layer for layer, _ in keys)
    taken = Counter(layer for layer, _ in order)
    most = max(taken.values(), default=0)
    for layer, count in there.items():
        assert taken[layer] in (count, most, most - 1), "no layer goes short while it has more"
        mine = [key for key in keys if key[0] == layer]
        assert [key for key in order if key[0] == layer] == mine[: taken[layer]][::-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=2)
    return write_checkpoint(tmp_path_factory.mktemp("residency") / "model", config)


REQUESTS = [Request(f"r{i}", (3 + i, 40 - i, 7 * i % 90), 6) for i in range(4)]


def ran(engine: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    with engine:
        handles = engine.submit_all(REQUESTS, logits=True)
        results = [handle.result() for handle in handles]
    return results, engine.records


@pytest.mark.rule("WARM-1", "WARM-2", "FETCH-8")
@pytest.mark.parametrize("kind", ["jax", "reference"])
def test_a_warm_engine(model: Path, kind: str) -> None:
    """Loads before the first arrival, judged and replayed like all; same bits, more hits."""
    def open_engine(**more: Any) -> Any:
        options: dict[str, Any] = {"memory": "50%", "ignore_eos": True, "keep_log": True, **more}
        if kind == "reference":
            return ReferenceEngine.open(model, chunk=4, **options)
        return JaxEngine.open(model, **{**SMALL, **options})

    cold = open_engine()
    was, _ = ran(cold)
    heat = cold.heat()
    slots = cold.options.slots if kind == "reference" else cold.sizes.slots
    assert sum(heat.values()) == sum(
        len({e for row in r["experts"] for e in row})
        for r in cold.records if r.get("event") == "Routed")
    hottest = sorted(heat, key=lambda key: -heat[key])
    warm = open_engine(warm=hottest)
    results, records = ran(warm)
    for a, b in zip(was, results, strict=True):
        assert a.tokens == b.tokens and np.array_equal(a.logits, b.logits)
    first = next(i for i, r in enumerate(records) if r.get("event") == "Arrived")
    before = [r for r in records[:first] if r.get("action") == "Load"]
    expected = warm_order(hottest, slots)
    assert len(expected) == slots and [tuple(r["key"]) for r in before] == list(expected)
    assert all(r["guess"] for r in before)
    assert sum(r.get("event") == "Loaded" for r in records[:first]) == slots
    after = [r for r in records[first:] if r.get("action") == "Load"]
    assert not any(r["guess"] for r in after)
    demanded = sum(r.get("action") == "Load" for r in cold.records)
    assert len(after) < demanded
    log = Log(records[0], records[1:], complete=True)
    assert not check_log(log)
    assert not replay(log, "log").difference
    totals = warm.totals()
    if kind == "jax":
        assert totals["guesses"] == slots and totals["loads"] == len(after)
        assert totals["guess_bytes"] == slots * cold.sizes.expert
        assert totals["bytes"] == len(after) * cold.sizes.expert
        assert totals["hit_rate"] > cold.totals()["hit_rate"]
        assert f"{slots} experts that had been hot were read" in warm.why()
        assert "had been hot" not in cold.why()


@pytest.mark.rule("WARM-1")
def test_a_warm_start_over_a_bad_disk(model: Path) -> None:
    """Reads that fail before anybody asked do no harm."""
    keys = [(layer, e) for layer in range(3) for e in range(8)]
    reader = FaultyReader("eio", nth=3, every=2, times=6)
    with JaxEngine.open(model, **{**SMALL, "memory": "50%"}, warm=keys, reader=reader) as engine:
        assert reader.fired == 6
        results = [h.result() for h in engine.submit_all(REQUESTS)]
    assert all(r.error is None for r in results)
    records = engine.records
    failed = sum(r.get("event") == "LoadFailed" for r in records)
    assert failed == 6 and engine.totals()["failed_loads"] == 0
    assert not check_log(Log(records[0], records[1:], complete=True))


@pytest.mark.rule("WARM-3")
def test_the_file(model: Path, tmp_path: Path) -> None:
    heat = {(0, 3): 5, (2, 1): 9, (1, 15): 5}
    config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=2)
    fused = write_checkpoint(tmp_path / "fused", config, experts="fused", shards=2)
    other = write_checkpoint(tmp_path / "other", config, seed=1)
    path = tmp_path / "hot.json"
    with Checkpoint.open(model) as a, Checkpoint.open(fused) as b, Checkpoint.open(other) as c:
        path.write_text(json.dumps(document(a, heat)))
        assert list(read_residency(path, a).items()) == [((2, 1), 9.0), ((0, 3), 5.0),
                                                         ((1, 15), 5.0)]
        assert fingerprint(a) == fingerprint(b) != fingerprint(c)
        assert read_residency(path, b)
        with pytest.raises(BadInput, match="is of another model"):
            read_residency(path, c)
        again = document(a, {(0, 3): 4, (0, 0): 1}, read_residency(path, a))
        assert again["experts"] == [[0, 3, 6.5], [2, 1, 4.5], [1, 15, 2.5], [0, 0, 1]]
        good = json.loads(path.read_text())
        for change, said in (
            ({"residency": 2}, "not a residency file of version 1"),
            ({"experts": 5}, "experts: None; .layer, expert, heat. is needed"),
            ({"experts": [[0, 16, 1]]}, "is needed"),
            ({"experts": [[3, 0, 1]]}, "is needed"),
            ({"experts": [[0, True, 1]]}, "is needed"),
            ({"experts": [[0, 0]]}, "is needed"),
            ({"experts": [[0, 0, -1]]}, "has no heat"),
            ({"experts": [[0, 0, "1"]]}, "has no heat"),
            ({"experts": [[0, 0, 1], [0, 0, 2]]}, "is there twice"),
        ):
            path.write_text(json.dumps(good | change))
            with pytest.raises(BadInput, match=said):
                read_residency(path, a)
        for text in ("", "[]", "{", "\x00"):
            path.write_text(text)
            with pytest.raises(BadInput, match=r"hot\.json"):
                read_residency(path, a)


@pytest.mark.rule("WARM-1", "WARM-3")
def test_the_flags(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, hot, out = tmp_path / "F", tmp_path / "hot.json", tmp_path / "out.json"
    file.write_text("".join(
        json.dumps({"id": r.id, "prompt": r.prompt, "max_new_tokens": 6}) + "\n" for r in REQUESTS))
    run = ["run", str(model), "--requests", str(file), "--memory", "50%", "--ignore-eos",
           "--check", "--quiet", "--engine", "reference", "--json", str(out)]
    assert main([*run, "--save-residency", str(hot)]) == 0
    cold = json.loads(out.read_text())
    saved = json.loads(hot.read_text())
    assert len(saved["experts"]) > 20
    assert main([*run, "--residency", str(hot), "--save-residency", str(hot)]) == 0
    warm = json.loads(out.read_text())
    assert [r["tokens"] for r in warm["requests"]] == [r["tokens"] for r in cold["requests"]]
    assert [r["ttft_s"] for r in warm["requests"]] < [r["ttft_s"] for r in cold["requests"]]
    again = json.loads(hot.read_text())
    assert again["experts"] == [[la, e, 1.5 * h] for la, e, h in saved["experts"]]
    capsys.readouterr()
    for words, said in (
        (["--residency", str(file)], "F"),
        (["--residency", str(tmp_path / "nowhere")], "nowhere"),
        (["--save-residency", str(tmp_path / "no" / "x")], "--save-residency: cannot write in"),
    ):
        assert main([*run, *words]) == 2
        assert said in capsys.readouterr().err
