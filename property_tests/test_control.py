"""The control plane by itself: random play, and one small scene for every rule."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import pytest

from property_tests.play import Play, random_play
from reference.control import Scheduler
from reference.control.balance import Balance
from reference.simulator.costs import CostModel
from reference.simulator.loop import VirtualLoop
from reference.simulator.routes import RoutedExecutor, random_routes
from reference.vocab.actions import Admit, Compute, Finish, Load, Reject
from reference.vocab.errors import BadInput, BudgetTooSmall, IllegalEvent
from reference.vocab.events import (
    Arrived,
    Cancelled,
    Computed,
    Drain,
    Failed,
    Loaded,
    LoadFailed,
    Routed,
    Sampled,
)
from reference.vocab.ids import ENTRY, Visit
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    READINESS,
    SCHEDULERS,
    ControlOptions,
)

BASE = ControlOptions(
    layers=(0, 1), experts=4, top_k=2, slots=4, chunk=4, kv_block=4, kv_tokens=400
)


class Scene:
    """A scheduler driven by hand: every call returns what it did."""

    def __init__(self, **changes: object) -> None:
        self.s = Scheduler(BASE.with_(**changes))

    def say(self, *events: object, channels: int = 1, compute: int | None = None) -> list:
        for e in events:
            self.s.handle(e)  # type: ignore[arg-type]
        idle = (0 if self.s.steps else 1) if compute is None else compute
        return self.s.next_actions(channels, idle)

    def enter(self, number: int, experts: tuple[int, ...], channels: int = 0) -> list:
        """Bring a one-token request to the first router and let it name `experts`."""
        actions = self.say(Arrived(number, 1, 4), channels=0)
        step = next(a for a in actions if isinstance(a, Compute))
        assert step.layer == ENTRY
        return self.say(
            Computed(step.step), Routed(Visit(number, 0, 0), (experts,)), channels=channels
        )


def only(actions: list, kind: type) -> list:
    return [a for a in actions if isinstance(a, kind)]


# -- random play -----------------------------------------------------------------------------


@pytest.mark.rule(
    "SCHED-1", "SCHED-3", "SCHED-9", "CACHE-1", "CACHE-2", "CACHE-7", "CACHE-9", "FETCH-2",
    "CANCEL-1", "CANCEL-2", "FETCH-6", "ADMIT-2", "SCHED-11",
)  # fmt: skip
def test_random_play_ends_and_leaves_nothing_behind() -> None:
    seen: set[str] = set()
    policies: Counter = Counter()
    for seed in range(1500):
        game = random_play(seed).run()
        seen |= game.seen
        o = game.options
        policies[o.grouping, o.readiness, o.fetch_order, o.eviction] += 1
        assert game.admitted == sorted(game.admitted)
    assert seen == {"arrive", "load", "late", "compute", "cancel", "drain", "failed step"}
    for place, values in ((1, READINESS), (2, FETCH_ORDERS), (3, EVICTIONS)):
        assert {(p[0], p[place]) for p in policies} == set(product(SCHEDULERS, values))


@pytest.mark.rule("CACHE-2")
def test_a_copy_is_independent_and_behaves_the_same() -> None:
    for seed in range(200):
        game = random_play(seed)
        while game.turn():
            twin = game.s.copy()
            assert twin.key() == game.s.key()
            before = game.s.key()
            for n in list(twin.running):
                twin.handle(Cancelled(n))
            twin.next_actions(3, 1)
            assert game.s.key() == before


@pytest.mark.rule("CACHE-1")
def test_slots_from_top_k_on_and_bad_options() -> None:
    Scheduler(BASE.with_(slots=2))
    with pytest.raises(BudgetTooSmall, match="at least 2 slots"):
        Scheduler(BASE.with_(slots=1))
    Scheduler(BASE.with_(layers=(), slots=0, experts=0, top_k=0))
    with pytest.raises(BadInput, match="supported: interleaved"):
        Scheduler(BASE.with_(grouping="eager"))
    with pytest.raises(BadInput, match="kv_block: 0"):
        Scheduler(BASE.with_(kv_block=0))


def test_the_protocol_is_enforced() -> None:
    x = Scene()
    x.say(Arrived(3, 1, 1))
    for bad in (
        Arrived(3, 1, 1),
        Arrived(4, 0, 1),
        Loaded(1),
        Computed(9),
        Routed(Visit(3, 0, 0), ((0, 1),)),
        Sampled(3, 1, False),
    ):
        with pytest.raises(IllegalEvent):
            x.s.handle(bad)
    x.say(Computed(1))
    for experts in (((0, 0),), ((0, 4),), ((0,),), ((0, 1), (0, 1))):
        with pytest.raises(IllegalEvent):
            x.s.handle(Routed(Visit(3, 0, 0), experts))


# -- admission and the end of a request ----------------------------------------------------------


@pytest.mark.rule("ADMIT-1", "ADMIT-2", "ADMIT-3")
def test_admission_reserves_whole_blocks_in_order_and_refuses_the_impossible() -> None:
    x = Scene(kv_tokens=16, max_running=8)
    # 4 + 5 tokens are three blocks of four; one block is left, so the next waits, and so does
    # the third, which would fit.
    got = x.say(Arrived(0, 4, 5), Arrived(1, 5, 0), Arrived(2, 1, 1))
    assert only(got, Admit) == [Admit(0)]
    [refusal] = only(x.say(Arrived(3, 10, 7)), Reject)
    assert refusal.request == 3
    assert "20 KV tokens" in refusal.reason and "16" in refusal.reason
    got = x.say(Cancelled(0))
    assert not got  # it computes: the blocks are not free yet
    got = x.say(Computed(1))
    assert only(got, Finish) == [Finish(0, "cancelled")]
    assert only(got, Admit) == [Admit(1), Admit(2)]


@pytest.mark.rule("ADMIT-4")
def test_drain_refuses_what_waits_and_lets_the_running_end() -> None:
    x = Scene(max_running=1)
    x.say(Arrived(0, 1, 1), Arrived(1, 1, 1))
    got = x.say(Drain(), Arrived(2, 1, 1))
    assert [a.request for a in only(got, Reject)] == [1, 2]
    assert not x.s.idle
    x.say(Computed(1), Routed(Visit(0, 0, 0), ((0, 1),)), channels=2)
    assert not x.s.idle


@pytest.mark.rule("CANCEL-1", "CANCEL-2")
def test_cancel_during_a_load_keeps_the_slot_until_the_write_is_over() -> None:
    x = Scene(slots=2)
    [load] = only(x.enter(0, (0, 1), channels=1), Load)
    got = x.say(Cancelled(0), Arrived(1, 1, 1), channels=0)
    assert only(got, Finish) == [Finish(0, "cancelled")]
    step = only(got, Compute)[0].step
    got = x.say(Computed(step), Routed(Visit(1, 0, 0), ((2, 3),)), channels=2)
    # Two experts are wanted and two slots exist, but one is still being written.
    assert not only(got, Load)
    got = x.say(Loaded(load.ticket), channels=2)
    assert {a.slot for a in only(got, Load)} == {0, 1}
    x.say(Routed(Visit(0, 0, 0), ((0, 1),)), Sampled(0, 1, False))  # about an ended request
    assert 0 not in x.s.running


@pytest.mark.rule("SCHED-10")
def test_a_failed_step_ends_those_it_names() -> None:
    x = Scene()
    x.say(Arrived(0, 1, 1))
    got = x.say(Failed(1, "NaN at layer 0"))
    assert only(got, Finish) == [Finish(0, "error", "NaN at layer 0")]
    x.say(Arrived(1, 1, 1), compute=0)
    got = x.say(Arrived(2, 1, 1))
    [step] = only(got, Compute)
    assert len(step.parts) == 2
    got = x.say(Failed(step.step, "NaN", (1,)), Routed(Visit(2, 0, 0), ((0, 1),)))
    assert only(got, Finish) == [Finish(1, "error", "NaN")]
    assert 2 in x.s.running


@pytest.mark.rule("FETCH-6", "CACHE-8", "CACHE-9")
def test_bounded_retries_quarantine_and_stale_completions() -> None:
    x = Scene(retries=1, slots=2)
    [first] = only(x.enter(0, (0, 1), channels=1), Load)
    # Not drained: the slot is in quarantine, the retry goes to the other one.
    [retry] = only(x.say(LoadFailed(first.ticket, "EIO", drained=False)), Load)
    assert retry.key == first.key
    assert retry.slot != first.slot
    assert not only(x.say(channels=1), Load)  # the second expert has no slot yet
    got = x.say(Loaded(first.ticket))  # late: frees the slot, its content does not count
    [other] = only(got, Load)
    assert (other.slot, other.key.expert) == (first.slot, 1)
    before = x.s.key()
    x.say(Loaded(first.ticket), channels=0)
    assert x.s.key() == before
    got = x.say(LoadFailed(retry.ticket, "EIO"))
    [end] = only(got, Finish)
    assert end.reason == "error"
    assert "expert 0 of layer 0" in end.error
    # The count is in a row: who comes later has all the attempts again.
    x.say(Loaded(other.ticket))
    [again] = only(x.enter(1, (0, 1), channels=1), Load)
    assert again.key.expert == 0
    [once] = only(x.say(LoadFailed(again.ticket, "EIO")), Load)
    assert once.key == again.key


# -- who runs ------------------------------------------------------------------------------------


@pytest.mark.rule("SCHED-2")
def test_a_visit_with_everything_there_overtakes_one_that_waits() -> None:
    x = Scene(slots=4)
    loads = only(x.enter(0, (0, 1), channels=2), Load)
    [step] = only(x.say(*(Loaded(a.ticket) for a in loads), channels=0), Compute)
    x.say(Cancelled(0), Computed(step.step), channels=0)
    [load] = only(x.enter(1, (2, 3), channels=1), Load)
    [step] = only(x.enter(2, (0, 1), channels=0), Compute)
    assert [p.visit for p in step.parts] == [Visit(2, 0, 0)]
    # Request 1 came first and still waits for its experts.
    got = x.say(Loaded(load.ticket), Computed(step.step), Routed(Visit(2, 0, 1), ((0, 1),)))
    assert not only(got, Compute)
    assert x.s.running[1].need


@pytest.mark.rule("SCHED-3", "CACHE-3")
def test_a_claim_takes_all_or_nothing_and_only_expert_mode_runs_a_part() -> None:
    x = Scene(slots=3)
    [a] = only(x.enter(0, (0, 1), channels=1), Load)
    x.enter(1, (2, 3))
    # One slot is promised to request 0, one is being written, one is free: no claim for two.
    [b] = only(x.say(channels=3), Load)
    assert b.key.expert == 1
    assert not x.s.running[1].claimed
    got = x.say(Loaded(a.ticket))
    assert not only(got, Compute)

    y = Scene(slots=3, readiness="expert")
    [a] = only(y.enter(0, (0, 1), channels=1), Load)
    [part] = only(y.say(Loaded(a.ticket), channels=1), Compute)[0].parts
    assert part.experts == (0,)
    assert not part.last


@pytest.mark.rule("SCHED-4")
def test_ready_visits_of_a_layer_run_as_one_step_least_advanced_first() -> None:
    x = Scene(slots=4, max_rows=8)
    x.say(*(Arrived(n, 1, 4) for n in range(3)), channels=0, compute=0)
    [entry] = only(x.say(), Compute)
    assert [p.visit.request for p in entry.parts] == [0, 1, 2]
    routed = [Routed(Visit(n, 0, 0), ((0, 1),)) for n in range(3)]
    loads = only(x.say(Computed(entry.step), *routed, channels=2), Load)
    assert len(loads) == 2
    [step] = only(x.say(*(Loaded(a.ticket) for a in loads)), Compute)
    assert [p.visit.request for p in step.parts] == [0, 1, 2]
    assert [e for e, _ in step.slots] == [0, 1]


@pytest.mark.rule("SCHED-4")
@pytest.mark.parametrize("grouping", [g for g in SCHEDULERS if g != "interleaved"])
def test_lockstep_never_leaves_the_front(grouping: str) -> None:
    for seed in range(150):
        game = random_play(seed)
        game.options = game.options.with_(grouping=grouping)
        game = Play(
            random.Random(seed), game.options, game.shapes, game.channels, game.faults, game.cancels
        )
        while game.turn():
            if game.step:
                stages = {r.stage for r in game.s.running.values() if r.running or r.status == 2}
                assert len(stages) <= 1
        game.run()


@pytest.mark.rule("SCHED-5", "FETCH-4")
def test_prompts_and_decoding_take_turns_and_share_the_channel() -> None:
    x = Scene(slots=6, chunk=4, bulk_slots=1, bulk_every=2, max_rows=16)
    loads = only(x.enter(0, (0, 1), channels=2), Load)
    got = x.say(*(Loaded(a.ticket) for a in loads), Arrived(1, 8, 1), channels=0)
    steps = only(got, Compute)
    orders = []
    for _ in range(2):
        orders += [p.visit.request for p in steps[0].parts]
        assert len({p.visit.request == 1 for p in steps[0].parts}) == 1
        got = x.say(
            Computed(steps[0].step),
            *(
                [Routed(Visit(0, 0, 1), ((0, 1),))]
                if orders[-1] == 0
                else [Routed(Visit(1, 0, 0), ((0, 1), (0, 2), (1, 2), (2, 3)))]
            ),
            channels=0,
        )
        steps = only(got, Compute)
    assert sorted(orders) == [0, 1]
    # The prompt may hold one slot beside the decoding request's; loads alternate.
    got = x.say(channels=3)
    assert sorted(a.key.layer for a in only(got, Load)) == [0, 1, 1]


# -- fairness --------------------------------------------------------------------------------------


def endless(order: str, readiness: str, turns: int, broken: bool = False) -> tuple[int, int]:
    """One long request among an endless stream of short ones, each of which lacks one expert where
    the long one lacks two; a transfer takes three turns and compute hardly any.
    Returns (tokens that the long one got, short requests that ended)."""
    o = BASE.with_(
        layers=(0,), experts=16, top_k=2, slots=6, max_running=6, fetch_order=order,
        readiness=readiness, max_lag=6, kv_tokens=100_000, eviction="global",
    )  # fmt: skip
    s = Scheduler(o)
    if broken:
        s.max_lag = 1 << 30
    s.handle(Arrived(0, 1, 10_000))
    number, tokens, ended, flying, step = 0, 0, 0, [], None
    for turn in range(turns):
        while len(s.queue) < 6:
            number += 1
            s.handle(Arrived(number, 1, 1))
        if flying and turn % 3 == 0:
            s.handle(Loaded(flying.pop(0).ticket))
        elif step:
            s.handle(Computed(step.step))
            for part in step.parts:
                v = part.visit
                if not part.last:
                    continue
                if v.layer == 0:
                    tokens += v.request == 0
                    s.handle(Sampled(v.request, 1, False))
                else:
                    far = 8 + 2 * (tokens % 4)
                    mine = (0, 1 + v.request % 7) if v.request else (far, far + 1)
                    s.handle(Routed(Visit(v.request, v.chunk, 0), (mine,)))
            step = None
        for a in s.next_actions(1 - len(flying), 0 if step else 1):
            if isinstance(a, Load):
                flying.append(a)
            elif isinstance(a, Compute):
                step = a
            elif isinstance(a, Finish):
                ended += 1
    return tokens, ended


@pytest.mark.rule("FETCH-7", "SCHED-8", "SCHED-6")
@pytest.mark.parametrize("readiness", ["visit", "expert"])
@pytest.mark.parametrize("order", FETCH_ORDERS)
def test_nobody_starves_under_endless_arrivals(order: str, readiness: str) -> None:
    half, _ = endless(order, readiness, 3000)
    tokens, ended = endless(order, readiness, 6000)
    assert ended > 2000  # the stream did press
    assert tokens > 100
    assert tokens > 1.8 * half  # and the long one goes on at the same pace
    if order == "fewest-missing":  # without its own rule this order does starve
        assert endless(order, readiness, 6000, broken=True)[0] <= 1


@pytest.mark.rule("SCHED-7")
@pytest.mark.parametrize("order", FETCH_ORDERS)
@pytest.mark.parametrize("max_lag", [1, 3, 8])
def test_the_lag_never_exceeds_its_bound(order: str, max_lag: int) -> None:
    o = BASE.with_(
        layers=(0, 1, 2), experts=8, slots=8, fetch_order=order, max_lag=max_lag, max_running=6
    )
    worst, ran = 0, 0
    loop = simulate(o, [(1, 12)] * 9, skew=1.0, seed=5)
    while loop.tick():
        progress = [r.progress for r in loop.scheduler.running.values() if not r.bulk]
        if progress:
            worst = max(worst, max(progress) - min(progress))
        ran += 1
    assert ran > 100
    assert 0 < worst <= max_lag


def simulate(
    options: ControlOptions, shapes: list[tuple[int, int]], *, skew: float = 0.5, seed: int = 0,
    costs: CostModel | None = None, arrivals: list[float] | None = None,
) -> VirtualLoop:  # fmt: skip
    """A virtual-time run without a model; `.run()` it or tick it."""
    routes = random_routes(options.experts, options.top_k, seed, skew)
    executor = RoutedExecutor(
        routes, options.layers, options.chunk, options.slots, lambda n: shapes[n],
        lambda: loop.now,
    )  # fmt: skip
    loop = VirtualLoop(Scheduler(options), executor, 1_000_000, costs or CostModel())
    for n, (prompt, new) in enumerate(shapes):
        at = arrivals[n] if arrivals else 0.0
        loop.at(at, lambda n=n, p=prompt, w=new: [Arrived(n, p, w)])
    return loop


@pytest.mark.rule("FETCH-4", "SCHED-5")
@pytest.mark.parametrize("readiness", ["visit", "expert"])
def test_a_long_prompt_does_not_stop_those_who_decode(readiness: str) -> None:
    """TPOT of four decoding requests while a prompt of 2,000 tokens runs, in virtual time."""
    o = BASE.with_(
        layers=tuple(range(6)), experts=16, top_k=2, slots=48, chunk=32, max_rows=64,
        kv_tokens=1 << 20, kv_block=64, readiness=readiness,
    )  # fmt: skip
    shapes = [(1, 400)] * 4 + [(2000, 1)]
    alone = simulate(o, shapes[:4], skew=1.0)
    alone.run()
    loop = simulate(o, shapes, skew=1.0, arrivals=[0.0] * 4 + [0.3])
    loop.run()

    def tpot(executor: RoutedExecutor, start: float, end: float) -> float:
        gaps = []
        for n in range(4):
            t = [x for x in executor.progress[n].token_s if start <= x <= end]
            gaps += [b - a for a, b in pairwise(t)]
        assert len(gaps) > 40
        return sum(gaps) / len(gaps)

    quiet, busy = alone.executor, loop.executor
    assert isinstance(quiet, RoutedExecutor)
    assert isinstance(busy, RoutedExecutor)
    prefill_end = busy.progress[4].token_s[0]
    before = tpot(quiet, 0.3, 10.0)
    during = tpot(busy, 0.3, min(prefill_end, busy.progress[0].token_s[-1]))
    # Half the loads and half the steps stay theirs; a prompt's step is at most four tiles long.
    assert during <= 4.0 * before
    assert prefill_end > 0.3


# -- slots and reading ---------------------------------------------------------------------------


def resident(s: Scheduler) -> set[tuple[int, int]]:
    return {s.key_of(c) for c in s.cache.where}


@pytest.mark.rule("CACHE-5", "CACHE-6")
@pytest.mark.parametrize(
    ("eviction", "gone"), [("global", {(0, 0), (0, 1)}), ("per-layer", {(1, 0), (1, 1)})]
)
def test_the_victim_by_hand(eviction: str, gone: set[tuple[int, int]]) -> None:
    """Layer 0 holds experts 0, 1 (older), layer 1 holds 0, 1; then layer 1 wants 2, 3."""
    x = Scene(eviction=eviction, slots=4)
    got = x.enter(0, (0, 1), channels=2)
    got = x.say(*(Loaded(a.ticket) for a in only(got, Load)))
    [step] = only(got, Compute)
    got = x.say(Computed(step.step), Routed(Visit(0, 0, 1), ((0, 1),)), channels=2)
    [step] = only(x.say(*(Loaded(a.ticket) for a in only(got, Load))), Compute)
    full = resident(x.s)
    assert len(full) == 4
    # The next token: at layer 0 it finds its experts (and makes them the more recent in global
    # order only if it runs); here it goes straight to other experts of layer 1.
    s = x.s
    s.handle(Computed(step.step))
    s.handle(Cancelled(0))
    x.say(channels=0)
    got = x.enter(1, (0, 1), channels=0)
    if eviction == "global":
        # Make layer 0 the least recently used again: layer 1 is what was used last.
        s.handle(Cancelled(1))
        x.say(channels=0)
    else:
        [step] = only(got, Compute)
        got = x.say(Computed(step.step), Routed(Visit(1, 0, 1), ((2, 3),)), channels=2)
        assert full - resident(s) == gone
        return
    for step_id in list(s.steps):
        s.handle(Computed(step_id))
    order = [s.key_of(s.cache.code[i]) for i in s.cache.policy.orders[0]]
    slot = s.cache.victim(1 * s.experts + 2, False)
    assert slot is not None
    assert s.key_of(s.cache.code[slot]) == order[0]


@pytest.mark.rule("CACHE-4", "FETCH-3")
def test_what_was_read_for_a_task_stays_until_its_first_use() -> None:
    x = Scene(slots=2, readiness="expert")
    x.say(Arrived(0, 1, 4), Arrived(1, 1, 4), channels=0, compute=0)
    [entry] = only(x.say(channels=0), Compute)
    routed = (Routed(Visit(0, 0, 0), ((2, 1),)), Routed(Visit(1, 0, 0), ((3, 1),)))
    loads = only(x.say(Computed(entry.step), *routed, channels=2), Load)
    # Two visits want expert 1: it is first. Then request 0's other one.
    assert [a.key.expert for a in loads] == [1, 2]
    got = x.say(*(Loaded(a.ticket) for a in loads), channels=2, compute=0)
    assert not only(got, Load)  # both are fresh: nothing may go before it is used
    [step] = only(x.say(channels=0), Compute)
    assert [(p.visit.request, p.experts, p.last) for p in step.parts] == [
        (0, (1, 2), True),
        (1, (1,), False),
    ]
    [load] = only(x.say(Computed(step.step), channels=1, compute=0), Load)
    assert load.key.expert == 3


@pytest.mark.rule("FETCH-1")
@pytest.mark.parametrize(
    ("order", "served"), [("least-progress", 0), ("first-come", 1), ("fewest-missing", 2)]
)
def test_the_fetch_orders(order: str, served: int) -> None:
    x = Scene(slots=8, experts=8, fetch_order=order, max_rows=8)
    # Experts 6, 7 of layer 0 are there. Request 0 has the least progress, 1 spoke first, and 2
    # lacks one expert only.
    loads = only(x.enter(9, (6, 7), channels=2), Load)
    x.say(*(Loaded(a.ticket) for a in loads), channels=0)
    x.s.handle(Cancelled(9))
    x.say(*(Computed(n) for n in list(x.s.steps)), channels=0)
    x.say(*(Arrived(n, 1, 4) for n in (10, 11, 12)), channels=0, compute=0)
    [entry] = only(x.say(channels=0), Compute)
    x.say(Computed(entry.step), channels=0, compute=0)
    for number, experts in ((11, (0, 1)), (10, (2, 3)), (12, (4, 6))):
        x.say(Routed(Visit(number, 0, 0), (experts,)), channels=0, compute=0)
    for number, progress in ((10, 1), (11, 2), (12, 3)):
        x.s.running[number].progress = progress
    [load] = only(x.say(channels=1, compute=0), Load)
    first_expert = {0: 2, 1: 0, 2: 4}[served]
    assert load.key.expert == first_expert


@pytest.mark.rule("FETCH-4")
@pytest.mark.parametrize("readiness", ["visit", "expert"])
def test_with_a_slot_for_every_expert_nothing_is_read_twice(readiness: str) -> None:
    """A full share of slots sends a prompt to its own slots only when no slot is free."""
    o = BASE.with_(
        layers=(0, 1, 2), experts=8, slots=24, chunk=4, bulk_slots=1, readiness=readiness
    )
    shapes = [(1, 8), (11, 3), (9, 4), (1, 8)]
    totals = simulate(o, shapes, arrivals=[0.0, 0.0, 0.004, 0.004]).run()
    assert 12 < totals.loads <= 24


@pytest.mark.rule("FETCH-5", "SIM-4")
def test_the_channel_never_idles_while_something_fits() -> None:
    o = BASE.with_(layers=(0, 1, 2), experts=16, slots=24, max_running=16)
    loop = simulate(o, [(1, 20)] * 16, costs=CostModel(step_s=1e-5, row_s=0, expert_s=0))
    totals = loop.run()
    assert totals.channel_s <= totals.seconds * (1 + 1e-9)
    assert totals.channel_s / totals.seconds > 0.98


@pytest.mark.rule("SIM-1", "SIM-2", "SIM-3")
def test_virtual_time_by_hand_and_twice_the_same() -> None:
    """One token through one layer: entry, two transfers in a row, one step."""
    o = BASE.with_(layers=(0,), slots=2)
    costs = CostModel(bytes_per_s=1e6, latency_s=0.25, depth=2, step_s=2.0, row_s=1.0, expert_s=4.0)
    runs = []
    for _ in range(2):
        loop = simulate(o, [(1, 1)], costs=costs)
        times = [loop.now for _ in iter(loop.tick, False)]
        runs.append(times)
    # entry 2 + 1; transfers end at 4.25 and 5.25; the step takes 2 + 1 + 8.
    assert runs[0] == pytest.approx([0.0, 3.0, 4.25, 5.25, 16.25])
    assert runs[0] == runs[1]


# Going together and apart


def _told(reading: int, computing: int, crowd: int, guesses: bool = False) -> bool:
    """Two layers of 16 experts, 16 slots."""
    b = Balance(16, 2, 16, guesses)
    b.loaded(reading)
    b.computed(1, computing)
    b.named(0, tuple(range(crowd)), 1)
    assert b.copy().apart == b.apart
    return b.apart


@pytest.mark.rule("SCHED-13")
@pytest.mark.parametrize(
    ("reading", "computing", "crowd", "apart"),
    [
        (100, 100, 5, True), (100, 101, 5, False), (100, 40, 5, True), (100, 39, 5, False),
        (100, 60, 6, False), (0, 0, 5, True), (100, 60, 5, True), (100, 61, 5, True),
    ],
)  # fmt: skip
def test_when_it_pays_to_go_apart(
    reading: int, computing: int, crowd: int, apart: bool
) -> None:
    """Eight slots a layer: five experts leave room, six do not."""
    assert _told(reading, computing, crowd) == apart
    assert _told(reading, computing, crowd, True) == (apart and computing <= 60)


@pytest.mark.rule("SCHED-13")
def test_a_crowd_is_counted_over_all_who_run_and_fades() -> None:
    b = Balance(32, 2, 16, False)
    for codes in ((0, 1), (1, 2), (18, 19), (2, 3)):  # the third is of the other layer
        b.named(codes[0] // 16, codes, 3)
    assert b.crowd == 8 * 4  # 0 to 3
    for _ in range(3):
        b.named(0, (0, 1), 1)
    assert b.crowd == 32 + 2 - 4 + 2 - 3 + 2 - 3
    b.loaded(7)
    b.computed(63, 9)
    assert (b.reading, b.computing) == (7, 9)
    b.computed(64, 2)
    assert (b.reading, b.computing) == (3, 5)


@pytest.mark.rule("SCHED-12")
def test_a_lockstep_batch_goes_on_in_one_step() -> None:
    """The first request has all it needs before the second has; it runs it, and waits."""
    sc = Scene(grouping="lockstep", slots=4)
    (first,) = only(sc.say(Arrived(0, 1, 4), Arrived(1, 1, 4), channels=0), Compute)
    loads = only(
        sc.say(Computed(first.step), Routed(Visit(0, 0, 0), ((0, 1),)),
               Routed(Visit(1, 0, 0), ((1, 2),)), channels=3),
        Load,
    )  # fmt: skip
    assert [load.key.expert for load in loads] == [1, 0, 2]
    (step,) = only(sc.say(Loaded(loads[0].ticket), Loaded(loads[1].ticket)), Compute)
    assert [(p.visit.request, p.experts, p.last) for p in step.parts] == [
        (0, (0, 1), False), (1, (1,), False),
    ]  # fmt: skip
    assert not sc.say(Computed(step.step))
    (step,) = only(sc.say(Loaded(loads[2].ticket)), Compute)
    assert [(p.visit.request, p.experts, p.last) for p in step.parts] == [
        (0, (), True), (1, (2,), True),
    ]  # fmt: skip


@pytest.mark.rule("SCHED-13", "FETCH-9")
@pytest.mark.parametrize("apart", [True, False])
def test_balanced_lets_one_go_ahead_only_while_it_pays(apart: bool) -> None:
    sc = Scene(grouping="balanced", slots=12, experts=4, layers=(0, 1))
    if not apart:
        sc.s.balance.computed(1, 5)
    (first,) = only(sc.say(Arrived(0, 1, 4), Arrived(1, 1, 4), channels=0), Compute)
    loads = only(
        sc.say(Computed(first.step), Routed(Visit(0, 0, 0), ((0, 1),)),
               Routed(Visit(1, 0, 0), ((2, 3),)), channels=9),
        Load,
    )  # fmt: skip
    assert [load.key.expert for load in loads] == [0, 1, 2, 3]
    done = [Loaded(load.ticket) for load in loads[:2]]
    (step,) = only(sc.say(*done), Compute)
    assert [(p.visit.request, p.experts, p.last) for p in step.parts] == [(0, (0, 1), apart)]
    assert sc.s.running[1].need == (2, 3)


@pytest.mark.rule("SCHED-14")
def test_micro_queues_take_the_fullest_layer() -> None:
    """Two wait at layer 1 and one, less advanced, at layer 0: interleaved takes that, micro-queues
    the two."""
    chosen = {}
    for grouping in ("interleaved", "micro-queues"):
        o = BASE.with_(grouping=grouping, readiness="expert", slots=8, experts=4, top_k=1)
        s = Scheduler(o)
        for n in (0, 1, 2):
            s.handle(Arrived(n, 1, 4))
        entry = only(s.next_actions(9, 1), Compute)[0]
        for event in (Computed(entry.step), *[Routed(Visit(n, 0, 0), ((0,),)) for n in (0, 1)]):
            s.handle(event)
        s.handle(Loaded(only(s.next_actions(9, 1), Load)[0].ticket))
        step = only(s.next_actions(9, 1), Compute)[0]
        for event in (Computed(step.step), *[Routed(Visit(n, 0, 1), ((0,),)) for n in (0, 1)]):
            s.handle(event)
        s.handle(Loaded(only(s.next_actions(9, 1), Load)[0].ticket))
        s.handle(Routed(Visit(2, 0, 0), ((0,),)))
        chosen[grouping] = only(s.next_actions(9, 1), Compute)[0].layer
    assert chosen == {"interleaved": 0, "micro-queues": 1}


@pytest.mark.rule("SCHED-7")
@pytest.mark.parametrize("grouping", ["interleaved", "micro-queues"])
def test_whoever_is_too_far_ahead_waits_though_its_experts_are_there(grouping: str) -> None:
    """Two layers, lag 1, every expert there: one may be a visit ahead of the other, not two."""
    sc = Scene(grouping=grouping, readiness="expert", experts=2, slots=4, max_lag=1, chunk=1)
    for code in range(4):
        sc.s.cache.loaded(sc.s.cache.begin(sc.s.cache.free[-1], code, False, False))
    (entry,) = only(sc.say(Arrived(0, 1, 9), Arrived(1, 1, 9)), Compute)
    said = [Routed(Visit(n, 0, 0), ((0, 1),)) for n in (0, 1)]
    (step,) = only(sc.say(Computed(entry.step), said[1]), Compute)
    assert [p.visit.request for p in step.parts] == [1]
    assert not sc.say(Computed(step.step), Routed(Visit(1, 0, 1), ((0, 1),)))
    (step,) = only(sc.say(said[0]), Compute)
    assert [p.visit.request for p in step.parts] == [0]
