"""The shipped scheduler, explored whole in small worlds; and the explorer put to the test."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest

from oracle import graph, pins
from oracle.__main__ import explore_one, main
from oracle.checkers import check_log
from oracle.explorer import Explorer, Report, explorer_of
from oracle.scopes import SCOPES
from oracle.seen import Level, Seen
from oracle.sometimes import SITUATIONS, Watching
from oracle.swarm import swarm
from oracle.transitions import replay, start
from reference.control.scheduler import Scheduler

CI = [name for name, scope in SCOPES.items() if scope.suite == "ci"]
SMALL = ["thrash-k1", "lost-k1", "visit-k2-s2", "expert-k2-s2", "kv-k1", "failed-k2", "dense"]


@pytest.mark.timeout(1200)  # the first of them explores all scopes, in two processes
@pytest.mark.rule(
    "SAFE-1", "SAFE-2", "SAFE-3", "SAFE-4", "SAFE-5", "SAFE-6", "SAFE-7", "SAFE-8", "SAFE-9",
    "SAFE-10", "SAFE-11", "LIVE-1", "LIVE-2", "LIVE-3",
)  # fmt: skip
@pytest.mark.parametrize("name", CI)
def test_scope_holds_and_its_counts_are_pinned(
    name: str, explored: dict[str, Future[Report]]
) -> None:
    report = explored[name].result()
    assert [f.as_json() for f in report.violations] == []
    assert pins.difference(report, pins.read_pins()) == ""


@pytest.fixture(scope="module")
def explored() -> Iterator[dict[str, Future[Report]]]:
    """All scopes of the suite, the largest first, in two processes."""
    counts = pins.read_pins()
    order = sorted(CI, key=lambda name: -counts.get(name, {}).get("transitions", 0))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        yield {name: pool.submit(explore_one, name) for name in order}


def test_every_scope_is_pinned_and_no_other() -> None:
    counts = pins.read_pins()
    assert set(CI) <= set(counts) <= set(SCOPES)
    assert len(CI) >= 12
    assert sum(counts[name]["canonical_states"] for name in CI) >= 1_500_000


def test_the_scopes_are_what_was_asked_for() -> None:
    by_k = [s.options.top_k for s in SCOPES.values()]
    assert len(by_k) >= 10
    assert by_k.count(2) * 2 >= len(by_k)
    for slots in (2, 3, 4):
        kinds = {
            (s.options.grouping, s.options.readiness)
            for s in SCOPES.values()
            if s.options.top_k == 2 and s.options.slots == slots
        }
        assert ("interleaved", "visit") in kinds
        assert ("interleaved", "expert") in kinds
        assert any(grouping.startswith("lockstep") for grouping, _ in kinds)
    big = SCOPES["faults-k1"]
    assert (len(big.requests), len(big.options.layers), big.options.experts) == (3, 2, 3)
    assert (big.options.slots, big.options.top_k, big.load_faults, big.cancels) == (2, 1, 1, 1)
    assert all(new == 2 for _, new in big.requests)
    assert {s.options.grouping for s in SCOPES.values()} >= {"lockstep", "lockstep-blocking"}
    assert any(s.initial < len(s.requests) for s in SCOPES.values())
    assert any(
        min(prompt, s.options.chunk) * s.options.top_k > s.options.slots
        for s in SCOPES.values()
        for prompt, _ in s.requests
        if s.options.layers
    )


@pytest.mark.parametrize("name", SMALL)
def test_the_log_checkers_agree_on_every_path(name: str) -> None:
    """The shortest path to every state, told as a log, passes the checkers (no false alarm)."""
    scope = SCOPES[name]
    explorer = Explorer(scope)
    explorer.run()
    inner = set(explorer.parent[1:])
    leaves = [n for n in range(len(explorer.parent)) if n not in inner]
    assert leaves
    whole = 0
    for number in leaves:
        log = replay(scope, explorer.path(number))
        complete = "end" in log[-1]
        whole += complete
        assert check_log(log, complete=complete) == [], log
    assert whole


@pytest.mark.parametrize("name", ["visit-k2-s3", "expert-k2-s2", "lockbulk-k2-s3", "lost-k1"])
def test_symmetry_is_sound(name: str) -> None:
    """Without it: the same verdict, and exactly the states that the orbits stand for."""
    report = Explorer(SCOPES[name]).run()
    raw = Explorer(SCOPES[name], symmetric=False).run()
    assert raw.violations == report.violations == []
    assert raw.canonical_states == report.raw_states
    assert raw.canonical_states > report.canonical_states or name == "lost-k1"


def test_exploring_is_deterministic() -> None:
    one, two = Explorer(SCOPES["cancel-k2"]), Explorer(SCOPES["cancel-k2"])
    one.run()
    two.run()
    assert one.index == two.index
    assert (one.sources, one.targets) == (two.sources, two.targets)


@pytest.mark.parametrize("name", ["cancel-k2", "any-k1"])
def test_levels_on_disk_change_nothing(name: str) -> None:
    scope = SCOPES[name]
    one, two = explorer_of(scope), explorer_of(scope)
    two.most = 7
    assert one.run().counts() == two.run().counts()
    assert one.index == two.index
    assert (one.parent, one.via, one.targets) == (two.parent, two.via, two.targets)


def test_a_level_gives_back_what_it_took() -> None:
    scope = SCOPES["lost-k1"]
    nodes = [start(scope, Scheduler) for _ in range(1_300)]
    level = Level(scope, 200)
    for number, node in enumerate(nodes):
        level.append((number, node))
    assert len(level) == 1_300 and level.written == 1_000
    for (number, node), (i, old) in zip(level.taken(), enumerate(nodes), strict=True):
        assert number == i and node.digest() == old.digest()
        assert (node is old) == (i < 200 or i >= 1_200)
        assert node.w.scope is scope and node.s.options is scope.options
    assert len(level) == 100 and level.file is not None and level.file.closed


def test_digests_are_numbered_and_found_again() -> None:
    seen = Seen()
    digests = [hashlib.blake2b(bytes([i % 256, i // 256]), digest_size=16).digest()
               for i in range(5_000)]  # fmt: skip
    # Halves in common: neither alone tells two digests apart.
    digests += [d[:8] + e[8:] for d, e in pairwise(digests[:1000])]
    for number, digest in enumerate(digests):
        assert seen.find(digest) == -1
        assert seen.add(digest) == number == seen.find(digest)
    assert [seen.find(d) for d in digests] == list(range(len(seen))) == list(range(5_999))
    assert list(seen) == digests


@pytest.mark.rule("LIVE-8")
def test_the_interesting_situations_do_occur() -> None:
    seen: set[str] = set()
    for name in ("lost-k1", "drain-k1", "bulk-k2-s2", "lostpart-k2", "pair-k2-c2", "failed-k2"):
        explorer = Watching(SCOPES[name])
        assert explorer.run().violations == []
        seen |= set(explorer.at)
    assert set(SITUATIONS) - seen == set()


@pytest.mark.rule("LIVE-8")
def test_a_situation_that_is_not_reached_is_missed() -> None:
    explorer = Watching(SCOPES["thrash-k1"])
    explorer.run()
    missing = set(SITUATIONS) - set(explorer.at)
    assert {"quarantine then late completion", "cancel during load", "fail then give up"} <= missing


# -- beyond the small worlds -----------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_swarm(block: int) -> None:
    """Random options, requests, costs and faults: every log passes every checker."""
    events = 0
    for seed in range(40 * block, 40 * block + 40):
        log = swarm(seed)
        events += len(log)
        assert check_log(log) == [], f"swarm({seed})"
    assert events > 5_000


def test_swarm_is_the_same_twice() -> None:
    assert swarm(7) == swarm(7)


# -- the graph questions ---------------------------------------------------------------------


def test_cycle_is_found_and_is_one() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (3, 1), (3, 4)]
    sources, targets = [a for a, _ in edges], [b for _, b in edges]
    found = graph.cycle(5, sources, targets)
    assert sorted(found) == [1, 2, 3]
    assert all(pair in edges for pair in pairwise([*found, found[0]]))
    assert graph.cycle(5, sources[:3], targets[:3]) == []
    assert graph.cycle(1, [0], [0]) == [0]


def test_states_that_cannot_reach_the_end_are_found() -> None:
    sources, targets = [0, 0, 1, 2], [1, 2, 3, 4]
    assert graph.cannot_reach(5, sources, targets, [1, 1, 1, 1], [3, 4]) is None
    assert graph.cannot_reach(5, sources, targets, [1, 1, 1, 1], [3]) == 2
    assert graph.cannot_reach(5, sources, targets, [1, 1, 0, 1], [3, 4]) == 1


# -- the command -----------------------------------------------------------------------------


def test_explore_writes_the_stated_form(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    assert main(["explore", "--scopes", "thrash-k1", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert set(document) == {"scopes", "seconds"}
    (scope,) = document["scopes"]
    assert list(scope) == [
        "name", "canonical_states", "raw_states", "transitions", "depth", "violations", "seconds",
    ]  # fmt: skip
    assert scope["violations"] == []
    assert "states/s" in capsys.readouterr().err


def test_a_count_that_is_not_the_pinned_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {name: dict(counts) for name, counts in pins.read_pins().items()}
    wrong["thrash-k1"]["canonical_states"] += 1
    monkeypatch.setattr("oracle.__main__.read_pins", lambda: wrong)
    assert main(["explore", "--scopes", "thrash-k1"]) == 1


def test_a_violation_fails_and_is_told_as_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A scope that must fail: nobody asks for more than there is, but the world lies about it."""
    scope = SCOPES["thrash-k1"]
    short = dataclasses.replace(scope, options=scope.options.with_(max_running=1))
    monkeypatch.setitem(SCOPES, "thrash-k1", short)
    monkeypatch.setattr("oracle.judge.World.idle", lambda world: (-1, 0 if world.step else 1))
    assert main(["explore", "--scopes", "thrash-k1"]) == 1
    assert '"event": "Arrived"' in capsys.readouterr().err


def test_an_unknown_scope_is_bad_usage(capsys: pytest.CaptureFixture) -> None:
    assert main(["explore", "--scopes", "everything"]) == 2
    assert "thrash-k1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"), ("", "holds no case"), ("\n\n", "holds no case"),
        ('{"a": 1}', "scope and play"), ("[]", "scope and play"), ("what", ":1: "),
        ('{"scope": "thrash-k1", "play": []}\n{"scope": "x", "play": []}', ":2: scope is x"),
        ('{"scope": ["x"], "play": []}', "no such scope"),
        ('{"scope": "thrash-k1", "play": [7]}', "play[0] is 7"),
        ('{"scope": "thrash-k1", "play": [[[], []], [[{"event": "No"}], []]]}', "play[1]"),
        ('{"scope": "thrash-k1", "play": [[[], ["x"]]]}', "not a list of choices"),
        ('{"scope": "thrash-k1", "play": [[[], [-1]]]}', "not a list of choices"),
    ],
)  # fmt: skip
def test_what_is_no_case_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, text: str | None, said: str
) -> None:
    file = tmp_path / "cases.jsonl"
    if text is not None:
        file.write_text(text)
    assert main(["replay", str(file)]) == 2
    told = capsys.readouterr().err
    assert said in told and str(file) in told and told.count("\n") == 1
    assert main(["replay", str(tmp_path)]) == 2  # a directory


def test_bad_flags_are_refused_before_anything_is_explored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("oracle.__main__.explore_one", lambda name: pytest.fail("explored"))
    out = tmp_path / "none" / "x.json"
    assert main(["explore", "--scopes", "thrash-k1", "--json", str(out)]) == 2
    assert f"--json {out}: cannot be written" in capsys.readouterr().err
    for word in ("-2", "0", "two"):
        with pytest.raises(SystemExit) as ended:
            main(["explore", "--scopes", "thrash-k1", "--jobs", word])
        assert ended.value.code == 2
        assert "at least 1 expected" in capsys.readouterr().err
