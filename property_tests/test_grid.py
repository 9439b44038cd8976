"""The comparison of schedulers: presets, the past that all start from, bounds, cells."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf import grid, grid_cells, grid_run
from perf.grid_cells import Cell, chosen, format_of, impossible, needed
from perf.grid_run import run_cell, run_scheduler
from reference.control import Scheduler
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
