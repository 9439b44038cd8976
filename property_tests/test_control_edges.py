"""Corners of the control plane that small changes of it would touch and nothing else would see."""

from __future__ import annotations

import pytest

from reference.control import Scheduler
from reference.control.grouping import _defrag
from reference.control.prefetch import expected
from reference.control.requests import WAITING, Request
from reference.vocab.actions import Action, Compute, Finish, Load
from reference.vocab.errors import BadInput, IllegalEvent
from reference.vocab.events import (
    Arrived,
    Cancelled,
    Computed,
    Event,
    Loaded,
    LoadFailed,
    Predicted,
    Routed,
    Sampled,
)
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions

BASE = ControlOptions(
    layers=(0, 1), experts=4, top_k=2, slots=4, chunk=4, kv_block=4, kv_tokens=400
)


def say(s: Scheduler, *events: Event, channels: int = 0) -> list[Action]:
    for event in events:
        s.handle(event)
    return s.next_actions(channels, 0 if s.steps else 1)


def step(actions: list[Action]) -> int:
    return next(a.step for a in actions if isinstance(a, Compute))


def load(actions: list[Action]) -> Load:
    return next(a for a in actions if isinstance(a, Load))


def at_layer(s: Scheduler, number: int, experts: tuple[int, ...], layer: int = 0) -> None:
    """A request of one token whose first router has named the experts."""
    entry = step(say(s, Arrived(number, 1, 4)))
    say(s, Computed(entry), Routed(Visit(number, 0, layer), (experts,)))


@pytest.mark.rule("SCHED-1", "SCHED-11", "ADMIT-1")
def test_events_that_fit_no_state_are_refused_each_with_the_same_error() -> None:
    s = Scheduler(BASE.with_(layers=(0,), top_k=1))
    at_layer(s, 0, (1,))
    say(s, Loaded(load(say(s, channels=1)).ticket))
    say(s, Computed(1 + len(s.steps)))
    assert s.running[0].stage == 0
    for bad in (
        Arrived(1, 1, -1),
        Routed(Visit(0, 0, 1), ((1,),)),  # there is no further layer
        Routed(Visit(0, 1, 0), ((1,),)),
        Routed(Visit(7, 0, 0), ((1,),)),
        Sampled(7, 1, False),
        Predicted(Visit(7, 0, 0), ((1, 1.0),)),
        Predicted(Visit(0, 1, 3), ((1, 1.0),)),
        Predicted(Visit(0, 1, 0), ((1, 1.0), (1, 0.5))),
        Predicted(Visit(0, 1, 0), ((4, 1.0),)),
        Predicted(Visit(0, 1, 0), ((-1, 1.0),)),
        Loaded(0),
        Loaded(2),
    ):
        with pytest.raises(IllegalEvent):
            s.handle(bad)
    two = Scheduler(BASE)
    entry = step(say(two, Arrived(0, 1, 4)))
    say(two, Computed(entry))
    for bad in (Routed(Visit(0, 0, 1), ((0, 1),)), Routed(Visit(0, 1, 0), ((0, 1),)),
                Sampled(0, 1, False)):  # fmt: skip
        with pytest.raises(IllegalEvent):
            two.handle(bad)


@pytest.mark.rule("CACHE-1", "FETCH-8")
@pytest.mark.rule("OPTIONS-1")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_lag", -1), ("max_lag", 0.5), ("retries", -1), ("bulk_slots", -1), ("prefetch", -1),
        ("kv_tokens", 2**24 + 1), ("prefetch", 2**24 + 1),
        ("prefetch_loads", -1), ("kv_tokens", -1), ("slots", -1), ("chunk", "4"), ("chunk", True),
        ("chunk", 0), ("bulk_every", 0), ("max_running", 0), ("max_rows", 0), ("kv_block", 0),
        ("top_k", 0), ("top_k", 5), ("warm", ((0, 1), (0, 1))), ("warm", ((2, 0),)),
        ("warm", ((0, 4),)), ("warm", ((0, -1),)), ("warm", ((0, 1), (1, 4))), ("max_rows", 3),
        ("grouping", ""), ("readiness", "now"), ("fetch_order", "any"), ("eviction", "none"),
    ],
)  # fmt: skip
def test_each_bad_option_is_refused_by_name(field: str, value: object) -> None:
    name = {"grouping": "scheduler", "eviction": "cache", "fetch_order": "fetch order"}
    told = "chunk" if field == "max_rows" and value else name.get(field, field)
    with pytest.raises(BadInput, match=f"^{told}: .*(expected|supported: )"):
        Scheduler(BASE.with_(**{field: value}))


def test_the_least_options_that_are_good() -> None:
    Scheduler(BASE.with_(chunk=1, bulk_every=1, max_running=1, max_rows=1, kv_block=1, top_k=1,
                         slots=1, experts=1, warm=((0, 0), (1, 0))))  # fmt: skip
    Scheduler(BASE.with_(top_k=4, chunk=64, max_rows=64))


@pytest.mark.rule("LIVE-1")
def test_it_is_idle_only_when_nothing_is_left_of_anything() -> None:
    s = Scheduler(BASE.with_(max_running=1))
    assert s.idle
    s.handle(Arrived(0, 1, 1))
    assert not s.idle, "queued"
    entry = step(say(s))
    assert not s.idle
    say(s, Computed(entry), Routed(Visit(0, 0, 0), ((0, 1),)))
    assert not s.idle, "it runs, and nothing is in flight"
    ticket = load(say(s, channels=1)).ticket
    s.handle(Cancelled(0))
    assert not s.idle, "its end is not told"
    assert [a for a in say(s) if isinstance(a, Finish)]
    assert not s.idle, "a transfer is under way"
    s.handle(Loaded(ticket))
    assert s.idle


@pytest.mark.rule("FETCH-6")
@pytest.mark.parametrize("readiness", ["visit", "expert"])
def test_failures_are_forgotten_when_nobody_waits_any_more(readiness: str) -> None:
    """One retry. A load fails, its only waiter ends; for the next one the row begins anew."""
    s = Scheduler(BASE.with_(readiness=readiness, retries=1))
    at_layer(s, 0, (0, 1))
    ticket = load(say(s, channels=1)).ticket
    say(s, LoadFailed(ticket, "EIO"), Cancelled(0))
    at_layer(s, 1, (0, 1))
    ticket = load(say(s, channels=1)).ticket
    again = say(s, LoadFailed(ticket, "EIO"), channels=1)
    assert load(again).key == (0, 0) and not [a for a in again if isinstance(a, Finish)]
    ended = say(s, LoadFailed(load(again).ticket, "EIO"))
    assert [a.reason for a in ended if isinstance(a, Finish)] == ["error"]


@pytest.mark.rule("FETCH-6")
def test_failures_are_kept_while_somebody_waits() -> None:
    """As above, but another waits for the same expert when the first one ends."""
    s = Scheduler(BASE.with_(retries=1))
    at_layer(s, 0, (0, 1))
    at_layer(s, 1, (0, 1))
    ticket = load(say(s, channels=1)).ticket
    again = say(s, LoadFailed(ticket, "EIO"), Cancelled(0), channels=1)
    ended = say(s, LoadFailed(load(again).ticket, "EIO"))
    assert [a.request for a in ended if isinstance(a, Finish)] == [1]


@pytest.mark.rule("PREFETCH-3")
def test_of_equal_guesses_the_one_due_soonest_goes_first() -> None:
    """Two layers, so three visits a token. Request 1 is two visits ahead of request 0."""
    s = Scheduler(BASE.with_(prefetch=1))
    for number in (0, 1):
        at_layer(s, number, (0, 1))
    s.running[1].progress = s.running[0].progress + 2
    now, base = s.running[0].progress, s.running[1].progress
    # Request 0 expects expert 3 at its next token, three visits on; request 1 the same expert's
    # neighbours at its next layer (one visit on, so as soon), and at its next token.
    s.handle(Predicted(Visit(0, 1, 0), ((3, 1.0),)))
    s.handle(Predicted(Visit(1, 0, 1), ((2, 1.0),)))
    assert now + 3 == base + 1
    assert list(expected(s)) == [3, 4 + 2]  # equally soon: the lower
    s.running[1].progress -= 1
    assert list(expected(s)) == [4 + 2, 3]
    s.running[1].progress += 2
    assert list(expected(s)) == [3, 4 + 2]


@pytest.mark.rule("PREFETCH-3")
def test_behind_a_barrier_what_comes_next_is_due_first() -> None:
    s = Scheduler(BASE.with_(prefetch=1, grouping="lockstep"))
    entry = step(say(s, Arrived(0, 1, 4)))
    s.handle(Predicted(Visit(0, 0, 1), ((0, 1.0),)))
    s.handle(Predicted(Visit(0, 1, 0), ((3, 1.0),)))
    # The barrier stands at the entry: layer 0 comes next, then layer 1.
    assert s.front == -1 and list(expected(s)) == [3, 4]
    say(s, Computed(entry), Routed(Visit(0, 0, 0), ((1, 2),)))
    assert s.front == 0 and list(expected(s)) == [4, 3]  # layer 0 only after a whole round


@pytest.mark.rule("SCHED-14")
def test_the_score_of_micro_queues_by_hand() -> None:
    """Six layers and the entry. Visits 1 to 4 layers on count 0.8, 0.64, .. of 1 / experts."""

    def layer(ready: list[int], others: list[int]) -> list[int]:
        s = Scheduler(BASE.with_(layers=tuple(range(6)), experts=2, top_k=1, max_running=20))
        visits = []
        for number, stage in enumerate([*ready, *others]):
            r = Request(number, 1, 1, 1)
            r.open_chunk(0, 4)
            r.stage, r.status = stage, WAITING
            s.running[number] = r
            visits.append((r, (), True))
        options: list[list[int]] = []

        def choose(equal: list[int]) -> int:
            options.append(equal)
            return 0

        chosen = _defrag(s, visits[: len(ready)], choose)
        return options[0] if options else [chosen[0][0].stage]

    # Alone each is 1; from 0, stage 3 is three layers on (0.512 / 2), from 3, stage 0 is four on.
    assert layer([0, 3], []) == [0]
    # Four layers on still counts, five do not: entry is four on from 2, and five from 1.
    assert layer([2, 1], []) == [1], "2 is one layer on from 1"
    assert layer([2, 2, 1], []) == [2], "two are there"
    assert layer([0, 1], [5, 5]) == [1], "5 is four layers on from 1, five from 0"
    assert layer([0, 3], [4]) == [3], "4 is one layer on from 3, four from 0"
    # One at 5 sees those at the entry next, those at 0 after them: around, past the last layer.
    assert layer([5, 2], [-1, -1]) == [5]
    # 5: the entry is one on, with two (0.8), then 1 and 2 (0.46); 1: 2, 3 and 5 (0.92).
    assert layer([5, 1], [-1, -1, 3, 2]) == [5]
    # 3: two, and 0 is four on, 2.20. 0: one, the two at 3 (0.512) and who comes next, 0.4 each.
    assert layer([0, 3, 3], [1]) == [3]
    assert layer([0, 3, 3], [1, 1]) == [0]
