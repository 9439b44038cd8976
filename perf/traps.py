"""What can make a comparison of offloading schedulers say anything, shown on one cell.

    python -m perf.traps [--platform jetson-thor] [--model qwen3-30b-a3b] [--cache 0.5]
        [--requests 8]

Cache scope: the same lock-step with one LRU over all layers and with one a layer. Overlap: blocking
and overlapped; (C + F) / max(C, F) is all that it can give. Replay: misses of a trace when all that
a step asks of a layer has to be there together, and when its experts are taken one by one. Reading:
the same with page faults of 128 KiB, one at a time.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.grid_cells import Cell, format_of
from perf.grid_run import lately, run_scheduler
from reference.simulator import models, platforms
from reference.simulator.costs import Roofline
from reference.simulator.hits import belady_hits, lockstep_hits
from reference.simulator.schedulers import preset


def one_by_one(routes: Sequence[np.ndarray], slots: int, skip: int) -> float:
    """Misses a choice of an LRU of `slots` a layer that takes a step's experts one after another,
    each free to go as soon as the next one comes. routes: uint [T, layers, K] a request."""
    tokens, layers, k = routes[0].shape
    missed = 0
    for layer in range(layers):
        held: OrderedDict[int, None] = OrderedDict()
        for t in range(tokens):
            for r in routes:
                for e in r[t, layer].tolist():
                    missed += e not in held and t >= skip
                    held[e] = None
                    held.move_to_end(e)
                    if len(held) > slots:
                        held.popitem(last=False)
    return missed / (len(routes) * layers * k * (tokens - skip))


def figures(cell: Cell) -> dict[str, Any]:
    """All of it for one cell."""
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    costs = Roofline(platform, model, None, format_of(platform, model))
    requests = lately(cell.model, cell.requests)
    found = {}
    names = ["on-demand-blocking-global", "on-demand-blocking-layer", "on-demand-overlapped-global",
             "on-demand-overlapped-layer", "bevy", "ours-alone"]  # fmt: skip
    if platform.host is None:
        names.append("memory-mapped")
    for name in names:
        found[name] = run_scheduler(cell, preset(name), costs, requests)
    rates = {name: f["tokens_per_s"] for name, f in found.items()}
    alone = found["on-demand-blocking-layer"]
    compute, channel = alone["compute_busy"], alone["channel_busy"]
    layers, skip = len(model.moe_layers), 16
    each = round(cell.cache_share * model.experts)
    routes = [requests.request(r, 48) for r in range(cell.requests)]
    together = lockstep_hits(routes, model.experts, each * layers, "per-layer", skip)
    whole = lockstep_hits(routes, model.experts, each * layers, "global", skip)
    belady = belady_hits(routes, model.experts, each * layers, skip=skip)
    apart = one_by_one(routes, each, skip)
    return cell.as_dict() | {
        "tokens_per_s": rates,
        "ours-alone over on-demand, by the baseline's cache and reading": {
            name: rates["ours-alone"] / rate for name, rate in rates.items() if name != "ours-alone"
        },
        "overlap": {
            "gained": rates["on-demand-overlapped-layer"] / alone["tokens_per_s"],
            "most that it can give": (compute + channel) / max(compute, channel),
        },
        "misses a choice, one LRU a layer": {
            "together": together.load_share, "one by one": apart,
            "one by one over together": apart / together.load_share,
            "Belady, together": belady.load_share,
        },
        "misses a choice, one LRU over all layers": whole.load_share,
        "visits that lack nothing, one LRU a layer": together.full_hit,
        "choices that are there, one LRU a layer": together.hit,
    }  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m perf.traps", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="jetson-thor")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--cache", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=8)
    args = parser.parse_args()
    found = figures(Cell(args.platform, args.model, args.cache, args.requests))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
