"""The engine as a caller sees it: tokens, bits, ends, refusals, totals."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engines import (
    CROWD,
    LIMIT_S,
    MINIMUM,
    alone,
    checkpoint,
    events,
    opened,
    request,
    results_of,
    same,
)

from jax_impl.fault_readers import ControlledReader
from reference.engine import ReferenceEngine
from reference.files.requests import Request
from reference.sampling import sample
from reference.vocab.errors import CoveyError, RequestFailed
from reference.vocab.ids import ExpertKey


@pytest.mark.rule("ENGINE-6")
@pytest.mark.parametrize(
    ("memory", "scheduler", "readiness"),
    [
        (MINIMUM, "interleaved", "visit"),
        (MINIMUM, "interleaved", "expert"),
        (MINIMUM, "lockstep", "visit"),
        (MINIMUM, "lockstep-blocking", "expert"),
        ("20%", "interleaved", "visit"),
        ("20%", "lockstep-blocking", "visit"),
        ("60%", "interleaved", "expert"),
        ("60%", "lockstep", "expert"),
        ("100%", "interleaved", "visit"),
    ],
)
def test_bits_are_those_of_each_request_alone(memory: Any, scheduler: str, readiness: str) -> None:
    options = {"scheduler": scheduler, "readiness": readiness}
    with opened(memory=memory, **options) as engine:
        results = results_of(engine, CROWD)
    for asked, result in zip(CROWD, results, strict=True):
        assert same(result, alone(asked)), f"request {asked.id}"
    head = engine.records[0]
    assert head["options"]["slots"] * head["slot_bytes"] <= head["budget_bytes"]


@pytest.mark.rule("ENGINE-6")
@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 8, "max_running": 4},
        {"chunk": 2, "max_running": 16},
        {"cache": "global", "fetch_order": "first-come"},
        {"fetch_order": "fewest-missing", "io": "buffered", "threads": 1},
        {"io": "direct", "max_rows": 4, "check": True},
        {"max_running": 1, "chunk": 32, "max_rows": 32},
        {"wide": 16, "chunk": 16, "max_rows": 16, "max_running": 4},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_how_it_is_run(options: dict[str, Any]) -> None:
    with opened(memory="30%", **options) as engine:
        results = results_of(engine, CROWD[::-1])
    for asked, result in zip(CROWD[::-1], results, strict=True):
        assert same(result, alone(asked)), f"request {asked.id}"


@pytest.mark.rule("ENGINE-6")
def test_arrivals_in_the_middle_and_cancels_change_no_bits() -> None:
    with opened(memory="30%") as engine:
        victims = [engine.submit(request(f"v{i}", 9, 40)) for i in range(3)]
        first = [engine.submit(r, logits=True) for r in CROWD[:3]]
        next(iter(victims[0]))
        victims[0].cancel()
        late = [engine.submit(r, logits=True) for r in CROWD[3:]]
        victims[1].cancel()
        results = [h.result(LIMIT_S) for h in [*first, *late]]
        victims[2].cancel()
        ended = [v.result(LIMIT_S) for v in victims]
    for asked, result in zip(CROWD, results, strict=True):
        assert same(result, alone(asked)), f"request {asked.id}"
    assert {r.finish_reason for r in ended} <= {"cancelled", "length"}
    assert ended[0].finish_reason == "cancelled" and ended[0].tokens


@pytest.mark.rule("ENGINE-6")
def test_generating_equals_scoring_the_generated_text() -> None:
    asked = CROWD[3]
    tokens, logits = alone(asked)
    whole = Request("whole", (*asked.prompt, *tokens[:-1]), 0)  # type: ignore[misc]
    with opened(memory="30%") as engine:
        score = engine.submit(whole, logits=True).result(LIMIT_S)
    assert score.tokens == () and score.finish_reason == "stop" and score.ttft_s is None
    assert score.logits is not None and score.logits.tobytes() == logits.tobytes()


@pytest.mark.rule("ENGINE-6")
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_other_families(family: str) -> None:
    path = checkpoint(family)
    memory = "40%" if family == "mixtral" else 0
    with opened(path, memory) as engine:
        results = results_of(engine, CROWD[:3])
    for asked, result in zip(CROWD, results, strict=False):
        assert same(result, alone(asked, path))
    assert (engine.totals()["loads"] > 0) == (family == "mixtral")


@pytest.mark.rule("ENGINE-6")
def test_sampling_is_keyed_by_seed_and_position() -> None:
    asked = request("warm", 5, 8, temperature=0.8, top_k=20, top_p=0.95, seed=11)
    with opened(memory="30%") as engine:
        noisy = engine.submit_all([asked, request("n", 6, 8, temperature=1.0)], logits=True)
        result = noisy[0].result(LIMIT_S)
    assert same(result, alone(asked))
    assert result.logits is not None
    for i, token in enumerate(result.tokens):
        row = result.logits[4 + i]
        told = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 11}
        assert token == sample(row, position=5 + i, **told)  # type: ignore[arg-type]


@pytest.mark.rule("ENGINE-13")
def test_generation_stops_at_end_of_text_or_at_a_stop_id() -> None:
    tokens, _ = alone(request(1, 7, 12))
    stop = tokens[2]
    at = tokens.index(stop)
    with opened() as engine:
        own = engine.submit(request(1, 7, 12, stop=(stop,))).result(LIMIT_S)
    assert own.finish_reason == "stop" and own.tokens == tokens[: at + 1]
    with opened(checkpoint(eos_token_id=stop), ignore_eos=False) as engine:
        text = engine.submit(request(1, 7, 12)).result(LIMIT_S)
    assert text.finish_reason == "stop" and text.tokens == tokens[: at + 1]
    with opened(checkpoint(eos_token_id=stop)) as engine:
        assert engine.submit(request(1, 7, 12)).result(LIMIT_S).finish_reason == "length"


@contextmanager
def one_of(kind: str) -> Iterator[Any]:
    whole = opened() if kind == "jax" else ReferenceEngine.open(checkpoint(), ignore_eos=True)
    with whole as engine:
        yield engine


@pytest.mark.rule("ENGINE-13")
@pytest.mark.parametrize("kind", ["jax", "reference"])
def test_the_caller_may_say_which_token_is_the_last(kind: str) -> None:
    tokens, _ = alone(request(1, 7, 12))
    heard: list[int] = []

    def third(token: int) -> bool:
        heard.append(token)
        return len(heard) == 3

    def broken(token: int) -> bool:
        raise RuntimeError("the caller's own")

    with one_of(kind) as engine:
        cut = engine.submit(request(1, 7, 12), stop_at=third)
        bad = engine.submit(request(1, 7, 12), stop_at=broken)
        free = engine.submit(request(1, 7, 12))
        assert (cut.result(LIMIT_S).tokens, cut.result().finish_reason) == (tokens[:3], "stop")
        assert free.result(LIMIT_S).tokens == tokens
        result = bad.result(LIMIT_S)
        assert result.finish_reason == "error" and "the caller's own" in str(result.error)
    assert heard == list(tokens[:3]), "once for each token"


@pytest.mark.rule("ENGINE-7")
def test_tokens_can_be_iterated_while_they_come() -> None:
    seen: list[int] = []
    with opened() as engine:
        handle = engine.submit(CROWD[0])
        for token in handle:
            seen.append(token)
        assert handle.done and list(handle) == seen, "a second iteration gives them again"
    result = handle.result()
    assert tuple(seen) == result.tokens == alone(CROWD[0])[0]
    assert result.ttft_s == result.token_s[0]
    assert list(result.token_s) == sorted(result.token_s)


@pytest.mark.rule("ENGINE-7")
def test_rows_are_passed_on_as_they_come() -> None:
    rows: dict[int, np.ndarray] = {}
    asked = CROWD[2]
    with opened() as engine:
        result = engine.submit(asked, on_logits=rows.__setitem__).result(LIMIT_S)
    assert result.logits is None, "they are not kept as well"
    expected = alone(asked)[1]
    assert list(rows) == list(range(len(expected)))
    assert all(rows[i].tobytes() == expected[i].tobytes() for i in rows)


@pytest.mark.rule("ENGINE-7")
def test_a_queued_request_can_be_cancelled_and_never_computes() -> None:
    with opened(max_running=1, chunk=32, max_rows=32) as engine:
        running, queued = engine.submit_all([request("a", 4, 30), request("b", 4, 30)])
        queued.cancel()
        assert queued.result(LIMIT_S).finish_reason == "cancelled"
        running.cancel()
        running.cancel()
        assert running.result(LIMIT_S).finish_reason == "cancelled"
        running.cancel()
    parts = [p for r in events(engine, "Compute") for p in r["parts"]]
    assert all(visit[0] != queued.number for visit, *_ in parts)


@pytest.mark.rule("ENGINE-7", "ENGINE-12")
def test_closing_ends_what_is_open_and_refuses_what_comes() -> None:
    with opened() as engine:
        handles = engine.submit_all([request(i, 20, 60) for i in range(6)])
        next(iter(handles[0]))
    reasons = [h.result(0).finish_reason for h in handles]
    assert "cancelled" in reasons and set(reasons) <= {"cancelled", "length"}
    engine.close()
    with pytest.raises(CoveyError, match="closed"):
        engine.submit(CROWD[0])


@pytest.mark.rule("ENGINE-7")
def test_drain_finishes_what_runs_and_rejects_the_rest() -> None:
    with opened(max_running=2, chunk=16, max_rows=16) as engine:
        handles = engine.submit_all([request(i, 4, 8) for i in range(4)])
        next(iter(handles[0]))
        engine.drain()
        late = engine.submit(request("late", 4))
        results = [h.result(LIMIT_S) for h in [*handles, late]]
    assert [r.finish_reason for r in results[:2]] == ["length"] * 2
    assert results[0].tokens == alone(request(0, 4, 8))[0]
    assert results[-1].finish_reason == "rejected" and "drain" in (results[-1].error or "")


@pytest.mark.rule("ENGINE-7", "ENGINE-12")
def test_many_cancels_from_many_threads_leave_nothing_behind() -> None:
    with opened(memory="30%") as engine:

        def work(worker: int) -> None:
            for i in range(25):
                handle = engine.submit(request(f"{worker}.{i}", 1 + (i * 5) % 14, 20))
                if i % 3 == 1:
                    next(iter(handle), None)
                handle.cancel()
                ended.append(handle.result(LIMIT_S).finish_reason)

        ended: list[str] = []
        workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        assert len(ended) == 100 and set(ended) <= {"cancelled", "length"}
        assert ended.count("cancelled") > 50
        assert same(engine.submit(CROWD[1], logits=True).result(LIMIT_S), alone(CROWD[1]))
    assert not any(engine._loop.missing().values())


@pytest.mark.rule("ENGINE-7")
def test_a_broken_engine_ends_every_request_and_still_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(broken=True) as engine:
        first = engine.submit(request("a", 4, 60))
        next(iter(first))

        def bug(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(engine._loop._scheduler.__class__, "handle", bug)
        second = engine.submit(request("b", 4, 4))
        for handle in (first, second):
            result = handle.result(LIMIT_S)
            assert result.finish_reason == "error" and "a bug" in (result.error or "")
        with pytest.raises(RequestFailed, match="a bug"):
            list(second)
        with pytest.raises(CoveyError, match="engine failed"):
            engine.submit(CROWD[0])
        monkeypatch.undo()
    assert isinstance(engine.failure, ZeroDivisionError)
    assert "end" not in engine.records[-1]


@pytest.mark.rule("ENGINE-7")
def test_an_error_in_a_callback_is_its_own_requests_error() -> None:
    def picky(position: int, row: np.ndarray) -> None:
        raise ValueError(f"no thanks at {position}")

    with opened(memory="40%") as engine:
        good = engine.submit(CROWD[1], logits=True)
        bad = engine.submit(request("bad", 5), on_logits=picky)
        result = bad.result(LIMIT_S)
        assert result.finish_reason == "error" and "no thanks at 0" in (result.error or "")
        assert same(good.result(LIMIT_S), alone(CROWD[1]))


@pytest.mark.rule("ENGINE-5")
def test_loads_are_issued_and_end_while_a_step_is_in_flight() -> None:
    with opened(memory="30%", scheduler="interleaved") as engine:
        results_of(engine, CROWD)
    open_step, inside = False, {"Load": 0, "Loaded": 0}
    for record in engine.records[1:]:
        kind = record.get("event") or record.get("action")
        if kind in ("Compute", "Computed", "Failed"):
            open_step = kind == "Compute"
        elif kind in inside and open_step:
            inside[kind] += 1
    assert inside["Load"] > 0 and inside["Loaded"] > 0


def experts_of(requests: list[Request]) -> dict[int, set[ExpertKey]]:
    """By number, every expert that a request uses."""
    used: dict[int, set[ExpertKey]] = defaultdict(set)
    with opened(memory="100%") as engine:
        results_of(engine, requests)
    for record in events(engine, "Routed"):
        number, _, layer = record["visit"]
        used[number] |= {ExpertKey(layer, e) for row in record["experts"] for e in row}
    return used


@pytest.mark.rule("ENGINE-5", "XFER-8")
def test_a_load_that_does_not_come_holds_up_only_those_who_need_it() -> None:
    asked = [request(i, 1, 2) for i in range(4)]
    used = experts_of(asked)
    counts = Counter(key for keys in used.values() for key in keys)
    only = min(key for key, n in counts.items() if n == 1)
    victim = next(n for n in used if only in used[n])
    reader = ControlledReader(hold=lambda ticket, key: key == only)
    with opened(memory="100%", reader=reader, max_lag=1000) as engine:
        handles = engine.submit_all(asked, logits=True)
        for number, handle in enumerate(handles):
            if number != victim:
                assert same(handle.result(LIMIT_S), alone(asked[number]))
        assert not handles[victim].done
        (ticket,) = reader.waiting(1)
        reader.release(ticket)
        assert same(handles[victim].result(LIMIT_S), alone(asked[victim]))
