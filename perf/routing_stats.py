"""Statistics of routes: how much tokens and requests share, how skewed the experts are.

    python -m perf.routing_stats MODEL [--requests 16] [--tokens 48]

Runs requests of random token ids with all experts in memory and measures what their routers chose
while they decoded; published figures of real models are in docs/bench.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_impl.app import builtin
from jax_impl.app.bench import random_requests
from jax_impl.engine import JaxEngine

LAGS = (1, 2, 4, 8, 32)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Mean share of the experts of a [..., K] that are in b [..., K] as well."""
    return float((a[..., :, None] == b[..., None, :]).any(-1).mean())


def statistics(topk: Sequence[np.ndarray], experts: int) -> dict[str, Any]:
    """Of decoding tokens' experts, one array [T, L, K] a request of equal T.

    lag d      share of a token's experts that the d-th token after it uses again, same layer
    requests   the same for two requests at the same step
    distinct   different experts of a layer that so many requests use in a step
    top        share of the uses that the most used quarter of a layer's experts takes
    """
    all_ = np.stack(topk)  # [R, T, L, K]
    requests, tokens, layers, k = all_.shape
    found: dict[str, Any] = {
        f"lag {d}": overlap(all_[:, d:], all_[:, :-d]) for d in LAGS if d < tokens
    }
    found["requests"] = overlap(all_[:-1], all_[1:])
    found["distinct"] = {
        str(n): float(np.mean([len(np.unique(all_[:n, t, la])) for t in range(tokens)
                               for la in range(layers)]))
        for n in (1, 2, 4, 8, 16) if n <= requests
    }  # fmt: skip
    counts = np.stack([np.bincount(all_[:, :, la].ravel(), minlength=experts)
                       for la in range(layers)])  # fmt: skip
    ordered = np.sort(counts, axis=1)[:, ::-1]
    found["top quarter"] = float((ordered[:, : experts // 4].sum(1) / ordered.sum(1)).mean())
    one = np.stack([[np.sort(np.bincount(r[:, la].ravel(), minlength=experts))[::-1]
                     for la in range(layers)] for r in all_])  # fmt: skip
    found["top quarter of a request"] = float((one[..., : experts // 4].sum(-1) / one.sum(-1))
                                              .mean())  # fmt: skip
    found["chance"] = k / experts
    return found


def loops(tokens: Sequence[int], longest: int = 8) -> bool:
    """The text ends in a loop: its second half repeats with a period of at most `longest`."""
    half = list(tokens)[len(tokens) // 2 :]
    return any(half[p:] == half[:-p] for p in range(1, min(longest, len(half) // 2) + 1))


def routes(
    model: Path, count: int, tokens: int, prompt: int = 24, **options: Any
) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
    """([T, L, K] of each request's decoding tokens, the tokens) of a run with everything in
    memory."""
    with JaxEngine.open(model, memory="100%", keep_log=True, ignore_eos=True, **options) as engine:
        config = engine.config
        asked = random_requests(config.vocab, count, prompt, tokens + 1)
        results = [h.result() for h in engine.submit_all(asked)]
        records = engine.records[1:]
    place = {layer: i for i, layer in enumerate(config.moe_layers)}
    found: dict[int, list[list[list[int]]]] = {}
    for record in records:
        if record.get("event") == "Routed" and len(record["experts"]) == 1:
            request, _, layer = record["visit"]
            rows = found.setdefault(request, [])
            if place[layer] == 0:
                rows.append([])
            rows[-1].append(record["experts"][0])
    short = min(len(rows) for rows in found.values())
    return [np.array(rows[:short]) for rows in found.values()], [r.tokens for r in results]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=builtin.model)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--compute", default="bf16")
    args = parser.parse_args()
    topk, texts = routes(args.model, args.requests, args.tokens, compute=args.compute)
    experts = int(max(t.max() for t in topk)) + 1
    found = statistics(topk, experts) | {
        "texts in a loop": sum(map(loops, texts)),
        "different tokens": len({t for text in texts for t in text}),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
