"""One cell of the grid: every scheduler over the same requests, from the same past (GRID-2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from perf.grid_cells import Cell, format_of
from reference.prediction import Predictor, predictor
from reference.simulator import models, platforms
from reference.simulator.compute_bound import least_seconds, queueing_limit, together_seconds
from reference.simulator.costs import Roofline
from reference.simulator.cpu_misses import popular, simulate_cpu_misses
from reference.simulator.history import Lately, filled, teach
from reference.simulator.models import ModelShape
from reference.simulator.run import control, routes_for, simulate
from reference.simulator.schedulers import PRESETS, Preset, preset
from reference.vocab.options import ControlOptions

PAST = 32
"""Tokens that each request has generated before."""
LEARNED = 32, 64
"""Requests that have ended before, and the tokens of each, for predictors that learn."""
NEW_TOKENS = 64

CI = (
    "on-demand-blocking-global", "on-demand-blocking-layer", "on-demand-overlapped-global",
    "on-demand-overlapped-layer", "memory-mapped", "lockstep-lfu", "lockstep-lfru",
    "lockstep-least-stale", "lockstep-known-demand", "lockstep-adaptive", "micro-queues",
    "mixtral-offloading", "adapmoe", "hobbit", "moe-infinity", "moe-infinity-layer", "layerscope",
    "layerscope-layer", "klotski", "klotski-layer", "fiddler", "ktransformers", "oracle", "bevy",
    "ours", "ours-next-gate",
)  # fmt: skip
"""What the ratios need."""
SLICE = (
    "on-demand-blocking-global", "on-demand-overlapped-layer", "lockstep-lfru",
    "mixtral-offloading", "bevy", "ours",
)  # fmt: skip


def schedulers(name: str, cell: Cell) -> list[Preset]:
    """Those of a set (ci, slice, all) that the cell's platform can have."""
    known = {"ci": CI, "slice": SLICE, "all": tuple(p.name for p in PRESETS)}
    names = known.get(name) or tuple(name.split(","))
    host = platforms.load(cell.platform).host is not None
    out = [preset(n) for n in names]
    return [
        p for p in out
        if p.simulated and not (p.kind == "cpu" and not host) and not (p.reading and host)
    ]  # fmt: skip


def rounds(requests: int) -> tuple[int, int]:
    """Tokens a request before the window and within it: few where many requests make many visits
    anyway."""
    return (4, max(12, 48 // requests)) if requests <= 4 else (3, 8 if requests < 32 else 6)


@cache
def _made(model: str) -> tuple[Any, dict[int, np.ndarray]]:
    """The routes of a model, kept for all cells of this process."""
    return routes_for(models.load(model)), {}


@cache
def past(model: str, requests: int) -> Lately:
    """The requests of a cell."""
    source, made = _made(model)
    return Lately(source, requests, PAST, made)


def run_cell(cell: Cell, names: str) -> dict[str, Any]:
    """Everything about a cell: figures by scheduler, bounds, seconds that it took."""
    began, busy = time.perf_counter(), time.process_time()
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    stored = format_of(platform, model)
    costs = Roofline(platform, model, None, stored)
    lately = past(cell.model, cell.requests)
    ahead = [lately.request(r, 12) for r in range(cell.requests)]
    together = together_seconds(costs, model.moe_layers, ahead)
    least = least_seconds(costs, model.moe_layers, ahead)
    found: dict[str, dict[str, Any]] = {}
    for p in schedulers(names, cell):
        at = time.perf_counter()
        figures = run_scheduler(cell, p, costs, lately)
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
        "transfer_s": costs.transfer(costs.expert_bytes), "schedulers": found,
        "seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - busy,
    }  # fmt: skip


def run_scheduler(cell: Cell, p: Preset, costs: Roofline, lately: Lately) -> dict[str, Any]:
    """Figures of one scheduler in a cell; `tokens_per_s` of its steady state."""
    model = costs.model
    before, inside = rounds(cell.requests)
    options = control(model, cell.cache_share, cell.requests, **p.policies(model))
    history = lately.before()
    if p.kind == "cpu":
        resident = popular(history, model.experts, options.slots)
        ahead = [lately.request(r, inside) for r in range(cell.requests)]
        return simulate_cpu_misses(
            costs, model.moe_layers, ahead, resident, bring=p.name == "fiddler"
        )
    options = options.with_(warm=filled(history, options, whole=options.eviction == "global"))
    at = costs if p.reading is None else Roofline(costs.platform, model, p.reading, _stored(costs))
    result = simulate(
        None, model, lately, options, requests=cell.requests, tokens=inside * cell.requests,
        warm_up=before * cell.requests, new_tokens=NEW_TOKENS, costs=at, stored=_stored(costs),
        predict=_predictor(p, model, options, lately, history),
    )  # fmt: skip
    figures = result.as_dict()
    return {k: v for k, v in figures.items() if k not in ("bound_share", "wall_s")} | {
        "tokens_per_s": result.visits_per_s, "by_tokens_per_s": result.tokens_per_s,
    }  # fmt: skip


def _stored(costs: Roofline) -> str:
    formats = costs.model.formats
    return next(name for name, size in formats.items() if size == costs.expert_bytes)


def _predictor(
    p: Preset, model: ModelShape, options: ControlOptions, lately: Lately,
    history: Sequence[np.ndarray],
) -> str | Predictor:  # fmt: skip
    """A name, or a predictor that has learned."""
    if p.predict not in ("activation", "layer"):
        return p.predictor(model)
    made = predictor(p.predict, options)
    assert made is not None
    teach(made, list(history), lately.earlier(*LEARNED))
    return made
