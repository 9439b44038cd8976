"""The comparison of schedulers: presets, the past that all start from, bounds, ratios, output."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf import counting, grid, grid_cells, grid_page, grid_report, grid_run
from perf.grid_cells import Cell, chosen, format_of, impossible, needed
from perf.grid_run import run_cell, run_scheduler
from perf.traps import one_by_one
from perf.workers import done_by
from reference.control import Scheduler, eviction_frequency
from reference.prediction import predictor, simulated
from reference.prediction.activation import ActivationMatrices
from reference.prediction.layer_table import LayerTable
from reference.simulator import models, platforms
from reference.simulator.arrivals import Arrival
from reference.simulator.compute_bound import (
    belady_rate,
    least_seconds,
    queueing_limit,
    together_seconds,
)
from reference.simulator.costs import CostModel, Roofline
from reference.simulator.cpu_misses import computing, layer_seconds, popular, simulate_cpu_misses
from reference.simulator.history import EARLIER, Lately, filled, teach
from reference.simulator.hits import units
from reference.simulator.run import control, routes_for, simulate
from reference.simulator.schedulers import PRESETS, preset
from reference.simulator.synthetic import RouterShares, SyntheticRouter
from reference.vocab.errors import BadInput
from reference.vocab.events import Routed
from reference.vocab.ids import Visit
from reference.vocab.options import ControlOptions

LAYERS, EXPERTS, K = 4, 12, 3


def small(requests: int = 3, past: int = 8) -> Lately:
    """Few layers, with favourites."""
    shares = (RouterShares(0.2, 0.2, 0.2, 0.5),) * LAYERS
    return Lately(SyntheticRouter(shares, EXPERTS, K), requests, past)


def options(slots: int, **changes: Any) -> ControlOptions:
    """For `small`."""
    return ControlOptions(tuple(range(LAYERS)), EXPERTS, K, slots).with_(**changes)


# The schedulers


@pytest.mark.rule("GRID-1")
@pytest.mark.parametrize("p", PRESETS, ids=lambda p: p.name)
def test_control_takes_every_preset_for_every_model(p: Any) -> None:
    assert p.source
    assert p.kind in ("baseline", "predictive", "cpu", "ours", "bound")
    for name in models.names():
        model = models.load(name)
        if p.kind != "cpu":
            Scheduler(control(model, 0.5, **p.policies(model)))
        if p.predict:
            assert simulated(p.predictor(model), control(model, 0.5), lambda v: ()) is not None
    guesses = bool(p.options.get("prefetch"))
    assert guesses == bool(p.predict)
    assert guesses or p.kind != "predictive"


@pytest.mark.rule("GRID-1")
def test_every_predictive_scheduler_also_comes_with_an_lru_a_layer() -> None:
    def guess(p: Any) -> tuple[str, float]:
        return p.predict, p.options["prefetch"]

    predictive = [p for p in PRESETS if p.kind == "predictive"]
    layered = {guess(p) for p in predictive if p.options["eviction"] == "per-layer"}
    assert {guess(p) for p in predictive} <= layered
    assert len({p.name for p in PRESETS}) == len(PRESETS)
    with pytest.raises(BadInput, match="scheduler: unknown 'x'"):
        preset("x")


# The past


@pytest.mark.rule("GRID-2")
def test_requests_go_on_where_their_past_ends() -> None:
    lately, source = small(), SyntheticRouter(small().source.shares, EXPERTS, K)  # type: ignore[attr-defined]
    for r in range(3):
        whole = source.request(r, 20)
        assert np.array_equal(lately.before()[r], whole[:8])
        assert np.array_equal(lately.request(r, 12), whole[8:])
    assert np.array_equal(lately.request(3, 5), source.request(3, 5))
    assert np.array_equal(lately.earlier(2, 6)[1], source.request(EARLIER + 1, 6))


@pytest.mark.rule("GRID-2")
@pytest.mark.parametrize(
    ("eviction", "slots"), [("global", 30), ("global", 47), ("per-layer", 40), ("per-layer", 47)]
)
def test_the_slots_are_what_lock_step_would_have_left(eviction: str, slots: int) -> None:
    routes = small().before()
    cache = filled([routes], options(slots, eviction=eviction))
    assert len(cache.where) == slots and not (cache.wanted or cache.readers or cache.flying)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(LAYERS)]
    rooms = [slots // LAYERS] * LAYERS
    if eviction == "global":
        caches, rooms = [OrderedDict()] * LAYERS, [slots] * LAYERS
    for t in range(8):
        for layer in range(LAYERS):
            for e in dict.fromkeys(int(e) for r in routes for e in sorted(r[t, layer])):
                caches[layer].pop(layer * EXPERTS + e, None)
                caches[layer][layer * EXPERTS + e] = None
            while len(caches[layer]) > rooms[layer]:
                caches[layer].popitem(last=False)
    assert {code for c in caches for code in c} <= set(cache.where)


@pytest.mark.rule("GRID-2")
def test_what_a_policy_counted_stays_counted() -> None:
    routes = small().before()
    cache = filled([routes], options(20, eviction="lfru"))
    found = np.array(cache.policy.count).reshape(LAYERS, EXPERTS)  # type: ignore[attr-defined]
    steps = [sum(any(e in r[t, 2] for r in routes) for t in range(8)) for e in range(EXPERTS)]
    assert found[2].tolist() == steps
    before = small().earlier(3, 8)
    more = filled([before, routes], options(20, eviction="lfru"))
    assert sum(more.policy.count) > sum(cache.policy.count)  # type: ignore[attr-defined]


@pytest.mark.rule("GRID-2")
def test_slots_that_nobody_has_used_are_filled_too() -> None:
    routes = [np.zeros((1, LAYERS, 1), np.uint16)]
    cache = filled([routes], options(10))
    assert not cache.free and len(cache.where) == 10
    assert set(cache.where) == {p * EXPERTS + e for e in (0, 1) for p in range(LAYERS)} | {2, 14}


@pytest.mark.rule("GRID-2")
def test_a_run_begins_with_the_slots_that_it_is_given() -> None:
    model = models.load("olmoe-1b-7b")
    lately = Lately(routes_for(model), 2, 4)
    o = control(model, 1.0, 2, grouping="lockstep")
    full = filled([lately.before()], o)
    figures = [
        simulate(platforms.load("macbook-m4-max"), model, lately, o, requests=2, tokens=8,
                 warm_up=0, warm=False, cache=cache)
        for cache in (full, None)
    ]  # fmt: skip
    assert figures[0].fetches_per_token == 0 and figures[1].fetches_per_token > 0
    assert full.where == filled([lately.before()], o).where  # it was a copy that ran


@pytest.mark.rule("GRID-2")
@pytest.mark.parametrize("name", ["activation", "layer"])
def test_a_taught_predictor_is_one_that_heard_all_of_it(name: str) -> None:
    lately, o = small(), options(20, prefetch=K)
    taught, heard = predictor(name, o), predictor(name, o)
    assert taught is not None and heard is not None
    ended = lately.earlier(4, 6)
    teach(taught, lately.before(), ended)
    for number, topk in [*((EARLIER + i, x) for i, x in enumerate(ended)),
                         *enumerate(lately.before())]:  # fmt: skip
        for t in range(len(topk)):
            for layer in range(LAYERS):
                heard.routed(Visit(number, t, layer), (tuple(topk[t, layer].tolist()),))
        if number >= EARLIER:
            heard.ended(number)
    if isinstance(taught, LayerTable) and isinstance(heard, LayerTable):
        for part in ("pairs", "used", "tokens", "kept", "compared"):
            assert np.allclose(getattr(taught, part), getattr(heard, part)), part
        assert taught.last == heard.last
    elif isinstance(taught, ActivationMatrices) and isinstance(heard, ActivationMatrices):
        assert taught.filled == heard.filled == 4
        assert np.array_equal(taught.counts, heard.counts)
        for r in range(3):
            assert np.array_equal(taught.running[r], heard.running[r])
            assert np.allclose(taught.cosines[r], heard.cosines[r], atol=1e-6)
    at, named = Visit(0, 8, 1), ((0, 1, 2),)
    assert taught.routed(at, named) == heard.routed(at, named) != []


# Bounds


def whole_run(policies: dict[str, Any], share: float = 1.0, tokens: int = 6) -> tuple[Any, Any]:
    """OLMoE on a laptop: three requests of `tokens` tokens, from first to last, and its costs."""
    model, platform = models.load("olmoe-1b-7b"), platforms.load("macbook-m4-max")
    costs = Roofline(platform, model)
    lately = Lately(routes_for(model), 0, 0)
    o = control(model, share, 3, **policies)
    result = simulate(platform, model, lately, o, requests=3, tokens=10**6, warm_up=0,
                      arrivals=[Arrival(0.0, 1, tokens)] * 3)  # fmt: skip
    return result, (costs, model.moe_layers, [lately.request(r, tokens) for r in range(3)])


@pytest.mark.rule("GRID-3")
def test_together_is_what_lock_step_takes_with_all_experts_there() -> None:
    result, what = whole_run({"grouping": "lockstep"})
    assert result.tokens == 18
    assert result.compute_busy == pytest.approx(1.0)
    assert result.seconds / 18 == pytest.approx(together_seconds(*what), rel=1e-9)


@pytest.mark.rule("GRID-3")
@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("grouping", ["lockstep", "interleaved", "balanced", "micro-queues"])
def test_no_schedule_computes_less_than_the_least(grouping: str, share: float) -> None:
    result, what = whole_run({"grouping": grouping}, share)
    made = result.compute_busy * result.seconds / result.tokens
    least = least_seconds(*what)
    assert least <= together_seconds(*what) * (1 + 1e-9)
    assert least <= made * (1 + 1e-9)
    if share == 1.0:
        assert least > 0.3 * made


@pytest.mark.rule("GRID-3")
def test_the_least_is_reached_where_requests_are_alike() -> None:
    routes = [np.tile(np.array([[[0, 1], [2, 3]]], np.uint16), (5, 1, 1))] * 4
    costs = CostModel(step_s=1.0, row_s=0.25, expert_s=0.5)
    assert least_seconds(costs, (0, 1), routes) == pytest.approx(
        together_seconds(costs, (0, 1), routes))  # fmt: skip
    assert together_seconds(costs, (0, 1), routes) == (3 * (1.0 + 4 * 0.25) + 2 * 2 * 0.5) / 4


@pytest.mark.rule("GRID-3")
@pytest.mark.parametrize("eviction", ["per-layer", "lfru", "global", "frequency"])
def test_lock_step_stays_below_beladys_rate(eviction: str) -> None:
    model, platform = models.load("olmoe-1b-7b"), platforms.load("macbook-m4-max")
    costs, lately = Roofline(platform, model), Lately(routes_for(model), 0, 0)
    routes = [lately.request(r, 10) for r in range(4)]
    o = control(model, 0.5, 4, grouping="lockstep", eviction=eviction)
    result = simulate(platform, model, lately, o, requests=4, tokens=10**6, warm_up=0, warm=False,
                      arrivals=[Arrival(0.0, 1, 10)] * 4)  # fmt: skip
    needs = [{c for v in visits for c in v} for visits in units(routes, model.experts)]
    together = together_seconds(costs, model.moe_layers, routes)
    rate, loads = belady_rate(costs, costs.expert_bytes, needs, o.slots, len(needs), 40, together)
    assert loads <= result.fetches_per_token and result.tokens_per_s <= rate
    assert loads > 0.4 * result.fetches_per_token
    late = belady_rate(costs, costs.expert_bytes, needs, o.slots, len(needs) // 2, 20, together)
    assert late[1] < loads  # the first rounds read what nobody had read before


@pytest.mark.rule("GRID-3")
def test_rounds_are_those_of_the_simulated_loop() -> None:
    model, platform = models.load("olmoe-1b-7b"), platforms.load("macbook-m4-max")
    lately = Lately(routes_for(model), 3, 4)
    o = control(model, 1.0, 3, grouping="lockstep")
    asked: list[list[tuple[int, ...]]] = []

    class Log:
        def event(self, event: Any, **_: Any) -> None:
            if isinstance(event, Routed) and event.visit.layer == model.moe_layers[5]:
                asked.append(list(event.experts))

        def ask(self, idle_channels: int, idle_compute: int) -> None: ...
        def action(self, *_: Any, **__: Any) -> None: ...

    simulate(platform, model, lately, o, requests=3, tokens=3 * 80, warm_up=0, log=Log(),
             new_tokens=grid_run.NEW_TOKENS, cache=filled([lately.before()], o))  # fmt: skip
    rounds = list(grid_run.in_lockstep(lately, 80))
    wanted = [sorted(tuple(r[5].tolist()) for r in rows) for rows in rounds]
    found = [sorted(x for one in asked[i : i + 3] for x in one) for i in range(0, 240, 3)]
    assert found == wanted


@pytest.mark.rule("GRID-3")
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (2.0, 1.0), (1.0, 1.25)])
def test_the_queueing_limit_is_that_of_the_chain(n: int, a: float, b: float) -> None:
    rates = np.zeros((n + 1, n + 1))  # state: customers at the first server
    for i in range(n + 1):
        if i:
            rates[i, i - 1] = 1 / a
        if i < n:
            rates[i, i + 1] = 1 / b
    rates -= np.diag(rates.sum(1))
    stay = np.linalg.lstsq(np.vstack([rates.T, np.ones(n + 1)]), np.eye(n + 2)[-1], rcond=None)[0]
    busy = (1 - stay[0], 1 - stay[n])[b > a]
    assert queueing_limit(a, b, n) == pytest.approx(busy)
    assert queueing_limit(0.0, 1.0, n) == 1.0
    if a == b:
        assert queueing_limit(a, b, n) == pytest.approx(n / (n + 1))


# Misses computed by the processor


@pytest.mark.rule("GRID-4")
def test_the_processor_takes_what_it_has_done_sooner() -> None:
    model, platform = models.load("mixtral-8x7b"), platforms.load("rtx-4090-pcie4")
    costs = Roofline(platform, model, None, "q4_k_m")
    assert platform.host is not None
    own = costs.expert_bytes / platform.host.bytes_per_s
    assert computing(costs, 1) == own  # one row: its memory is the limit
    rows = int(own * platform.host.flops_per_s / (2 * model.expert_params)) + 1
    assert computing(costs, rows) > own  # many: its arithmetic
    tokens, spans = [(0, 1), (0, 2), (0, 3), (4, 5)], [(9, 10)] * 4
    took, cpu, channel, brought = layer_seconds(costs, 3, tokens, {1}, spans, bring=False)
    assert (brought, channel) == (0, 0.0)
    assert cpu == pytest.approx(computing(costs, 3) + 4 * computing(costs, 1))
    faster = layer_seconds(costs, 3, tokens, {1}, spans, bring=True)
    assert faster[0] < took
    move = costs.transfer(costs.expert_bytes)
    assert faster[3] == 1 and faster[2] == move  # 4 on the processor take as long as this
    assert faster[1] == pytest.approx(cpu - computing(costs, 1))
    with pytest.raises(BadInput, match=r"no \[host\]"):
        computing(Roofline(platforms.load("jetson-thor"), model), 1)


@pytest.mark.rule("GRID-4")
def test_with_all_experts_there_the_processor_is_idle() -> None:
    model, platform = models.load("deepseek-v2-lite"), platforms.load("rtx-5090-pcie5")
    costs, lately = Roofline(platform, model), Lately(routes_for(model), 3, 8)
    routes = [lately.request(r, 4) for r in range(3)]
    everything = popular(lately.before(), model.experts, model.all_experts)
    found = simulate_cpu_misses(costs, model.moe_layers, routes, everything, bring=True)
    assert found["fetches_per_token"] == found["processor_busy"] == 0
    assert 1 / found["tokens_per_s"] == pytest.approx(
        together_seconds(costs, model.moe_layers, routes)
    )
    part = popular(lately.before(), model.experts, 30 * len(model.moe_layers) + 2)
    assert [len(p) for p in part[:3]] == [31, 31, 30]
    counts = np.bincount(np.concatenate([r[:, 5].reshape(-1) for r in lately.before()]))
    assert min(counts[list(part[5])]) >= max(counts[[e for e in range(64) if e not in part[5]]])
    slower = simulate_cpu_misses(costs, model.moe_layers, routes, part, bring=False)
    assert slower["tokens_per_s"] < found["tokens_per_s"]


# Cells


@pytest.mark.rule("GRID-5")
def test_cells_that_cannot_be_say_why() -> None:
    ci = chosen("ci")
    assert len(ci) == len(set(ci)) >= 40
    assert {c.requests for c in ci} == set(grid_cells.REQUESTS)
    assert {c.cache_share for c in ci} == set(grid_cells.SHARES)
    assert not [c for c in ci if impossible(c)]
    assert len(chosen("all")) == len(platforms.names()) * len(models.names()) * 30
    assert len(chosen("jetson-thor/olmoe-1b-7b")) == 30
    for bad in ("rtx", "jetson-thor/x", ""):
        with pytest.raises(SystemExit, match="cells: unknown"):
            chosen(bad)
    large = Cell("rtx-4090-pcie4", "gpt-oss-120b", 0.75, 8)
    assert impossible(large).startswith("memory: 4")
    assert not impossible(Cell("rtx-4090-pcie4", "gpt-oss-120b", 0.25, 8))
    for p in map(platforms.load, platforms.names()):
        for m in map(models.load, models.names()):
            kept = format_of(p, m)
            wider = [f for f in m.formats if m.bytes_of(f) > m.bytes_of(kept)]
            room = p.memory.capacity_bytes
            if "mxfp4" not in m.formats:
                assert all(needed(m, f, 0.875, 32) > room for f in wider), (p.name, m.name)


# Ratios and output


def made_cell(requests: int = 8, **rates: float) -> dict[str, Any]:
    """A cell as run_cell gives it, with these tokens/s."""
    found = {}
    for name, rate in rates.items():
        p = preset(name.replace("_", "-"))
        found[p.name] = {
            "tokens_per_s": rate, "end_to_end_per_s": rate / 2, "kind": p.kind, "cache": p.cache,
            "eviction": p.options.get("eviction", ""), "grouping": p.options.get("grouping", ""),
            "bound_share": 0.9, "bound_share_least": 0.8, "compute_over_fetch": 1.0,
            "queueing_limit": 0.9, "tpot_p50": 1.0, "tpot_p99": 1.5, "channel_busy": 0.8,
            "compute_busy": 0.5, "both_busy": 0.4, "fetches_per_token": 2.0 * rate,
        }  # fmt: skip
    return {"platform": "p", "model": "m", "cache_share": 0.5, "requests": requests,
            "processor_seconds": 1.0, "schedulers": found}  # fmt: skip


@pytest.mark.rule("GRID-6")
def test_ratios_are_over_the_best_of_their_kind() -> None:
    c = grid_report.ratios(made_cell(
        ours=12, ours_alone=9, bevy=11, oracle=40, fiddler=30, ktransformers=20, balanced=13,
        informed=16, belady=18, ours_oracle=15, ours_3_ahead=14,
        on_demand_blocking_global=3, on_demand_overlapped_layer=6, lockstep_lfru=8, layerscope=10,
        layerscope_layer=7, mixtral_offloading=5, micro_queues=2,
    ))  # fmt: skip
    assert c["best_baseline"] == "layerscope" and c["ours_over_best_baseline"] == 1.2
    assert c["ours_over_best_predictive"] == 1.2
    assert c["ours_over_best_predictive_per_layer"] == 12 / 7
    assert c["ours_over_best_per_layer_overlapped"] == 12 / 7
    assert c["ours_over_on_demand_global_lru"] == 4
    assert c["ours_over_best_baseline_with_cpu"] == 0.4
    assert c["ours_over_cpu_misses"] == 0.4
    assert c["ours_over_informed"] == 0.75
    assert c["informed_over_best_per_layer_overlapped"] == 16 / 7
    assert c["informed_over_best_predictive"] == pytest.approx(1.6)
    assert c["belady_over_best_per_layer_overlapped"] == pytest.approx(18 / 7)
    assert c["ours_oracle_over_best_predictive"] == pytest.approx(1.5)
    assert c["ours_3_ahead_over_best_predictive"] == pytest.approx(1.4)
    assert c["ours_oracle_3_over_best_predictive"] is None
    assert c["ours_oracle_bound_share"] == 0.9 and c["ours_oracle_3_bound_share"] is None
    assert c["ours_over_bevy"] == 12 / 11
    assert c["ours_alone_over_best_baseline"] == pytest.approx(0.9)
    assert c["ours_alone_over_on_demand_global_lru"] == pytest.approx(3)
    assert c["ours_alone_bound_share"] == 0.9
    assert c["bound_share"] == 0.9
    assert c["end_to_end_over_best_baseline"] == 1.2
    alone = grid_report.ratios(made_cell(ours=1.0))
    assert alone["ours_over_best_baseline"] is None
    assert "ours_over_best_baseline" not in grid_report.ratios(made_cell(bevy=1.0))


@pytest.mark.rule("GRID-6")
def test_targets_are_judged_over_their_cells() -> None:
    cells = [grid_report.ratios(made_cell(n, ours=rate, lockstep_lfru=1, mixtral_offloading=0.5))
             for n, rate in ((8, 0.9), (16, 2.0), (32, 3.0), (4, 0.5))]  # fmt: skip
    found = grid_report.summary(cells)
    targets = found["targets"]
    never = targets["never below 0.97 x the best baseline"]
    assert (never["found"], never["met"], never["cells"]) == (0.5, False, 4)
    assert "x4" in never["worst"][0]
    middle = next(t for name, t in targets.items() if name.startswith("median over the best"))
    assert (middle["found"], middle["met"], middle["cells"]) == (4.0, True, 3)
    assert targets["TPOT p99 over p50, the greatest"]["met"]
    assert len(found["compute and fetch within 1.3x of each other"]) == 3
    text = grid_report.table({"summary": found, "cells": cells, "skipped": []})
    assert "NOT MET never below" in text and text.count("lockstep-lfru") >= 4


def test_garbage_is_looked_for_between_cells_whatever_happens() -> None:
    @grid_run.uncollected()
    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()


@pytest.mark.rule("CACHE-14")
def test_other_weights_of_the_counts_are_tried_and_put_back() -> None:
    cell = counting.cell_of("h200-pcie5/gpt-oss-20b/0.5/2")
    before = vars(eviction_frequency).copy(), eviction_frequency.Named.PASSES
    plain, shipped = counting.run(cell, "1,0,0,12"), counting.run(cell, "1,3,8,32")
    assert shipped[1] < plain[1]  # reads
    assert counting.run(cell, "1,3,8,32") == shipped
    assert (vars(eviction_frequency), eviction_frequency.Named.PASSES) == before
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    costs = Roofline(platform, model, None, format_of(platform, model))
    past = grid_run.lately(cell.model, cell.requests)
    as_it_is = run_scheduler(cell, preset("lockstep-frequency"), costs, past)
    assert shipped == (as_it_is["tokens_per_s"], as_it_is["fetches_per_token"])


@pytest.mark.rule("GRID-6")
def test_a_cell_that_is_near_is_told_with_what_more_knowing_is_worth() -> None:
    made = made_cell(ours=3.0, ours_oracle=4.0) | {
        "layers": 4, "transfer_s": 0.5, "compute_s_a_token": 0.25, "halves_compute_s_a_token": 0.5,
    }
    found = grid_report.summary([grid_report.ratios(made)])
    (line,) = found["compute and fetch within 1.3x of each other"]
    assert line.endswith(
        "bound share 0.900, queueing limit 0.900, N/(N+1) 0.889; all of the next layer known "
        "0.900; a read takes 1.00 of a layer's computing, 12.00 reads a layer, in halves 2.00 "
        "times the computing"
    )
    share = "all of the next layer known: least share of the bound (requests >= 8)"
    assert (found["targets"][share]["found"], found["targets"][share]["met"]) == (0.9, True)


@pytest.mark.rule("GRID-6")
def test_worth_is_told_by_what_limits() -> None:
    cells = [made_cell(ours=9.0, ours_alone=3.0, lockstep_frequency=2.0),
             made_cell(ours=4.0, ours_alone=4.0, bevy=1.0),
             made_cell(ours=9.0, ours_alone=1.0, lockstep_frequency=2.0)]  # fmt: skip
    cells = [grid_report.ratios(c) for c in cells]
    cells[2]["compute_over_fetch"] = 0.5
    found = grid_report.worth(cells)["the schedule alone, same cache"]
    assert found["both"] == [1.5, 1.5, 1.5, 1] and found["reading"] == [0.5, 0.5, 0.5, 1]
    assert "compute" not in found
    assert [grid_report.regime({"compute_over_fetch": x}) for x in (None, 2.0, 1.2, 0.8, 0.7)] == [
        "compute", "compute", "both", "both", "reading"]  # fmt: skip


@pytest.mark.rule("GRID-8")
def test_the_page_is_made_from_a_result() -> None:
    made = [made_cell(ours=3.0, lockstep_frequency=2.0, layerscope=2.5,
                      on_demand_overlapped_layer=1.0)]  # fmt: skip
    made[0]["schedulers"]["layerscope"]["prediction"] = {
        "overall": {"recall": 0.9}, "absent": {"recall": 0.4}}  # fmt: skip
    done = [grid_report.ratios(c | {"stored": "bf16"}) for c in made]
    found = {"cells": done, "skipped": [], "summary": grid_report.summary(done), "commit": "c0ffee",
             "command": "python -m perf.grid", "seconds": 12.0, "processor_seconds": 9.0,
             "machine": {"cores": 2, "load": [7.0, 7.0, 7.0]}}  # fmt: skip
    page = "a\n" + "\n".join(
        f"{grid_page.BEGIN.format(p)}old{grid_page.END.format(p)} text" for p in grid_page.PARTS
    )
    filled_in = grid_page.fill(page, found)
    assert filled_in.startswith("a\n") and "old" not in filled_in
    assert filled_in.count(" text") == len(grid_page.PARTS)
    assert "commit c0ffee" in filled_in and "**not met**" in filled_in
    assert "| p | m | bf16 | 0.5 | 8 | 3.0 | - | 1.200 | 3.000 | 1.200 | - |" in filled_in
    assert "| layerscope | 0.5 | 0.90 | 0.40 | 1 |" in filled_in
    assert "| 8 at a time | - | 1.20 (1.20 to 1.20) | 3.00 (3.00 to 3.00) | 1 |" in filled_in
    assert "| `ours` | 80% | 50% | 40% | 80% |" in filled_in
    assert "| m | - | - | 2.00 (2.00 to 2.00) | - | - | 1 |" in filled_in
    assert grid_page.fill(filled_in, found) == filled_in
    with pytest.raises(ValueError, match="grid setting"):
        grid_page.fill("nothing", found)


@pytest.mark.rule("GRID-8")
def test_the_page_has_its_marks_and_its_result() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "reproduction.md").read_text()
    named = re.findall(r"perf/results/grid-[a-z]+-[0-9-]+\.json", page)
    assert named
    for name in set(named):
        assert (root / name).is_file(), name
    main = json.loads((root / named[0]).read_text())
    assert grid_page.fill(page, main) == page, "python -m perf.grid_page"


def test_one_by_one_misses_what_together_would_have_kept() -> None:
    a, b = [[[0, 1]]] * 3, [[[1, 2]]] * 3
    routes = [np.array(x, np.uint16) for x in (a, b)]
    # Two slots: 0 1 | 1 2 -> 2 puts 0 out, then 0 puts 1 out, 1 puts 2 out: 3 of 4 miss a step.
    assert one_by_one(routes, 2, 0) == (2 + 1 + 3 + 3) / 12
    assert one_by_one(routes, 3, 1) == 0


@pytest.mark.rule("GRID-7")
def test_a_later_run_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cell = tmp_path / "g.json", Cell("p", "m", 0.5, 8)
    monkeypatch.setattr(grid, "code", lambda: "one")
    out = grid.Output(path, "ci", False)
    out.add(made_cell(ours=2.0, lockstep_lfru=1.0))
    out.write(out.document([cell]))
    saved = json.loads(path.read_text())
    assert saved["cells"][0]["ours_over_best_baseline"] == 2.0
    assert {"machine", "versions", "commit", "seconds", "command", "summary"} <= set(saved)
    assert [p.name for p in tmp_path.iterdir()] == ["g.json"]
    assert list(grid.Output(path, "ci", False).cells) == [cell]
    assert not grid.Output(path, "ci", True).cells
    assert not grid.Output(path, "all", False).cells
    monkeypatch.setattr(grid, "code", lambda: "two")
    assert not grid.Output(path, "ci", False).cells


@pytest.mark.rule("GRID-7")
def test_the_digest_is_of_what_the_figures_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = grid.code()
    assert before == grid.code()
    for folder in (*grid.SOURCES, "perf"):
        (tmp_path / folder).mkdir(parents=True)
    for part in ("cells", "run"):
        (tmp_path / "perf" / f"grid_{part}.py").write_text("")
    monkeypatch.setattr(grid, "ROOT", tmp_path)
    empty = grid.code()
    (tmp_path / "reference/simulator/x.toml").write_text("a = 1")
    assert len({before, empty, grid.code()}) == 3


@pytest.mark.rule("GRID-7")
def test_cells_of_earlier_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of other cells into the same file; those asked for come first, in their order."""
    path, one, other = tmp_path / "g.json", Cell("p", "m", 0.5, 8), Cell("p", "m", 0.5, 4)
    for cell in (one, other):
        out = grid.Output(path, "ci", False)
        out.skipped |= {Cell("q", "m", 0.5, cell.requests): {**cell.as_dict(), "platform": "q"}}
        out.add(made_cell(cell.requests, ours=2.0, lockstep_lfru=1.0))
        out.write(out.document([cell]))
    saved = json.loads(path.read_text())
    assert [c["requests"] for c in saved["cells"]] == [4, 8]
    assert [c["requests"] for c in saved["skipped"]] == [8, 4]
    assert saved["processor_seconds"] == 2.0
    assert list(grid.Output(path, "ci", False).cells) == [other, one]


def _damaged(change: Any) -> str:
    cell = made_cell(ours=2.0, lockstep_lfru=1.0)
    document = {"code": grid.code(), "schedulers": "ours", "seconds": 1.0, "skipped": [],
                "command": "c", "cells": [cell]}  # fmt: skip
    change(document, cell)
    return json.dumps(document)


@pytest.mark.rule("GRID-7")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no result of the grid (Expecting value"),
        ('{"cells": [', "no result of the grid (Expecting value"),
        ("[]", "no result of the grid ([]; an object expected)"),
        (lambda d, c: d.pop("cells"), "a damaged result of the grid (KeyError: 'cells')"),
        (lambda d, c: d.update(cells=None), "a damaged result of the grid (TypeError: "),
        (lambda d, c: d.update(cells=[[1]]), "a damaged result of the grid (TypeError: "),
        (lambda d, c: d.update(seconds="x"), "a damaged result of the grid (ValueError: "),
        (lambda d, c: c.pop("platform"), "a damaged result of the grid (KeyError: 'platform')"),
        (lambda d, c: c.pop("processor_seconds"), "a damaged result of the grid (KeyError: "),
        (lambda d, c: c.update(schedulers={}), "a cell without schedulers"),
        (lambda d, c: c["schedulers"]["ours"].pop("tokens_per_s"), "(KeyError: 'tokens_per_s')"),
    ],
)
def test_a_damaged_result_is_refused(
    text: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "g.json"
    path.write_text(text if isinstance(text, str) else _damaged(text))
    words = ["--cells", "slice", "--schedulers", "ours", "--json", str(path)]
    assert grid.main(words) == 2
    error = capsys.readouterr().err
    assert f"perf.grid: --json: {path}: " in error and told in error
    assert error.count("\n") == 1 and "--fresh begins anew" in error


@pytest.mark.rule("GRID-7")
def test_what_cannot_be_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"--cells": "slice", "--json": str(tmp_path / "g.json")}
    (tmp_path / "file").write_text("")
    for words, told in (
        ({"--schedulers": "nope"}, "scheduler: unknown 'nope'; there are: on-demand"),
        ({"--json": str(tmp_path)}, "is a directory"),
        ({"--json": str(tmp_path / "file" / "g.json")}, "--json: "),
        ({"--csv": str(tmp_path)}, "--csv: "),
    ):
        assert grid.main([w for pair in (good | words).items() for w in pair]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        grid.main(["--json", "x", "--processes", "0"])
    assert "0; at least 1 expected" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    cell = Cell("jetson-thor", "olmoe-1b-7b", 0.5, 1)
    nobody = grid.run([cell], tmp_path / "n.json", "fiddler")
    assert nobody["skipped"][0]["reason"] == "schedulers: none of fiddler can be there"


def _work(what: str) -> str:
    if what == "die":
        os._exit(7)
    return {"good": "done"}[what]


@pytest.mark.rule("GRID-7")
def test_a_worker_that_fails_or_dies_is_heard() -> None:
    assert list(done_by(_work, [("good",)] * 3, 1)) == [(("good",), "done")] * 3
    with pytest.raises(RuntimeError, match=r"(?s)\('bad',\): Traceback.*KeyError: 'bad'"):
        list(done_by(_work, [("good",), ("bad",)], 2))
    with pytest.raises(RuntimeError, match=r"\('die',\): its process died: 7"):
        list(done_by(_work, [("die",), ("good",)], 2))


LONG = """
import signal
from pathlib import Path
from perf import grid
from perf.grid_cells import Cell
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
grid.chosen = lambda name: [Cell("rtx-4090-pcie4", "olmoe-1b-7b", i / 2000, 1)
                            for i in range(500, 1500)]
raise SystemExit(grid.main(["--json", "g.json", "--schedulers", "ktransformers"]))
"""


@pytest.mark.rule("GRID-7", "APP-5")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_with_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C comes to all processes of a terminal, the others to one; what is done is saved."""
    root = str(Path(grid.__file__).parents[1])
    run = subprocess.Popen(
        [sys.executable, "-c", LONG], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stderr is not None
    try:
        assert "/1000 rtx-4090" in run.stderr.readline()
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
        assert run.wait(30) == (130 if number != signal.SIGKILL else -9)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and _group(run.pid):
            time.sleep(0.05)
        assert not _group(run.pid)
    finally:
        if _group(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    if number != signal.SIGKILL:
        assert "perf.grid: interrupted; cells that are done are in g.json" in run.stderr.read()
        assert [p.name for p in tmp_path.iterdir()] == ["g.json"]
    run.stderr.close()
    assert 1 <= len(json.loads((tmp_path / "g.json").read_text())["cells"]) < 1000


def _group(number: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


# Cells that are run


@pytest.mark.rule("GRID-2")
def test_a_window_three_times_as_long_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("macbook-m4-max", "olmoe-1b-7b", 0.5, 4)
    model = models.load(cell.model)
    costs = Roofline(platforms.load(cell.platform), model, None, "bf16")
    names = ("on-demand-blocking-global", "on-demand-overlapped-layer", "lockstep-lfru", "bevy",
             "ours")  # fmt: skip
    lately = grid_run.lately(cell.model, 4)
    short = {n: run_scheduler(cell, preset(n), costs, lately) for n in names}
    monkeypatch.setattr(grid_run, "rounds", lambda requests: (16, 36))
    for n in names:
        long = run_scheduler(cell, preset(n), costs, lately)
        assert short[n]["tokens_per_s"] == pytest.approx(long["tokens_per_s"], rel=0.07), n
        assert 0.9 < long["steady"] < 1.1


@pytest.mark.rule("GRID-6", "GRID-7")
def test_the_slice(tmp_path: Path) -> None:
    found = grid.run(chosen("slice"), tmp_path / "g.json", "slice")
    assert len(found["cells"]) == 4 and not found["skipped"]
    for c in found["cells"]:
        s = c["schedulers"]
        for name, f in s.items():
            assert 0 < f["bound_share_least"] <= f["bound_share"] <= 1.02, name
            assert max(f["channel_busy"], f["compute_busy"]) <= 1 + 1e-9
            assert 0.7 < f["steady"] < 1.4, name
        assert c["ours_over_on_demand_global_lru"] > 1.1
        assert s["on-demand-overlapped-layer"]["tokens_per_s"] > 0
    again = run_cell(chosen("slice")[1], "ours")["schedulers"]["ours"]
    same = found["cells"][1]["schedulers"]["ours"]
    assert again["tokens_per_s"] == same["tokens_per_s"]
