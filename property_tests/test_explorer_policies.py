"""Any legal policy, bounded bypass, kept counterexamples, replay twice, randomised schedules."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from oracle import cases
from oracle.__main__ import main
from oracle.any_policy import AnyPolicy
from oracle.bypass import BOUNDS, bypass
from oracle.checkers import check_log
from oracle.explorer import Explorer, explorer_of
from oracle.faults import CONTROL_MUTANTS
from oracle.patching import Mutant, mutated
from oracle.pct import WORLDS, Tally, pct
from oracle.scopes import SCOPES
from oracle.swarm import SWARMS, WIDE, decisions, swarm
from oracle.transitions import replay_node, steps
from oracle.walks import WALKS, draw_world, pinned, walk
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, READINESS, SCHEDULERS

# -- any legal choice --------------------------------------------------------------------------


@pytest.mark.rule("SAFE-1", "SAFE-7", "SAFE-9")
def test_any_policy_covers_what_the_shipped_one_does() -> None:
    """Each load and step of the shipped policy is among the choices: it visits at least as many
    placements of slots and requests, and its transitions are more."""
    scope = SCOPES["any-split"]
    free, shipped = explorer_of(scope), Explorer(scope)
    report, narrow = free.run(), shipped.run()
    assert report.violations == narrow.violations == []
    assert report.transitions > 2 * narrow.transitions
    assert free.make is AnyPolicy and not free.lively


@pytest.mark.rule("SAFE-6", "SAFE-9")
@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("state == READY and slot not in cache.readers", "state == READY", "S6"),
        ("if r.stage != stage or (", "if (", "S9"),
    ],
)
def test_an_illegal_choice_is_seen(old: str, new: str, broken: str) -> None:
    """The policy with one choice too many: safety breaks, so it is safety that was asked for."""
    mutant = Mutant(f"any-{broken}", "oracle.any_policy", old, new, broken)
    with mutated(mutant) as module:
        explorer = Explorer(SCOPES["any-k1-c2" if broken != "S9" else "any-k1"],
                            module.AnyPolicy, lively=False)  # fmt: skip
        (found,) = explorer.run().violations
    assert found.property == broken


# -- bounded bypass ----------------------------------------------------------------------------


@pytest.mark.rule("LIVE-4")
@pytest.mark.parametrize("name", BOUNDS)
def test_nobody_is_passed_more_often_than_proved(name: str) -> None:
    bound, report = bypass(SCOPES[name])
    assert report.violations == [] and not report.truncated
    assert bound == BOUNDS[name]


@pytest.mark.rule("LIVE-4")
def test_an_unfair_order_passes_more_often() -> None:
    newest = Mutant(
        "newest-first",
        "reference.control.fetch",
        "lambda s, r: (r.progress, -waiters(s, r))",
        "lambda s, r: (-r.progress, -waiters(s, r), -r.number)",
        "L4",
    )
    with mutated(newest) as module:
        for name in ("thrash-k1", "visit-k2-s2"):
            assert bypass(SCOPES[name], module.Scheduler)[0] > BOUNDS[name]


# -- the same again ----------------------------------------------------------------------------


@pytest.mark.rule("LIVE-1")
@pytest.mark.parametrize("name", ["cancel-k2", "expert-k2-s2", "drain-k1", "any-k1"])
def test_paths_replayed_lead_to_the_same_states(name: str) -> None:
    """Every 101st state: told again from the start, the same digest and the same way on."""
    scope = SCOPES[name]
    explorer = explorer_of(scope)
    explorer.run()
    digests = list(explorer.index)
    on: dict[int, list[int]] = {}
    for source, target in zip(explorer.sources, explorer.targets, strict=True):
        on.setdefault(source, []).append(target)
    for number in range(0, len(digests), 101):
        node = replay_node(scope, explorer.path(number), explorer.make)
        assert node.digest() == digests[number]
        again = [explorer.index.find(s.node.digest()) for s in steps(scope, node)]
        assert again == on.get(number, [])


# -- kept counterexamples ----------------------------------------------------------------------


KEPT = {c["name"]: c for c in cases.read_cases()}


def test_every_seeded_fault_of_control_has_its_case() -> None:
    assert set(KEPT) == {m.name for m in CONTROL_MUTANTS if m.scopes}


@pytest.mark.rule("LIVE-1", "LIVE-2", "LIVE-3")
@pytest.mark.parametrize("name", KEPT)
def test_the_case_breaks_the_fault_and_not_the_shipped_code(name: str) -> None:
    case = KEPT[name]
    fault, _ = cases.play(case)
    assert fault is None or fault[1].startswith("("), fault  # an event that could not be
    mutant = next(m for m in CONTROL_MUTANTS if m.name == name)
    with mutated(mutant) as module:
        fault, states = cases.play(case, module.Scheduler)
    if case["property"] == "L2":
        assert fault is None and states[-1] in states[:-1]
    elif not case["graph"]:
        assert fault is not None
        assert fault[0] == case["seen"]


def test_a_printed_case_plays(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "case.jsonl"
    file.write_text(json.dumps(KEPT["step-reused"]) + "\n")
    assert main(["replay", str(file)]) == 0
    assert "thrash" not in capsys.readouterr().out


# -- random walks ------------------------------------------------------------------------------


@pytest.mark.rule("SAFE-9", "LIVE-1", "PREFETCH-2", "FETCH-8")
def test_random_walks_decide_as_pinned() -> None:
    """Every policy, warm experts, predictions and faults: no property breaks, and no decision is
    another one than before."""
    taken = [walk(seed) for seed in range(WALKS)]
    assert [w for w in taken if w.fault is not None] == []
    assert [w.seed for w, digest in zip(taken, pinned(), strict=True) if w.digest != digest] == []
    assert sum(w.steps for w in taken) > 40_000


@pytest.mark.rule("SCHED-13", "CACHE-10", "CACHE-11", "CACHE-12", "CACHE-13", "CACHE-14")
def test_wide_runs_decide_as_pinned() -> None:
    """Layers and slots by the dozen, times that count, guesses: no log breaks a property, and no
    decision is another one than before."""
    logs = [swarm(WIDE + i) for i in range(SWARMS)]
    assert [i for i, log in enumerate(logs) if check_log(log)] == []
    assert [i for i, (log, digest) in enumerate(zip(logs, pinned("swarms"), strict=True))
            if decisions(log) != digest] == []  # fmt: skip
    heads = [log[0]["options"] for log in logs]
    assert {(h["grouping"], h["eviction"]) for h in heads} >= {
        ("balanced", "frequency"), ("balanced", "adaptive"), ("interleaved", "adaptive"),
    }  # fmt: skip
    assert sum(h["prefetch"] > 0 for h in heads) > SWARMS // 3
    assert sum(map(len, logs)) > 100_000


def test_wide_runs_find_what_takes_time_to_show() -> None:
    """Nothing of this is seen in the small worlds."""
    for module, old, new in (
        ("reference.control.balance", "self.computing //= 2", "pass"),
        ("reference.control.eviction_frequency", "self.passes = 0\n            self._", "self._"),
    ):
        with mutated(Mutant("slow", module, old, new, "")) as changed:
            scheduler = sys.modules[f"{changed.__name__.rsplit('.', 1)[0]}.scheduler"]
            found = [decisions(swarm(WIDE + i, scheduler.Scheduler)) for i in range(SWARMS)]
        assert any(a != b for a, b in zip(found, pinned("swarms"), strict=True)), old


def test_a_walk_ends_when_what_a_warm_start_reads_has_come() -> None:
    """Nobody ever ran, so it goes on reading after the last request was refused (FETCH-8)."""
    for seed in (21681, 22109):
        assert walk(seed).fault is None


def test_walks_are_drawn_over_all_that_ships() -> None:
    worlds = [draw_world(random.Random(f"walk {seed}")) for seed in range(WALKS)]
    met = {(w.options.grouping, w.options.readiness, w.options.fetch_order) for w in worlds}
    assert len(met) == len(SCHEDULERS) * len(READINESS) * len(FETCH_ORDERS)
    assert {w.options.eviction for w in worlds} == set(EVICTIONS)
    assert sum(bool(w.options.warm) for w in worlds) > 300
    assert sum(w.predictions > 0 for w in worlds) > 300


def test_walks_find_a_seeded_fault_and_another_decision() -> None:
    for name in ("evict-while-read", "step-reused"):
        with mutated(next(m for m in CONTROL_MUTANTS if m.name == name)) as module:
            taken = [walk(seed, module.Scheduler) for seed in range(40)]
        assert any(w.fault is not None for w in taken), name
    highest = Mutant("highest-first", "reference.control.fetch",
                     "return min(absent, key=lambda c: (-wanted[c], c))",
                     "return min(absent, key=lambda c: (-wanted[c], -c))", "")  # fmt: skip
    with mutated(highest) as module:
        taken = [walk(seed, module.Scheduler) for seed in range(40)]
    assert [w for w in taken if w.fault is not None] == []
    assert any(w.digest != digest for w, digest in zip(taken, pinned(), strict=False))


# -- randomised schedules ----------------------------------------------------------------------


RUNS, BLOCKS = 5_000, 2


@pytest.fixture(scope="module")
def tallies() -> dict[tuple[str, int], Future[Tally]]:
    out = {}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for world in WORLDS:
            for block in range(BLOCKS):
                n = RUNS // BLOCKS
                out[world.name, block] = pool.submit(pct, world, n, 3, block * n)
    return out


@pytest.mark.rule("SAFE-9", "LIVE-1")
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.name)
def test_randomised_schedules(world, tallies: dict[tuple[str, int], Future[Tally]]) -> None:
    whole = Tally()
    for block in range(BLOCKS):
        tally = tallies[world.name, block].result()
        assert tally.fault is None, (world.name, tally.seed)
        whole.runs += tally.runs
        whole.transitions += tally.transitions
        whole.threads = max(whole.threads, tally.threads)
        whole.steps = max(whole.steps, tally.steps)
    print(f"{world.name}: {whole}")
    assert whole.runs == RUNS
    assert whole.miss(1) < 1e-6 and whole.miss(2) < 1e-3


@pytest.mark.rule("SAFE-6")
def test_randomised_schedules_find_a_seeded_fault() -> None:
    mutant = next(m for m in CONTROL_MUTANTS if m.name == "evict-while-read")
    with mutated(mutant) as module:
        tally = pct(WORLDS[1], 400, make=module.Scheduler)
    assert tally.fault is not None
    assert 0 < tally.chance(3) < tally.chance(2) < tally.chance(1) <= 1
    assert random.Random(f"{WORLDS[1].name} {tally.seed}").random() < 1
