"""Seeded faults in the control plane and in the executors: each dies of what it declares."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.__main__ import main
from oracle.checkers import CHECKS, check_log
from oracle.faults import ALL, CONTROL_MUTANTS, EQUIVALENT, EXECUTOR_MUTANTS
from oracle.mutants import kill
from oracle.patching import CONTROL, PatchFailed, mutated
from property_tests import mutation
from property_tests.changes import sample
from property_tests.rule_mutants import RULE_MUTANTS, judge

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 30.0
"""A fault's budget; most need a tenth of a second."""


@pytest.mark.rule(
    "SAFE-1", "SAFE-2", "SAFE-3", "SAFE-4", "SAFE-5", "SAFE-6", "SAFE-7", "SAFE-8", "SAFE-9",
    "SAFE-10", "SAFE-11", "SAFE-12", "SAFE-13", "SAFE-14", "SAFE-15", "SAFE-16", "LIVE-1", "LIVE-2",
    "LIVE-3", "LIVE-4", "LIVE-5", "LIVE-6", "LIVE-7",
)  # fmt: skip
@pytest.mark.parametrize("name", [m.name for m in ALL])
def test_the_fault_is_killed_by_the_property_that_it_declares(name: str) -> None:
    mutant = next(m for m in ALL if m.name == name)
    verdict = kill(mutant)
    assert verdict.killed_by == mutant.declared, verdict
    assert verdict.seconds < SECONDS
    assert verdict.trace_length > 0
    if verdict.found and mutant.declared[0] == "S" and mutant.declared != "S1":
        # The explorer's world and the log checkers share no code; they must see the same.
        log = verdict.found.log
        broken = {v.property for v in check_log(log, complete="end" in log[-1])}
        assert mutant.declared in broken


def test_there_are_enough_and_every_property_kills() -> None:
    assert len(CONTROL_MUTANTS) >= 15
    assert len(EXECUTOR_MUTANTS) >= 8
    kills = Counter(m.declared for m in ALL)
    assert set(kills) == {*CHECKS, "S16"}
    assert len({m.name for m in ALL}) == len(ALL)
    assert all(set(e) == {"name", "proof"} for e in EQUIVALENT)


@pytest.fixture(scope="module")
def by_rule() -> dict[str, dict[str, str | None]]:
    """What became of the faults in sampling, numerics and files, each in a process of its own."""
    command = [sys.executable, "-m", "property_tests.rule_mutants"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


@pytest.mark.rule("SAMPLE-1", "SAMPLE-5", "ROUTE-2", "NUM-4", "ATTN-2", "FILE-2", "FILE-6")
@pytest.mark.parametrize("name", [m.name for m in RULE_MUTANTS])
def test_the_fault_is_killed_by_a_test_of_its_rule(
    name: str, by_rule: dict[str, dict[str, str | None]]
) -> None:
    killer = by_rule[name]["killed_by"]
    assert killer is not None and killer.startswith("test_")


def test_unchanged_modules_are_not_blamed() -> None:
    mutant = next(m for m in RULE_MUTANTS if m.name == "top-k-one-more")
    assert judge(replace(mutant, new=mutant.old)) == ""


def test_there_are_sixty() -> None:
    assert len({m.name for m in (*ALL, *RULE_MUTANTS)}) == len(ALL) + len(RULE_MUTANTS) >= 60


@pytest.mark.parametrize(
    ("group", "count", "most", "page"),
    [("control", 40, "quick tests", "control"), ("transfer", 4, "tiers", "jax")],
)
def test_a_slice_of_the_mechanical_faults(
    tmp_path: Path, group: str, count: int, most: str, page: str
) -> None:
    """The changes that are first drawn from a fixed seed, judged by the cheapest stages alone: what
    lives is explained. The others, by all stages, by hand. In a process of its own: a judge must
    not have met the module unchanged."""
    out = tmp_path / "slice.jsonl"
    words = [group, str(out), "--seed", "1", "--count", str(count), "--jobs", "2", "--most", most]
    done = subprocess.run(
        [sys.executable, "-m", "property_tests.mutation", *words], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdicts = mutation.results(out)
    assert len(verdicts) == count
    lived = {name for name, record in verdicts.items() if not record["killed_by"]}
    assert lived <= set(mutation.explained(ROOT / "specs" / f"mutation-{page}.md"))


@pytest.mark.parametrize(
    ("page", "modules"),
    [("control", mutation.CONTROL + mutation.TIERS + mutation.LAMINA),
     ("jax", mutation.TRANSFER + mutation.ENGINE)],
)  # fmt: skip
def test_what_is_explained_is_there(page: str, modules: tuple[str, ...]) -> None:
    """A row about code that has changed says nothing."""
    known = mutation.explained(ROOT / "specs" / f"mutation-{page}.md")
    assert known.keys() <= {c.name for c in sample(modules, 1)}


def test_a_patch_that_no_longer_applies_is_an_error() -> None:
    gone = replace(ALL[0], old="this line was rewritten")
    with pytest.raises(PatchFailed, match="0 times"):
        kill(gone)
    twice = replace(ALL[0], old="def ")
    with pytest.raises(PatchFailed, match="times"):
        kill(twice)


def test_the_shipped_modules_are_left_alone() -> None:
    from reference.control import scheduler

    with mutated(CONTROL_MUTANTS[0]) as module:
        assert module.Scheduler is not scheduler.Scheduler
        assert module.Scheduler.__module__.startswith("covey_mutant_")
        assert CONTROL not in module.Scheduler.__module__
    from reference.control.scheduler import Scheduler

    assert Scheduler is scheduler.Scheduler


def test_an_unchanged_executor_is_not_blamed() -> None:
    """The same rigs over the shipped modules: no violation, so the faults are what is seen."""
    import jax_impl.transfer
    import reference.control.scheduler
    import reference.executor
    import reference.simulator.loop
    from oracle import company_rig, rigs

    assert not any(company_rig.engine(reference.executor))
    assert not any(company_rig.decided(reference.control.scheduler))

    for rig, module in (
        (rigs.loop, reference.simulator.loop),
        (rigs.transfer, jax_impl.transfer),
    ):
        log = rig(module)
        assert log[-1]["end"] == {}
        assert check_log(log) == []
        assert any(r.get("event") == "LoadFailed" for r in log)


def test_mutants_writes_the_stated_form(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    assert main(["mutants", "--only", "step-reused", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert set(document) == {"mutants", "equivalent"}
    (one,) = document["mutants"]
    assert list(one) == ["name", "declared", "killed_by", "also", "trace_length", "seconds"]
    assert main(["mutants", "--only", "no-such-fault"]) == 2
    assert "step-reused" in capsys.readouterr().err
