"""Rooflines of the two kinds of work, and what follows (LAMINA-14 to LAMINA-18). Seconds, bytes.

    slices     max(2 N B / (a F), (W + activations) / (a BW))     every layer of a step together
    attention  B l (KV bytes a token) / (b BW)
    wire       (q + kv + a) B a layer

`Efficiency` scales the peaks; 1 everywhere is the ideal machine. It is told with every result that
uses another.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.control.attention_rotation import Steady
from reference.simulator.lamina.hardware import Device, Network
from reference.simulator.lamina.workloads import Shape


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that are reached: FLOP/s, memory bandwidth of weights, of KV."""

    flops: float = 1.0
    weights: float = 1.0
    cache: float = 1.0


IDEAL = Efficiency()


def model_s(s: Shape, batch: float, d: Device, count: int, eff: Efficiency = IDEAL) -> float:
    """All slices of one step of `batch` tokens on `count` devices."""
    compute = s.flops_token * batch / (count * d.flops * eff.flops)
    moved = s.read(batch) + 2 * s.element * batch * s.hidden
    return max(compute, moved / (count * d.bandwidth * eff.weights))


def attention_s(
    s: Shape, tokens: float, d: Device, count: int, eff: Efficiency = IDEAL
) -> float:  # fmt: skip
    """All attentions of one step; `tokens`: cached tokens of the whole batch."""
    read = tokens * s.kv_token / (count * d.bandwidth * eff.cache)
    # A query times a key and a weight times a value, two operations each: 4 d where both are d.
    flops = 2 * tokens * ((s.q + s.a) / s.element) * s.layers / (count * d.flops * eff.flops)
    return max(read, flops)


def wire_s(s: Shape, batch: float, net: Network, ports: int) -> float:
    """A round trip a layer, and the bytes of both directions, one batch."""
    return s.layers * net.rtt + batch * s.wire_token / (net.rate * ports)


def least_bandwidth(
    s: Shape, batch: float, context: float, slowdown: float, compute: Device, memory: Device,
    a: int = 1, b: int = 1,
) -> float:  # fmt: skip
    """LAMINA-14: bytes/s between the pools so that, nothing overlapped and without latency, a
    step takes (1 + slowdown) times what it takes with a free network."""
    free = model_s(s, batch, compute, a) + attention_s(s, batch * context, memory, b)
    return batch * s.wire_token / (slowdown * free)


def projections_s(s: Shape, batch: float, d: Device, count: int) -> float:
    """The K and V projections of one layer."""
    flops = 2 * batch * s.kv_proj / s.element / (count * d.flops)
    return max(flops, s.kv_proj / (count * d.bandwidth))


@dataclass(frozen=True)
class LayerTimes:
    """One layer of one batch, in order: queries at `query`, slice ends at `slice`, seconds."""

    plain: float
    overlapped: float

    @property
    def saving(self) -> float:
        """Share of the plain time that sending queries first saves (LAMINA-17)."""
        return 1 - self.overlapped / self.plain


def layer_s(
    s: Shape, batch: float, context: float, compute: Device, a: int, memory: Device, b: int,
    net: Network, ports: int = 1,
) -> LayerTimes:  # fmt: skip
    """A layer's round trip without and with the queries sent first."""
    t_m = model_s(s, batch, compute, a) / s.layers
    t_a = attention_s(s, batch * context, memory, b) / s.layers
    t_kv = projections_s(s, batch, compute, a)
    beta, tau = net.rate * ports, net.rtt / 2
    q, kv, back = batch * s.q / beta, batch * s.kv / beta, batch * s.a / beta
    plain = t_m + q + kv + tau + t_a + back + tau
    asked = t_m - t_kv
    arrived_q = asked + q + tau
    arrived_kv = max(t_m, asked + q) + kv + tau
    overlapped = max(arrived_q + t_a, arrived_kv) + back + tau
    return LayerTimes(plain, overlapped)


@dataclass(frozen=True)
class Served:
    """A configuration in steady state with its memory full."""

    batch: float
    token_s: float
    tokens_per_s: float
    price: float
    model_s: float
    attention_s: float
    wire_s: float

    @property
    def tokens_per_dollar(self) -> float:
        return self.tokens_per_s * 3600 / self.price if self.price else float("inf")


def monolithic(
    s: Shape, context: float, d: Device, count: int, usable: float = 0.9, eff: Efficiency = IDEAL
) -> Served | None:
    """Weights and KV on the same `count` devices; None where the weights leave no room."""
    room = count * d.memory * usable - s.weights
    batch = room / (context * s.kv_token)
    if room <= 0:
        return None
    m = model_s(s, batch, d, count, eff)
    t = attention_s(s, batch * context, d, count, eff)
    return Served(batch, m + t, batch / (m + t), count * d.price, m, t, 0.0)


def pooled(
    s: Shape, context: float, compute: Device, a: int, memory: Device, b: int, net: Network,
    batches: int = 2, usable: float = 0.9, eff: Efficiency = IDEAL, batch: float | None = None,
) -> Served | None:  # fmt: skip
    """The two pools with the memory pool full (or `batch` requests in all): n - 1 replicas of `a`
    compute devices, `b` memory devices. None where the weights do not fit a replica.

    The wire's bytes and round trips count once for each batch (t_net of LAMINA-6): with other
    batches to work on meanwhile they cost only what exceeds that work.
    """
    if a * compute.memory * usable < s.weights:
        return None
    total = b * memory.memory * usable / (context * s.kv_token) if batch is None else batch
    each = total / batches
    m = model_s(s, each, compute, a, eff)
    t = attention_s(s, each * context, memory, b, eff)
    w = wire_s(s, each, net, a)
    steady = Steady(batches, m / s.layers, t / s.layers, w / s.layers)
    token = steady.token_s(s.layers)
    price = a * max(1, batches - 1) * compute.price + b * memory.price
    return Served(total, token, total / token, price, m, t, w)


def batch_ratio(
    s: Shape, monolithic_on: Device, count: int, memory: Device, b: int, usable: float
) -> float:
    """LAMINA-15: resident requests of the pools over those of the monolithic system, whatever
    their length: b C_m u / (n C_c u - W)."""
    room = count * monolithic_on.memory * usable - s.weights
    return b * memory.memory * usable / room
