"""One cell of the grid: every scheduler over the same requests, from the same past (GRID-2)."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np

from perf.grid_cells import Cell, format_of
from reference.control.cache import ExpertCache
from reference.prediction import Predictor, predictor
from reference.simulator import models, platforms
from reference.simulator.compute_bound import (
    belady_rate,
    least_seconds,
    paced,
    queueing_limit,
    together_seconds,
)
from reference.simulator.costs import Roofline
from reference.simulator.cpu_misses import popular, simulate_cpu_misses
from reference.simulator.history import Lately, filled, teach
from reference.simulator.hits import units
from reference.simulator.informed import InformedCache, somebody
from reference.simulator.models import ModelShape
from reference.simulator.run import control, lengths, routes_for, simulate
from reference.simulator.schedulers import PRESETS, Preset, preset
from reference.simulator.synthetic import SyntheticRouter
from reference.vocab.options import ControlOptions

SERVED = 256
"""Tokens of all requests together that have gone through the slots, at least."""
LEARNED = 32, 64
"""Requests that have ended before, and the tokens of each, for predictors that learn."""
NEW_TOKENS = 64
LEFT_OUT = ("bound_share", "wall_s", "cpu_s", "batches", "visits_per_s", "finished", "itl_p50",
            "itl_p99")  # fmt: skip
"""Figures of a run that the grid does not keep."""

CI = (
    "on-demand-blocking-global", "on-demand-blocking-layer", "on-demand-overlapped-global",
    "on-demand-overlapped-layer", "lockstep-lfru", "lockstep-known-demand", "micro-queues",
    "mixtral-offloading", "hobbit", "moe-infinity", "layerscope", "layerscope-layer",
    "klotski-layer", "fiddler", "ktransformers", "belady", "informed", "bevy",
    "lockstep-frequency",
    "ours-alone", "ours", "ours-next-gate", "ours-oracle", "ours-3-ahead", "ours-oracle-3",
)  # fmt: skip
"""What the ratios need. Left out is what has another's predictor or cache, and was the fastest in
no cell where all of them ran."""
SHOWN = (
    "on-demand-blocking-global", "on-demand-overlapped-layer", "lockstep-lfru",
    "mixtral-offloading", "layerscope", "klotski-layer", "micro-queues", "bevy",
    "ours-alone", "ours",
)  # fmt: skip
"""What the picture over requests shows."""
SLICE = (
    "on-demand-blocking-global", "on-demand-overlapped-layer", "lockstep-lfru",
    "layerscope", "bevy", "ours-alone", "ours",
)  # fmt: skip


def schedulers(name: str, cell: Cell) -> list[Preset]:
    """Those of a set (ci, shown, slice, all) or named that the cell's platform can have."""
    known = {"ci": CI, "shown": SHOWN, "slice": SLICE, "all": tuple(p.name for p in PRESETS)}
    names = known.get(name) or tuple(name.split(","))
    host = platforms.load(cell.platform).host is not None
    out = [preset(n) for n in names]
    return [
        p for p in out
        if not (p.kind == "cpu" and not host) and not (p.reading and host)
    ]  # fmt: skip


LONGER = {0.5: 1.5, 0.75: 2.0, 0.875: 3.0}
"""Where more is cached less is read: the window is longer."""


def rounds(cell: Cell) -> tuple[int, int]:
    """Tokens a request before the window and within it: few where many requests make many visits
    anyway, more where layers are few or reads are rare, since chance would decide."""
    n, layers = cell.requests, len(models.load(cell.model).moe_layers)
    before, inside = (4 + 8 // n, max(12, 96 // n)) if n <= 8 else (3, 8 if n < 32 else 6)
    return before, round(inside * LONGER.get(cell.cache_share, 1.0) * max(1.0, 48 / layers))


@cache
def _made(model: str) -> tuple[Any, dict[int, np.ndarray]]:
    """The routes of a model, kept for all cells of this process."""
    return routes_for(models.load(model)), {}


def past(requests: int) -> int:
    """Tokens that each request has generated before."""
    return 32 if requests <= 8 else 16


@cache
def lately(model: str, requests: int) -> Lately:
    """The requests of a cell."""
    source, made = _made(model)
    return Lately(source, requests, past(requests), made)


@lru_cache(maxsize=16)
def slots_after(lately: Lately, options: ControlOptions) -> ExpertCache:
    """The slots before the window: other requests went through them, then the past of these."""
    return filled(_groups(lately), options)


def _groups(lately: Lately) -> list[list[np.ndarray]]:
    """Routes that go through the slots before the window, one group in lock-step after another."""
    n, each = lately.requests, lately.requests * lately.past
    earlier = lately.earlier(max(0, -(-(SERVED - each) // each)) * n, lately.past)
    return [*(earlier[i : i + n] for i in range(0, len(earlier), n)), lately.before()]


def in_lockstep(lately: Lately, count: int) -> Iterator[list[np.ndarray]]:
    """Round by round, what each running request asks, uint [L, K]: the closed loop of `simulate`,
    in which who ends is replaced."""
    length, following = lengths(lately.requests, NEW_TOKENS), lately.requests
    running = {r: lately.request(r, length(r) + 1) for r in range(lately.requests)}
    at = dict.fromkeys(running, 0)
    for _ in range(count):
        yield [topk[at[r]] for r, topk in running.items()]
        for r in list(running):
            at[r] += 1
            if at[r] == length(r):
                del running[r], at[r]
                running[following] = lately.request(following, length(following) + 1)
                at[following] = 0
                following += 1


@contextmanager
def uncollected() -> Iterator[None]:
    """Cycles of garbage are looked for afterwards: simulations make hardly any, and looking takes a
    twentieth of their time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        gc.collect()


@uncollected()
def run_cell(cell: Cell, names: str) -> dict[str, Any]:
    """Everything about a cell: figures by scheduler, bounds, seconds that it took."""
    began, busy = time.perf_counter(), time.process_time()
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    stored = format_of(platform, model)
    costs = Roofline(platform, model, None, stored)
    requests = lately(cell.model, cell.requests)
    ahead = [requests.request(r, 12) for r in range(cell.requests)]
    together = together_seconds(costs, model.moe_layers, ahead)
    least = least_seconds(costs, model.moe_layers, ahead)
    halves = together_seconds(costs, model.moe_layers, ahead[: -(-cell.requests // 2)])
    found: dict[str, dict[str, Any]] = {}
    for p in schedulers(names, cell):
        at = time.perf_counter()
        figures = run_scheduler(cell, p, costs, requests)
        rate = figures["tokens_per_s"]
        figures |= {"kind": p.kind, "cache": p.cache, "grouping": p.options.get("grouping", ""),
                    "eviction": p.options.get("eviction", "")}  # fmt: skip
        figures["bound_share"] = max(together * rate, figures["channel_busy"])
        figures["bound_share_least"] = max(least * rate, figures["channel_busy"])
        fetch = figures["fetches_per_token"] * costs.transfer(costs.expert_bytes)
        figures["compute_over_fetch"] = together / fetch if fetch else None
        figures["queueing_limit"] = queueing_limit(together, fetch, cell.requests)
        figures["wall_s"] = time.perf_counter() - at
        found[p.name] = figures
    return cell.as_dict() | {
        "stored": stored, "expert_bytes": costs.expert_bytes,
        "compute_s_a_token": together, "least_compute_s_a_token": least,
        "halves_compute_s_a_token": halves, "layers": len(model.moe_layers),
        "transfer_s": costs.transfer(costs.expert_bytes), "schedulers": found,
        "seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - busy,
    }  # fmt: skip


def run_scheduler(cell: Cell, p: Preset, costs: Roofline, requests: Lately) -> dict[str, Any]:
    """Figures of one scheduler in a cell; `tokens_per_s` of its steady state."""
    model = costs.model
    before, inside = rounds(cell)
    options = control(model, cell.cache_share, cell.requests, **p.policies(model))
    if p.kind == "cpu":
        resident = popular(requests.before(), model.experts, options.slots)
        ahead = [requests.request(r, inside) for r in range(cell.requests)]
        return simulate_cpu_misses(
            costs, model.moe_layers, ahead, resident, bring=p.name == "fiddler"
        )
    if p.name == "belady":
        return _belady(costs, options, requests, before, inside)
    if p.name == "informed":
        return _informed(costs, options, requests, before, inside)
    slots = slots_after(requests, control(model, cell.cache_share, eviction=options.eviction))
    at = costs if p.reading is None else Roofline(costs.platform, model, p.reading, _stored(costs))
    result = simulate(
        None, model, requests, options, requests=cell.requests, tokens=inside * cell.requests,
        warm_up=before * cell.requests, new_tokens=NEW_TOKENS, costs=at, stored=_stored(costs),
        predict=_predictor(p, model, options, requests), cache=slots,
    )  # fmt: skip
    figures = result.as_dict()
    said = result.prediction
    kept = {k: said[k] for k in ("guesses", "used")} if said else {}
    for k in ("overall", "absent") if said else ():
        kept[k] = {part: said[k][part] for part in ("precision", "recall")}
    return {k: v for k, v in figures.items() if k not in LEFT_OUT} | {
        "tokens_per_s": result.visits_per_s, "by_tokens_per_s": result.tokens_per_s,
        "prediction": kept,
    }  # fmt: skip


def _belady(
    costs: Roofline, options: ControlOptions, requests: Lately, before: int, inside: int
) -> dict[str, Any]:
    """Of the same past, warm-up and window, in lock-step."""
    experts, layers, n = options.experts, len(options.layers), requests.requests
    past = [visits for group in _groups(requests) for visits in units(group, experts)]
    needs = [{c for codes in visits for c in codes} for visits in past]
    rounds_of_it = list(in_lockstep(requests, before + inside))
    for rows in rounds_of_it:
        needs += [{i * experts + int(e) for r in rows for e in r[i]} for i in range(layers)]
    together = _together(costs, options, rounds_of_it[before:])
    rate, loads = belady_rate(costs, costs.expert_bytes, needs, options.slots, inside * layers,
                              inside * n, together)  # fmt: skip
    return _bound(costs, rate, loads)


def _together(costs: Roofline, options: ControlOptions, window: list[list[np.ndarray]]) -> float:
    lanes = [np.stack(lane) for lane in zip(*window, strict=True)]
    return together_seconds(costs, options.layers, lanes)


def _bound(costs: Roofline, rate: float, loads: float) -> dict[str, Any]:
    channel = rate * loads * costs.transfer(costs.expert_bytes)
    return {"tokens_per_s": rate, "fetches_per_token": loads, "channel_busy": channel}


class _Chances:
    """A router's chances in place of its routes."""

    def __init__(self, router: SyntheticRouter) -> None:
        self.request = router.chances


def _informed(
    costs: Roofline, options: ControlOptions, requests: Lately, before: int, inside: int
) -> dict[str, Any]:
    """Of the same warm-up and window, in lock-step; its cache begins with what it would keep."""
    assert isinstance(requests.source, SyntheticRouter)
    chances = Lately(_Chances(requests.source), requests.requests, requests.past)
    ahead = (somebody(rows) for rows in in_lockstep(chances, before + inside + 1))
    cache = InformedCache(options.slots, next(ahead))
    loads, window = 0, []
    asked = in_lockstep(requests, before + inside)
    for i, (rows, chance) in enumerate(zip(asked, ahead, strict=True)):
        read = [
            cache.serve(layer, np.unique([r[layer] for r in rows]), chance[layer])
            for layer in range(len(options.layers))
        ]
        if i >= before:
            loads += sum(read)
            window.append(rows)
    each = loads / (inside * requests.requests)
    together = _together(costs, options, window)
    return _bound(costs, paced(costs, costs.expert_bytes, each, together), each)


def _stored(costs: Roofline) -> str:
    formats = costs.model.formats
    return next(name for name, size in formats.items() if size == costs.expert_bytes)


def _predictor(
    p: Preset, model: ModelShape, options: ControlOptions, requests: Lately
) -> str | Predictor:
    """A name, or a predictor that has learned."""
    if p.predict not in ("activation", "layer"):
        return p.predictor(model)
    made = predictor(p.predict, options)
    assert made is not None
    teach(made, requests.before(), requests.earlier(*LEARNED))
    return made
