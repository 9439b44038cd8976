"""Random walks through drawn worlds, with every decision on the way pinned.

Options of every policy, requests, faults, warm experts and predictions are drawn from the seed,
then what happens next, one group of events after another. Each action is judged as in the small
worlds, and a walk must end (L1). The digest of all decisions is pinned in walks.json, as counts of
scopes are: who changes a decision sees it and has to say why (`python -m oracle walks --pin`).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from oracle.judge import Fault, obey
from oracle.scope import Scope
from oracle.transitions import Make, Node, _tell, start
from reference.control.scheduler import Scheduler
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    READINESS,
    SCHEDULERS,
    ControlOptions,
)

FILE = Path(__file__).with_name("walks.json")
WALKS = 1500
MOST = 1_500
"""Steps after which a walk counts as one that does not end."""


@dataclass
class Walk:
    """What a walk came to. digest: of every decision, in order."""

    seed: int
    digest: str = ""
    steps: int = 0
    fault: Fault | None = None


def draw_world(rng: random.Random) -> Scope:
    """Any legal options and anything that may go wrong, small enough that slots, rows, KV and the
    lag run out."""
    top_k = rng.choice((1, 2, 2))
    experts, layers = rng.randint(top_k + 1, 5), rng.randint(1, 3)
    grouping = rng.choice(SCHEDULERS)
    every = [(layer, e) for layer in range(layers) for e in range(experts)]
    options = ControlOptions(
        layers=tuple(range(0, 2 * layers, 2)),
        experts=experts,
        top_k=top_k,
        slots=rng.randint(top_k, min(len(every), 3 * top_k + 2)),
        chunk=rng.choice((1, 2, 2)),
        grouping=grouping,
        readiness=rng.choice(READINESS),
        fetch_order=rng.choice(FETCH_ORDERS),
        eviction=rng.choice(EVICTIONS),
        bulk_slots=rng.choice((0, 0, 1, 2)),
        bulk_every=rng.choice((1, 2, 3)),
        max_lag=rng.choice((0, 0, 1, 2, 4)),
        max_running=rng.choice((1, 2, 3, 8)),
        max_rows=rng.choice((2, 3, 4, 8)),
        kv_tokens=rng.choice((8, 16, 64)),
        kv_block=rng.choice((1, 1, 4)),
        retries=rng.choice((0, 1, 2)),
        prefetch=0 if grouping == "lockstep-blocking" else rng.choice((0, 0, 1, 2)),
        prefetch_loads=rng.choice((0, 1)),
        warm=tuple(
            (2 * layer, e) for layer, e in rng.sample(every, rng.choice((0, 0, 2, len(every))))
        ),
    )
    requests = tuple(
        (rng.choice((1, 1, 2, 3, 5)), rng.choice((0, 1, 2, 4))) for _ in range(rng.randint(1, 5))
    )
    return Scope(
        "walk", "", options, requests,
        initial=rng.randint(0, len(requests)),
        channels=rng.randint(1, 3),
        load_faults=rng.choice((0, 0, 1, 4)),
        step_faults=rng.choice((0, 0, 1)),
        cancels=rng.choice((0, 0, 1, 2)),
        drains=rng.choice((0, 0, 0, 1)),
        predictions=rng.choice((2, 10)) if options.prefetch else 0,
        undrained=rng.random() < 0.5,
        stops=rng.random() < 0.2,
        split=rng.random() < 0.3,
    )  # fmt: skip


def walk(seed: int, make: Make = Scheduler) -> Walk:
    """One walk; raises nothing, a fault is in the result."""
    rng = random.Random(f"walk {seed}")
    scope = draw_world(rng)
    out, sums = Walk(seed), blake2b(repr(scope).encode(), digest_size=8)
    try:
        node = start(scope, make)
        out.fault = _ask(node, rng, sums)
        while out.fault is None and not node.w.done:
            may = node.w.events()
            if not may and not node.asked:
                out.fault = _ask(node, rng, sums)
                continue
            if not may or out.steps == MOST:
                out.fault = ("L1", f"not the end after {out.steps} steps: {node.w.live}")
                break
            must = [group for group, needed in may if needed]
            if out.steps % 3 == 0:
                node = Node(node.s.copy(), node.w.copy(), node.asked)
            groups = must if must and rng.random() < 0.8 else [group for group, _ in may]
            out.fault = _tell(node, rng.choice(groups))
            node.asked = False
            if out.fault is None and rng.random() < 0.85:
                out.fault = _ask(node, rng, sums)
            out.steps += 1
        if out.fault is None:
            out.fault = _ask(node, rng, sums)
        while out.fault is None and not node.s.idle and (may := node.w.events()):
            out.fault = _tell(node, may[0][0]) or _ask(node, rng, sums)  # a warm start's last reads
        if out.fault is None and not node.s.idle:
            out.fault = ("L1", "everything has ended, but control is not idle")
    except Exception as error:
        out.fault = ("L1", f"{type(error).__name__}: {error}")
    out.digest = sums.hexdigest()
    return out


def _ask(node: Node, rng: random.Random, sums: blake2b) -> Fault | None:
    node.asked = True
    channels, lanes = node.w.idle()
    actions = node.s.next_actions(channels, lanes, lambda options: rng.randrange(len(options)))
    sums.update(repr(actions).encode())
    return obey(node.w, actions, channels, lanes)


def pinned(kind: str = "walks") -> list[str]:
    """The digests of the walks with the seeds 0, 1, 2, ...; of the `swarms`, WIDE on; or of the
    `plays` of oracle/turns.py."""
    return json.loads(FILE.read_text(encoding="utf-8")).get(kind, []) if FILE.exists() else []


def pin(walks: list[Walk], swarms: list[str], plays: list[str]) -> None:
    """Write these digests, in order."""
    digests = {"walks": [w.digest for w in walks], "swarms": swarms, "plays": plays}
    text = json.dumps(digests, indent=0)
    FILE.write_text(text + "\n", encoding="utf-8")
