"""Logs of everything that executes, given to a new control, lead to the same decisions again.

The logs of all other tests of the JAX engine are replayed too (`engines.judge`).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from engines import LIMIT_S, MINIMUM, alone, checkpoint, judge, request, same

from jax_impl.app import main as app
from jax_impl.app.replay import replay
from oracle.swarm import swarm
from property_tests.driven import driven
from property_tests.witness import violations
from reference.engine import ReferenceEngine
from reference.files.event_log import Log, read_log
from reference.files.requests import write_requests
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, READINESS, SCHEDULERS

PAIR = [request("a", 4, 1), request("b", 2, 2)]
POLICIES = [
    (*served, eviction)
    for served, eviction in zip(
        itertools.product(SCHEDULERS, READINESS, FETCH_ORDERS), itertools.cycle(EVICTIONS),
        strict=False,
    )
]
"""Every way of serving, and each eviction in turn."""
assert {names[-1] for names in POLICIES} == set(EVICTIONS)


def policy(names: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(("scheduler", "readiness", "fetch_order", "cache"), names, strict=True))


@pytest.mark.rule("LOG-4", "ENGINE-6")
def test_logs_of_the_jax_engine_replay_under_every_policy() -> None:
    for names in POLICIES:
        with driven(MINIMUM, **policy(names)) as d:
            handles = d.engine.submit_all(PAIR, logits=True)
            d.finish()
        assert all(same(h.result(0), alone(h.request)) for h in handles), names
        judge(d.engine)  # checks, and replays


@pytest.mark.rule("LOG-4")
def test_logs_of_the_readable_engine_replay_under_every_policy() -> None:
    for names in POLICIES:
        with ReferenceEngine.open(
            checkpoint(), memory=MINIMUM, chunk=4, max_rows=8, keep_log=True, ignore_eos=True,
            **policy(names),
        ) as engine:  # fmt: skip
            handles = engine.submit_all(PAIR)
            handles[0].result(LIMIT_S)
            handles[1].cancel()
        again(engine.records, names)


@pytest.mark.rule("LOG-4", "SIM-2")
def test_logs_of_the_simulator_replay() -> None:
    seen: set[tuple[str, ...]] = set()
    for seed in range(1000, 1120):
        records = swarm(seed)
        again(records, seed)
        o = records[0]["options"]
        seen.add((o["grouping"], o["readiness"], o["fetch_order"], o["eviction"]))
    assert len(seen) > 30


def again(records: list[dict[str, Any]], what: object) -> None:
    """The log passes the checkers, and control decides all of it again; another log does not."""
    assert violations(records) == [], what
    head, *rest = json.loads(json.dumps(records))
    seen = replay(Log(head, rest), str(what))
    assert not seen.difference and seen.complete, f"{what}: {seen}"
    actions = [i for i, r in enumerate(rest) if "action" in r]
    assert len(actions) == seen.actions > 0
    del rest[actions[len(actions) // 2]]
    assert replay(Log(head, rest), str(what)).difference, "a lost action is noticed"


@pytest.mark.rule("LOG-4", "APP-7")
@pytest.mark.parametrize("engine", ["jax", "reference"])
def test_logs_of_the_command_replay(engine: str, tmp_path: Path) -> None:
    asked = tmp_path / "requests.jsonl"
    write_requests(asked, PAIR)
    policies = (("interleaved", "expert", "global"), ("lockstep-blocking", "visit", "per-layer"))
    for scheduler, readiness, cache in policies:
        log = tmp_path / f"{scheduler}.jsonl"
        flags = ["--scheduler", scheduler, "--readiness", readiness, "--cache", cache]
        words = ["run", str(checkpoint()), "--requests", str(asked), "--engine", engine,
                 "--memory", "20%", "--ignore-eos", "--log", str(log), *flags]  # fmt: skip
        assert app.main(words) == 0
        seen = replay(read_log(log), str(log))
        assert not seen.difference and seen.complete and seen.actions > 20
