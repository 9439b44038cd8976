"""The engine at its edges: what it refuses, what it compiles, what it says about its time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engines import (
    COMPILED,
    CROWD,
    LIMIT_S,
    MINIMUM,
    SMALL,
    alone,
    checkpoint,
    events,
    judge,
    opened,
    request,
    results_of,
)

from jax_impl.compile_cache import use
from jax_impl.engine import JaxEngine
from jax_impl.totals import Totals, why
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import read_log
from reference.files.requests import Request
from reference.vocab.errors import BadInput, BudgetTooSmall, CoveyError, Unsupported
from reference.vocab.ids import ExpertKey

ROOT = Path(__file__).resolve().parent.parent

BAD_REQUESTS = [
    (Request("x", "some text", 4), "text"),
    (Request("x", (), 4), "empty"),
    (Request("x", [1, 2], 4), "tuple"),  # type: ignore[arg-type]
    (Request("x", (1, 2.5), 4), "integers"),  # type: ignore[arg-type]
    (Request("x", (1, 96), 4), "96"),
    (Request("x", (-1,), 4), "-1"),
    (Request("x", (1,), None), "max_new_tokens"),
    (Request("x", (1,), -1), "max_new_tokens"),
    (Request("x", (1,) * 500, 13), "512"),
    (Request("x", (1,), 4, stop=("\n",)), "stop text"),
]


@pytest.mark.rule("ENGINE-8")
def test_bad_requests_are_refused_and_the_engine_goes_on() -> None:
    with opened() as engine:
        for asked, says in BAD_REQUESTS:
            with pytest.raises(BadInput, match=says):
                engine.submit(asked)
            with pytest.raises(BadInput):
                engine.submit_all([CROWD[0], asked])
        assert engine.submit(CROWD[0]).result(LIMIT_S).tokens == alone(CROWD[0])[0]
    assert len(events(engine, "Arrived")) == 1, "nothing of a refused batch was queued"


@pytest.mark.rule("ENGINE-8", "ENGINE-12")
def test_what_exceeds_the_kv_capacity_is_rejected_at_once_and_blocks_nobody() -> None:
    with opened(kv_tokens=64) as engine:
        big, small = engine.submit_all([request("big", 50, 30), CROWD[0]])
        result = big.result(LIMIT_S)
        assert result.finish_reason == "rejected" and "64" in (result.error or "")
        assert small.result(LIMIT_S).tokens == alone(CROWD[0])[0]


@pytest.mark.rule("SAFE-14", "JAX-13")
def test_where_every_layer_has_a_window_no_kv_of_a_whole_text_is_told() -> None:
    asked = [request("a", 20, 6), request("b", 3, 4)]
    with opened(checkpoint("mistral")) as engine:
        results = results_of(engine, asked)
    assert [len(r.tokens) for r in results] == [6, 4]
    assert [("kv" in r) for r in events(engine, "Admit")] == [False, False]
    with opened() as engine:
        results_of(engine, asked)
    assert [r["kv"] for r in events(engine, "Admit")] == [32, 16]


@pytest.mark.rule("ENGINE-3", "ENGINE-1")
def test_the_budget_below_the_minimum_names_the_one_that_would_do() -> None:
    with pytest.raises(BudgetTooSmall, match="12KiB") as told:
        JaxEngine.open(checkpoint(), MINIMUM - 1, **SMALL)
    assert told.value.exit_code == 2
    with opened(memory="12KiB") as engine:
        assert engine.sizes.slots == 2 and engine.sizes.budget == MINIMUM
        assert engine.submit(CROWD[0]).result(LIMIT_S).tokens == alone(CROWD[0])[0]
    with opened(memory="auto") as engine:
        assert engine.sizes.slots == 24, "all of them, and no more"
    with opened(memory="37%") as engine:
        assert engine.sizes.slots == 8


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memory": "4 bananas"}, BadInput, "bananas"),
        ({"prefetch": "psychic"}, Unsupported, "psychic"),
        ({"scheduler": "chaos"}, BadInput, "chaos"),
        ({"io": "smoke"}, Unsupported, "smoke"),
        ({"compute": "f8"}, Unsupported, "f8"),
        ({"threads": 0}, BadInput, "threads"),
        ({"deadline_s": 0.0}, BadInput, "deadline_s"),
        ({"kv_tokens": 7}, BadInput, "kv_tokens"),
        ({"colour": "red"}, BadInput, "colour"),
        ({"log": "/nowhere/at/all"}, BadInput, "/nowhere"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        JaxEngine.open(checkpoint(), **(SMALL | options))


@pytest.mark.rule("ENGINE-10")
def test_a_compile_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(BadInput, match="not private"):
        use(loose)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="compile cache"):
        use(tmp_path / "file")
    assert use(None) is None


FORGETFUL = """
import sys
from jax_impl.engine import JaxEngine
from reference.files.requests import Request
engine = JaxEngine.open(sys.argv[1], "50%", compile_cache=sys.argv[2], chunk=4, max_rows=8)
print(len(engine.submit(Request("a", (5, 6, 7), 4)).result(60.0).tokens), flush=True)
"""


@pytest.mark.rule("ENGINE-7")
def test_a_program_that_forgets_to_close_ends() -> None:
    words = [sys.executable, "-c", FORGETFUL, str(checkpoint()), str(COMPILED)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr[-500:]


@pytest.mark.rule("ENGINE-10")
def test_everything_is_compiled_before_the_first_request() -> None:
    said: list[str] = []
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with opened(memory="30%", progress=said.append) as engine:
            assert compiled, "the listener hears of compiling"
            compiled.clear()
            results_of(engine, CROWD)
            assert not compiled
    finally:
        jax.monitoring.clear_event_listeners()
    for part in ("of resident weights", "compiled", "experts fit"):
        assert any(part in line for line in said), part


def in_flight_s(records: Sequence[dict[str, Any]]) -> float:
    """Seconds in which a load was in flight, as the log has it."""
    seconds, flying, since = 0.0, 0, 0.0
    for record in records:
        step = (record.get("action") == "Load") - (record.get("event") == "Loaded")
        seconds += record["t"] - since if step and flying else 0.0
        flying, since = flying + step, record["t"] if step else since
    return seconds


@pytest.mark.rule("ENGINE-9")
def test_totals_add_up_and_agree_with_the_log(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with opened(memory="30%", log=log) as engine:
        results = results_of(engine, CROWD)
        live = engine.totals()
    t = engine.totals()
    assert live["tokens"] == t["tokens"] == sum(len(r.tokens) for r in results)
    assert t["wall_s"] == pytest.approx(t["compute_s"] + t["waiting_s"] + t["other_s"])
    loads = events(engine, "Load")
    assert t["loads"] == len(loads) == len(events(engine, "Loaded"))
    assert t["bytes"] == sum(r["bytes"] for r in loads)
    assert t["steps"] == len(events(engine, "Compute"))
    assert t["experts_named"] - t["hits"] >= len({tuple(r["key"]) for r in loads})
    assert 0 < t["of_bound"] <= 1.0 and t["bound_s"] <= t["wall_s"]
    told = {n: sum(r["ns"] for r in events(engine, n)) / 1e9 for n in ("Loaded", "Computed")}
    assert told == pytest.approx({"Loaded": t["channel_s"], "Computed": t["compute_s"]})
    assert t["channel_s"] == pytest.approx(in_flight_s(engine.records), rel=0.1)
    assert t["ended"] == {"length": len(CROWD)}
    assert t["prompt_tokens"] == sum(len(r.prompt) for r in CROWD)
    assert sum(s for _, s in t["waited_for_layers"]) == pytest.approx(t["waiting_s"], abs=0.05)
    text = engine.why()
    assert "bound" in text and f"{t['tokens']} tokens" in text and "\n" not in text
    stored = read_log(log)
    assert stored.complete and stored.records == engine.records[1:]
    assert stored.records[-1]["end"]["tokens"] == t["tokens"]
    judge(engine)


@pytest.mark.rule("ENGINE-9")
def test_time_is_booked_under_what_was_going_on() -> None:
    t, key = Totals(), ExpertKey(2, 7)
    t.request_opened(10.0, 5)
    t.load_started(11.0)
    t.load_ended(13.0, key, 100, True)
    t.step_started(13.5)
    t.load_started(14.0)
    t.step_ended(15.5, 1)
    t.load_ended(16.0, ExpertKey(1, 1), 50, True)
    t.request_ended(16.0, "length")
    t.load_started(17.0)
    t.load_ended(20.0, key, 100, True)
    d = t.as_dict(30.0, rate=50.0)
    assert (d["compute_s"], d["waiting_s"], d["other_s"]) == (2.0, 2.5, 1.5)
    assert d["wall_s"] == 6.0 and d["channel_s"] == 4.0, "time without a request does not count"
    assert d["fetch_s"] == 5.0 and d["bound_s"] == 5.0
    assert d["waited_for_experts"] == [[2, 7, 2.0], [1, 1, 0.5]]
    assert why(Totals().as_dict(1.0)) == "Nothing was run."


@pytest.mark.rule("ENGINE-9")
@pytest.mark.parametrize(
    ("compute", "waiting", "other", "fetch", "says", "not_says"),
    [
        (6.0, 3.7, 0.3, 4.0, "waited for 37% of the time: more memory", "would not help"),
        (9.6, 0.3, 0.1, 4.0, "more memory would not help", "would help"),
        (2.0, 7.0, 1.0, 8.0, "more memory or a faster disk would help", "would not help"),
        (1.0, 0.1, 8.9, 0.5, "nothing was in flight", "more memory"),
    ],
)
def test_the_reason_follows_from_the_numbers(
    compute: float, waiting: float, other: float, fetch: float, says: str, not_says: str
) -> None:
    t = Totals().as_dict(0.0) | {
        "compute_s": compute, "waiting_s": waiting, "other_s": other, "fetch_s": fetch,
        "wall_s": 10.0, "experts_named": 5, "bound_s": max(compute, fetch),
    }  # fmt: skip
    assert says in why(t) and not_says not in why(t)


def test_what_a_checkpoint_changes_between_opening_and_reading_is_noticed(tmp_path: Path) -> None:
    from oracle.tiny import tiny_config, write_checkpoint

    path = write_checkpoint(tmp_path / "m", tiny_config("qwen3_moe"))
    real = Checkpoint.check_unchanged

    def touched(self: Checkpoint, file: Path, fd: int | None = None) -> None:
        if fd is None:
            file.touch()
        real(self, file, fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "check_unchanged", touched)
        with pytest.raises(BadInput, match="changed"):
            JaxEngine.open(path, "50%", **SMALL)


@pytest.mark.rule("ENGINE-7")
def test_close_in_a_callback_is_refused_and_close_from_many_threads_waits(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", tiny_config("mixtral"))
    engine = JaxEngine.open(path, memory="50%")
    said: list[str] = []

    def callback(position: int, row: np.ndarray) -> None:
        try:
            engine.close()
        except CoveyError as error:
            said.append(str(error))

    result = engine.submit(Request("a", (1, 2, 3), 3), on_logits=callback).result(60)
    assert result.finish_reason in ("length", "stop")
    assert said
    assert "another thread" in said[0]
    before = threading.active_count()
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(30)
        assert not closer.is_alive()
    assert threading.active_count() < before
