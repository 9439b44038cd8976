"""What a warm start gains: the first requests of a run, with and without `--residency`.

    python -m perf.residency MODEL [--rate 60MB] [--rounds 5]

Eight texts make the experts hot; then one other text, and four others together, are run on engines
that start cold and warm, in turn, with reads paced to `--rate`. Tokens and logits must be the same.
Writes perf/results/residency-DATE.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from jax_impl.app import builtin, demo_text
from jax_impl.app.contest import Sameness
from jax_impl.app.demo import OPTIONS
from jax_impl.app.text import Text
from jax_impl.engine import JaxEngine
from jax_impl.readers import ThrottledReader
from perf.record import write_result
from reference.files.budget import parse_size
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request

BUDGETS = ("30%", "60%", "80%")


def run(
    model: Path, memory: str, rate: float, requests: list[Request], warm: Any, same: Sameness
) -> dict[str, float]:
    """One engine, from opening to close; figures of its requests."""
    reader = ThrottledReader(rate)
    with JaxEngine.open(model, memory=memory, io="buffered", reader=reader, warm=warm,
                        **OPTIONS) as engine:
        handles = engine.submit_all(requests, logits=True)
        results = [handle.result() for handle in handles]
        totals = engine.totals()
    for result in results:
        same.see(result, f"{memory}, {'warm' if warm else 'cold'}")
    return {
        "ttft_s": median(r.ttft_s or 0.0 for r in results), "wall_s": totals["wall_s"],
        "hit_rate": totals["hit_rate"], "bytes": totals["bytes"],
        "warm_bytes": totals["guess_bytes"],
    }  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=builtin.model)
    parser.add_argument("--rate", default="60MB", help="bytes a second of the paced disk")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rate = float(parse_size(args.rate))
    with Checkpoint.open(args.model) as ckpt:
        vocab = ckpt.config.vocab
    texts = demo_text.requests(Text(args.model), vocab, 16, 16)
    same, rows = Sameness(), []
    for memory in BUDGETS:
        with JaxEngine.open(args.model, memory=memory, **OPTIONS) as engine:
            for handle in engine.submit_all(texts[8:]):
                handle.result()
            heat = engine.heat()
        hot = tuple(sorted(heat, key=lambda key: (-heat[key], key)))
        for crowd in (1, 4):
            found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
            for _ in range(args.rounds):
                for name, warm in (("cold", ()), ("warm", hot)):
                    found[name].append(run(args.model, memory, rate, texts[:crowd], warm, same))
            row: dict[str, Any] = {"memory": memory, "requests": crowd, "rounds": found}
            for key in ("ttft_s", "wall_s", "hit_rate", "bytes"):
                cold, warm = (median(r[key] for r in found[n]) for n in ("cold", "warm"))
                row[key] = {"cold": cold, "warm": warm, "ratio": cold / warm if warm else None}
            rows.append(row)
            print(f"{memory}, {crowd} requests: first token {row['ttft_s']['cold'] * 1e3:.0f} -> "
                  f"{row['ttft_s']['warm'] * 1e3:.0f} ms, hits {row['hit_rate']['cold']:.0%} -> "
                  f"{row['hit_rate']['warm']:.0%}, whole run {row['wall_s']['cold']:.2f} -> "
                  f"{row['wall_s']['warm']:.2f} s")
    if same.different:
        raise SystemExit(f"results differ: {same.different}")
    write_result("residency", {"model": builtin.name_of(args.model), "bytes_per_s": rate,
                               "comparisons": same.comparisons, "rows": rows})


if __name__ == "__main__":
    main()
