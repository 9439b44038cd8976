"""What a measurement says: figures of one scheduler from its runs, and lines of the table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from jax_impl.app.contest import Figures, ratio
from reference.files.budget import show_size
from reference.files.checkpoint import Checkpoint
from reference.handle import Result


def shape_of(ckpt: Checkpoint) -> dict[str, Any]:
    """The model as numbers."""
    c = ckpt.config
    return {"family": c.family, "layers": len(c.layers), "moe_layers": len(c.moe_layers),
            "experts": c.experts, "top_k": c.top_k, "expert_bytes": ckpt.expert_bytes(),
            "experts_bytes": ckpt.experts_bytes, "other_bytes": ckpt.non_expert_bytes}


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value at or above the share q of all; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def decode_rate(results: Sequence[Result]) -> float | None:
    """Tokens/s of one run while all of its requests decode: from the last of the first tokens to
    the first of the last ones. None where there is no such time."""
    start = max(r.token_s[0] for r in results)
    end = min(r.token_s[-1] for r in results)
    tokens = sum(start < t <= end for r in results for t in r.token_s)
    return tokens / (end - start) if end > start and tokens >= len(results) else None


def told(figures: Figures, disk: int, rate: float | None) -> dict[str, Any]:
    """Figures of one scheduler over all rounds (BENCH-3). Times are seconds, sizes bytes.

    tokens_per_s          median over rounds, prompts included
    decode_tokens_per_s   median over rounds of `decode_rate`
    of_bound              max(computing, fetching) / time, fetching: a load was in flight
    of_disk               the same, fetching: bytes at the rate of the probe (None without it)
    disk_bytes            what the system says it read from the disk for this process
    """
    whole, sums = figures.as_dict(), figures.sums
    count = len(figures.results) // max(1, len(figures.rates))
    runs = [figures.results[i : i + count] for i in range(0, len(figures.results), count)]
    decoding = [found for r in runs if (found := decode_rate(r)) is not None]
    gaps = [(r.token_s[-1] - r.token_s[0]) / (len(r.token_s) - 1) for r in figures.results]
    waits = [r.ttft_s for r in figures.results if r.ttft_s is not None]
    wall = sums["wall_s"]
    fetch = sums["bytes"] / rate if rate else None
    return {
        "tokens_per_s": whole["tokens_per_s"],
        "rounds_tokens_per_s": whole["rounds_tokens_per_s"],
        "decode_tokens_per_s": median(decoding) if decoding else None,
        "bytes_per_token": whole["bytes_per_token"],
        "hit_rate": whole["hit_rate"], "full_hit_rate": whole["full_hit_rate"],
        "channel_busy": whole["channel_busy"], "compute_busy": whole["compute_busy"],
        "of_bound": ratio(max(sums["compute_s"], sums["channel_s"]), wall),
        "of_disk": None if fetch is None else ratio(max(sums["compute_s"], fetch), wall),
        "channel_bytes_per_s": ratio(sums["bytes"], sums["channel_s"]),
        "visits_per_step": ratio(sums["visits"], sums["steps"]),
        "tpot_s": {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99)},
        "ttft_s": {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99)},
        "disk_bytes": disk, "loaded_bytes": sums["bytes"],
        "sums": whole["sums"],
    }  # fmt: skip


def opening(document: dict[str, Any]) -> list[str]:
    """The model and the machine, before anything is measured."""
    s, m = document["shape"], document["machine"]
    return [
        f"{document['model']}: {s['family']}, {s['moe_layers']} layers of {s['experts']} experts, "
        f"{s['top_k']} a token; all experts {show_size(s['experts_bytes'])}, "
        f"{show_size(s['expert_bytes'])} each",
        f"{m['processor']}, {m['cores']} cores, {show_size(m['memory_bytes'])}, load "
        f"{m['load'][0]:.1f}; commit {document['commit']}; --compute "
        f"{document['options']['compute']}, {document['prompt_tokens']} prompt and "
        f"{document['new_tokens']} new tokens a request, {document['rounds']} rounds",
    ]


def heading(memory: str, disk: float | None, io: str, together: bool) -> str:
    """What stands over the rows of a budget."""
    rate = f"; experts come at {disk / 1e6:.0f} MB/s with nothing else going on" if disk else ""
    alone = "" if together else "; engines one after another, for memory"
    return (
        f"\nbudget {memory}, {io} reads{rate}{alone}\n"
        f"{'requests  scheduler':36}{'tok/s':>7}{'(rounds)':>14}{'decode':>8}{'MB/tok':>8}"
        f"{'channel':>9}{'compute':>9}{'bound':>7}{'TPOT ms':>9}{'TTFT s':>8}{'rows':>6}"
    )


def lines_of(row: dict[str, Any]) -> list[str]:
    """One line a scheduler; channel and compute: shares of the time; rows: visits a step."""
    lines = []
    for name, f in row["schedulers"].items():
        rates = f["rounds_tokens_per_s"]
        spread = f"({min(rates):.1f}-{max(rates):.1f})"
        decode = "" if f["decode_tokens_per_s"] is None else f"{f['decode_tokens_per_s']:.1f}"
        tpot, ttft = f["tpot_s"]["p50"], f["ttft_s"]["p50"]
        lines.append(
            f"{row['requests']:>8}  {name:26}{f['tokens_per_s']:>7.1f}{spread:>14}{decode:>8}"
            f"{f['bytes_per_token'] / 1e6:>8.1f}{f['channel_busy']:>9.0%}{f['compute_busy']:>9.0%}"
            f"{f['of_bound']:>7.0%}{(tpot or 0) * 1e3:>9.0f}{ttft or 0:>8.2f}"
            f"{f['visits_per_step']:>6.1f}"
        )
    return lines
