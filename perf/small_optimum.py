"""How far every shipped scheduler is from the best there is, in worlds small enough to solve.

    python -m perf.small_optimum [--samples 8] [--plays 24] [--deep] [--json OUT]

For each world (two or three requests, three layers, three or four experts; three ways of sharing
time between reading and computing): the clairvoyant optimum of `samples` drawn routes, and of the
same with only named experts read (OPT-1); the causal optimum, exactly (OPT-2; with --deep also the
one that may guess, which has thirty times the states, and a larger world); and every scheduler on
those routes and on `plays` drawn routes. Times are in ticks, all from the cost model alone: no
clock of this machine is in the figures.

over_clairvoyant, over_named: mean of makespan / optimum over the samples, with the worst;
over_causal: mean makespan over `plays` / causal optimum, give or take error (one standard error).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from oracle.optimum.causal import Causal
from oracle.optimum.clairvoyant import Search
from oracle.optimum.small import Route, Small
from perf.record import write_result
from reference.control import Scheduler
from reference.simulator.bounds import Bounds, VisitWork
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, READINESS, SCHEDULERS

SEED = 1
SHAPES = (
    Small(2, 3, 3, 1, 4, 2, 0, 0, 0, 0),
    Small(2, 3, 4, 1, 5, 2, 0, 0, 0, 0),
    Small(2, 3, 4, 2, 5, 1, 0, 0, 0, 0),
    Small(3, 3, 3, 1, 4, 1, 0, 0, 0, 0),
    Small(3, 3, 4, 1, 4, 1, 0, 0, 0, 0),
)
DEEP = Small(3, 3, 3, 1, 5, 2, 0, 0, 0, 0)
REGIMES = {
    "reading": {"load": 4, "step": 1, "row": 1, "expert": 1},
    "even": {"load": 3, "step": 2, "row": 1, "expert": 1},
    "computing": {"load": 1, "step": 3, "row": 1, "expert": 1},
}
"""What takes longer, in ticks."""


@dataclass(frozen=True)
class Subject:
    """A shipped scheduler: its options, and a simulated predictor or none."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    predict: str = ""


def subjects() -> list[Subject]:
    """Every grouping with each eviction, and what else means something there; three that know."""
    out = []
    for grouping in SCHEDULERS:
        ready = READINESS if grouping == "interleaved" else READINESS[:1]
        orders = FETCH_ORDERS if grouping in ("interleaved", "micro-queues") else FETCH_ORDERS[:1]
        for readiness, order, eviction in itertools.product(ready, orders, EVICTIONS):
            options = {"grouping": grouping, "readiness": readiness, "fetch_order": order,
                       "eviction": eviction}  # fmt: skip
            out.append(Subject("/".join(options.values()), options))
    for grouping in ("lockstep", "interleaved", "balanced"):
        known = {"grouping": grouping, "prefetch_loads": 0}
        out.append(Subject(f"{grouping}/next layer known", known, "perfect"))
    return out


def bound(world: Small, routes: Sequence[Route]) -> float:
    """BOUND-4 for these routes."""
    work = [
        [VisitWork(world.stage(v), (v, v + 1), world.experts_of(need), world.top_k)
         for v, need in enumerate(route)]
        for route in routes
    ]  # fmt: skip
    return Bounds(work, world.slots, world.costs, world.load, max_rows=64).makespan


def solve(
    world: Small, samples: int, plays: int, some: Sequence[Subject], guess: bool
) -> dict[str, Any]:
    """A world's optima and the distance of each subject."""
    more = world.sample(SEED, max(samples, plays))
    routes = more[:samples]
    best = [Search(world, r).makespan for r in routes]
    named = [Search(world, r, named_only=True).makespan for r in routes]
    causal = Causal(world)
    value = causal.value
    found = {}
    for subject in some:
        wide = [play(world, r, subject) for r in more]
        made = wide[: len(routes)]
        over = [m / b for m, b in zip(made, best, strict=True)]
        over_named = [m / b for m, b in zip(made, named, strict=True)]
        row = {
            "over_clairvoyant": mean(over), "worst_over_clairvoyant": max(over),
            "over_named": mean(over_named), "worst_over_named": max(over_named),
            "over_causal": mean(wide) / value,
            "error": stdev(wide) / len(wide) ** 0.5 / value if len(wide) > 1 else 0.0,
        }  # fmt: skip
        found[subject.name] = {key: round(x, 4) for key, x in row.items()}
    return {
        "world": asdict(world), "routes": len(routes), "plays": len(more),
        "bound": mean(bound(world, r) for r in routes), "clairvoyant": mean(best),
        "named": mean(named), "causal": value,
        "causal_guessing": Causal(world, guess=True).value if guess else None,
        "causal_states": causal.states, "schedulers": found,
    }  # fmt: skip


def play(world: Small, routes: Sequence[Route], subject: Subject) -> float:
    """The makespan of one run."""
    options = dict(subject.options)
    if subject.predict:
        options["prefetch"] = world.top_k
    return world.run(routes, Scheduler(world.options(**options)), subject.predict).seconds


def summary(worlds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the worlds, and the worst single run, the nearest to the causal optimum first."""
    names = worlds[0]["schedulers"]
    rows = {}
    for name in names:
        mine = [w["schedulers"][name] for w in worlds]
        rows[name] = {
            key: round((max if key.startswith("worst") else mean)([m[key] for m in mine]), 4)
            for key in mine[0] if key != "error"
        }  # fmt: skip
    return dict(sorted(rows.items(), key=lambda item: item[1]["over_causal"]))


def report(
    worlds: Sequence[tuple[str, Small]], samples: int, plays: int, some: Sequence[Subject],
    guess: bool = False,
) -> dict[str, Any]:
    """All of it, with progress on the screen."""
    began, out = time.perf_counter(), []
    for regime, world in worlds:
        solved = {"regime": regime, **solve(world, samples, plays, some, guess)}
        out.append(solved)
        least = min(solved["schedulers"].items(), key=lambda item: item[1]["over_causal"])
        print(f"{time.perf_counter() - began:6.0f} s  {regime:9s} {world.requests} requests, "
              f"{world.experts} experts, {world.top_k} a token, {world.tokens} tokens: "
              f"bound {solved['bound']:.1f}, clairvoyant {solved['clairvoyant']:.1f}, "
              f"named {solved['named']:.1f}, causal {solved['causal']:.1f}; nearest "
              f"{least[0]} {least[1]['over_causal']:.3f}", flush=True)  # fmt: skip
    by_regime = {
        regime: summary([w for w in out if w["regime"] == regime])
        for regime in dict.fromkeys(w["regime"] for w in out)
    }
    return {"seed": SEED, "worlds": out, "summary": summary(out), "by_regime": by_regime,
            "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def main() -> None:
    """Solve every world in every regime; print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=8, help="routes solved a world")
    parser.add_argument("--plays", type=int, default=24, help="routes played a world")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    parser.add_argument("--deep", action="store_true", help="guesses, and a larger world")
    args = parser.parse_args()
    shapes = (*SHAPES, DEEP) if args.deep else SHAPES
    worlds = [(name, replace(shape, **times)) for shape in shapes for name, times in
              REGIMES.items()]  # fmt: skip
    figures = report(worlds, args.samples, args.plays, subjects(), args.deep)
    for name, row in figures["summary"].items():
        print(f"{name:55s} causal x {row['over_causal']:.3f}  named x {row['over_named']:.3f}  "
              f"clairvoyant x {row['over_clairvoyant']:.3f}")  # fmt: skip
    write_result("small-optimum", figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
