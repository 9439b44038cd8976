"""Beyond the small worlds: long random runs of the shipped scheduler in virtual time.

Everything is drawn from the seed: options, requests, costs, and how often what goes wrong (reads
that fail, writes that land late, cancels, a drain). The verdict is that of the log checkers.

Runs from WIDE on have layers and slots by the dozen, requests that go on for a while, and guesses:
there counts grow, layers trade slots, and times decide who goes apart. The digest of all that such
a run decides is pinned (walks.json), as the decisions of walks are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from oracle.rigs import EXPERT_BYTES, Records
from reference.control import Scheduler
from reference.prediction import simulated
from reference.prediction.listener import Listener, Predicting
from reference.simulator.costs import CostModel
from reference.simulator.loop import Fault, VirtualLoop
from reference.simulator.routes import RoutedExecutor, random_routes
from reference.vocab.actions import Load
from reference.vocab.events import Arrived, Cancelled, Drain
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    READINESS,
    SCHEDULERS,
    ControlOptions,
)

WIDE, SWARMS = 1_000_000, 160
"""The first of the larger runs, and how many of them are pinned."""


class _Failing(RoutedExecutor):
    """Each read fails with the given probability."""

    chance = 0.0
    draw: random.Random

    def fill(self, action: Load) -> None:
        if self.draw.random() < self.chance:
            raise OSError("a failed read")
        super().fill(action)


def draw_options(rng: random.Random) -> ControlOptions:
    """Any legal options, small enough that slots, rows and KV run out."""
    top_k = rng.randint(1, 4)
    experts, layers = rng.randint(top_k, 12), rng.randint(1, 4)
    return ControlOptions(
        layers=tuple(sorted(rng.sample(range(9), layers))),
        experts=experts,
        top_k=top_k,
        slots=rng.randint(top_k, max(top_k, min(layers * experts, 4 * top_k))),
        chunk=rng.choice((1, 2, 3, 8)),
        grouping=rng.choice(SCHEDULERS),
        readiness=rng.choice(READINESS),
        fetch_order=rng.choice(FETCH_ORDERS),
        eviction=rng.choice(EVICTIONS),
        bulk_slots=rng.choice((0, 0, 1, 3)),
        bulk_every=rng.choice((1, 2, 4)),
        max_lag=rng.choice((0, 0, 1, 2, 5)),
        max_running=rng.randint(1, 10),
        max_rows=rng.choice((8, 16)),
        kv_tokens=rng.choice((64, 256)),
        kv_block=rng.choice((1, 4)),
        retries=rng.choice((0, 1, 2)),
    )


def draw_wide(rng: random.Random) -> ControlOptions:
    """The same with more of everything. Each eviction and scheduler comes up in turn."""
    top_k = rng.randint(1, 4)
    experts, layers = rng.randint(max(4, top_k), 32), rng.randint(1, 5)
    o = replace(
        draw_options(rng),
        layers=tuple(sorted(rng.sample(range(12), layers))),
        experts=experts,
        top_k=top_k,
        slots=rng.randint(max(top_k, layers * experts // 4), layers * experts),
        max_lag=rng.choice((0, 0, 2, 9)),
        kv_tokens=1024,
        eviction=rng.choice(EVICTIONS),
        grouping=rng.choice((*SCHEDULERS, "interleaved", "balanced")),
    )
    ahead = 0 if o.grouping == "lockstep-blocking" else rng.choice((0, 1, top_k, 2 * top_k))
    return replace(o, prefetch=ahead, prefetch_loads=rng.choice((0, 1, 2)))


def decisions(records: list[dict[str, Any]]) -> str:
    """A digest of all that was decided, in order, without times."""
    sums = blake2b(digest_size=8)
    for record in records:
        if "action" in record:
            sums.update(repr({k: v for k, v in record.items() if k != "t"}).encode())
    return sums.hexdigest()


def swarm(seed: int, make: Callable[..., Any] = Scheduler) -> list[dict[str, Any]]:
    """The records of one run. The same seed gives the same log."""
    rng, wide = random.Random(seed), seed >= WIDE
    options = draw_wide(rng) if wide else draw_options(rng)
    lengths = (1, 4, 12, 60) if wide else (0, 1, 2, 5, 9)
    shapes = [
        (rng.choice((1, 1, 2, 5, 9, 20)), rng.choice(lengths)) for _ in range(rng.randint(1, 12))
    ]
    routes = random_routes(options.experts, options.top_k, seed, rng.choice((0.0, 1.0)))
    executor = _Failing(
        routes, options.layers, options.chunk, options.slots, shapes.__getitem__, lambda: 0.0
    )
    executor.draw, executor.chance = rng, rng.choice((0.0, 0.0, 0.05, 0.3))
    log = Records(executor, options)
    costs = CostModel(
        bytes_per_s=rng.choice((4e6, 4e7, 4e8)),
        depth=rng.randint(1, 4),
        step_s=rng.choice((1e-5, 3e-4)),
    )
    faults = {
        rng.randint(1, 60): Fault("late", late_s=rng.choice((None, 1e-4, 1e-2)))
        for _ in range(rng.choice((0, 0, 3, 10)))
    }
    said = simulated(rng.choice(("0.6", "0.9")), options, executor.truth) if wide else None
    told = Predicting(executor, Listener(said, options)) if said and options.prefetch else executor
    loop = VirtualLoop(make(options), told, EXPERT_BYTES, costs, log, faults)
    time = 0.0
    for number, (prompt, new) in enumerate(shapes):
        time += rng.choice((0.0, 0.0, 1e-4, 2e-3))
        arrival = Arrived(number, prompt, new)
        loop.at(time, lambda e=arrival: [e])
        if rng.random() < 0.15:
            cancel = Cancelled(number)
            loop.at(time + rng.random() * 5e-3, lambda e=cancel: [e])
    if rng.random() < 0.1:
        loop.at(rng.random() * time, lambda: [Drain()])
    loop.run()
    return log.whole()
