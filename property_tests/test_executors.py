"""Every order of completion, every load given up or late, a stop at every point where threads meet.

The engine is held by hand here (driven.py), so that what is tried is tried on purpose and each time
in the same way; test_engine_faults.py has the same engine with faults at full speed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import LIMIT_S, MINIMUM, alone, checkpoint, events, judge, request, same

from jax_impl.loop import Loop
from jax_impl.transfer import Transferred, Transfers
from property_tests.driven import Driven, driven
from property_tests.meeting import Points, Script
from reference.control.cache import LOADING, QUARANTINED
from reference.files.requests import Request
from reference.vocab.errors import CoveyError
from reference.vocab.options import READINESS

PAIR = [request("a", 4, 1), request("b", 2, 2)]
APART = [request(0, 1, 1), request(8, 1, 1)]
"""One token each, with different experts in every layer."""


def right(asked: list[Request], results: list[Any], path: Path | None = None) -> bool:
    return all(same(r, alone(a, path)) for r, a in zip(results, asked, strict=True))


# -- completions in every order


@pytest.mark.rule("ENGINE-6", "XFER-8", "ENGINE-7")
@pytest.mark.parametrize("mode", READINESS)
@pytest.mark.parametrize(("layers", "threads", "orders"), [(1, 4, 24), (2, 2, 112)])
def test_loads_complete_in_every_order(
    mode: str, layers: int, threads: int, orders: int
) -> None:
    """All orders in which the loads of a run can end, each a run of its own."""
    every_order(layers, threads, orders, mode)


@pytest.mark.slow
@pytest.mark.rule("ENGINE-6")
def test_loads_of_two_layers_complete_in_every_order_of_four() -> None:
    every_order(2, 4, 1120, "visit")


def every_order(layers: int, threads: int, orders: int, mode: str) -> None:
    path = checkpoint(num_hidden_layers=layers)
    script = Script()
    ends: set[tuple[int, ...]] = set()
    while script.another():
        with driven(2 * MINIMUM, path, threads=threads, readiness=mode) as d:
            handles = d.engine.submit_all(APART, logits=True)
            while held := d.settle():
                d.reader.release(sorted(held)[script.choose(len(held))])
        assert right(APART, [h.result(0) for h in handles], path)
        judge(d.engine)
        ends.add(tuple(r["ticket"] for r in events(d.engine, "Loaded")))
    assert len(ends) == script.runs >= orders, (len(ends), script.runs)


# -- every load of a run: given up, or late after its request was cancelled


def each_load(tier: int | None = None) -> Iterator[tuple[Driven, list[Any], int]]:
    """A run of PAIR that is stopped when its nth load is held, for every n."""
    for nth in itertools.count(1):
        with driven(2 * MINIMUM, threads=2, host_memory=tier) as d:
            handles = d.engine.submit_all(PAIR, logits=True)
            while (held := d.settle()) and nth not in held:
                d.reader.release(min(held))
            if not held:
                assert nth > 20, "every load of the run was tried"
                return
            yield d, handles, nth
            nothing_left(d)


def all_but(d: Driven, ticket: int) -> None:
    """Everything else completes."""
    while others := d.settle().keys() - {ticket}:
        d.reader.release(min(others))


def nothing_left(d: Driven) -> None:
    """Once nothing runs: no row, block, handle, slot or thread is missing; all works on."""
    d.finish()
    assert not any(d.loop.missing().values())
    states = d.loop._scheduler.cache.state
    assert LOADING not in states and QUARANTINED not in states
    assert d.transfers.idle == d.engine.options.threads
    after = d.engine.submit(PAIR[0], logits=True)
    d.finish()
    assert same(after.result(0), alone(PAIR[0]))
    judge(d.engine, complete=False)


@pytest.mark.rule("XFER-7", "ENGINE-6", "ENGINE-7", "CACHE-9")
@pytest.mark.parametrize("tier", [None, 3 * MINIMUM])
def test_every_load_may_be_given_up_and_land_late(tier: int | None) -> None:
    for d, handles, nth in each_load(tier):
        d.give_up(nth)
        all_but(d, nth)
        assert right(PAIR, [h.result(0) for h in handles]), nth
        assert d.overdue() == {nth}, "it still hangs, and nobody needs it"
        d.release(nth)
        told = [(r["drained"], r["error"]) for r in events(d.engine, "LoadFailed")]
        assert len(told) == 1 and not told[0][0] and "not read within" in told[0][1]


@pytest.mark.rule("CANCEL-1", "ENGINE-6", "ENGINE-7")
@pytest.mark.parametrize("gone", [0, 1])
def test_every_load_may_end_after_its_request_was_cancelled(gone: int) -> None:
    alive, waited = 1 - gone, 0
    for d, handles, nth in each_load():
        key = list(d.reader.held()[nth])
        handles[gone].cancel()
        d.settle()
        assert handles[gone].result(0).finish_reason in ("cancelled", "length")
        all_but(d, nth)
        if not handles[alive].done:  # only for that very expert
            waited += 1
            named = [r for r in events(d.engine, "Routed") if r["visit"][0] == alive][-1]
            assert named["visit"][2] == key[0] and any(key[1] in row for row in named["experts"])
        d.release(nth)
        d.finish()
        assert same(handles[alive].result(0), alone(PAIR[alive])), nth
    assert waited, "it does happen that the other needs it too"


# -- a stop at every place where threads meet


def stopped(d: Driven, point: str, nth: int) -> list[Any] | None:
    """Requests come, one is cancelled, and a thread stops at the point; None: nobody got there."""
    d.reader.open_all()
    d.points.arm(point, nth)
    handles = d.engine.submit_all([*PAIR, request("victim", 5, 40)], logits=True)
    handles[2].cancel()
    end = time.monotonic() + LIMIT_S
    while not d.points.reached(0.002):
        if all(h.done for h in handles) and not d.points.reached(0.02):
            return None
        assert time.monotonic() < end
    return handles


@pytest.mark.rule("ENGINE-5", "ENGINE-6", "ENGINE-7")
@pytest.mark.parametrize("point", Points.NAMES)
def test_a_thread_may_stop_wherever_threads_meet(point: str) -> None:
    late = request("late", 3, 1)
    for nth, meanwhile in itertools.product((1, 2, 5), ("nothing", "a request", "a cancel")):
        tier = MINIMUM if nth == 2 else None
        with driven(2 * MINIMUM, threads=2, host_memory=tier) as d:
            handles = stopped(d, point, nth)
            if handles is None:
                assert nth > 1, f"never: {point}"
                continue
            more = [d.engine.submit(late, logits=True)] if meanwhile == "a request" else []
            if meanwhile == "a cancel":
                handles[1].cancel()
            time.sleep(0.002)  # the others go as far as they can
            d.points.release()
            results = [h.result(LIMIT_S) for h in [*handles, *more]]
            assert same(results[0], alone(PAIR[0]))
            if meanwhile == "a cancel" and results[1].finish_reason == "cancelled":
                tokens = results[1].tokens
                assert tokens == alone(PAIR[1])[0][: len(tokens)]
            else:
                assert same(results[1], alone(PAIR[1]))
            assert results[2].finish_reason == "cancelled"
            assert not more or same(results[3], alone(late))
        assert d.engine.failure is None and not any(d.loop.missing().values())
        judge(d.engine)


@pytest.mark.rule("XFER-8")
def test_such_a_stop_shows_a_load_that_is_told_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch thread that tells before it has left the slot: at full speed nobody would notice."""
    real, post = Transfers._transfer, Loop.post
    told: list[Transferred] = []

    def early(self: Transfers, *args: Any) -> Transferred:
        done = real(self, *args)
        self._post(done)
        told.append(done)
        return done

    def once(self: Loop, item: Any) -> None:
        if not any(item is done for done in told):
            post(self, item)

    monkeypatch.setattr(Transfers, "_transfer", early)
    monkeypatch.setattr(Loop, "post", once)
    with driven(2 * MINIMUM, threads=2) as d:
        handles = stopped(d, "after a load is told", 1)
        assert handles is not None
        assert "still being written" in (handles[0].result(LIMIT_S).error or "")
    assert isinstance(d.engine.failure, AssertionError)


@pytest.mark.rule("ENGINE-7", "ENGINE-12")
@pytest.mark.parametrize("point", [*Points.NAMES, *Points.CLOSING])
def test_closing_while_a_thread_stops_anywhere(point: str) -> None:
    with driven(2 * MINIMUM, threads=2) as d:
        if point in Points.CLOSING:
            d.reader.open_all()
            d.points.arm(point)
            handles = d.engine.submit_all(PAIR, logits=True)
        else:
            handles = stopped(d, point, 1) or []
        assert handles
        closing = threading.Thread(target=d.engine.close)
        closing.start()
        if point in Points.CLOSING:
            assert d.points.reached(LIMIT_S)
            if point == Points.CLOSING[1]:
                with pytest.raises(CoveyError, match="closed"):
                    d.engine.submit(PAIR[0])
            else:  # the stop is not yet heard of
                handles.append(d.engine.submit(PAIR[0]))
        time.sleep(0.002)
        d.points.release()
        closing.join(LIMIT_S)
        assert not closing.is_alive()
        for handle in handles:
            result = handle.result(0)
            assert result.finish_reason in ("cancelled", "length")
            if result.finish_reason == "length":
                assert same(result, alone(handle.request))
    assert d.engine.failure is None and not any(d.loop.missing().values())
    judge(d.engine)


@pytest.mark.rule("ENGINE-7")
@pytest.mark.parametrize(
    "point",
    ["between the end of a load and the ask", "before a step runs",
     "between a load and its telling"],
)  # fmt: skip
def test_closing_returns_even_if_the_thread_never_comes_back(point: str) -> None:
    """One of each kind: the engine's thread, the computing one, a fetching one."""
    with driven(2 * MINIMUM, threads=2) as d:
        handles = stopped(d, point, 1)
        assert handles is not None
        began = time.monotonic()
        d.engine.close(timeout_s=0.2)
        assert time.monotonic() - began < 5.0
        assert all(h.done for h in handles)
        assert "end" not in d.engine.records[-1], "the log does not claim to be whole"
        d.points.release()
        d.loop._thread.join(LIMIT_S)
        with pytest.raises(CoveyError):
            d.engine.submit(PAIR[0])
