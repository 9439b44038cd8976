"""What the grid found: ratios of a cell, targets over cells, a table, a CSV (GRID-6)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Found = dict[str, Any]
"""A cell as perf.grid_run gives it."""

CAUSAL = ("baseline", "predictive")
"""Kinds that a real system could be, on the units that all are given: the channel and the GPU."""
OURS = "ours"
FOUR = ("best_baseline", "on_demand_global_lru", "best_predictive", "best_per_layer_overlapped")
"""What is also told of `ours-alone`, which guesses nothing."""
KNOWING = {
    "ours-3-ahead": "guesses 0.94 right of three layers at a time",
    "ours-oracle": "all of the next layer known",
    "ours-oracle-3": "all of the next three layers known",
}
"""What `ours` could do if it knew more than anybody has been shown to."""


def best(cell: Found, keep: Callable[[str, Found], bool]) -> tuple[str, float]:
    """(name, tokens/s) of the fastest scheduler that `keep` takes; ("", 0.0) of none."""
    rates = [(f["tokens_per_s"], n) for n, f in cell["schedulers"].items() if keep(n, f)]
    rate, name = max(rates, default=(0.0, ""))
    return name, rate


def ratios(cell: Found) -> Found:
    """The cell with what `ours` is worth there; None where there is nothing to compare with.

    best_baseline: realistic and causal, predictive or not, none of ours; with_cpu: computing missed
    experts on the processor counts too. best_predictive: each with the cache that it was published
    with; _per_layer: those with one LRU a layer. best_per_layer_overlapped: lock-step that overlaps
    over one LRU a layer, predictive or not.
    """
    ours = cell["schedulers"].get(OURS)
    out = dict(cell)
    if ours is None:
        return out
    mine = ours["tokens_per_s"]

    def over(name: str, keep: Callable[[str, Found], bool]) -> None:
        which, rate = best(cell, keep)
        out[f"ours_over_{name}"] = mine / rate if rate else None
        if "best" in name:
            out[name] = which

    over("best_baseline", lambda n, f: f["kind"] in CAUSAL)
    over("best_baseline_with_cpu", lambda n, f: f["kind"] in (*CAUSAL, "cpu"))
    over("on_demand_global_lru", lambda n, f: n == "on-demand-blocking-global")
    over("best_predictive", lambda n, f: f["kind"] == "predictive" and f["cache"] == "published")
    over("best_predictive_per_layer",
         lambda n, f: f["kind"] == "predictive" and f["eviction"] == "per-layer")  # fmt: skip
    over("best_per_layer_overlapped",
         lambda n, f: f["kind"] in CAUSAL and f["eviction"] == "per-layer"
         and f["grouping"] == "lockstep")  # fmt: skip
    over("bevy", lambda n, f: n == "bevy")
    over("oracle", lambda n, f: n == "oracle")
    over("belady_lockstep", lambda n, f: n == "belady")
    over("informed", lambda n, f: n == "informed")
    over("cpu_misses", lambda n, f: f["kind"] == "cpu")
    alone = cell["schedulers"].get("ours-alone")
    for name in FOUR if alone else ():
        ratio = out[f"ours_over_{name}"]
        out[f"ours_alone_over_{name}"] = ratio and ratio * alone["tokens_per_s"] / mine
    for knowing, key in (("informed", "informed"), ("belady", "belady_lockstep")):
        for name in FOUR[2:]:
            both = out[f"ours_over_{name}"], out[f"ours_over_{key}"]
            out[f"{knowing}_over_{name}"] = both[0] / both[1] if both[0] and both[1] else None
    out["ours_alone_bound_share"] = alone and alone["bound_share"]
    for name in KNOWING:
        told = cell["schedulers"].get(name)
        under = f"{name.replace('-', '_')}_"
        out[under + "bound_share"] = told and told["bound_share"]
        ratio = out["ours_over_best_predictive"]
        out[under + "over_best_predictive"] = (
            ratio * told["tokens_per_s"] / mine if told and ratio else None
        )
    guessing = cell["schedulers"].get("ours-next-gate", {}).get("tokens_per_s")
    rival = best(cell, lambda n, f: f["kind"] in CAUSAL)[1]
    out["ours_next_gate_over_best_baseline"] = guessing / rival if guessing and rival else None
    for key in ("bound_share", "bound_share_least", "compute_over_fetch", "queueing_limit"):
        out[key] = ours[key]
    out["tpot_p99_over_p50"] = ours["tpot_p99"] / ours["tpot_p50"] if ours["tpot_p50"] else None
    best_name = out["best_baseline"]
    if best_name:
        ends = cell["schedulers"][best_name]["end_to_end_per_s"]
        out["end_to_end_over_best_baseline"] = ours["end_to_end_per_s"] / ends
    return out


def label(cell: Found) -> str:
    """One line's worth of where."""
    return (f"{cell['platform']:20s} {cell['model']:17s} {cell['cache_share']:5.3f} "
            f"x{cell['requests']:<2d}")  # fmt: skip


def _values(cells: Sequence[Found], key: str) -> list[tuple[float, Found]]:
    return sorted(((c[key], c) for c in cells if c.get(key) is not None), key=lambda x: x[0])


def summary(cells: Sequence[Found]) -> Found:
    """Each target: what was wanted, what was found, whether it was met, the worst cells."""
    many = [c for c in cells if c["requests"] >= 8]
    large = [c for c in many if c["cache_share"] >= 0.5]
    targets: Found = {}

    def target(
        name: str, among: Sequence[Found], key: str, statistic: Callable[[list[float]], float],
        wanted: float, at_most: bool = False,
    ) -> None:  # fmt: skip
        values = _values(among, key)
        if not values:
            return
        figure = statistic([v for v, _ in values])
        ends = values[::-1] if at_most else values
        targets[name] = {
            "wanted": wanted, "found": figure, "cells": len(values),
            "met": figure <= wanted if at_most else figure >= wanted,
            "worst": [f"{label(c)} {v:.3f} {c.get('best_baseline', '')}" for v, c in ends[:10]],
        }  # fmt: skip

    target("never below 0.97 x the best baseline", cells, "ours_over_best_baseline", min, 0.97)
    target("best cell, over on-demand blocking lock-step with one LRU", cells,
           "ours_over_on_demand_global_lru", max, 3.46)  # fmt: skip
    target("best cell, over the best predictive with its published cache", cells,
           "ours_over_best_predictive", max, 1.55)  # fmt: skip
    target("best cell, over the best predictive with one LRU a layer", cells,
           "ours_over_best_predictive_per_layer", max, 1.55)  # fmt: skip
    target("median over the best overlapped lock-step with one LRU a layer "
           "(cache >= 0.5, requests >= 8)", large, "ours_over_best_per_layer_overlapped", median,
           1.25)  # fmt: skip
    target("median share of the bound (requests >= 8)", many, "bound_share", median, 0.90)
    target("least share of the bound (requests >= 8)", many, "bound_share", min, 0.80)
    target("TPOT p99 over p50, the greatest", cells, "tpot_p99_over_p50", max, 2.0, at_most=True)
    target("beside it: never below 0.97 x the best, processors that compute misses included",
           cells, "ours_over_best_baseline_with_cpu", min, 0.97)  # fmt: skip
    target("beside it: never below 0.97 x the best, with a next gate on top of ours", cells,
           "ours_next_gate_over_best_baseline", min, 0.97)  # fmt: skip
    target("without guesses: never below 0.97 x the best baseline", cells,
           "ours_alone_over_best_baseline", min, 0.97)  # fmt: skip
    target("without guesses: best cell, over on-demand blocking lock-step with one LRU", cells,
           "ours_alone_over_on_demand_global_lru", max, 3.46)  # fmt: skip
    target("without guesses: best cell, over the best predictive with its published cache", cells,
           "ours_alone_over_best_predictive", max, 1.55)  # fmt: skip
    target("without guesses: median over the best overlapped lock-step with one LRU a layer", large,
           "ours_alone_over_best_per_layer_overlapped", median, 1.25)  # fmt: skip
    target("without guesses: least share of the bound (requests >= 8)", many,
           "ours_alone_bound_share", min, 0.80)  # fmt: skip
    target("beside it: median over cells of ours over the best baseline", cells,
           "ours_over_best_baseline", median, 1.0)  # fmt: skip
    target("what an informed cache could reach: median over the best overlapped lock-step with one "
           "LRU a layer", large, "informed_over_best_per_layer_overlapped", median,
           1.25)  # fmt: skip
    target("what an informed cache could reach: best cell, over the best predictive", cells,
           "informed_over_best_predictive", max, 1.55)  # fmt: skip
    target("what Belady's rule could reach: median over the best overlapped lock-step with one LRU "
           "a layer", large, "belady_over_best_per_layer_overlapped", median, 1.25)  # fmt: skip
    for name, said in KNOWING.items():
        key = name.replace("-", "_")
        target(f"{said}: least share of the bound (requests >= 8)", many, f"{key}_bound_share",
               min, 0.80)  # fmt: skip
        target(f"{said}: best cell, over the best predictive", cells,
               f"{key}_over_best_predictive", max, 1.55)  # fmt: skip
    near = [
        f"{label(c)} bound share {c['bound_share']:.3f}, queueing limit {c['queueing_limit']:.3f}, "
        f"N/(N+1) {c['requests'] / (c['requests'] + 1):.3f}{_knowing(c)}{_layer(c)}"
        for c in many
        if c.get("compute_over_fetch") and 1 / 1.3 < c["compute_over_fetch"] < 1.3
    ]
    return {"targets": targets, "compute and fetch within 1.3x of each other": near,
            "worth": worth(cells)}  # fmt: skip


def _knowing(c: Found) -> str:
    """The shares of the bound with more known."""
    shares = {said: c.get(f"{n.replace('-', '_')}_bound_share") for n, said in KNOWING.items()}
    return "".join(f"; {said} {share:.3f}" for said, share in shares.items() if share)


def _layer(c: Found) -> str:
    """What a layer is like: how long a read is, how many there are, what going apart costs."""
    if "halves_compute_s_a_token" not in c:
        return ""
    computing = c["compute_s_a_token"] * c["requests"] / c["layers"]
    reads = c["schedulers"][OURS]["fetches_per_token"] * c["requests"] / c["layers"]
    apart = c["halves_compute_s_a_token"] / c["compute_s_a_token"]
    return (f"; a read takes {c['transfer_s'] / computing:.2f} of a layer's computing, "
            f"{reads:.2f} reads a layer, in halves {apart:.2f} times the computing")  # fmt: skip


PAIRS = (
    ("the schedule alone, same cache", "ours-alone", "lockstep-frequency"),
    ("the cache alone, lock-step, over one LRU a layer", "lockstep-frequency",
     "on-demand-overlapped-layer"),
    ("Bevy in paper mode, over overlapped lock-step with the same cache", "bevy",
     "on-demand-overlapped-layer"),
    ("next gate on top of ours", "ours-next-gate", "ours-alone"),
    ("guesses 0.94 right on top of ours", "ours", "ours-alone"),
    ("0.94 right of three layers at a time, over one", "ours-3-ahead", "ours"),
    ("all of the next layer known, on top of ours", "ours-oracle", "ours-alone"),
    ("all of the next three layers known, on top of ours", "ours-oracle-3", "ours-alone"),
    ("0.94 right, in lock-step", "layerscope-layer", "on-demand-overlapped-layer"),
    ("all right one layer ahead, in lock-step", "oracle", "on-demand-overlapped-layer"),
    ("overlap alone", "on-demand-overlapped-layer", "on-demand-blocking-layer"),
    ("one LRU a layer rather than one of all, blocking", "on-demand-blocking-layer",
     "on-demand-blocking-global"),
    ("processors that compute misses, over ours", "fiddler", "ours"),
)  # fmt: skip


def regime(cell: Found) -> str:
    """What limits `ours` in a cell."""
    share = cell.get("compute_over_fetch")
    if share is None or share > 1.3:
        return "compute"
    return "reading" if share < 1 / 1.3 else "both"


def worth(cells: Sequence[Found]) -> Found:
    """For pairs of schedulers, tokens/s of the one over the other: least, median, greatest, number
    of cells; where reading is the limit, where computing is, and where they differ by less than
    1.3x."""
    out: Found = {}
    for title, one, other in PAIRS:
        by: dict[str, list[float]] = {"reading": [], "both": [], "compute": []}
        for c in cells:
            s = c["schedulers"]
            if one in s and other in s and OURS in s:
                by[regime(c)].append(s[one]["tokens_per_s"] / s[other]["tokens_per_s"])
        told = {k: [min(v), median(v), max(v), len(v)] for k, v in by.items() if v}
        if told:
            out[title] = {"one": one, "other": other} | told
    return out


def table(found: Found) -> str:
    """The summary and one line a cell, as text."""
    lines = []
    for name, t in found["summary"]["targets"].items():
        lines.append(f"{'met    ' if t['met'] else 'NOT MET'} {name}: {t['found']:.3f}, "
                     f"wanted {t['wanted']} ({t['cells']} cells)")  # fmt: skip
        lines += [f"          {w}" for w in t["worst"][: 3 if t["met"] else 10]]
    lines += found["summary"]["compute and fetch within 1.3x of each other"]
    for title, w in found["summary"]["worth"].items():
        lines.append(f"{title}: {w['one']} over {w['other']}; " + "; ".join(
            f"{k} {v[0]:.2f} to {v[2]:.2f}, median {v[1]:.2f} ({v[3]})"
            for k, v in w.items() if isinstance(v, list)
        ))  # fmt: skip
    lines.append(f"{'':44s} ours   /base /dem.G /pred  /PL-ov /cpu   bound  best baseline")
    for c in found["cells"]:
        if OURS not in c["schedulers"]:
            continue
        lines.append(f"{label(c)} {c['schedulers'][OURS]['tokens_per_s']:7.2f} " + " ".join(
            f"{c[k]:6.3f}" if c.get(k) is not None else "     -"
            for k in ("ours_over_best_baseline", "ours_over_on_demand_global_lru",
                      "ours_over_best_predictive", "ours_over_best_per_layer_overlapped",
                      "ours_over_cpu_misses", "bound_share")
        ) + f" {c['best_baseline']}")  # fmt: skip
    for c in found["skipped"]:
        lines.append(f"{label(c)} left out: {c['reason']}")
    return "\n".join(lines)


COLUMNS = (
    "tokens_per_s", "end_to_end_per_s", "steady", "fetches_per_token", "bytes_per_token",
    "channel_busy", "compute_busy", "both_busy", "bound_share", "bound_share_least", "batch_mean",
    "distinct_mean", "lag_max_tokens", "hit_rate", "full_hit", "tpot_p50", "tpot_p99",
)  # fmt: skip


def write_csv(path: Path, cells: Sequence[Found]) -> None:
    """A line for each scheduler of each cell."""
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["platform", "model", "cache_share", "requests", "stored", "scheduler", "kind",
                      *COLUMNS, "prediction_recall", "prediction_recall_absent"])  # fmt: skip
        for c in cells:
            for name, s in c["schedulers"].items():
                said = s.get("prediction") or {}
                out.writerow([
                    c["platform"], c["model"], c["cache_share"], c["requests"], c["stored"], name,
                    s["kind"], *[s.get(k, "") for k in COLUMNS],
                    *[said.get(k, {}).get("recall", "") for k in ("overall", "absent")],
                ])  # fmt: skip
