"""More corners of the control plane: each was found by a mechanical fault that nothing else saw."""

from __future__ import annotations

import pytest

from property_tests.test_control_edges import BASE, at_layer, load, say, step
from reference.control import Scheduler
from reference.control.cache import ExpertCache
from reference.control.fetch import ORDERS, _count_turn, _pick
from reference.vocab.actions import Compute, Finish, Load, Reject
from reference.vocab.errors import IllegalEvent
from reference.vocab.events import (
    Arrived,
    Cancelled,
    Computed,
    Drain,
    Loaded,
    LoadFailed,
    Predicted,
    Routed,
    Sampled,
)
from reference.vocab.ids import Visit


@pytest.mark.rule("SCHED-1", "SCHED-11")
def test_more_events_that_fit_no_state() -> None:
    s = Scheduler(BASE.with_(layers=(0,)))
    entry = step(say(s, Arrived(0, 1, 4)))
    say(s, Computed(entry))
    for token in ((0, 1, 2), (0, 1, 1), (0,), (0, 0), (-1, 0), (0, 4)):
        with pytest.raises(IllegalEvent):
            s.handle(Routed(Visit(0, 0, 0), (token,)))
    s.handle(Routed(Visit(0, 0, 0), ((0, 1),)))
    with pytest.raises(IllegalEvent):
        s.handle(Sampled(0, 1, False))  # at the last layer, and not computed


@pytest.mark.rule("LIVE-1", "ADMIT-4")
def test_a_refusal_that_is_not_told_is_something_left() -> None:
    s = Scheduler(BASE)
    say(s, Drain())
    s.handle(Arrived(0, 1, 1))
    assert not s.idle
    assert [a for a in say(s) if isinstance(a, Reject)] and s.idle


@pytest.mark.rule("CANCEL-1")
@pytest.mark.parametrize("order", ["first-come", "fewest-missing", "least-progress"])
def test_who_ends_while_it_waits_leaves_the_line(order: str) -> None:
    s = Scheduler(BASE.with_(fetch_order=order))
    at_layer(s, 0, (0, 1))
    say(s, Cancelled(0))
    assert s.routed_order == [] and not s.cache.wanted and not s.cache.tasks


@pytest.mark.rule("SCHED-8")
def test_while_the_first_in_line_finds_no_room_nobody_else_claims() -> None:
    """Two requests hold all four slots; the third needs what is not there, and is blocked; the
    fourth needs what is there already, and has to wait all the same."""
    s = Scheduler(BASE.with_(layers=(0,), experts=6))
    at_layer(s, 0, (0, 1))
    at_layer(s, 1, (2, 3))
    loads = [a.ticket for a in say(s, channels=4) if isinstance(a, Load)]
    for number, experts in ((2, (4, 5)), (3, (0, 1))):
        s.handle(Arrived(number, 1, 4))
        entry = step(say(s, channels=4))
        say(s, Computed(entry), Routed(Visit(number, 0, 0), (experts,)), channels=4)
    say(s, Loaded(loads[0]), channels=4)
    run = say(s, Loaded(loads[1]), channels=4)
    assert not [a for a in run if isinstance(a, Load)]
    assert not s.running[2].claimed and not s.running[3].claimed
    (ran,) = [a for a in run if isinstance(a, Compute)]
    assert [p.visit.request for p in ran.parts] == [0]
    later = say(s, Computed(ran.step), channels=4)
    assert s.running[2].claimed and [a.key.expert for a in later if isinstance(a, Load)] == [4, 5]


@pytest.mark.rule("FETCH-6")
def test_giving_up_ends_the_row_of_failures() -> None:
    """One retry. An expert is given up while the only one that waits for it computes; who asks for
    it next has a retry of its own."""
    s = Scheduler(BASE.with_(readiness="expert", retries=1))
    s.handle(Arrived(0, 1, 4))
    entry = step(say(s, Arrived(1, 1, 4)))
    say(s, Computed(entry))
    first, second = [
        a.ticket for a in say(s, Routed(Visit(0, 0, 0), ((0, 1),)), channels=2)
        if isinstance(a, Load)
    ]  # fmt: skip
    part = step(say(s, Loaded(first)))
    again = load(say(s, LoadFailed(second, "EIO"), channels=1))
    assert again.key == (0, 1)
    assert not [a for a in say(s, LoadFailed(again.ticket, "EIO")) if isinstance(a, Finish)]
    mine = load(say(s, Routed(Visit(1, 0, 0), ((1, 2),)), channels=1))
    assert mine.key == (0, 1)
    retried = say(s, LoadFailed(mine.ticket, "EIO"), channels=1)
    assert load(retried).key == (0, 1) and not [a for a in retried if isinstance(a, Finish)]
    assert [a.request for a in say(s, Computed(part)) if isinstance(a, Finish)] == [0]


@pytest.mark.rule("PREFETCH-1")
def test_the_heaviest_guess_and_one_that_is_taken_back() -> None:
    s = Scheduler(BASE.with_(prefetch=2))
    at_layer(s, 0, (0, 1))
    s.handle(Predicted(Visit(0, 0, 1), ((2, 1e9),)))
    s.handle(Predicted(Visit(0, 1, 0), ((3, 0.5), (1, 0.0))))
    assert s.guesses.of == {0: {(0, 1): ((4 + 2, 1_000_000),), (1, 0): ((3, 500),)}}
    s.handle(Predicted(Visit(0, 0, 1), ((2, 0.0),)))
    assert s.guesses.of == {0: {(1, 0): ((3, 500),)}}
    s.handle(Predicted(Visit(0, 1, 0), ((3, 0.0),)))
    assert s.guesses.of == {}


@pytest.mark.rule("SCHED-13")
@pytest.mark.parametrize(("prefetch", "most"), [(0, (1, 1)), (1, (3, 5)), (2, (3, 5))])
def test_any_guess_keeps_the_channel_busy(prefetch: int, most: tuple[int, int]) -> None:
    assert Scheduler(BASE.with_(grouping="balanced", prefetch=prefetch)).balance.most == most


@pytest.mark.rule("CACHE-4", "CACHE-7", "SCHED-9")
def test_room_is_what_nobody_keeps() -> None:
    cache = ExpertCache(3, 1, 6, "per-layer")
    for code in (0, 1, 2):
        cache.loaded(cache.begin(cache.free[-1], code, code == 2, False))
    assert cache.room(3)
    slot = cache.read(0, False, True)
    assert cache.room(2) and not cache.room(3), "a step reads one"
    cache.want((2,), 1, True)
    assert cache.room(1) and not cache.room(2), "a task waits for another"
    cache.hold((1,), 1)
    assert cache.room(0) and not cache.room(1), "and the last is claimed"
    cache.release(slot)
    assert cache.room(1)


@pytest.mark.rule("CACHE-4")
def test_a_slot_that_was_given_away_is_no_longer_new() -> None:
    cache = ExpertCache(1, 1, 6, "per-layer")
    cache.loaded(cache.begin(0, 0, True, False))
    cache.loaded(cache.begin(0, 1, False, False))
    cache.want((1,), 1, True)
    assert cache.evictable(0)


@pytest.mark.rule("CACHE-9", "FETCH-4")
def test_a_prompts_slot_that_is_written_is_not_given_away() -> None:
    cache = ExpertCache(2, 1, 6, "per-layer")
    cache.begin(cache.free[-1], 0, True, True)
    assert cache.bulk_victim() is None


@pytest.mark.rule("FETCH-7")
def test_who_was_passed_over_goes_first_wherever_it_stands_in_line() -> None:
    s = Scheduler(BASE.with_(fetch_order="fewest-missing", experts=8, slots=8, max_lag=2))
    for number, experts in enumerate([(0, 1), (2, 3), (4, 5), (6, 7)]):
        at_layer(s, number, experts)
    late, new = s.running[2], s.running[3]
    late.passed = s.max_lag
    assert s.routed_order.index(2) == 2
    new.need = new.need[:1]
    order = ORDERS["fewest-missing"]
    assert order(s, late) < order(s, new)
    for _ in range(5):
        assert _pick(s, [late, new], lambda equal: 0) is late
    assert late.passed == s.max_lag == new.passed, "nobody is counted for ever"


@pytest.mark.rule("FETCH-4")
def test_turns_are_counted_no_further_than_they_matter() -> None:
    s = Scheduler(BASE.with_(bulk_every=3))
    entry = step(say(s, Arrived(0, 4, 4)))
    say(s, Computed(entry), Routed(Visit(0, 0, 0), ((0, 1),) * 4))
    for _ in range(6):
        _count_turn(s, False)
    assert s.loads_since_bulk == 2
    _count_turn(s, True)
    assert s.loads_since_bulk == 0


@pytest.mark.rule("SCHED-3", "CANCEL-1")
@pytest.mark.parametrize("cancel", [False, True])
def test_a_prompt_among_claims_leaves_no_task_behind(cancel: bool) -> None:
    """Visit mode: prompts run task by task all the same."""
    s = Scheduler(BASE)
    entry = step(say(s, Arrived(0, 4, 4)))
    say(s, Computed(entry), Routed(Visit(0, 0, 0), ((0, 1), (1, 2), (0, 1), (1, 2))))
    first = load(say(s, channels=1))
    part = step(say(s, Loaded(first.ticket)))
    assert s.running[0].need and set(s.cache.tasks) == set(s.running[0].need)
    if cancel:
        say(s, Cancelled(0))
        assert not s.cache.tasks and not s.cache.wanted
        return
    tickets = [a.ticket for a in say(s, Computed(part), channels=2) if isinstance(a, Load)]
    s.handle(Loaded(tickets[0]))
    run = say(s, Loaded(tickets[1]))
    assert not s.cache.tasks and not s.cache.wanted
    say(s, Computed(step(run)))
    assert s.running[0].stage == 0 and not s.running[0].need


@pytest.mark.rule("FETCH-8")
def test_a_warm_slot_that_comes_free_is_filled() -> None:
    """Two slots, three experts named. A read fails: its slot is free, and the third is read."""
    s = Scheduler(BASE.with_(slots=2, warm=((0, 0), (0, 1), (1, 3))))
    one, two = [a for a in say(s, channels=3) if isinstance(a, Load)]
    assert (one.key, two.key) == ((0, 0), (0, 1)) and not say(s, channels=1)
    (three,) = say(s, LoadFailed(two.ticket, "EIO"), channels=1)
    assert isinstance(three, Load) and three.key == (1, 3) and three.guess
    say(s, Arrived(0, 1, 1))
    assert not say(s, LoadFailed(three.ticket, "EIO"), channels=1)


def prompt_and_others(s: Scheduler, *decoding: int) -> None:
    """Request 0 is a prompt of four tokens, the others of one; all at the entry, and past it."""
    s.handle(Arrived(0, 4, 4))
    for number in decoding:
        s.handle(Arrived(number, 1, 4))
    first = step(say(s))
    say(s, Computed(step(say(s, Computed(first)))))


PROMPT = Routed(Visit(0, 0, 0), ((4, 5),) * 4)


@pytest.mark.rule("SCHED-2", "FETCH-4")
def test_a_load_for_a_prompt_holds_nobody_back_who_lacks_nothing() -> None:
    s = Scheduler(BASE.with_(layers=(0,), experts=6, warm=((0, 0), (0, 1))))
    for a in say(s, channels=2):
        assert isinstance(a, Load)
        s.handle(Loaded(a.ticket))
    prompt_and_others(s, 1)
    s.handle(PROMPT)
    told = say(s, Routed(Visit(1, 0, 0), ((0, 1),)), channels=1)
    assert load(told).key == (0, 4)
    assert [p.visit.request for a in told if isinstance(a, Compute) for p in a.parts] == [1]


@pytest.mark.rule("SCHED-8", "FETCH-4")
def test_a_prompt_that_finds_no_room_holds_claims_back() -> None:
    """Two requests hold all slots. The prompt is the only one that lacks anything, and its share is
    not used up; until it finds room nobody claims, not even what is there."""
    s = Scheduler(BASE.with_(layers=(0,), experts=6))
    prompt_and_others(s, 1, 2, 3)
    s.handle(Routed(Visit(1, 0, 0), ((0, 1),)))
    loads = [a.ticket for a in say(s, Routed(Visit(2, 0, 0), ((2, 3),)), channels=4)
             if isinstance(a, Load)]  # fmt: skip
    s.handle(Loaded(loads[0]))
    say(s, Loaded(loads[1]), channels=2)
    assert len(s.steps) == 1 and s.running[2].claimed
    s.handle(PROMPT)
    told = say(s, Routed(Visit(3, 0, 0), ((0, 1),)), channels=2)
    assert told == [] and not s.running[3].claimed


@pytest.mark.rule("FETCH-4", "CACHE-3")
def test_the_slot_that_is_promised_is_not_for_prompts() -> None:
    """Two slots: a claim has one load under way, and the other slot is promised. It is the
    prompts' turn all the same."""
    s = Scheduler(BASE.with_(layers=(0,), experts=6, slots=2, bulk_every=1))
    prompt_and_others(s, 1)
    assert load(say(s, Routed(Visit(1, 0, 0), ((2, 3),)), channels=1)).key == (0, 2)
    assert s.pending == [3]
    assert load(say(s, PROMPT, channels=1)).key == (0, 3)


@pytest.mark.rule("CACHE-13")
def test_nobody_trades_with_itself() -> None:
    policy = ExpertCache(8, 2, 6, "adaptive").policy
    policy.gain, policy.loss = [20, 0], [0, 5]  # type: ignore[attr-defined]
    policy.past[0][3] = None  # type: ignore[attr-defined]
    policy.named(0, [(3, -1, True)])
    assert policy.shares == [5, 3] and policy.gain == [5, 0]  # type: ignore[attr-defined]
