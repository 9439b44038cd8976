"""Missed experts computed by the processor beside a discrete GPU, as Fiddler (2402.07033) and
KTransformers do (GRID-4).

Lock-step, a layer at a time, all requests together: no control plane, and no memory of what was
missed, since what is computed elsewhere need not come. At each layer the GPU computes the experts
that it holds; the processor computes missed ones one after another at its own memory bandwidth or
arithmetic; beside that the channel brings the others. When all three have ended the GPU computes
what came, and the attention up to the next router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from reference.simulator.costs import Roofline, Work
from reference.vocab.actions import Compute
from reference.vocab.errors import BadInput
from reference.vocab.ids import ENTRY


def popular(routes: Sequence[np.ndarray], experts: int, slots: int) -> list[set[int]]:
    """The most used experts of each layer in `routes`, each uint [T, layers, K], as many as its
    even share of `slots` (the first layers take the rest); of equals the lowest."""
    layers = routes[0].shape[1]
    out = []
    for i in range(layers):
        counts = sum(np.bincount(r[:, i].reshape(-1), minlength=experts) for r in routes)
        order = np.argsort(-np.asarray(counts), kind="stable")
        out.append({int(e) for e in order[: slots // layers + (i < slots % layers)]})
    return out


def computing(costs: Roofline, rows: int) -> float:
    """Seconds in which the processor computes one expert for `rows` rows."""
    host = costs.platform.host
    if host is None:
        raise BadInput(f"platform {costs.platform.name}: no [host]; a discrete GPU expected")
    flops = 2.0 * costs.model.expert_params * rows
    return max(costs.expert_bytes / host.bytes_per_s, flops / host.flops_per_s)


def layer_seconds(
    costs: Roofline, layer: int, tokens: Sequence[Sequence[int]], resident: set[int],
    spans: Sequence[tuple[int, int]], bring: bool,
) -> tuple[float, float, float, int]:  # fmt: skip
    """(seconds of the layer, of the processor, of the channel, experts brought) for the experts of
    each request's token. With `bring`, a missed expert goes, those with most rows first, to
    whichever of the processor and the channel has it done sooner; without, to the processor."""
    rows = Counter(e for named in tokens for e in named)
    here = [e for e in rows if e in resident]
    missed = sorted((e for e in rows if e not in resident), key=lambda e: (-rows[e], e))
    if not missed:
        return costs.step(_reads(layer, len(here)), Work(spans, _pairs(rows, here))), 0.0, 0.0, 0
    move = costs.transfer(costs.expert_bytes)
    told = costs.delay(costs.expert_bytes) - move
    cpu = channel = 0.0
    brought: list[int] = []
    for e in missed:
        own = cpu + computing(costs, rows[e])
        on_gpu = channel + move + told + costs.step(_reads(layer, 1), Work((), rows[e]))
        if bring and on_gpu < own:
            channel += move
            brought.append(e)
        else:
            cpu = own
    first = costs.step(_reads(layer, len(here)), Work((), _pairs(rows, here))) if here else 0.0
    come = channel + told if brought else 0.0
    last = costs.step(_reads(layer, len(brought)), Work(spans, _pairs(rows, brought)))
    return max(cpu, first, come) + last, cpu, channel, len(brought)


def _pairs(rows: Counter[int], experts: Sequence[int]) -> int:
    return sum(rows[e] for e in experts)


def _reads(layer: int, distinct: int) -> Compute:
    """A step as costs see it: a layer, and so many experts."""
    return Compute(0, layer, (), tuple([(0, 0)] * distinct))


def simulate_cpu_misses(
    costs: Roofline, layers: tuple[int, ...], routes: Sequence[np.ndarray],
    resident: list[set[int]], *, bring: bool,
) -> dict[str, Any]:  # fmt: skip
    """Figures of requests that decode together, routes uint [T, layers, K] each: tokens_per_s,
    fetches_per_token, busy shares of processor and channel, seconds, tokens."""
    seconds = cpu = channel = 0.0
    brought = 0
    tokens = routes[0].shape[0]
    lists = [r.tolist() for r in routes]
    for t in range(tokens):
        spans = [(t, t + 1)] * len(routes)
        seconds += costs.step(_reads(ENTRY, 0), Work(spans, 0))
        for i, layer in enumerate(layers):
            took = layer_seconds(costs, layer, [r[t][i] for r in lists], resident[i], spans, bring)
            seconds, cpu, channel = seconds + took[0], cpu + took[1], channel + took[2]
            brought += took[3]
    done = tokens * len(routes)
    return {
        "tokens_per_s": done / seconds, "seconds": seconds, "tokens": done,
        "fetches_per_token": brought / done, "processor_busy": cpu / seconds,
        "channel_busy": channel / seconds,
    }  # fmt: skip
