"""The paper's numbers, computed again; a trace served; the rotation and the hand-off in time."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.tiny import tiny_config, write_checkpoint
from reference.control.attention_rotation import Steady
from reference.control.attention_wire import WireBytes
from reference.files.checkpoint import Checkpoint
from reference.files.layout import layer_roles
from reference.simulator.lamina import tables
from reference.simulator.lamina.costs import attention_s, least_bandwidth, model_s, pooled, wire_s
from reference.simulator.lamina.hardware import DEVICES, NETWORKS, Network, device, network
from reference.simulator.lamina.offloaded import Setting, compare
from reference.simulator.lamina.pipeline import (
    Ingress,
    Played,
    ingress_needed,
    ingress_room,
    play,
    with_misses,
)
from reference.simulator.lamina.plan import Limits, best, choices, monolithic_choices
from reference.simulator.lamina.serving import residents_imbalance, serve
from reference.simulator.lamina.workloads import (
    FILES,
    MODELS,
    TRACES,
    lengths_of,
    read_trace,
    shape_of,
)
from reference.vocab.errors import BadInput

H100, H20 = DEVICES["H100"], DEVICES["H20"]
FHBN, NCCL, FREE = (NETWORKS[n] for n in ("fhbn", "nccl", "ideal"))
PUBLIC = Path(
    os.environ.get("COVEY_TRACES", Path(__file__).parents[2] / "shared" / "traces" / "requests")
)


def near(value: float, told: float, digits: int) -> bool:
    """`told` is `value` rounded to so many digits behind the point."""
    return abs(value - told) <= 0.5000001 * 10**-digits


# Rooflines


@pytest.mark.rule("LAMINA-14")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("batch", "context"), [(16, 1024), (100, 4096), (300, 16384)])
def test_the_least_bandwidth_slows_down_by_what_was_allowed(
    model: str, batch: int, context: int
) -> None:
    s = MODELS[model]
    rate = least_bandwidth(s, batch, context, 0.2, H100, H20, 1, 1)
    wire = Network("just enough", 0.0, rate, "made up")
    free = model_s(s, batch, H100, 1) + attention_s(s, batch * context, H20, 1)
    slow = free + wire_s(s, batch, wire, 1)
    assert slow / free == pytest.approx(1.2, rel=0.01)


@pytest.mark.rule("LAMINA-14")
def test_the_curve_of_bandwidths() -> None:
    """GB/s for 70B, one H100 and one H20, at most 20 % slower: batches 16 64 100 200 300."""
    told = {
        1024: [5.6, 20.3, 29.8, 51.0, 66.1], 2048: [5.4, 18.2, 25.5, 39.5, 48.1],
        4096: [5.1, 15.1, 19.8, 27.3, 31.1], 8192: [4.6, 11.2, 13.6, 16.8, 18.2],
        16384: [3.8, 7.4, 8.4, 9.5, 10.0],
    }  # fmt: skip
    curve = tables.bandwidth_curve()
    assert all(near(x, t, 1) for c in told for x, t in zip(curve[c], told[c], strict=True))
    assert max(curve[8192]) < 30 < max(curve[2048])


@pytest.mark.rule("LAMINA-15")
def test_the_ratio_of_batches_in_closed_form() -> None:
    told = {0.80: (2.43, 2.44, 2.59), 0.85: (2.29, 2.30, 2.43), 0.90: (2.18, 2.19, 2.30),
            0.95: (2.09, 2.10, 2.19)}
    for usable, row in told.items():
        ratios = tables.batch_ratios(usable)
        assert all(near(x, t, 2) for x, t in zip(ratios.values(), row, strict=True))
        for m, ratio in ratios.items() if usable == 0.9 else ():
            assert tables.cell(m, "kimi-conv", usable).batch_ratio == pytest.approx(ratio)
        if 0.8 <= usable <= 0.9:
            assert 2.2 <= sum(ratios.values()) / 3 <= 2.5  # the paper's mean is 2.39
    assert tables.cell("70B", "azure-conv", 0.86).two.batch == pytest.approx(800, rel=0.01)


@pytest.mark.rule("LAMINA-16")
@pytest.mark.parametrize(
    ("model", "trace", "alone", "two", "ratios"),
    [
        ("33B", "azure-conv", (39, 21.5, 1833), (86, 38.6, 2222), (2.18, 1.21, 0.96)),
        ("33B", "kimi-conv", (4.1, 21.5, 189), (8.9, 38.6, 229), (2.18, 1.21, 1.08)),
        ("65B", "azure-conv", (48, 21.5, 2224), (105, 38.8, 2694), (2.19, 1.21, 0.95)),
        ("65B", "kimi-ta", (7.0, 21.5, 324), (15, 38.8, 392), (2.19, 1.21, 1.06)),
        ("70B", "azure-conv", (364, 23.9, 15250), (837, 58.2, 14385), (2.30, 0.94, 0.50)),
        ("70B", "azure-code", (223, 21.5, 10365), (512, 42.2, 12117), (2.30, 1.17, 0.65)),
        ("70B", "kimi-conv", (38, 21.5, 1751), (86, 41.0, 2105), (2.30, 1.20, 1.04)),
        ("70B", "kimi-ta", (53, 21.5, 2470), (122, 41.0, 2970), (2.30, 1.20, 1.01)),
    ],
)
def test_the_table_of_throughputs(
    model: str, trace: str, alone: tuple, two: tuple, ratios: tuple
) -> None:
    c = tables.cell(model, trace)
    for served, (batch, ms, rate) in ((c.alone, alone), (c.two, two)):
        assert near(served.batch, batch, 0 if batch > 9 else 1)
        assert near(served.token_s * 1e3, ms, 1)
        assert near(served.tokens_per_s, rate, 0)
    assert near(c.batch_ratio, ratios[0], 2)
    assert near(c.throughput_ratio, ratios[1], 2)
    assert near(c.single_ratio, ratios[2], 2)
    # Memory-bound cells gain, at equal money more; the compute-bound one does not.
    assert (c.throughput_ratio > 1.15) == ((model, trace) != ("70B", "azure-conv"))
    assert c.per_dollar_ratio / c.throughput_ratio == pytest.approx(44.24 / 40.64, rel=1e-3)
    assert c.two.token_s > c.alone.token_s


@pytest.mark.rule("LAMINA-16")
def test_memory_devices_pay_until_compute_is_the_limit() -> None:
    """70B on Azure conv: doubling b from 1 doubles throughput, from 4 it does nothing."""
    found = tables.sweep("70B", "azure-conv", (2, 4), (1, 2, 4, 8))
    rate = {k: v.tokens_per_s for k, v in found.items() if v}
    assert rate[2, 2] / rate[2, 1] > 1.9 and rate[2, 8] / rate[2, 4] < 1.01
    assert rate[4, 1] / rate[2, 1] < rate[2, 2] / rate[2, 1]
    assert tables.sweep("70B", "azure-conv", (1,), (4,))[1, 4] is None  # weights do not fit


@pytest.mark.rule("LAMINA-17")
def test_queries_first_saves_what_the_paper_measured() -> None:
    """At most 13.2 % for 65B and 3.5 % for 70B, at 4096 tokens."""
    mha = [tables.overlap("65B", n) for n in (4, 8, 32)]
    gqa = [tables.overlap("70B", n) for n in (4, 128, 256)]
    assert [round(100 * x, 1) for x in mha] == [11.1, 12.9, 10.7]
    assert [round(100 * x, 1) for x in gqa] == [1.8, 3.1, 3.7]
    assert all(tables.overlap(m, n) >= 0 for m in MODELS for n in range(1, 300, 7))
    assert MODELS["65B"].kv == MODELS["70B"].kv * MODELS["70B"].group


@pytest.mark.rule("LAMINA-18")
@pytest.mark.parametrize("context", [4096, 8192])
def test_the_parts_of_a_step(context: int) -> None:
    """Model time flat below the ridge, attention linear, wire = L RTT + bytes / rate; what is
    observed is at most the sum, and more than the monolithic system needs."""
    rows = tables.breakdown("70B", (8, 16, 32, 64, 128, 256), context)
    for small, big in itertools.pairwise(rows):
        assert big.model_s == pytest.approx(small.model_s, rel=0.001)
        assert big.attention_s == pytest.approx(2 * small.attention_s)
        floor = tables.latency_floor("70B", FHBN)
        assert big.wire_s - floor == pytest.approx(2 * (small.wire_s - floor))
    for row in rows:
        assert row.observed_s <= row.model_s + row.attention_s + row.wire_s
        assert row.observed_s > max(row.model_s, row.attention_s)
    saved = tables.latency_floor("70B", NCCL) - tables.latency_floor("70B", FHBN)
    assert near(saved * 1e3, 2.7, 1)
    # With two batches in flight the difference shows less than with one.
    rates = {}
    for net in (FHBN, NCCL, FREE):
        for n in (1, 2):
            rates[net.name, n] = pooled(MODELS["70B"], 4096, H100, 2, H20, 4, net, n).tokens_per_s
    gain = {n: rates["fhbn", n] / rates["nccl", n] for n in (1, 2)}
    assert 1 <= gain[2] < gain[1] and rates["ideal", 2] >= rates["fhbn", 2]


# Traces


def made_up(tmp_path: Path) -> list[tuple[int, int]]:
    path = tmp_path / "t.jsonl.gz"
    rows = [{"input_length": 200 + 37 * i % 900, "output_length": 20 + 11 * i % 90}
            for i in range(3000)]
    with gzip.open(path, "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return read_trace(path)


@pytest.mark.rule("LAMINA-4", "LAMINA-15")
def test_a_trace_served_comes_near_the_closed_form(tmp_path: Path) -> None:
    requests = made_up(tmp_path)
    ratio = tables.batch_ratios(0.9)["65B"]
    small = serve(requests, 60_000, lambda n, cached, even: 1.0)
    large = serve(requests, 60_000 * ratio, lambda n, cached, even: 1.0)
    assert large.batch / small.batch == pytest.approx(ratio, rel=0.05)
    assert small.refused == 0 and small.requests == len(requests)
    uneven = serve(requests, 60_000, lambda n, c, even: even, devices=4, partition="request")
    assert 1.0 < uneven.imbalance < 1.5 and uneven.token_s == pytest.approx(uneven.imbalance)
    assert serve([(50, 3), (5, 0), (500, 1)], 100, lambda *a: 1.0).refused == 1
    with pytest.raises(BadInput, match="rows"):
        serve(requests, 1000, lambda *a: 1.0, partition="rows")


def test_bad_traces_are_refused(tmp_path: Path) -> None:
    for name, text, told in (
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,x\n", "a.csv:2"),
        ("b.csv", "when,in,out\nx,5,6\n", "b.csv:1"),
        ("c.jsonl", '{"input_length": 4}\n', "c.jsonl:1"),
        ("d.jsonl", "", "no request"),
        ("e.txt", "1,2", "trace is .csv or .jsonl"),
        ("f.csv.gz", "no gzip", "cannot be read"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput, match=told):
            read_trace(tmp_path / name)
    with pytest.raises(BadInput, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="H100"):
        device("H200")
    with pytest.raises(BadInput, match="fhbn"):
        network("tcp")


@pytest.mark.rule("LAMINA-3", "LAMINA-15", "LAMINA-16")
@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public request traces are not here")
def test_the_public_traces() -> None:
    """Means as the paper tells them; request-level imbalance; batches and throughput served."""
    found = {t: read_trace(PUBLIC / f) for t, f in FILES.items()}
    for name, requests in found.items():
        mine, told = lengths_of(requests, name), TRACES[name]
        assert (mine.requests, round(mine.prompt, 1), round(mine.output, 1)) == (
            told.requests, told.prompt, told.output)  # fmt: skip
    for name, batch, told in (("azure-conv", 100, 1.12), ("azure-conv", 800, 1.05),
                              ("azure-code", 64, 1.24), ("kimi-conv", 86, 1.29),
                              ("kimi-conv", 11, 1.80)):  # fmt: skip
        assert residents_imbalance(found[name], batch, 4) == pytest.approx(told, abs=0.02)
    s = MODELS["70B"]

    def step(n: int, cached: float, even: float) -> float:
        m = model_s(s, n / 2, H100, 2)
        t = attention_s(s, cached / 2, H20, 4) * even
        return Steady(2, m, t, wire_s(s, n / 2, FHBN, 2)).period_s

    for name, ratio in (("azure-conv", 0.93), ("azure-code", 1.19), ("kimi-conv", 1.19)):
        alone = serve(
            found[name], (4 * 72e9 - s.weights) / s.kv_token,
            lambda n, c, e: model_s(s, n, H100, 4) + attention_s(s, c, H100, 4),
        )  # fmt: skip
        two = serve(found[name], 4 * 0.9 * 96e9 / s.kv_token, step)
        assert two.batch / alone.batch == pytest.approx(tables.batch_ratios(0.9)["70B"], rel=0.03)
        assert near(two.tokens_per_s / alone.tokens_per_s, ratio, 2)


# In virtual time


@pytest.mark.rule("LAMINA-6")
def test_the_rotation_in_virtual_time_keeps_the_formula() -> None:
    for n, m, a, net in ((1, 3.0, 1.0, 0.5), (2, 2.0, 2.0, 0.3), (3, 2.0, 1.0, 0.0),
                         (4, 1.0, 1.0, 0.2)):  # fmt: skip
        ran = play(n, 60, lambda j, k, m=m: m, lambda j, k, a=a: a, net)
        steady = Steady(n, m, a, net)
        assert ran.period() == pytest.approx(steady.period_s, rel=0.02)
        assert ran.replicas_busy == pytest.approx(steady.replicas_busy, rel=0.06)
        assert ran.pool_busy == pytest.approx(steady.pool_busy, rel=0.06)
        assert (ran.moved > 0) == (n > 2)


@pytest.mark.rule("LAMINA-7", "LAMINA-20")
@pytest.mark.parametrize("miss", [0.1, 0.3])
def test_misses_favour_queues(miss: float) -> None:
    """Slices that wait for missing experts: the rotation waits for the late one."""
    slices = with_misses(1.0, 0.5, needed=8, miss=miss)
    mean = 1.0 + 0.5 * 8 * miss
    for n in (3, 4):
        a = mean / (n - 1)
        ran = {o: play(n, 400, slices, lambda j, k, a=a: a, 0.0, o)  # type: ignore[arg-type]
               for o in ("rotation", "queue")}
        assert ran["queue"].seconds < 0.97 * ran["rotation"].seconds
        # Nothing can be faster than the work of the replicas.
        assert ran["queue"].seconds >= sum(ran["queue"].replica_s) / (n - 1)
    even = {o: play(3, 400, lambda j, k: mean, lambda j, k: mean / 2, 0.0, o).seconds  # type: ignore[arg-type]
            for o in ("rotation", "queue")}
    assert even["queue"] == pytest.approx(even["rotation"], rel=0.01)


@pytest.mark.rule("LAMINA-20", "SIM-4")
@pytest.mark.parametrize(
    ("slots", "low", "high"), [(48, 1.4, 2.0), (96, 1.4, 2.0), (192, 1.0, 1.3)]
)
def test_the_schedulers_groups_against_fixed_batches(slots: int, low: float, high: float) -> None:
    """A mixture over its budget with attention elsewhere: the same work, who goes next decides.
    With every expert resident after its first read little is left to gain."""
    told = compare(Setting(slots=slots, requests=16, tokens=6))
    assert low < told.gain < high, told
    assert told.scheduler_loads <= told.rotation_loads
    # Nobody beats the channel.
    for seconds, loads in ((told.rotation_s, told.rotation_loads),
                           (told.scheduler_s, told.scheduler_loads)):  # fmt: skip
        assert seconds >= loads * 1_000_000 / 8e9
    assert compare(Setting(slots=slots, requests=16, tokens=6)) == told  # nothing is left to chance


@pytest.mark.rule("LAMINA-12", "LAMINA-19")
def test_prompts_come_in_through_the_gaps() -> None:
    """While they fit, decoding keeps its period to the second and all offered bytes come; when
    they do not, decoding still keeps its period and the backlog grows."""

    def run(offer: int, every: int = 4) -> Played:
        ingress = Ingress(100.0, 0.25, offer, every, 20)
        return play(2, 200, lambda j, k: 1.0, lambda j, k: 0.7, 0.1, "rotation", ingress)

    none, some, much = run(1, 10**9), run(200), run(600)
    assert none.starts == some.starts == much.starts
    # 4 attentions last 4 s and leave 3 s of gaps: 300 bytes.
    assert some.pulled >= 200 * 99 and max(some.backlog) <= 400
    assert much.backlog[-1] > 100 * 200 and much.backlog[-1] > 1.8 * much.backlog[200]
    # The same from rates alone: Azure code offers more than the ports take, conv does not.
    s = MODELS["70B"]
    for trace, fits in (("azure-conv", True), ("azure-code", False), ("kimi-conv", True)):
        rate, t = tables.cell("70B", trace).two.tokens_per_s, TRACES[trace]
        need = ingress_needed(rate, t.prompt, t.output, s.kv_token)
        room = ingress_room(rate, (s.q + s.kv) * s.layers, FHBN.rate, 4)
        assert (need <= room) == fits, (trace, need / 1e9, room / 1e9)
        decode = rate * s.wire_token
        assert need / decode == pytest.approx(
            {"azure-conv": 0.61, "azure-code": 8.2, "kimi-conv": 3.9}[trace], abs=0.06)


# Plans


@pytest.mark.rule("LAMINA-22")
def test_the_plan_keeps_its_limits_and_finds_the_best() -> None:
    s, load = MODELS["70B"], TRACES["kimi-conv"]
    limits = Limits(token_s=0.05, price=60.0)
    found = list(choices(s, load, H100, H20, FHBN, limits))
    assert found
    for c in found:
        assert c.served.token_s <= 0.05 * 1.0001 and c.served.price <= 60.0
        assert c.memory in (1, 2, 4, 8) and c.compute >= 2
    order = best(found)
    assert order[0].served.tokens_per_dollar == max(c.served.tokens_per_dollar for c in found)
    assert best(found, "rate")[0].served.tokens_per_s == max(c.served.tokens_per_s for c in found)
    alone = best(monolithic_choices(s, load, H100, limits))[0]
    assert order[0].served.tokens_per_dollar > alone.served.tokens_per_dollar
    tight = list(choices(s, load, H100, H20, FHBN, Limits(token_s=0.001)))
    assert tight == []
    anything = list(choices(s, load, H100, H20, FHBN, Limits(), partition="request"))
    assert {c.memory for c in anything} == set(range(1, 17))
    # A tighter limit on token time never allows more throughput from the same devices.
    by = {(c.compute, c.memory, c.batches): c for c in choices(s, load, H100, H20, FHBN, Limits())}
    for c in found:
        loose = by[c.compute, c.memory, c.batches].served
        assert c.served.batch <= loose.batch * 1.0001


@pytest.mark.rule("LAMINA-22")
def test_the_shape_of_our_own_models(tmp_path: Path) -> None:
    """Weights and KV of a description against what its checkpoint holds."""
    for family in ("llama", "mixtral"):
        path = write_checkpoint(tmp_path / family, tiny_config(family), seed=1)
        ckpt = Checkpoint.open(path)
        s = shape_of(ckpt.config, family, element=4)
        experts = sum(ckpt.expert_bytes(m) * ckpt.config.experts for m in ckpt.config.moe_layers)
        held = ckpt.non_expert_bytes + experts
        norms = 4 * ckpt.config.hidden * (2 * len(ckpt.config.layers) + 1)
        assert s.weights == pytest.approx(held - norms, abs=1)
        assert s.kv_token == len(ckpt.config.layers) * 4 * 2 * 2 * 8
        if family == "mixtral":
            assert s.read(1) < s.read(4) < s.read(1000) == pytest.approx(s.weights)
            assert s.flops_token < 2 * s.weights / 4


@pytest.mark.rule("LAMINA-22", "LAMINA-5")
def test_the_shape_of_latent_attention_is_the_absorbed_one(tmp_path: Path) -> None:
    """Widths as the pools send and cache them; weights against what a checkpoint holds."""
    path = write_checkpoint(tmp_path / "m", tiny_config("deepseek_v3"), seed=1)
    ckpt = Checkpoint.open(path)
    s, layers = shape_of(ckpt.config, "mla", element=4), ckpt.config.layers
    wire = WireBytes([spec.attention for spec in layers], ckpt.config.hidden)
    assert (s.q, s.kv, s.a) == (wire.layers[0].q, wire.layers[0].kv, wire.layers[0].a)
    assert s.wire_token == wire.attention(1) and s.head_shares == (1,)
    a = layers[0].attention
    assert s.kv_token == len(layers) * 4 * (a.kv_rank + a.rope_dim)
    assert s.kv_proj == 4 * ckpt.config.hidden * (a.kv_rank + a.rope_dim)
    experts = sum(ckpt.expert_bytes(m) * ckpt.config.experts for m in ckpt.config.moe_layers)
    vectors = sum(
        4 * shape[0] for spec in layers for _, shape in layer_roles(ckpt.config, spec)
        if len(shape) == 1
    )
    held = ckpt.non_expert_bytes + experts - vectors - 4 * ckpt.config.hidden
    assert s.weights == pytest.approx(held, abs=1)
    # A query is as wide as a cached row, a value is kv_rank of it: two operations for each.
    least = 2 * 100 * a.heads * (2 * a.kv_rank + a.rope_dim) * len(layers)
    slow = replace(H20, flops=1.0)
    assert attention_s(s, 100, slow, 1) == pytest.approx(least)
