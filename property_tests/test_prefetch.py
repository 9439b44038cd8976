"""Guesses of the control plane: a small scene for every rule, and random play with predictions."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from oracle.explorer import Explorer
from oracle.scope import scope
from property_tests.play import Play, random_play
from reference.control import Scheduler
from reference.control.fetch import Chooser, first
from reference.control.prefetch import prefetch
from reference.vocab.actions import Compute, Load
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
)
from reference.vocab.ids import ExpertKey, Visit
from reference.vocab.options import ControlOptions

BASE = ControlOptions(
    layers=(0, 1, 2), experts=4, top_k=1, slots=4, chunk=4, kv_block=4, kv_tokens=400,
    grouping="lockstep", prefetch=4, eviction="global",
)  # fmt: skip


class Scene:
    """A scheduler driven by hand: every call returns what it asked for."""

    def __init__(self, **changes: object) -> None:
        self.s = Scheduler(BASE.with_(**changes))

    def say(self, *events: Event, channels: int = 1, compute: int | None = None) -> list:
        for e in events:
            self.s.handle(e)
        idle = (0 if self.s.steps else 1) if compute is None else compute
        return self.s.next_actions(channels, idle)

    def at_first_layer(self, *named: int) -> None:
        """Request i stands at layer 0 and has named expert named[i] there; nothing is read."""
        got = self.say(*[Arrived(i, 1, 4) for i in range(len(named))], channels=0)
        [step] = only(got, Compute)
        routed = [Routed(Visit(i, 0, 0), ((e,),)) for i, e in enumerate(named)]
        self.say(Computed(step.step), *routed, channels=0)

    def load(self, *events: Event) -> Load | None:
        """The one load that an ask with one channel, and no idle compute, starts."""
        loads = only(self.say(*events, compute=0), Load)
        assert len(loads) <= 1
        return loads[0] if loads else None

    def done(self) -> Loaded:
        """The oldest transfer in flight ends."""
        return Loaded(min(self.s.cache.flying))

    def here(self) -> set[ExpertKey]:
        """What the slots hold or are brought."""
        return {ExpertKey(*self.s.key_of(c)) for c in self.s.cache.where}


def only(actions: list, kind: type) -> list:
    return [a for a in actions if isinstance(a, kind)]


def expect(request: int, layer: int, *pairs: tuple[int, float], chunk: int = 0) -> Predicted:
    return Predicted(Visit(request, chunk, layer), pairs)


# -- the rules, one by one -----------------------------------------------------------------------


@pytest.mark.rule("PREFETCH-1")
@pytest.mark.parametrize("n", [0, 1, 3])
def test_so_many_of_a_prediction_are_guessed_and_none_with_none(n: int) -> None:
    x = Scene(prefetch=n, slots=8)
    x.at_first_layer(0)
    said = expect(0, 1, (3, 0.9), (1, 0.0), (2, 0.5), (0, 0.1))
    loads = [x.load(said)]
    while loads[-1]:
        loads.append(x.load(x.done()))
    assert [a.key for a in loads if a and not a.guess] == [(0, 0)]
    guessed = [a.key for a in loads if a and a.guess]
    assert guessed == [(1, 3), (1, 2)][: max(0, n - 1) if n > 1 else n]


@pytest.mark.rule("PREFETCH-1")
def test_what_is_said_again_counts_instead_and_what_is_past_counts_not_at_all() -> None:
    x = Scene(slots=8)
    x.at_first_layer(0)
    x.load(expect(0, 0, (3, 1.0)), expect(0, 1, (2, 1.0)), expect(0, 1, (1, float("nan"))))
    assert x.load(x.done()) is None
    guess = x.load(expect(0, 2, (1, 1.0)), expect(0, 2, (3, 0.5)))
    assert guess and guess.guess and guess.key == (2, 3)
    guess = x.load(x.done(), expect(0, 0, (2, 1.0), chunk=1))
    assert guess and guess.guess and guess.key == (0, 2)


@pytest.mark.rule("PREFETCH-1")
def test_malformed_predictions_break_the_protocol() -> None:
    x = Scene()
    x.at_first_layer(0)
    for bad in (
        expect(0, 7, (1, 1.0)), expect(0, 1, (4, 1.0)), expect(0, 1, (1, 1.0), (1, 0.5)),
        expect(5, 1, (1, 1.0)),
    ):  # fmt: skip
        with pytest.raises(IllegalEvent):
            x.s.handle(bad)
    x.say(Cancelled(0))
    x.s.handle(expect(0, 1, (1, 1.0)))
    assert not x.s.guesses.of


@pytest.mark.rule("PREFETCH-1")
def test_blocking_guesses_nothing_and_says_so() -> None:
    with pytest.raises(BadInput, match=r"prefetch: 2; lockstep-blocking .* balanced, micro-queues"):
        Scheduler(BASE.with_(grouping="lockstep-blocking", prefetch=2))


@pytest.mark.rule("PREFETCH-1")
@pytest.mark.parametrize("grouping", ["lockstep", "interleaved"])
def test_prompts_are_guessed_for_in_lock_step_only(grouping: str) -> None:
    x = Scene(grouping=grouping, slots=8)
    [step] = only(x.say(Arrived(0, 3, 1)), Compute)
    x.say(Computed(step.step), Routed(Visit(0, 0, 0), ((0,),) * 3), expect(0, 1, (2, 1.0)))
    guess = x.load(x.done())
    assert (guess is not None and guess.guess) == (grouping == "lockstep")


@pytest.mark.rule("PREFETCH-2")
@pytest.mark.parametrize("grouping", ["lockstep", "interleaved"])
@pytest.mark.parametrize("readiness", ["visit", "expert"])
def test_what_is_named_goes_first(grouping: str, readiness: str) -> None:
    x = Scene(grouping=grouping, readiness=readiness, slots=6)
    x.at_first_layer(0, 1)
    keys = [x.load(expect(0, 1, (3, 1.0)))]
    keys += [x.load(x.done()) for _ in range(2)]
    assert [(tuple(a.key), a.guess) for a in keys if a] == [
        ((0, 0), False), ((0, 1), False), ((1, 3), True),
    ]  # fmt: skip


@pytest.mark.rule("PREFETCH-2")
def test_a_visit_that_finds_no_room_is_not_robbed_by_a_guess() -> None:
    # Two slots, one read by a step: request 1 waits for two slots, and no guess takes the one.
    x = Scene(grouping="interleaved", top_k=2, slots=2, experts=4)
    got = x.say(Arrived(0, 1, 4), Arrived(1, 1, 4), channels=0)
    [step] = only(got, Compute)
    routed = [Routed(Visit(0, 0, 0), ((0, 1),)), Routed(Visit(1, 0, 0), ((2, 3),))]
    x.say(Computed(step.step), *routed, channels=2)
    got = x.say(*[Loaded(t) for t in sorted(x.s.cache.flying)], expect(0, 1, (2, 1.0)), channels=2)
    assert only(got, Compute) and not only(got, Load)


@pytest.mark.rule("PREFETCH-2")
@pytest.mark.parametrize(("most", "count"), [(0, 3), (1, 1), (2, 2)])
def test_guesses_in_flight_are_bounded(most: int, count: int) -> None:
    x = Scene(slots=8, prefetch_loads=most)
    x.at_first_layer(0)
    x.load(expect(0, 1, *[(e, 1.0) for e in range(4)]))
    got = only(x.say(x.done(), channels=3, compute=0), Load)
    assert len(got) == count and all(a.guess for a in got)
    if most:
        assert len(only(x.say(x.done(), channels=3, compute=0), Load)) == 1


@pytest.mark.rule("PREFETCH-3")
def test_votes_of_a_batch_are_summed_then_the_soonest_then_the_lowest() -> None:
    x = Scene(slots=12)
    x.at_first_layer(0, 0, 0)
    said = [
        expect(0, 1, (3, 0.6), (2, 0.5)), expect(1, 1, (3, 0.6), (1, 0.5)),
        expect(2, 2, (0, 0.5)), expect(2, 1, (0, 0.5)),
    ]  # fmt: skip
    order = [x.load(*said)]
    while order[-1]:
        order.append(x.load(x.done()))
    keys = [tuple(a.key) for a in order[1:] if a]
    assert keys == [(1, 3), (1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.rule("PREFETCH-3")
def test_interleaved_equals_go_by_who_is_due_soonest() -> None:
    x = Scene(grouping="interleaved", slots=12)
    x.at_first_layer(0, 0)
    for r in (0, 1):
        x.s.running[r].progress = 5 - r  # request 1 is behind
    x.load(expect(0, 1, (0, 1.0)), expect(1, 1, (3, 1.0)))
    guess = x.load(x.done())
    assert guess and guess.key == (1, 3)


@pytest.mark.rule("PREFETCH-3")
def test_what_is_named_beyond_the_barrier_is_certain() -> None:
    """The barrier waits for the word of request 1; request 0 has named an expert behind it."""
    x = Scene(slots=8)
    x.at_first_layer(0, 0)
    x.load()
    [step] = only(x.say(x.done(), channels=0), Compute)
    ahead = Routed(Visit(0, 0, 1), ((2,),))
    guess = x.load(Computed(step.step), expect(1, 1, (1, 0.9)), ahead)
    assert x.s.front == 0 and guess and guess.guess and guess.key == (1, 2)
    after = x.load(x.done())
    assert after and after.key == (1, 1)


@pytest.mark.rule("PREFETCH-4")
def test_no_guess_drives_out_what_is_named_or_expected_more() -> None:
    x = Scene(slots=3)
    x.at_first_layer(0)
    x.load(expect(0, 1, (1, 0.9), (2, 0.3)))
    assert x.load(x.done()).key == (1, 1)  # type: ignore[union-attr]
    assert x.load(x.done()).key == (1, 2)  # type: ignore[union-attr]
    assert x.here() == {(0, 0), (1, 1), (1, 2)}  # full: one named, two expected
    assert x.load(x.done(), expect(0, 2, (3, 0.3))) is None  # no better than what is there
    better = x.load(expect(0, 2, (3, 0.5)))
    assert better and better.guess and x.here() == {(0, 0), (1, 1), (2, 3)}


@pytest.mark.rule("PREFETCH-4")
@pytest.mark.parametrize("eviction", ["global", "per-layer"])
def test_what_nobody_expects_goes_before_what_is_expected_less(eviction: str) -> None:
    x = Scene(slots=3, eviction=eviction)
    x.at_first_layer(0)
    x.load(expect(0, 1, (1, 0.1)))
    x.load(x.done())
    x.load(x.done(), expect(0, 2, (2, 0.1)))
    x.load(x.done(), expect(0, 2))  # (2, 2) came last, and is expected no more
    x.load(expect(0, 1, (1, 0.1), (3, 0.9)))
    assert x.here() == {(0, 0), (1, 1), (1, 3)}


@pytest.mark.rule("PREFETCH-5")
@pytest.mark.parametrize("grouping", ["lockstep", "interleaved"])
@pytest.mark.parametrize("arrived", [False, True])
def test_a_guess_that_comes_true_is_read_once(grouping: str, arrived: bool) -> None:
    x = Scene(grouping=grouping, slots=4)
    x.at_first_layer(0)
    x.load(expect(0, 1, (2, 1.0)))
    got = x.say(x.done(), channels=1)
    [step], [guess] = only(got, Compute), only(got, Load)
    assert guess.guess and guess.key == (1, 2)
    end = [Computed(step.step), Routed(Visit(0, 0, 1), ((2,),))]
    got = x.say(x.done(), *end) if arrived else [*x.say(*end), *x.say(x.done())]
    assert not only(got, Load)
    [step] = only(got, Compute)
    assert step.layer == 1 and step.slots == ((2, guess.slot),)


@pytest.mark.rule("PREFETCH-5")
def test_a_failed_guess_is_let_be_until_it_is_said_or_named_again() -> None:
    x = Scene(slots=6, retries=2)
    x.at_first_layer(0)
    x.load(expect(0, 1, (2, 1.0)))
    guess = x.load(x.done())
    assert guess and guess.guess
    assert x.load(LoadFailed(guess.ticket, "EIO")) is None and not x.s.fails
    again = x.load(expect(0, 1, (2, 1.0)))
    assert again and again.guess and again.key == guess.key
    # Named while it is in flight, its failure is the first of that visit's attempts (FETCH-6).
    [step] = only(x.say(), Compute)
    x.say(Computed(step.step), Routed(Visit(0, 0, 1), ((2,),)))
    retry = x.load(LoadFailed(again.ticket, "EIO"))
    assert retry and not retry.guess and retry.key == guess.key and list(x.s.fails.values()) == [1]


@pytest.mark.rule("PREFETCH-6")
def test_what_was_said_is_forgotten_with_its_visit_and_its_request() -> None:
    x = Scene(slots=2, top_k=1)
    x.at_first_layer(0, 0)
    x.s.handle(expect(0, 1, (1, 1.0)))
    x.s.handle(expect(0, 2, (1, 1.0)))
    x.s.handle(expect(1, 2, (3, 1.0)))
    x.load()
    [step] = only(x.say(x.done(), channels=0), Compute)
    routed = [Routed(Visit(i, 0, 1), ((0,),)) for i in (0, 1)]
    x.say(Computed(step.step), *routed, channels=0)
    assert x.s.guesses.of == {0: {(0, 2): ((9, 1000),)}, 1: {(0, 2): ((11, 1000),)}}
    x.say(Cancelled(0), channels=0)
    assert x.s.guesses.of == {1: {(0, 2): ((11, 1000),)}}
    before = x.s.key()
    twin = x.s.copy()
    twin.handle(Cancelled(1))
    twin.next_actions(0, 0)
    assert not twin.guesses.of and x.s.key() == before


class Eager(Scheduler):
    """A seeded fault: guesses before what is named (PREFETCH-2)."""

    __slots__ = ()

    def copy(self) -> Scheduler:
        new = super().copy()
        new.__class__ = Eager
        return new

    def next_actions(self, idle_channels: int, idle_compute: int, choose: Chooser = first) -> list:
        guesses: list = []
        prefetch(self, guesses, idle_channels)
        return guesses + super().next_actions(idle_channels - len(guesses), idle_compute, choose)


@pytest.mark.rule("PREFETCH-2", "LIVE-3")
def test_explored_whole_nothing_named_waits_for_a_guess_and_a_fault_shows() -> None:
    world = scope(
        "guesses", "two expert layers, one expert expected at a time, a failed load",
        (2, 2, 1, 2), ((1, 1), (1, 1)), prefetch=1, predictions=1, load_faults=1,
    )  # fmt: skip
    report = Explorer(world).run()
    assert not report.violations and report.canonical_states > 900
    [found] = Explorer(world, Eager).run().violations[:1]
    assert found.property == "L3" and "(c) a channel is idle" in found.text


# -- random play ---------------------------------------------------------------------------------


class GuessingPlay(Play):
    """Play in which predictions come at any time, about anything, right or wrong."""

    def happen(self, kind: str) -> list[Event]:
        events = super().happen(kind)
        rng, o = self.rng, self.options
        for event in list(events):
            if isinstance(event, Routed) and rng.random() < 0.7:
                number, chunk, _ = event.visit
                experts = rng.sample(range(o.experts), rng.randint(0, o.experts))
                scores = tuple((e, rng.choice([-0.5, 0.0, 0.3, 0.5, 1.0])) for e in experts)
                visit = Visit(number, chunk + rng.randint(0, 1), rng.choice(o.layers))
                events.insert(rng.randint(0, len(events)), Predicted(visit, scores))
        return events

    def obey(self, action: object) -> None:
        if isinstance(action, Load) and action.guess:
            assert self.options.prefetch, "PREFETCH-1: a guess without the option"
            live = [n for n in self.named if n not in self.over]
            gone = self.resident.get(action.slot)
            assert not any(gone in self.named[n] for n in live), "PREFETCH-4: named, and gone"
            self.guessed += 1
            named, self.named[-1] = self.named.get(-1), {action.key}
            super().obey(action)
            self.named.pop(-1)
            assert named is None
            return
        super().obey(action)

    guessed = 0


def guessing_play(seed: int) -> GuessingPlay:
    """A random game with guesses allowed."""
    plain = random_play(seed)
    rng = random.Random(seed)
    options = plain.options.with_(
        grouping=rng.choice(["lockstep", "interleaved", "interleaved"]),
        prefetch=rng.randint(1, 4), prefetch_loads=rng.randint(0, 2),
    )  # fmt: skip
    return GuessingPlay(
        plain.rng, options, plain.shapes, plain.channels, plain.faults, plain.cancels, plain.drain
    )


@pytest.mark.rule("PREFETCH-1", "PREFETCH-4", "PREFETCH-5", "CACHE-2", "CACHE-7", "FETCH-2")
def test_random_play_with_guesses_ends_and_leaves_nothing_behind() -> None:
    guesses: Counter = Counter()
    for seed in range(600):
        game = guessing_play(seed)
        game.run()
        guesses[game.options.grouping, game.options.readiness] += game.guessed
        assert not game.s.guesses.of
    assert len(guesses) == 4 and min(guesses.values()) > 90


@pytest.mark.rule("PREFETCH-1")
def test_predictions_change_nothing_without_the_option() -> None:
    for seed in range(60):
        plain, told = random_play(seed), random_play(seed)
        while plain.turn():
            assert told.turn()
            for n, r in list(told.s.running.items()):
                for layer in told.options.layers:
                    told.s.handle(Predicted(Visit(n, r.chunk, layer), ((0, 1.0),)))
            assert told.s.key() == plain.s.key()
