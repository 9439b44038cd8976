"""What goes wrong below and beside the engine: who is hurt, who is not, what is left behind.

The numbers in the names' comments are those of the public failure cases that this project answers.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    CROWD,
    LIMIT_S,
    MINIMUM,
    SMALL,
    alone,
    checkpoint,
    events,
    opened,
    request,
    results_of,
    same,
)

from jax_impl.engine import JaxEngine
from jax_impl.fault_readers import ControlledReader, Fault, FaultyReader
from oracle.checkers import check_log
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.checkpoint import Checkpoint
from reference.files.event_log import read_log
from reference.vocab.ids import ExpertKey

PAIR = [request("a", 4, 1), request("b", 2, 2)]


def reads_of(path: Path, key: ExpertKey) -> range:
    """Byte offsets of an expert's tensors, which lie one after another."""
    with Checkpoint.open(path) as ckpt:
        refs = ckpt.expert(*key)
    return range(min(r.offset for r in refs), max(r.offset + r.nbytes for r in refs))


@contextmanager
def faulty(reader: FaultyReader, **options: Any) -> Iterator[JaxEngine]:
    """An engine of the minimum budget, so that nearly every visit reads its experts anew."""
    with opened(memory=MINIMUM, reader=reader, io="buffered", threads=1, **options) as engine:
        yield engine


# 14, 49, 50
@pytest.mark.rule("ENGINE-6", "ENGINE-7", "XFER-4")
@pytest.mark.parametrize("fault", ["eio", "eof", "short", "eintr"])
def test_each_read_of_a_run_may_fail_once_without_any_trace_in_the_results(fault: Fault) -> None:
    reader = FaultyReader(fault, 0, armed=False)
    with faulty(reader) as engine:
        for nth in itertools.count(1):
            reader.arm(nth)
            results = results_of(engine, PAIR)
            assert all(same(r, alone(a)) for r, a in zip(results, PAIR, strict=True)), nth
            if not reader.fired:
                break
    assert nth > 20, "every read of the run was tried"
    failed = events(engine, "LoadFailed")
    assert len(failed) == (nth - 1 if fault in ("eio", "eof") else 0)
    assert all(r["error"] and r["drained"] for r in failed)


# 49
@pytest.mark.rule("ENGINE-7", "XFER-4", "XFER-5")
@pytest.mark.parametrize(("fault", "says"), [("eio", "Input/output"), ("eof", "ends")])
def test_without_retries_each_failed_read_ends_those_who_need_it_and_no_other(
    fault: Fault, says: str
) -> None:
    reader = FaultyReader(fault, 0, armed=False)
    hurt = 0
    with faulty(reader, retries=0) as engine:
        for nth in itertools.count(1):
            reader.arm(nth)
            results = results_of(engine, PAIR)
            for asked, result in zip(PAIR, results, strict=True):
                if result.error is None:
                    assert same(result, alone(asked)), nth
                    continue
                hurt += 1
                assert "cannot be read" in result.error and says in result.error
                assert result.finish_reason == "error"
                tokens, logits = alone(asked)
                n = len(result.logits)  # type: ignore[arg-type]
                assert result.tokens == tokens[: len(result.tokens)]
                assert result.logits is not None
                assert result.logits.tobytes() == logits[:n].tobytes(), "no token of a failed load"
            if not reader.fired:
                break
            assert any(r.error for r in results), "a failed load ends somebody"
    assert hurt >= nth - 1


# 49, 50
@pytest.mark.rule("ENGINE-7")
def test_an_expert_that_can_never_be_read_fails_who_needs_it_after_bounded_retries() -> None:
    with opened(memory="100%") as engine:
        results_of(engine, CROWD)
    used: dict[int, set[ExpertKey]] = {n: set() for n in range(len(CROWD))}
    for r in events(engine, "Routed"):
        number, _, layer = r["visit"]
        used[number] |= {ExpertKey(layer, e) for row in r["experts"] for e in row}
    everything = set().union(*used.values())
    bad = max(everything, key=lambda k: (sum(k not in u for u in used.values()), k))
    lucky = [n for n in used if bad not in used[n]]
    assert 0 < len(lucky) < len(CROWD)
    place = reads_of(checkpoint(), bad)
    reader = FaultyReader("eio", 1, every=1, where=lambda offset: offset in place)
    with opened(memory="40%", reader=reader, io="buffered") as engine:
        results = results_of(engine, CROWD)
    for n, (asked, result) in enumerate(zip(CROWD, results, strict=True)):
        if n in lucky:
            assert same(result, alone(asked))
        else:
            assert result.finish_reason == "error"
            assert f"expert {bad.expert} of layer {bad.layer}" in (result.error or "")
    assert reader.fired >= 3 and reader.fired % 3 == 0, "two retries for each attempt"


# 7, 51, 6
@pytest.mark.rule("XFER-7", "ENGINE-7")
def test_an_overdue_load_is_tried_elsewhere_and_its_slot_comes_back_late() -> None:
    reader = ControlledReader(hold=lambda ticket, key: ticket == 1)
    with opened(memory="40%", reader=reader, deadline_s=0.2) as engine:
        results = results_of(engine, CROWD[:3])
        assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=False))
        assert list(reader.waiting()) == [1], "the load still hangs"
        late = events(engine, "LoadFailed")
        assert [(r["ticket"], r["drained"]) for r in late] == [(1, False)]
        slot = events(engine, "Load")[0]["slot"]
        reader.release(1)
        again = engine.submit(CROWD[4], logits=True).result(LIMIT_S)
        assert same(again, alone(CROWD[4]))
    assert [r["ticket"] for r in events(engine, "Loaded")].count(1) == 1
    assert any(r["slot"] == slot and r["ticket"] > 1 for r in events(engine, "Load"))
    assert engine.totals()["overdue_loads"] == 1


# 5, 6
@pytest.mark.rule("ENGINE-6", "ENGINE-7")
def test_a_load_that_ends_after_its_request_was_cancelled_harms_nobody() -> None:
    reader = ControlledReader(hold=lambda ticket, key: ticket <= 2)
    with opened(memory=MINIMUM, reader=reader) as engine:
        gone = engine.submit(CROWD[0])
        held = reader.waiting(2)
        gone.cancel()
        assert gone.result(LIMIT_S).finish_reason == "cancelled"
        rest = engine.submit_all(CROWD[1:3], logits=True)
        assert not rest[0].wait(0.1), "both slots are still being written"
        for ticket in held:
            reader.release(ticket)
        assert all(same(h.result(LIMIT_S), alone(a)) for h, a in zip(rest, CROWD[1:], strict=False))


# 7, 15, 17
@pytest.mark.rule("ENGINE-7")
def test_closing_while_a_load_hangs_returns_and_ends_every_request() -> None:
    reader = ControlledReader()
    engine = JaxEngine.open(checkpoint(), "40%", reader=reader, **SMALL)
    handles = engine.submit_all(CROWD)
    reader.waiting(1)
    began = time.monotonic()
    engine.close(timeout_s=0.5)
    assert time.monotonic() - began < 5.0
    assert {h.result(0).finish_reason for h in handles} == {"cancelled"}
    assert "end" not in engine.records[-1], "the log does not claim to be whole"
    reader.open_all()


# 39
@pytest.mark.rule("ENGINE-7")
def test_a_nan_ends_its_own_request_and_names_the_layer(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "nan", tiny_config("qwen3_moe"))
    with Checkpoint.open(path) as ckpt:
        embed = ckpt.tensor("embed")
    token = 95
    with embed.file.open("r+b") as file:
        file.seek(embed.offset + token * 32 * 4)
        file.write(np.float32("nan").tobytes())
    asked = [a for a in CROWD[:4] if token not in (*a.prompt, *alone(a)[0])]
    bad = request("nan", 9, 4)
    bad = bad.__class__("nan", (*bad.prompt[:6], token, *bad.prompt[7:]), 4)
    with opened(path, "40%") as engine:
        handles = engine.submit_all([bad, *asked], logits=True)
        failed = handles[0].result(LIMIT_S)
        assert failed.finish_reason == "error" and not failed.tokens
        assert "NaN" in (failed.error or "") and "layer 0" in (failed.error or "")
        for a, handle in zip(asked, handles[1:], strict=True):
            assert same(handle.result(LIMIT_S), alone(a))
    assert events(engine, "Failed")[0]["requests"] == [0]


@pytest.mark.rule("ENGINE-7")
def test_an_exception_in_a_step_ends_those_in_it_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(memory="40%", max_rows=4) as engine:
        model = engine._loop._computer._model
        real, calls = model.advance, []

        def once(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 9:
                raise MemoryError("no more")
            return real(*args, **more)

        monkeypatch.setattr(model, "advance", once)
        results = results_of(engine, CROWD)
    failed = [r for r in results if r.error]
    assert failed and all("MemoryError" in (r.error or "") for r in failed)
    inside = {p[0][0] for r in events(engine, "Compute") for p in r["parts"] if r["step"] in {
        f["step"] for f in events(engine, "Failed")}}  # fmt: skip
    for n, (asked, result) in enumerate(zip(CROWD, results, strict=True)):
        assert (n in inside) == bool(result.error)
        assert result.error or same(result, alone(asked))


# 48, 52
@pytest.mark.rule("XFER-10")
def test_a_bit_that_flips_in_memory_is_caught_before_it_is_used() -> None:
    with opened(memory="100%", check=True, judged=False) as engine:
        good = engine.submit(CROWD[0], logits=True).result(LIMIT_S)
        assert same(good, alone(CROWD[0]))
        slots = [s for r in events(engine, "Compute") for s in r["slots"]]
        expert, slot = slots[0]
        sums = {r["ticket"]: r["sum"] for r in events(engine, "Loaded")}
        assert len(sums) == len(events(engine, "Load"))
        engine._loop._pool.view(slot)[100] ^= 4
        bad = engine.submit(CROWD[0], logits=True).result(LIMIT_S)
        assert bad.finish_reason == "error" and not bad.tokens
        assert f"expert {expert}" in (bad.error or "") and "changed" in (bad.error or "")
    assert [v.property for v in check_log(engine.records)] == ["S9"], "and seen in the log"


# 41, 45, 55
@pytest.mark.rule("XFER-5", "XFER-6", "ENGINE-7")
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_shard_cut_while_serving_is_a_request_error_and_the_engine_lives(
    tmp_path: Path, io: str
) -> None:
    path = write_checkpoint(tmp_path / "cut", tiny_config("qwen3_moe"))
    shard = path / "model.safetensors"
    with opened(path, MINIMUM, io=io) as engine:
        assert same(engine.submit(CROWD[0], logits=True).result(LIMIT_S), alone(CROWD[0]))
        os.truncate(shard, shard.stat().st_size // 2)
        for asked in CROWD[1:3]:
            result = engine.submit(asked).result(LIMIT_S)
            assert result.finish_reason == "error" and "model.safetensors" in (result.error or "")


# 53
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_on_a_full_disk_is_said_once_and_the_run_goes_on() -> None:
    said: list[str] = []
    with opened(memory="40%", log="/dev/full", warn=said.append) as engine:
        results = results_of(engine, CROWD)
    assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=True))
    assert "No space left" in engine.log_failed
    assert said == [engine.log_failed]


def test_a_log_of_a_closed_run_is_whole_and_of_a_broken_one_is_not(tmp_path: Path) -> None:
    with opened(memory="40%", log=tmp_path / "good") as engine:
        engine.submit(request("x", 30, 60))
    assert read_log(tmp_path / "good").complete
    with opened(memory="40%", log=tmp_path / "bad", broken=True) as engine:
        engine._loop.post(object())  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._loop, "_obey", lambda: 1 // 0)
            engine.submit(CROWD[0]).result(LIMIT_S)
    assert isinstance(engine.failure, ZeroDivisionError)
    assert not read_log(tmp_path / "bad").complete


# 4, 10
@pytest.mark.rule("ENGINE-12")
def test_hundreds_of_aborts_leave_capacity_threads_and_files_as_they_were() -> None:
    with opened(memory="40%", keep_log=False, judged=False) as engine:
        engine.submit(CROWD[0]).result(LIMIT_S)
        before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        for i in range(300):
            handle = engine.submit(request(i % 7, 1 + i % 9, 30))
            if i % 3 == 0:
                next(iter(handle))
            handle.cancel()
            if i % 50 == 49:
                handle.wait(LIMIT_S)
        assert same(engine.submit(CROWD[1], logits=True).result(LIMIT_S), alone(CROWD[1]))
        after = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        assert after <= before
        assert not any(engine._loop.missing().values())
