"""What the paper tells, computed again: one function a claim, plain rows out.

Equal-cost pairs of the paper: 33B on (1 H100, 2 H20) against 2 H100; 65B and 70B on (2, 4) against
4 H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference.control.attention_rotation import Steady
from reference.simulator.lamina.costs import (
    IDEAL,
    Efficiency,
    Served,
    attention_s,
    batch_ratio,
    layer_s,
    least_bandwidth,
    model_s,
    monolithic,
    pooled,
    wire_s,
)
from reference.simulator.lamina.hardware import DEVICES, NETWORKS, Device, Network
from reference.simulator.lamina.serving import Outcome, serve
from reference.simulator.lamina.workloads import MODELS, TRACES

PAIRS = {"33B": (1, 2, 2), "65B": (2, 4, 4), "70B": (2, 4, 4)}
"""Model: (compute devices, memory devices, devices of the monolithic system)."""
CELLS = (
    ("33B", "azure-conv"), ("33B", "kimi-conv"), ("65B", "azure-conv"), ("65B", "kimi-ta"),
    ("70B", "azure-conv"), ("70B", "azure-code"), ("70B", "kimi-conv"), ("70B", "kimi-ta"),
)  # fmt: skip

H100, H20 = DEVICES["H100"], DEVICES["H20"]
FHBN, NCCL, FREE = NETWORKS["fhbn"], NETWORKS["nccl"], NETWORKS["ideal"]


@dataclass(frozen=True)
class Cell:
    """One model on one trace: the monolithic system, two batches in flight, one batch alone."""

    model: str
    trace: str
    alone: Served
    two: Served
    single: Served

    @property
    def batch_ratio(self) -> float:
        return self.two.batch / self.alone.batch

    @property
    def throughput_ratio(self) -> float:
        return self.two.tokens_per_s / self.alone.tokens_per_s

    @property
    def single_ratio(self) -> float:
        return self.single.tokens_per_s / self.alone.tokens_per_s

    @property
    def per_dollar_ratio(self) -> float:
        """Throughput ratio at equal money."""
        return self.two.tokens_per_dollar / self.alone.tokens_per_dollar


def cell(
    model: str, trace: str, usable: float = 0.9, eff: Efficiency = IDEAL, net: Network = FHBN
) -> Cell:
    """One row of the table of throughputs (LAMINA-16); both systems with the same efficiency."""
    s, context = MODELS[model], TRACES[trace].context
    a, b, count = PAIRS[model]
    alone = monolithic(s, context, H100, count, usable, eff)
    two = pooled(s, context, H100, a, H20, b, net, 2, usable, eff)
    single = pooled(s, context, H100, a, H20, b, net, 1, usable, eff)
    assert alone is not None and two is not None and single is not None
    return Cell(model, trace, alone, two, single)


def bandwidth_curve(
    model: str = "70B", slowdown: float = 0.2, compute: Device = H100, memory: Device = H20,
    a: int = 1, b: int = 1,
    batches: tuple[int, ...] = (16, 64, 100, 200, 300),
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384),
) -> dict[int, list[float]]:  # fmt: skip
    """GB/s between the pools for each context length and batch."""
    s = MODELS[model]
    return {
        length: [
            least_bandwidth(s, n, length, slowdown, compute, memory, a, b) / 1e9 for n in batches
        ]
        for length in contexts
    }  # fmt: skip


def overlap(model: str, batch: int, context: int = 4096, net: Network = FHBN) -> float:
    """Share of a layer's time that sending queries first saves, with one port."""
    a, b, _ = PAIRS[model]
    return layer_s(MODELS[model], batch, context, H100, a, H20, b, net).saving


def batch_ratios(usable: float) -> dict[str, float]:
    """The closed form for each model."""
    return {
        m: batch_ratio(MODELS[m], H100, count, H20, b, usable) for m, (_, b, count) in PAIRS.items()
    }


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step of one batch alone, part by part, and as observed with overlap."""

    batch: int
    model_s: float
    attention_s: float
    wire_s: float
    observed_s: float


def breakdown(
    model: str, batches: tuple[int, ...], context: int, net: Network = FHBN
) -> list[Breakdown]:
    """Pipelining off, queries first, as in the paper's breakdown of latency."""
    s = MODELS[model]
    a, b, _ = PAIRS[model]
    rows = []
    for n in batches:
        one = pooled(s, context, H100, a, H20, b, net, 1, batch=n)
        assert one is not None
        layer = layer_s(s, n, context, H100, a, H20, b, net, ports=a)
        rows.append(
            Breakdown(n, one.model_s, one.attention_s, one.wire_s, layer.overlapped * s.layers)
        )
    return rows


def latency_floor(model: str, net: Network) -> float:
    """A round trip a layer, with nothing in it."""
    return wire_s(MODELS[model], 0, net, 1)


def sweep(
    model: str, trace: str, compute: tuple[int, ...], memory: tuple[int, ...], batches: int = 2
) -> dict[tuple[int, int], Served | None]:
    """Every pair of pool sizes (numbers that heads cannot be shared out over: requests are)."""
    s, context = MODELS[model], TRACES[trace].context
    return {
        (a, b): pooled(s, context, H100, a, H20, b, FHBN, batches) for a in compute for b in memory
    }


def trace_sweep(
    model: str, requests: Sequence[tuple[int, int]], compute: tuple[int, ...],
    memory: tuple[int, ...], usable: float = 0.9, partition: str = "head",
) -> dict[tuple[int, int], Outcome | None]:  # fmt: skip
    """Every pair of pool sizes with two batches in flight, a trace served from a full queue with
    paged KV. None: the weights do not fit."""
    s = MODELS[model]
    found: dict[tuple[int, int], Outcome | None] = {}
    for a in compute:
        for b in memory:
            if a * H100.memory * usable < s.weights:
                found[a, b] = None
                continue
            room = b * H20.memory * usable / s.kv_token

            def step(n: int, cached: float, even: float, a: int = a, b: int = b) -> float:
                m = model_s(s, n / 2, H100, a)
                t = attention_s(s, cached / 2, H20, b) * even
                return Steady(2, m, t, wire_s(s, n / 2, FHBN, a)).period_s

            found[a, b] = serve(requests, room, step, devices=b, partition=partition)
    return found


def against_few(model: str, context: float, count: int, usable: float = 0.9) -> float | None:
    """Tokens a dollar of the equal-cost pools over those of a monolithic system of only `count`
    devices: the fewer hold the weights, the less room is left for KV, down to none (None). It
    shows how far the choice of the baseline moves a ratio."""
    s = MODELS[model]
    a, b, _ = PAIRS[model]
    alone = monolithic(s, context, H100, count, usable)
    two = pooled(s, context, H100, a, H20, b, FHBN, 2, usable)
    if alone is None or alone.batch < 1 or two is None:
        return None
    return two.tokens_per_dollar / alone.tokens_per_dollar
