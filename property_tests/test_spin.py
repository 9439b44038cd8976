"""A second opinion: control modelled again in Promela, explored by Spin, compared state by state.

The model (specs/promela/visits.pml) was written from specs/control.md and shares nothing with the
scheduler or with the explorer. What makes a state there, and hence the projection of the explorer's
states, is told in specs/promela/README.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from oracle.explorer import Explorer
from oracle.scopes import SCOPES, Scope
from oracle.transitions import Node
from oracle.world import NEED, PART, PHASE, QUEUED, RUNNING, STAGE, TOKENS, WAITING

MODEL = Path(__file__).resolve().parent.parent / "specs" / "promela" / "visits.pml"
NEEDS = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(NEEDS), reason=f"not installed: {', '.join(NEEDS)} (Debian: apt-get install spin gcc)"
)
NAMES = ("thrash-k1", "visit-k2-s3", "lost-k1", "cancel-k2")
LARGER = ("visit-k2-s2", "visit-k2-s4", "three-k2-s4", "faults-k1", "late-k1")
"""The other scopes that the model describes, in reasonable time."""
SLOW = pytest.mark.slow
PHASES = {QUEUED: 1, WAITING: 2, RUNNING: 3}
NO_HOLD, NO_CLAIM = 1, 2
"""SEED of the model: claims keep nothing in its slot; there are no claims."""


def defines(scope: Scope, seed: int = 0) -> list[str]:
    """The scope in the model's words. Fails for a scope that the model does not describe."""
    o = scope.options
    assert (o.grouping, o.readiness) == ("interleaved", "visit")
    assert (o.fetch_order, o.eviction) == ("least-progress", "per-layer")
    assert scope.channels == 1 and scope.initial >= len(scope.requests) <= 3
    assert not (scope.step_faults or scope.drains or scope.stops or scope.split)
    assert all(prompt == 1 for prompt, _ in scope.requests)
    assert len(scope.requests) <= min(o.max_running, o.max_rows)
    assert sum(scope.reserved(*r) for r in scope.requests) <= o.kv_tokens
    visits = max(new for _, new in scope.requests) * (len(o.layers) + 1)
    assert visits <= scope.lag_bound, "nobody can be too far ahead"
    values = {
        "N": len(scope.requests),
        "SHAPES": "{" + ",".join(str(new) for _, new in scope.requests) + "}",
        "L": len(o.layers), "E": o.experts, "K": o.top_k, "S": o.slots, "RETRIES": o.retries,
        "FAULTS": scope.load_faults, "UNDRAINED": int(scope.undrained),
        "CANCELS": scope.cancels, "BATCH": int(scope.batch), "SEED": seed,
    }  # fmt: skip
    return [f"-D{name}={value}" for name, value in values.items()]


@dataclass
class Verdict:
    """What one run of Spin's verifier said. `errors`: its words for what is wrong."""

    stored: int
    errors: list[str]
    states: set[str]


def spin(folder: Path, scope: Scope, liveness: bool = False, seed: int = 0) -> Verdict:
    """Explore the model exhaustively: assertions and invalid end states, or with `liveness`
    cycles, of which every one is without progress because nothing is labelled as progress."""

    def call(*words: str) -> str:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call("spin", "-a", *defines(scope, seed), str(MODEL))
    kind = "-DNP" if liveness else "-DSAFETY"
    call("gcc", "-O0", "-w", kind, "-DPRINTF", "-DNOREDUCE", "-o", "pan", "pan.c")
    said = call("./pan", "-m20000", "-w18", *(["-l"] if liveness else []))
    assert "max search depth too small" not in said
    stored = re.search(r"(\d+) states, stored", said)
    assert stored is not None, said
    return Verdict(
        int(stored.group(1)),
        re.findall(r"^pan:\d+: (.*?) \(", said, re.MULTILINE),
        set(re.findall(r"^S .*$", said, re.MULTILINE)),
    )


def projected(node: Node) -> str:
    """A state of the explorer in the words that the model prints."""
    s, w = node.s, node.w
    cache, o = s.cache, w.scope.options
    requests = [*s.running.values(), *s.queue]
    out = ["S", int(node.asked), w.load_faults, w.cancels, len(w.live) - len(requests)]
    for r in requests:
        truth = w.find(r.number)
        assert truth is not None
        named = (truth[NEED] | truth[PART]) << max(0, truth[STAGE]) * o.experts
        out += ["r", r.max_new, PHASES[truth[PHASE]], truth[TOKENS], truth[STAGE] + 1, named]
        out += [int(r.claimed), int(r.doomed is not None)]
    for order in cache.policy.orders:
        out += ["c", *(cache.code[slot] for slot in order)]
    out += ["t", *(cache.code[slot] for slot in cache.flying.values())]
    out += ["p", *s.pending]
    out += ["f", *(s.fails.get(code, 0) for code in range(len(o.layers) * o.experts))]
    return " ".join(map(str, out))


class _Projecting(Explorer):
    """Notes the projection of every state."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.seen: list[str] = []

    def _expand(self, number: int, node: Node, following: list[tuple[int, Node]]) -> bool:
        self.seen.append(projected(node))
        return super()._expand(number, node, following)


@pytest.mark.rule(
    "LIVE-1", "LIVE-2", "SAFE-3", "SAFE-5", "SAFE-6", "SAFE-7", "SAFE-9", "CACHE-3", "CACHE-5",
    "CACHE-6", "CACHE-9", "FETCH-1", "FETCH-6", "SCHED-2", "SCHED-4", "SCHED-8", "CANCEL-1",
)  # fmt: skip
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(n, marks=SLOW) for n in LARGER)])
def test_spin_has_the_same_verdict_and_the_same_states(name: str, tmp_path: Path) -> None:
    scope = SCOPES[name]
    explorer = _Projecting(scope)
    assert explorer.run().violations == []
    first, *_ = explorer.seen  # nobody has asked: no transition leads there, so none prints it
    found = spin(tmp_path, scope)
    assert found.errors == []
    assert found.states | {first} == set(explorer.seen)
    assert found.stored == len(set(explorer.seen))
    assert spin(tmp_path, scope, liveness=True).errors == []


@pytest.mark.rule("CACHE-3", "LIVE-1", "LIVE-2")
def test_spin_finds_a_dropped_reservation(tmp_path: Path) -> None:
    """Claims that keep nothing in its slot end in a state without a way on; without claims every
    state is safe and has a way on, and yet experts push one another out for ever."""
    two, one = SCOPES["visit-k2-s3"], SCOPES["thrash-k1"]
    assert spin(tmp_path, two, seed=NO_HOLD).errors == ["invalid end state"]
    assert spin(tmp_path, one, seed=NO_CLAIM).errors == [], "no safety property sees it"
    assert spin(tmp_path, one, liveness=True, seed=NO_CLAIM).errors == ["non-progress cycle"]


def test_another_model_has_other_states(tmp_path: Path) -> None:
    """The comparison can fail: with one retry more the states are others."""
    scope = SCOPES["lost-k1"]
    explorer = _Projecting(scope)
    explorer.run()
    more = replace(scope, options=scope.options.with_(retries=2))
    other = spin(tmp_path, more)
    assert other.errors == []
    assert other.stored != len(set(explorer.seen))
    assert not other.states <= set(explorer.seen)
