"""Hit rates of the eviction policies in lock-step, beside Belady's and published ones.

    python -m perf.hit_rates [--tokens 300] [--json OUT]

Routes come from the synthetic router (for Qwen3-30B-A3B and DeepSeek-V2-Lite) and, with --traces
FOLDER, from the route traces that github.com/Helldez/BigMoeOnEdge publishes. The published figures
beside them are other people's routes, other prompts: what has to agree is the size of things.
`belady`: a unit's experts are resident together; `belady-apart`: used one by one (BOUND-6).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf.record import write_result
from reference.files.routing_trace import read_trace
from reference.simulator.hits import Hits, belady_hits, lockstep_hits
from reference.simulator.synthetic import SyntheticRouter, deepseek_v2_lite_shares, qwen3_shares
from reference.vocab.options import EVICTIONS

SEED = 1


@dataclass(frozen=True)
class Row:
    """A row of a published table. own: slots a layer; requests in lock-step; published: by policy,
    the hit rate, (hit, full hit), or -(loads / asked)."""

    source: str
    model: str
    own: int
    requests: int
    published: dict[str, Any]


LOADS = "moe-cache-eval, arXiv 2608.07911: loads / asked, Qwen3, 40 % cached"
RATES = "moe-trace (github): hit rate, Qwen3-30B-A3B, one request"
FULL = "replay of 260 recorded prompts of DeepSeek-V2-Lite: hit, full hit"
ROWS = (
    Row(RATES, "qwen3", 8, 1, {"lfu": 0.425, "per-layer": 0.424, "belady-apart": 0.608}),
    Row(RATES, "qwen3", 16, 1, {"lfu": 0.615, "per-layer": 0.647, "belady-apart": 0.784}),
    Row(RATES, "qwen3", 32, 1, {"lfu": 0.795, "per-layer": 0.810, "belady-apart": 0.888}),
    Row(RATES, "qwen3", 64, 1, {"lfu": 0.917, "per-layer": 0.918, "belady-apart": 0.929}),
    Row(LOADS, "qwen3", 51, 2, {"lfru": -0.1284, "belady-apart": -0.0637}),
    Row(LOADS, "qwen3", 51, 4, {"lfru": -0.1626, "belady-apart": -0.0843}),
    Row(LOADS, "qwen3", 51, 8, {"per-layer": -0.193, "lfru": -0.1801, "lfu": -0.1914,
                                "belady-apart": -0.0993}),
    Row(LOADS, "qwen3", 51, 16, {"lfru": -0.1664, "belady-apart": -0.1132}),
    Row(FULL, "deepseek-v2-lite", 16, 1, {"per-layer": (0.452, 0.032),
                                          "belady-apart": (0.684, 0.162)}),
    Row(FULL, "deepseek-v2-lite", 32, 1, {"per-layer": (0.692, 0.171), "lfu": (0.620, 0.088),
                                          "belady-apart": (0.867, 0.478)}),
    Row(FULL, "deepseek-v2-lite", 48, 1, {"per-layer": (0.882, 0.517),
                                          "belady-apart": (0.959, 0.794)}),
    Row(FULL, "deepseek-v2-lite", 32, 8, {"per-layer": (0.576, 0.058),
                                          "belady-apart": (0.769, 0.251)}),
    Row(FULL, "deepseek-v2-lite", 48, 8, {"per-layer": (0.815, 0.321),
                                          "belady-apart": (0.923, 0.638)}),
    Row(FULL, "deepseek-v2-lite", 56, 8, {"per-layer": (0.916, 0.603)}),
    Row(FULL, "deepseek-v2-lite", 48, 16, {"per-layer": (0.801, 0.284),
                                           "belady-apart": (0.899, 0.549)}),
)  # fmt: skip
TRACED = "BigMoeOnEdge's own traces, one prompt each: hit, full hit"
TRACE_ROWS = (
    Row(TRACED, "qwen", 16, 1, {"per-layer": (0.617, 0.124)}),
    Row(TRACED, "qwen", 32, 1, {"per-layer": (0.831, 0.447)}),
    Row(TRACED, "qwen", 48, 1, {"per-layer": (0.930, 0.708)}),
    Row(TRACED, "qwen", 64, 1, {"per-layer": (0.958, 0.805)}),
    Row(TRACED, "gemma", 32, 1, {"per-layer": (0.796, 0.339)}),
    Row(TRACED, "gptoss", 8, 1, {"per-layer": (0.602, 0.400)}),
    Row(TRACED, "gptoss", 16, 1, {"per-layer": (0.742, 0.589)}),
    Row(TRACED, "gptoss", 32, 1, {"per-layer": (0.850, 0.738)}),
)
MODELS = {"qwen3": (qwen3_shares, 128, 8), "deepseek-v2-lite": (deepseek_v2_lite_shares, 64, 6)}


def synthetic(model: str, requests: int, tokens: int) -> tuple[list[np.ndarray], int]:
    """(routes of each request, experts): each request's place is taken by another at half time."""
    shares, experts, k = MODELS[model]
    router = SyntheticRouter(shares(), experts, k, SEED)
    half = -(-tokens // 2)
    places = [(router.request(2 * r, half), router.request(2 * r + 1, tokens - half))
              for r in range(requests)]  # fmt: skip
    return [np.concatenate(place) for place in places], experts


def measure(
    routes: Sequence[np.ndarray], experts: int, own: int, skip: int, each: int = 0
) -> Iterator[Any]:
    """(policy, Hits) of every shipped policy and of Belady's rule, both ways. each: steps after
    which other requests come."""
    slots = own * routes[0].shape[1]
    for eviction in EVICTIONS:
        yield eviction, lockstep_hits(routes, experts, slots, eviction, skip, each)
    yield "belady", belady_hits(routes, experts, slots, True, skip)
    yield "belady-apart", belady_hits(routes, experts, slots, True, skip, together=False)
    yield "belady-pooled", belady_hits(routes, experts, slots, False, skip)


def told(row: Row, found: dict[str, Hits]) -> dict[str, Any]:
    """A row as JSON, and on the screen."""
    out: dict[str, Any] = {
        "source": row.source, "model": row.model, "slots_a_layer": row.own,
        "requests": row.requests, "published": row.published,
        "found": {name: {"hit": round(h.hit, 4), "full_hit": round(h.full_hit, 4),
                         "loads_of_asked": round(h.load_share, 4)} for name, h in found.items()},
    }  # fmt: skip
    print(f"{row.model}, {row.own} slots a layer, {row.requests} requests")
    for name, h in found.items():
        beside = row.published.get(name, "")
        print(f"  {name:13s} hit {h.hit:.3f}  full {h.full_hit:.3f}  loads/asked "
              f"{h.load_share:.4f}  {beside}", flush=True)  # fmt: skip
    return out


def main() -> None:
    """Print every row and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=300, help="decode steps of a row")
    parser.add_argument("--traces", type=Path, help="folder of *.route.csv")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    args = parser.parse_args()
    began, rows = time.perf_counter(), []
    for row in ROWS:
        tokens = max(40, args.tokens // row.requests**0.5)
        routes, experts = synthetic(row.model, row.requests, int(tokens))
        each = -(-len(routes[0]) // 2)
        rows.append(told(row, dict(measure(routes, experts, row.own, 20, each))))
    for row in TRACE_ROWS if args.traces else ():
        trace = read_trace(args.traces / f"{row.model}.route.csv")
        (one,) = trace.requests
        decoded = one.topk[one.prompt_len :]
        rows.append(told(row, dict(measure([decoded], trace.experts, row.own, skip=0))))
    figures = {"seed": SEED, "tokens": args.tokens, "rows": rows,
               "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip
    write_result("hit-rates", figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
