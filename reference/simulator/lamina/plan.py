"""Pool sizes for a model, a load, a limit on the time between tokens and a budget (LAMINA-22)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reference.control.attention_rotation import replicas_of
from reference.simulator.lamina.costs import IDEAL, Efficiency, Served, monolithic, pooled
from reference.simulator.lamina.hardware import Device, Network
from reference.simulator.lamina.pipeline import ingress_needed, ingress_room
from reference.simulator.lamina.workloads import Lengths, Shape


@dataclass(frozen=True)
class Limits:
    """token_s: most time between tokens;  price: most dollars an hour;  a, b: most devices."""

    token_s: float = float("inf")
    price: float = float("inf")
    compute: int = 8
    memory: int = 16
    batches: int = 4


@dataclass(frozen=True)
class Choice:
    """One configuration. `compute` counts the devices of all replicas; batches 0: monolithic.

    prefill_fits  the pool's ports can also take in the prompts' KV at this rate
    limited_by    weights (reading them), compute, cache (reading it) or wire
    """

    compute: int
    memory: int
    batches: int
    partition: str
    served: Served
    prefill_fits: bool
    limited_by: str


def limited_by(s: Shape, served: Served, d: Device, count: int, batches: int) -> str:
    """What the time between tokens is made of most."""
    each = served.batch / max(1, batches)
    compute = s.flops_token * each / (count * d.flops)
    turn = batches * served.model_s / replicas_of(batches) if batches else served.model_s
    parts = {
        "compute" if compute >= served.model_s * 0.999 else "weights": turn,
        "cache": max(1, batches) * served.attention_s,
    }
    if served.model_s + served.attention_s + served.wire_s > max(parts.values()):
        parts["wire"] = served.wire_s if batches else 0.0
        parts["cache"] = served.attention_s
    return max(parts, key=lambda k: parts[k])


def choices(
    s: Shape, load: Lengths, compute: Device, memory: Device, net: Network, limits: Limits,
    usable: float = 0.9, eff: Efficiency = IDEAL, partition: str = "head",
) -> Iterable[Choice]:  # fmt: skip
    """Every configuration of the two pools within the limits that can hold one request."""
    for a in range(1, limits.compute + 1):
        for b in range(1, limits.memory + 1):
            if partition == "head" and b not in s.head_shares:
                continue
            for n in range(1, limits.batches + 1):
                if a * replicas_of(n) > limits.compute:
                    continue
                found = _within(s, load, compute, a, memory, b, net, n, limits, usable, eff)
                if found is None:
                    continue
                need = ingress_needed(found.tokens_per_s, load.prompt, load.output, s.kv_token)
                to_memory = (s.q + s.kv) * s.layers
                room = ingress_room(found.tokens_per_s, to_memory, net.rate, b)
                yield Choice(
                    a * replicas_of(n), b, n, partition, found, need <= room,
                    limited_by(s, found, compute, a, n),
                )  # fmt: skip


def _within(
    s: Shape, load: Lengths, compute: Device, a: int, memory: Device, b: int, net: Network,
    n: int, limits: Limits, usable: float, eff: Efficiency,
) -> Served | None:  # fmt: skip
    """The largest batch within the limit on token time; the memory's, if that keeps it."""

    def with_batch(batch: float | None) -> Served | None:
        return pooled(s, load.context, compute, a, memory, b, net, n, usable, eff, batch)

    full = with_batch(None)
    if full is None or full.price > limits.price or full.batch < n:
        return None
    if full.token_s <= limits.token_s:
        return full
    low, high = float(n), full.batch
    least = with_batch(low)
    if least is None or least.token_s > limits.token_s:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        tried = with_batch(middle)
        assert tried is not None
        low, high = (middle, high) if tried.token_s <= limits.token_s else (low, middle)
    return with_batch(low)


def monolithic_choices(
    s: Shape, load: Lengths, d: Device, limits: Limits, usable: float = 0.9,
    eff: Efficiency = IDEAL,
) -> Iterable[Choice]:  # fmt: skip
    """The same weights and KV on 1, 2, 4, ... devices of one kind, for comparison."""
    count = 1
    while count <= limits.compute:
        served = monolithic(s, load.context, d, count, usable, eff)
        if served is not None and served.batch >= 1 and served.price <= limits.price:
            if served.token_s <= limits.token_s:
                limit = limited_by(s, served, d, count, 0)
                yield Choice(count, 0, 0, "none", served, True, limit)
        count *= 2


def best(found: Iterable[Choice], by: str = "dollar") -> list[Choice]:
    """Best first: tokens a dollar ("dollar") or a second ("rate"); equals: the cheaper one."""
    key = {
        "dollar": lambda c: (-c.served.tokens_per_dollar, c.served.price),
        "rate": lambda c: (-c.served.tokens_per_s, c.served.price),
    }[by]
    return sorted(found, key=key)
