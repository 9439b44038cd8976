"""What guessing is worth: the predictors on a real model, what asking a router costs, and Qwen3.

    python -m perf.prefetch MODEL [--tokens 16] [--rounds 300]

The predictors run on MODEL with the NumPy engine in virtual time, so that nothing but the guesses
differs: half of the experts' memory, one and eight texts, after eight others that fill the cache
and teach those that learn; reading an expert takes as long as told, computing is the same. Tokens
must be the same. What asking the next router costs is measured on the JAX model. The last part is
Qwen3-30B-A3B's shape with its synthetic routes on a Jetson AGX Thor.
Writes perf/results/prefetch-DATE.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from jax_impl.app import builtin, demo_text
from jax_impl.app.text import Text
from jax_impl.kv import Table
from jax_impl.model import JaxModel
from perf.record import write_result
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.prediction.accuracy import Counts
from reference.simulator import models, platforms
from reference.simulator.costs import CostModel
from reference.simulator.run import control, routes_for, simulate
from reference.vocab.options import PREFETCHERS

Figures = dict[str, Any]

COSTS = CostModel(depth=2, step_s=150e-6, row_s=5e-6, expert_s=20e-6)
FETCH_S = (50e-6, 100e-6, 200e-6, 500e-6)
"""To read one expert; a step of eight requests takes about half a millisecond."""
SIZES: Figures = {"chunk": 16, "max_running": 16, "max_rows": 16, "kv_tokens": 16 * 64,
                  "ignore_eos": True}  # fmt: skip
SCHEDULERS = ("lockstep", "interleaved")
CROWDS = (1, 8)
SHARES = (0.25, 0.5, 0.75)
SIMULATED = ("", "next-gate-qwen3", "trace", "layer", "activation", "perfect")


def run(model: Path, fetch_s: float, texts: list[Request], count: int, **options: Any) -> Figures:
    """The first `count` texts after the others: tokens, tokens a virtual second, bytes read, and
    what the predictor was worth."""
    with Checkpoint.open(model) as ckpt:
        costs = replace(COSTS, bytes_per_s=ckpt.expert_bytes() / fetch_s)
    with ReferenceEngine.open(model, memory="50%", costs=costs, **SIZES, **options) as engine:
        for handle in engine.submit_all(texts[max(CROWDS) :]):
            handle.result()
        before = engine.totals()
        handles = engine.submit_all(texts[:count])
        tokens = [list(handle.result().tokens) for handle in handles]
        now = engine.totals()
    seconds = now["seconds"] - before["seconds"]
    told = since(before["prediction"], now["prediction"]) if "prediction" in now else None
    return {
        "tokens": tokens, "tokens_per_s": sum(map(len, tokens)) / seconds, "prediction": told,
        "bytes": now["bytes"] - before["bytes"],
        "channel": (now["channel_s"] - before["channel_s"]) / seconds,
        "compute": (now["compute_s"] - before["compute_s"]) / seconds,
    }  # fmt: skip


def since(before: Figures, now: Figures) -> Figures:
    """The accuracy of what came between two totals."""
    out = {k: now[k] - before[k] for k in ("routed", "predicted", "guesses", "used", "failed")}
    for part in ("overall", "absent"):
        counts = Counts(*[now[part][k] - before[part][k] for k in ("predicted", "named", "right")])
        out[part] = counts.as_dict()
    return out


def share(value: float | None) -> str:
    """A share for people."""
    return "-" if value is None else f"{value:.0%}"


def readable(model: Path, texts: list[Request]) -> list[Figures]:
    """Every predictor under each scheduler, time to read an expert, and number of texts."""
    rows = []
    for fetch_s, scheduler, crowd in product(FETCH_S, SCHEDULERS, CROWDS):
        none: Figures = {}
        for p in PREFETCHERS:
            got = run(model, fetch_s, texts, crowd, scheduler=scheduler, prefetch=p)
            none = none or got
            if got["tokens"] != none["tokens"]:
                raise SystemExit(f"{p}: other tokens than without a predictor")
            row = {"fetch_s": fetch_s, "scheduler": scheduler, "requests": crowd, "predictor": p,
                   "over_none": got["tokens_per_s"] / none["tokens_per_s"],
                   **{k: v for k, v in got.items() if k != "tokens"}}  # fmt: skip
            rows.append(row)
            text = f"{fetch_s * 1e3:g} ms, {scheduler}, {crowd} requests, {p}: "
            text += f"{got['tokens_per_s']:.0f} tokens/s, {row['over_none']:.3f} of none"
            if told := got["prediction"]:
                text += (f"; recall {share(told['overall']['recall'])}, of absent "
                         f"{share(told['absent']['recall'])} (precision "
                         f"{share(told['absent']['precision'])}); {told['used']} of "
                         f"{told['guesses']} guesses used")  # fmt: skip
            print(text, flush=True)
    return rows


def cost(model: Path, rounds: int) -> Figures:
    """What asking the next router adds to a stage (the way from one layer's experts to the next
    router) of one and of eight rows: the least of many, for other programs run here too."""
    rows = []
    with Checkpoint.open(model) as ckpt:
        made = {
            n: JaxModel(ckpt, rows=64, kv_blocks=64, max_len=1024, ahead=n)
            for n in (0, ckpt.config.top_k)
        }
        for each in made.values():
            each.compile()
        for count in (1, 8):
            least = dict.fromkeys(made, float("inf"))
            for _ in range(rounds):
                for n, each in made.items():
                    least[n] = min(least[n], stage_s(each, ckpt.config.moe_layers[0], count))
            without, asking = least.values()
            rows.append({"rows": count, "without_s": without, "asking_s": asking})
            print(f"a stage of {count} rows: {without * 1e6:.0f} us, asking {asking * 1e6:.0f} us")
    return {"rounds": rounds, "stages": rows}


def stage_s(model: JaxModel, layer: int, rows: int) -> float:
    """Seconds of one stage on so many rows; whatever the bank holds will do."""
    tables = [Table(tuple([i] for _ in model.kinds), 8) for i in range(rows)]
    begun = time.perf_counter()
    model.advance(layer, list(range(rows)), [3] * rows, tables, [False] * rows).get()
    return time.perf_counter() - begun


def virtual(tokens: int) -> list[Figures]:
    """Qwen3-30B-A3B on a Jetson AGX Thor, per-layer LRU."""
    model, platform = models.load("qwen3-30b-a3b"), platforms.load("jetson-thor")
    routes, rows = routes_for(model), []
    for crowd in CROWDS:
        for cache in SHARES:
            for scheduler in SCHEDULERS:
                none = 0.0
                for name in SIMULATED:
                    options = control(model, cache, crowd, grouping=scheduler,
                                      prefetch=model.top_k if name else 0)  # fmt: skip
                    got = simulate(platform, model, routes, options, requests=crowd,
                                   tokens=tokens, warm_up=48, predict=name)  # fmt: skip
                    none = none or got.tokens_per_s
                    row = {"requests": crowd, "cache_share": cache, "scheduler": scheduler,
                           "predictor": name or "none", "tokens_per_s": got.tokens_per_s,
                           "over_none": got.tokens_per_s / none, "channel": got.channel_busy,
                           "compute": got.compute_busy, "fetches": got.fetches_per_token,
                           "prediction": got.prediction}  # fmt: skip
                    rows.append(row)
                    print(f"virtual: {crowd} requests, {cache:.0%}, {scheduler}, "
                          f"{row['predictor']}: {got.tokens_per_s:.1f} tokens/s, "
                          f"{row['over_none']:.3f} of none", flush=True)  # fmt: skip
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=builtin.model)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    with Checkpoint.open(args.model) as ckpt:
        vocab = ckpt.config.vocab
    texts = demo_text.requests(Text(args.model), vocab, 2 * max(CROWDS), args.tokens)
    write_result("prefetch", {
        "model": builtin.name_of(args.model),
        "readable": readable(args.model, texts),
        "next_gate_cost": cost(args.model, args.rounds),
        "qwen3_on_thor": virtual(6 * args.tokens),
    })  # fmt: skip


if __name__ == "__main__":
    main()
