"""Small worlds solved: the optima against plainer searches, the bounds and every scheduler."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import pytest

from oracle.any_policy import AnyPolicy
from oracle.optimum.causal import Causal
from oracle.optimum.causal import State as CausalState
from oracle.optimum.clairvoyant import Search, State
from oracle.optimum.small import Route, Small, bits, subsets
from oracle.transitions import _Choices
from perf.small_optimum import report, subjects
from reference.control import Scheduler
from reference.simulator.bounds import Bounds, VisitWork
from reference.simulator.loop import VirtualLoop
from reference.simulator.routes import RoutedExecutor
from reference.vocab.events import Arrived
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, READINESS, SCHEDULERS


def random_world(rng: random.Random, **fixed: int) -> Small:
    top_k = rng.randint(1, 2)
    shape = {
        "requests": 2, "layers": rng.randint(1, 2), "experts": 3, "top_k": top_k,
        "slots": rng.randint(top_k, 4), "tokens": rng.randint(1, 2), "load": rng.randint(1, 4),
        "step": rng.randint(0, 2), "row": rng.randint(1, 2), "expert": rng.randint(0, 2),
    }  # fmt: skip
    return Small(**(shape | fixed))


# -- the clairvoyant optimum ---------------------------------------------------------------------


class Plain(Search):
    """The same moves, with nothing left out that is never better, and no bound to guide it."""

    @property
    def makespan(self) -> int:
        start: State = (tuple((0, 0) for _ in self.routes), 0, 0, 0, 0, 0, 0, 0)
        best: dict[State, int] = {start: 0}
        queue: list[tuple[int, int, State]] = [(0, 0, start)]
        count = 0
        while queue:
            spent, _, state = heapq.heappop(queue)
            if best[state] < spent:
                continue
            if all(visit == self.world.visits for visit, _ in state[0]) and not state[1]:
                return spent
            for passed, new in self.following(state):
                if spent + passed < best.get(new, 1 << 60):
                    best[new] = spent + passed
                    count += 1
                    heapq.heappush(queue, (spent + passed, count, new))
        raise AssertionError("no schedule ends")

    def _future(self, left: Any) -> int:
        return (1 << self.world.layers * self.world.experts) - 1  # anything may be kept and read

    def _loads(self, state: State) -> Iterator[State]:
        left, busy, step_left, read, resident, _, flying, load_left = state
        yield left, busy, step_left, read, resident, 0, flying, load_left
        if flying:
            return
        for code in bits(self.future(left) & ~resident):
            free = self.world.slots - resident.bit_count()
            for gone in [0] if free else [1 << c for c in bits(resident & ~read)]:
                yield (left, busy, step_left, read, resident & ~gone, 0, 1 << code,
                       self.world.load)  # fmt: skip


@pytest.mark.rule("OPT-1")
def test_what_the_search_leaves_out_is_never_better() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        world = random_world(rng, layers=1)
        routes = world.sample(seed, 1)[0]
        assert Search(world, routes).makespan == Plain(world, routes).makespan, (world, routes)


@pytest.mark.rule("OPT-1")
def test_the_optimum_of_named_experts_is_that_of_any_policy() -> None:
    """Against every run of the scheduler that may choose anything legal, in virtual time."""
    for seed in range(6):
        rng = random.Random(seed)
        world = random_world(rng, layers=1, experts=2, top_k=1, tokens=1, slots=1 + seed % 2)
        routes = world.sample(seed, 1)[0]
        best = min(every_run(world, routes))
        assert Search(world, routes, named_only=True).makespan == best, (world, routes)


def every_run(world: Small, routes: Sequence[Route]) -> Iterator[float]:
    """Makespans of all runs that end."""
    script: list[int] | None = []
    shape = (1, world.tokens)
    while script is not None:
        choices = _Choices(script)
        policy = Scripted(world.options(readiness="expert"), choices)
        executor = RoutedExecutor(
            lambda r, p, layer: world.experts_of(routes[r][p * (world.layers + 1) + layer + 1]),
            tuple(range(world.layers)), 1, world.slots, lambda r: shape, lambda: 0.0,
        )  # fmt: skip
        loop = VirtualLoop(policy, executor, world.load, world.costs)
        loop.at(0.0, lambda: [Arrived(r, 1, world.tokens) for r in range(world.requests)])
        turns = 0
        while turns < 40 and loop.tick():  # longer ones load and evict for nothing
            turns += 1
        if policy.idle:
            yield loop.totals.seconds
        script = choices.next()


class Scripted(AnyPolicy):
    """Any policy that takes its choices from a script."""

    __slots__ = ("choices",)

    def __init__(self, options: Any, choices: Any) -> None:
        super().__init__(options)
        self.choices = choices

    def next_actions(self, idle_channels: int, idle_compute: int, choose: Any = None) -> Any:
        return super().next_actions(idle_channels, idle_compute, self.choices)


@pytest.mark.rule("OPT-3")
def test_bound_clairvoyant_named_scheduler() -> None:
    tight = 0
    for seed in range(40):
        rng = random.Random(seed)
        world = random_world(rng, requests=rng.choice([2, 2, 3]))
        if world.requests == 3:
            world = random_world(rng, requests=3, top_k=1, tokens=1)
        routes = world.sample(seed, 1)[0]
        bound = bounds(world, routes)
        best, named = Search(world, routes).makespan, Search(world, routes, True).makespan
        assert bound <= best <= named, (world, routes)
        tight += bound == best
        for grouping in SCHEDULERS:
            scheduler = Scheduler(world.options(
                grouping=grouping, readiness=rng.choice(READINESS), eviction=rng.choice(EVICTIONS),
                fetch_order=rng.choice(FETCH_ORDERS),
            ))  # fmt: skip
            assert named <= world.run(routes, scheduler).seconds, (world, routes, grouping)
    assert tight > 5


def bounds(world: Small, routes: Sequence[Route]) -> float:
    work = [
        [
            VisitWork(world.stage(v), (v, v + 1), world.experts_of(need), world.top_k)
            for v, need in enumerate(route)
        ]
        for route in routes
    ]
    return Bounds(work, world.slots, world.costs, world.load, max_rows=64).makespan


@pytest.mark.rule("OPT-1")
def test_the_optimum_by_hand() -> None:
    """One request, one layer, one of two experts: entry 1 + 1, load 2, its step 1 + 1 + 1."""
    world = Small(1, 1, 2, 1, 1, 1, load=2, step=1, row=1, expert=1)
    route = world.route([1])
    assert Search(world, [route]).makespan == 2 + 3  # read while at the entry
    assert Search(world, [route], named_only=True).makespan == 2 + 2 + 3
    assert Causal(world).value == 7.0
    # Every second guess is right, and a wrong one has come just when the router speaks.
    assert Causal(world, guess=True).value == 0.5 * (2 + 3) + 0.5 * (2 + 2 + 3)
    slow = Small(1, 1, 2, 1, 1, 1, load=5, step=1, row=1, expert=1)
    assert Causal(slow, guess=True).value == Causal(slow).value == 10.0  # 8 or 13: not worth it


# -- the causal optimum --------------------------------------------------------------------------


class PlainCausal(Causal):
    """No two states are alike, and of equals each is tried."""

    def _canonical(self, state: CausalState) -> CausalState:
        return state

    def _kinds(self, mask: int, state: CausalState) -> Iterator[int]:
        return bits(mask)


@pytest.mark.rule("OPT-2")
@pytest.mark.parametrize("guess", [False, True])
def test_states_that_are_alike_have_one_value(guess: bool) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        world = random_world(rng, layers=1, experts=2, tokens=1 + seed % 2)
        plain, short = PlainCausal(world, guess), Causal(world, guess)
        assert short.value == pytest.approx(plain.value)
        assert short.states < plain.states


@pytest.mark.rule("OPT-2", "OPT-3")
def test_the_causal_optimum_lies_between() -> None:
    """Over all worlds of routes: knowing them is better, and no shipped scheduler is."""
    for world in (
        Small(2, 2, 3, 1, 3, 1, load=3, step=2, row=1, expert=1),
        Small(2, 1, 3, 1, 2, 2, load=2, step=1, row=1, expert=1),
        Small(2, 1, 3, 2, 3, 1, load=1, step=2, row=1, expert=2),
    ):
        worlds = list(world.all_routes())
        assert len(worlds) == world.worlds <= 81
        causal, guessing = Causal(world).value, Causal(world, guess=True).value
        named = mean(Search(world, routes, True).makespan for routes in worlds)
        best = mean(Search(world, routes).makespan for routes in worlds)
        assert best <= guessing <= causal + 1e-9 and named <= causal + 1e-9
        for grouping in SCHEDULERS:
            for readiness in READINESS if grouping == "interleaved" else READINESS[:1]:
                options = world.options(grouping=grouping, readiness=readiness)
                made = mean(world.run(r, Scheduler(options)).seconds for r in worlds)
                assert causal <= made + 1e-9, (world, grouping)


@pytest.mark.rule("OPT-2")
def test_where_nothing_is_unknown_both_optima_are_one() -> None:
    """As many experts a token as there are: every route is known."""
    world = Small(2, 2, 2, 2, 3, 2, load=2, step=1, row=1, expert=1)
    (routes,) = world.all_routes()
    assert Causal(world).value == Search(world, routes, True).makespan
    assert Causal(world, guess=True).value == Search(world, routes).makespan


@pytest.mark.rule("OPT-3")
def test_a_slice_of_the_saved_comparison() -> None:
    """As `python -m perf.small_optimum`, on one world: distances of every shipped scheduler."""
    world = Small(2, 2, 2, 1, 2, 1, load=3, step=2, row=1, expert=1)
    some = subjects()
    assert {s.options["eviction"] for s in some if not s.predict} == set(EVICTIONS)
    assert {s.options["grouping"] for s in some} == set(SCHEDULERS)
    told = report([("even", world)], samples=8, plays=world.worlds, some=some, guess=True)
    (solved,) = told["worlds"]
    assert solved["bound"] <= solved["clairvoyant"] <= solved["named"]
    assert solved["causal_guessing"] <= solved["causal"]
    for name, row in solved["schedulers"].items():
        assert row["worst_over_clairvoyant"] >= row["over_clairvoyant"] >= 1.0
        if "known" not in name:  # the predictor knows what no causal policy does
            assert row["over_causal"] >= 1 - 1e-9 and row["over_named"] >= 1.0
    assert list(told["summary"]) == list(told["by_regime"]["even"])


def test_masks() -> None:
    assert list(bits(0b1011)) == [0, 1, 3]
    assert sorted(subsets(0b101)) == [1, 4, 5]
    world = Small(1, 2, 3, 2, 2, 1, 1, 1, 1, 1)
    assert world.choices == (0b011, 0b101, 0b110)
    assert world.route([0, 2]) == (0, 0b011, 0b110_000)
    assert [world.stage(v) for v in range(3)] == [-1, 0, 1]
    assert world.worlds == 9 and len(world.sample(0, 4)) == 4
