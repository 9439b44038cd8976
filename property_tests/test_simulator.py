"""The simulator's data files, costs and figures, against arithmetic done by hand."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from jax_impl.app import this_host
from jax_impl.app.main import main
from reference.files.bare import BareModel
from reference.simulator import models, platforms
from reference.simulator.arrivals import Arrival
from reference.simulator.costs import CostModel, Reading, Roofline, Work
from reference.simulator.meter import percentile
from reference.simulator.models import LayerShape, ModelShape
from reference.simulator.platforms import Arithmetic, Channel, Memory, Overhead, Platform
from reference.simulator.run import control, routes_for, simulate, warm_slots
from reference.simulator.synthetic import SyntheticRouter, uniform_shares
from reference.vocab.actions import Compute
from reference.vocab.errors import BadInput
from reference.vocab.ids import ENTRY, Part, Visit

CONFIGS = Path(__file__).parent / "configs"
TRACES = Path(__file__).parents[2] / "shared" / "traces"
PUBLISHED = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-120b": "gpt-oss-120b", "gpt-oss-20b": "gpt-oss-20b",
    "mixtral-8x7b": "Mixtral-8x7B", "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "olmoe-1b-7b": "OLMoE-1B-7B",
}  # fmt: skip


# Data files


@pytest.mark.rule("SIM-6")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_what_its_config_json_gives(name: str, tmp_path: Path) -> None:
    facts = json.loads((CONFIGS / f"{PUBLISHED[name]}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts["config"]))
    bare = BareModel.open(tmp_path)
    ours, theirs = models.load(name), models.of_config(bare.config)
    assert ours.source == facts["source"]
    assert ours.layers == theirs.layers
    assert (ours.moe_layers, ours.experts, ours.top_k) == (
        bare.config.moe_layers, bare.config.experts, bare.config.top_k)  # fmt: skip
    assert (ours.head, ours.expert_params) == (theirs.head, theirs.expert_params)
    assert ours.bytes_of() == bare.expert_bytes()
    for form, size in ours.formats.items():
        if form != "mxfp4":
            assert size == round(ours.expert_params * models.BITS[form] / 8)
    embed = bare.tensor("embed").nbytes
    assert ours.non_expert_bytes == bare.non_expert_bytes - (0 if bare.config.tied else embed)


def test_every_model_is_compared() -> None:
    assert sorted(PUBLISHED) == sorted(models.names())


@pytest.mark.rule("SIM-6")
def test_every_figure_of_a_platform_has_a_source() -> None:
    assert {"jetson-thor", "macbook-m4-max", "mac-studio-m3-ultra", "rtx-4090-pcie4",
            "rtx-5090-pcie5", "h200-pcie5"} <= set(platforms.names())  # fmt: skip
    for name in platforms.names():
        p = platforms.load(name)  # refuses a figure without a source
        assert p.memory.bytes_per_s > p.channel.bytes_per_s
        assert len(p.sources) == 13 + 2 * (p.host is not None)
        assert p.title


THOR = (Path(platforms.__file__).parent / "jetson-thor.toml").read_text()


@pytest.mark.rule("SIM-6")
@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("depth = 32", "depth = 0", "channel.depth: 0; a whole number from 1 to 65536 expected"),
        ("depth = 32", 'depth = "deep"', "channel.depth: 'deep'; a whole number"),
        ("depth = 32", "depth = 0.5", "channel.depth: 0.5; a whole number"),
        ("block_bytes = ", "block_bytes = 0.5 #", "channel.block_bytes: 0.5; a whole number"),
        ("bytes_per_s = ", "bytes_per_s = inf #", "channel.bytes_per_s: inf; a number from 1 to"),
        ("bytes_per_s = ", "bytes_per_s = 1e-300 #", "channel.bytes_per_s: 1e-300; a number"),
        ("latency_s = ", "latency_s = inf #", "channel.latency_s: inf; a number from 0 to 1000"),
        ("latency_s = ", "latency_s = true #", "channel.latency_s: True; a number"),
        ("flops_per_s = ", "flops_per_s = nan #", "compute.flops_per_s: nan; a number"),
        ("step_s = ", "step_s = 1e300 #", "overhead.step_s: 1e+300; a number"),
        ("expert_s = ", "expert_s = -1e-9 #", "overhead.expert_s: -1e-09; a number"),
        ("share = 0.8", "share = 1e-300", "memory.share: 1e-300; a number"),
        ("depth = 32\n", "", "channel: block_bytes, bytes_per_s, latency_s; expected"),
        ("share = 0.8", "share = 1.8", "memory.share: 1.8; a number from 1e-06 to 1 expected"),
        ('"memory.share" = "assumed:', '"memory.share" = "guessed:', "sources: memory.share: "),
        ('"memory.share" =', '"memory.part" =', "sources: memory.share: None"),
        ("[sources]", '[sources]\n"channel.colour" = "nominal: red"', "channel.colour names no"),
        ("[memory]", "[memories]", "unknown memories; there are: channel"),
        ("title = ", "titel = ", "title: None; a text"),
        ("[channel]", "[channel", "Expected ']'"),
    ],
)
def test_a_bad_platform_is_refused_by_field(was: str, becomes: str, told: str) -> None:
    assert was in THOR
    with pytest.raises(BadInput) as refused:
        platforms.parse("thor", THOR.replace(was, becomes, 1))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("experts = 64", "experts = 0", "experts: 0; a positive integer"),
        ("experts = 64", "", "'experts'"),
        ("top_k = 6", "top_k = 65", "65 of 64 experts a token"),
        ("count = 26", "", "'count'"),
        ("window = 0", "windows = 0", "windows"),
        ("router = 262144", "router = 0", "0 layers with a router"),
        ("bf16 = 17301504", "bf16 = 0.5", "bf16: 0.5; a positive integer"),
    ],
)
def test_a_bad_model_is_refused_by_field(was: str, becomes: str, told: str) -> None:
    text = (Path(models.__file__).parent / "deepseek-v2-lite.toml").read_text()
    assert was in text
    with pytest.raises(BadInput) as refused:
        models.parse("lite", text.replace(was, becomes))
    assert told in str(refused.value)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"unknown 'thor'; there are: .*jetson-thor"):
        platforms.load("thor")
    with pytest.raises(BadInput, match=r"unknown 'qwen'; there are: .*qwen3-30b-a3b"):
        models.load("qwen")
    with pytest.raises(BadInput, match="not known as 'int3'; known: bf16, q8_0, q4_k_m"):
        models.load("olmoe-1b-7b").bytes_of("int3")


# Costs


@pytest.mark.rule("SIM-8")
def test_small_and_serial_reads_do_not_reach_the_channels_rate() -> None:
    c = Channel(bytes_per_s=1e9, latency_s=1e-3, depth=4, block_bytes=1000_000)
    assert c.alone(500_000, 1 << 30, 0) == pytest.approx(1.5e-3)  # one block
    assert c.alone(8_000_000, 1_000_000, 1) == pytest.approx(8 * 2e-3)  # one after another
    assert c.alone(8_000_000, 100_000, 1) == pytest.approx(80 * 1.1e-3)
    assert c.alone(8_000_000, 1_000_000, 2) == pytest.approx(2e-3 + 7e-3)  # two: the full rate
    assert c.alone(8_000_000, 1_000_000, 9) == pytest.approx(1e-3 + 8e-3)
    assert c.alone(8_000_000, 10, 9) == pytest.approx(200_000 * (1e-3 + 1e-8), rel=1e-3)  # four


LAYER = LayerShape(attention=60, router=20, shared=10, dense=0, kv_bytes=5, attend_flops=3.0,
                   window=0)  # fmt: skip
SMALL = ModelShape("small", "Small", (
    LayerShape(attention=60, router=0, shared=0, dense=40, kv_bytes=5, attend_flops=3.0, window=0),
    LAYER, LayerShape(60, 20, 10, 0, 5, 3.0, window=4)), (1, 2), 4, 2, 50, {"own": 100}, 1000)
MACHINE = Platform(
    "m", "M", Channel(1000.0, 0.0, 4, 1 << 20), Memory(20.0, 1e9, 0.5), Arithmetic(100.0, 0.5),
    Overhead(step_s=1000.0, layer_s=100.0, row_s=10.0, expert_s=1.0),
)  # fmt: skip


def step(layer: int, experts: tuple[int, ...] = (), requests: int = 1) -> Compute:
    parts = tuple([Part(Visit(n, 0, layer), experts, True) for n in range(requests)])
    return Compute(1, layer, parts, tuple((e, e) for e in experts))


@pytest.mark.rule("SIM-7")
def test_a_roofline_step_by_hand() -> None:
    """Memory gives 10 bytes a second, arithmetic 50 operations a second."""
    costs = Roofline(MACHINE, SMALL)
    # The entry: layer 0 whole, layer 1 up to its router: 180 bytes, 180 operations a row.
    got = costs.step(step(ENTRY), Work([(9, 10)], 0))
    over = 1000 + 2 * 100 + 10
    assert got == pytest.approx(over + max(18.0, 3.6) + 2 * max(5 * 10 / 10, 3 * 10 / 50))
    # Layer 1: two experts of 100 bytes, three products of 100 operations; then layer 2, window 4.
    got = costs.step(step(1, (0, 1), 2), Work([(9, 10), (2, 3)], 3))
    over = 1000 + 100 + 2 * 10 + 2 * 1
    experts = max(20.0, 3 * 100 / 50)
    weights = max((10 + 60 + 20) / 10, 2 * 90 / 50)
    attention = max(5 * (4 + 3) / 10, 3 * (4 + 3) / 50)
    assert got == pytest.approx(over + experts + weights + attention)
    # The last layer: its shared experts and the head. A prompt chunk of 50 rows computes longer.
    got = costs.step(step(2, (0,)), Work([(0, 50)], 40))
    rows = 1000 + 100 + 50 * 10 + 1 + max(10.0, 40 * 100 / 50)
    assert got == pytest.approx(rows + max(101.0, 50 * 1010 / 50))


@pytest.mark.rule("SIM-7")
def test_attention_counts_what_each_row_sees() -> None:
    """Rows 4 and 5 of a text see 5 and 6 tokens; with a window of 4, 4 each, from 5 tokens."""
    from reference.simulator.costs import _attended

    assert _attended([(4, 6)], 0) == (6, 11)
    assert _attended([(4, 6)], 4) == (5, 8)
    assert _attended([(0, 3), (9, 10)], 4) == (3 + 4, 6 + 4)


@pytest.mark.rule("SIM-7")
def test_the_experts_term_beside_measured_kernels() -> None:
    """One MoE layer of Qwen3-30B-A3B on an RTX PRO 6000, 50 measured points; the worst are those
    whose eight experts fit into the card's second-level cache."""
    file = TRACES / "requests/llmservingsim-sharegpt/moe_kernel_profile_rtxpro6000_bf16_tp1.csv"
    if not file.exists():
        pytest.skip(f"{file.name} is not here")
    model = models.load("qwen3-30b-a3b")
    platform = platforms.load("rtx-pro-6000-pcie5")
    costs = Roofline(platform, model)
    idle = costs.step(step(1), Work([], 0)) - platform.overhead.layer_s
    wrong = []
    with open(file) as lines:
        for row in csv.DictReader(lines):
            experts = tuple(range(int(row["activated_experts"])))
            pairs = 8 * int(row["tokens"])
            took = costs.step(step(1, experts), Work([], pairs)) - idle
            wrong.append(abs(took / (float(row["time_us"]) * 1e-6) - 1))
    assert len(wrong) == 50
    assert median(wrong) < 0.10
    assert sorted(wrong)[44] < 0.30  # nine of ten points


# Figures


def routes(layers: int, experts: int = 4, top_k: int = 2) -> SyntheticRouter:
    return SyntheticRouter(uniform_shares(layers), experts, top_k)


@pytest.mark.rule("SIM-10")
def test_figures_with_everything_resident_by_hand() -> None:
    """Lock-step of three requests: a token of each takes an entry and two layers."""
    costs = CostModel(bytes_per_s=1e6, depth=2, step_s=1.0, row_s=0.1, expert_s=0.0)
    got = simulate(None, SMALL, routes(2), control(SMALL, 1.0, 3, grouping="lockstep"),
                   requests=3, tokens=90, warm_up=30, new_tokens=10_000, costs=costs)  # fmt: skip
    assert got.tokens_per_s == pytest.approx(3 / (3 * 1.3), rel=0.02)
    assert got.tpot_p50 == pytest.approx(3 * 1.3)
    assert got.tpot_p99 == pytest.approx(3 * 1.3)
    assert got.compute_busy == pytest.approx(1.0)
    assert got.bound_share == pytest.approx(1.0)
    assert got.channel_busy == 0.0
    assert got.fetches_per_token == 0.0
    assert got.hit_rate == got.full_hit == 1.0
    assert got.batches == {3: got.batches[3]}
    assert got.lag_max <= 1
    assert got.stalls["channel: nothing is missing"] == pytest.approx(1.0)


@pytest.mark.rule("SIM-10", "SIM-4")
@pytest.mark.parametrize("grouping", ["interleaved", "lockstep", "lockstep-blocking"])
def test_shares_and_stalls_add_up(grouping: str) -> None:
    model = models.load("olmoe-1b-7b")
    got = simulate(platforms.load("jetson-thor"), model, routes_for(model),
                   control(model, 0.4, 4, grouping=grouping), requests=4, tokens=60, warm_up=20,
                   new_tokens=12)  # fmt: skip
    stalls = got.stalls
    assert got.compute_busy + sum(v for k, v in stalls.items() if "compute" in k) == (
        pytest.approx(1.0))  # fmt: skip
    assert got.channel_busy + sum(v for k, v in stalls.items() if "channel" in k) == (
        pytest.approx(1.0))  # fmt: skip
    assert 0 < got.bound_share <= 1.0 + 1e-9
    assert got.both_busy <= min(got.channel_busy, got.compute_busy) + 1e-9
    assert got.compute_busy + got.channel_busy - got.both_busy <= 1.0 + 1e-9
    if grouping == "lockstep-blocking":
        assert got.both_busy == 0.0
    else:
        assert got.both_busy > 0.05
    assert got.bytes_per_token == pytest.approx(got.fetches_per_token * model.bytes_of())
    rate = platforms.load("jetson-thor").channel.bytes_per_s
    assert got.channel_busy == pytest.approx(
        got.bytes_per_token * got.tokens_per_s / rate, rel=0.05)  # fmt: skip
    assert got.tokens >= 60
    assert got.finished >= 4
    assert got.lag_p95 <= got.lag_max


def _timeless(figures: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in figures.items() if k not in ("wall_s", "cpu_s", "events_per_s")}


@pytest.mark.rule("SIM-10")
def test_a_closed_loop_keeps_its_number_and_prompts_cost() -> None:
    model = models.load("olmoe-1b-7b")
    thor, options = platforms.load("jetson-thor"), control(model, 0.5, 4, chunk=16)
    given = {"requests": 4, "tokens": 60, "warm_up": 20, "new_tokens": 8}
    short = simulate(thor, model, routes_for(model), options, **given)
    long = simulate(thor, model, routes_for(model), options, prompt=64, **given)
    assert long.tokens_per_s < 0.7 * short.tokens_per_s
    same = simulate(thor, model, routes_for(model), options, shapes=lambda n: (1, 8), **given)
    assert same.tokens == 60
    again = simulate(thor, model, routes_for(model), options, **given)
    assert _timeless(again.as_dict()) == _timeless(short.as_dict())  # fmt: skip


@pytest.mark.rule("SIM-10")
@pytest.mark.parametrize("grouping", ["lockstep", "balanced", "interleaved"])
def test_a_window_measures_a_round_at_least(grouping: str) -> None:
    """Lock-step ends warm-up and window in one moment; interleaved could end the window before any
    request's second token."""
    costs = CostModel(bytes_per_s=1e6, depth=2, step_s=1.0, row_s=0.1, expert_s=0.0)

    def run(**given: Any) -> Any:
        return simulate(None, SMALL, routes(2), control(SMALL, 1.0, 8, grouping=grouping),
                        requests=8, new_tokens=100, costs=costs, **given)  # fmt: skip

    got, long = run(tokens=4, warm_up=1), run(tokens=320, warm_up=80)
    assert got.tokens >= 8
    assert got.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.2)
    assert got.tpot_p50 is None and got.hit_rate == 1.0
    assert long.tpot_p50 == pytest.approx(8 / long.tokens_per_s, rel=0.1)
    with pytest.raises(BadInput, match="2 tokens in all, none after a warm-up of 3; a shorter"):
        run(tokens=4, warm_up=3, arrivals=[Arrival(0.0, 1, 2)])
    every = run(tokens=9, warm_up=0, arrivals=[Arrival(0.0, 1, 1)])
    assert (every.tokens, every.itl_p50, every.full_hit) == (1, None, 1.0)


@pytest.mark.rule("SIM-10")
def test_a_request_that_can_never_fit_is_told() -> None:
    """In a closed loop its follower came at the same moment, for ever."""
    given: dict[str, Any] = {"tokens": 9, "warm_up": 0, "costs": CostModel()}
    options = control(SMALL, 0.5, 2, kv_tokens=64)
    needs = r"prompt of 1 plus 100 new tokens needs 128 KV tokens; the capacity is 64"
    with pytest.raises(BadInput, match=f"request 1: {needs}"):
        simulate(None, SMALL, routes(2), options, requests=2, new_tokens=100, **given)
    some = [Arrival(0.0, 1, 100), Arrival(0.0, 1, 3)]
    got = simulate(None, SMALL, routes(2), options, arrivals=some, **given)
    assert (got.finished, got.refused, got.tokens) == (1, 1, 3)
    with pytest.raises(BadInput, match=f"every request is refused; request 0: {needs}"):
        simulate(None, SMALL, routes(2), options, arrivals=some[:1], **given)


@pytest.mark.rule("SIM-8")
def test_faults_of_mapped_pages_are_slower_than_whole_experts() -> None:
    model = models.load("olmoe-1b-7b")
    thor, options = platforms.load("jetson-thor"), control(model, 0.5, 1, grouping="lockstep")
    given = {"requests": 1, "tokens": 30, "warm_up": 10}
    whole = simulate(thor, model, routes_for(model), options, **given)
    mapped = simulate(thor, model, routes_for(model), options, reading=Reading(1, 1 << 17, 1),
                      **given)  # fmt: skip
    assert mapped.fetches_per_token == pytest.approx(whole.fetches_per_token, rel=0.1)
    assert mapped.tokens_per_s < 0.5 * whole.tokens_per_s


def test_control_options_and_their_refusals() -> None:
    model = models.load("qwen3-30b-a3b")
    options = control(model, 0.5, 8, readiness="expert")
    assert (options.slots, options.readiness, options.max_running) == (3072, "expert", 8)
    warm = warm_slots(options)
    assert len(warm) == len(set(warm)) == 3072
    assert {sum(la == layer for la, _ in warm) for layer in range(48)} == {64}
    with pytest.raises(BadInput, match=r"cache_share: 1\.5; above 0 and at most 1"):
        control(model, 1.5)
    with pytest.raises(BadInput, match="no option speed"):
        control(model, 0.5, 8, speed=3)
    with pytest.raises(BadInput, match="neither a platform nor costs"):
        simulate(None, model, routes_for(model), options)
    with pytest.raises(BadInput, match="0 requests"):
        simulate(platforms.load("jetson-thor"), model, routes_for(model), options, requests=0)


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    assert [percentile([3, 1, 2, 4], p) for p in (0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 2, 3, 4, 4]


@pytest.mark.rule("SIM-10")
def test_the_loop_is_fast_enough() -> None:
    """20,000 events and actions a second of processor time, which other programs hardly change."""
    model = models.load("qwen3-30b-a3b")
    rates = []
    for _ in range(2):
        got = simulate(platforms.load("jetson-thor"), model, routes_for(model),
                       control(model, 0.5, 8), requests=8, tokens=40, warm_up=8)  # fmt: skip
        rates.append((got.events + got.actions) / got.cpu_s)
    assert max(rates) > 20_000


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_probe_of_this_host_finds_a_known_overhead(share: float) -> None:
    """Steps of a host whose overhead is known, with one request and with eight, give it back."""
    model = models.load("olmoe-1b-7b")
    true = platforms.load("jetson-thor")
    true = replace(true, overhead=Overhead(400e-6, 0.0, 30e-6, 0.0))
    plain = replace(true, overhead=Overhead(0.0, 0.0, 0.0, 0.0))
    alone, crowd = (this_host.step(true, model, n, share) for n in (1, this_host.CROWD))
    found = this_host.overhead(plain, model, share, alone, crowd)
    assert (found.step_s, found.row_s) == pytest.approx((400e-6, 30e-6), rel=0.1)
    assert this_host.overhead(plain, model, share, 0.0, 0.0) == plain.overhead


@pytest.mark.rule("SIM-12")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two schedulers, with the figures that the function gives; folders, files and refusals."""
    base = ["simulate", "--model", "olmoe-1b-7b", "--tokens", "16", "--requests", "2"]
    both = ["--scheduler", "lockstep", "--scheduler", "interleaved"]
    assert main([*base, *both, "--share", "40%", "--json", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "OLMoE-1B-7B: 1024 experts of 12 MiB, 40.0% of them in memory" in told
    model = models.load("olmoe-1b-7b")
    for name, got in json.loads((tmp_path / "out").read_text())["schedulers"].items():
        same = simulate(platforms.load("jetson-thor"), model, routes_for(model),
                        control(model, 0.4, 2, grouping=name, eviction="frequency"),
                        requests=2, tokens=16, warm_up=4)  # fmt: skip
        assert got["tokens_per_s"] == same.tokens_per_s
        assert f"{name}: {same.tokens_per_s:.2f} tokens/s" in told
    assert main([*base[:1], "--model", "demo", "--tokens", "16", "--predict", "0.8"]) == 0
    (tmp_path / "mine.toml").write_text(THOR.replace("14.7e9", "1e9"))
    assert main([*base, "--platform", str(tmp_path / "mine.toml")]) == 0
    assert main([*base[:1], "--model", "demo", "--tokens", "16", "--platform", "this"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"this host .* ms an expert, .* ms a step, .* ms a row", told)
    arrivals = tmp_path / "requests"
    arrivals.write_text('{"arrival_s": 0, "input_toks": 30, "output_toks": 20}\n')
    assert main([*base, "--arrivals", str(arrivals), "--divide", "10"]) == 0
    assert "1 requests of requests, lengths divided by 10" in capsys.readouterr().out
    with open(arrivals, "a") as file:
        file.write('{"arrival_s": 0, "input_toks": 30, "output_toks": 2000000}\n')
    assert main([*base, "--arrivals", str(arrivals)]) == 0
    assert "; 1 requests can never fit and were refused" in capsys.readouterr().out
    assert main(["simulate", "--model", "demo", "--tokens", "1", "--requests", "1"]) == 0
    assert " ? ms a token (p99 ?)" in capsys.readouterr().out
    assert main(["simulate", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*platforms.names(), *models.names()))
    for words, said in (
        (["--platform", "thor"], "platform: unknown 'thor'"),
        (["--platform", str(tmp_path / "none.toml")], "No such file"),
        (["--model", str(tmp_path)], "neither a folder with config.json"),
        (["--share", "2"], "above 0 and at most 100%"),
        (["--stored", "int3"], "not known as 'int3'"),
        (["--arrivals", str(tmp_path / "mine.toml")], "no request trace"),
        (["--scheduler", "fast"], "unsupported 'fast'"),
        (["--predict", "me"], "me"),
        (["--predict", "layer@2"], "layer@2"),
        (["--predict", "0.9", "--scheduler", "balanced", "--scheduler", "lockstep-blocking"],
         "--predict: lockstep-blocking reads nothing ahead"),
        (["--platform", "this"], "a folder with weights, or demo"),
        (["--counts", str(tmp_path / "mine.toml")], "not an npz"),
    ):  # fmt: skip
        assert main([*base, *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
