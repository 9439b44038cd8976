"""What the counts of `frequency` (CACHE-14) are worth: other weights and windows, on some cells.

    python -m perf.counting [--cells PLATFORM/MODEL/SHARE/REQUESTS,...] [--weights 1,3,8,32 ...]

A weight is what a visit counts for ever, beside that while its request runs, beside that until its
request's next visit of the layer, and the passes after which all is halved. Each cell is run in
lock-step over that cache, as the comparison of schedulers runs it; the first weights are what the
others are compared with. Saved in perf/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from perf.grid_cells import Cell, format_of
from perf.grid_run import lately, run_scheduler, slots_after
from perf.record import write_result
from reference.control import eviction_frequency
from reference.simulator import models, platforms
from reference.simulator.costs import Roofline
from reference.simulator.schedulers import preset

CELLS = (
    "jetson-thor/deepseek-v2-lite/0.75/4", "macbook-m4-max/mixtral-8x7b/0.5/8",
    "mac-studio-m3-ultra/gpt-oss-120b/0.5/32", "rtx-4090-pcie4/qwen3-30b-a3b/0.75/32",
    "rtx-4090-pcie4/qwen3-30b-a3b/0.5/4", "rtx-4090-pcie4/qwen3-30b-a3b/0.5/1",
    "h200-pcie5/gpt-oss-20b/0.875/8", "rtx-4090-pcie4/deepseek-v2-lite/0.75/8",
)  # fmt: skip
WEIGHTS = (
    "1,0,0,12", "1,0,0,32", "1,3,0,32", "1,0,8,32", "1,3,4,32", "1,3,8,32", "1,3,16,32", "1,1,8,32",
    "1,7,8,32", "0,3,8,32", "1,3,8,16", "1,3,8,64",
)  # fmt: skip
"""The first is a plain count of visits."""


def cell_of(text: str) -> Cell:
    """PLATFORM/MODEL/SHARE/REQUESTS. Raises ValueError for anything else."""
    platform, model, share, requests = text.split("/")
    cell = Cell(platform, model, float(share), int(requests))
    if platform not in platforms.names() or model not in models.names():
        raise ValueError(text)
    if not 0 < cell.cache_share <= 1 or cell.requests < 1:
        raise ValueError(text)
    return cell


def weights_of(text: str) -> tuple[int, int, int, int]:
    """ONCE,RUNS,LAST,PASSES. Raises ValueError for anything else."""
    once, runs, last, passes = (int(x) for x in text.split(","))
    if min(once, runs, last) < 0 or once + runs + last < 1 or passes < 1:
        raise ValueError(text)
    return once, runs, last, passes


def run(cell: Cell, weights: str) -> tuple[float, float]:
    """(tokens/s, experts read a token) of lock-step over `frequency` with these weights."""
    counts = eviction_frequency
    once, runs, last, passes = weights_of(weights)
    before = counts.ONCE, counts.RUNS, counts.LAST, counts.Named.PASSES
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    costs = Roofline(platform, model, None, format_of(platform, model))
    try:
        counts.ONCE, counts.RUNS, counts.LAST, counts.Named.PASSES = once, runs, last, passes
        slots_after.cache_clear()  # what the past leaves depends on the weights
        got = run_scheduler(
            cell, preset("lockstep-frequency"), costs, lately(cell.model, cell.requests)
        )
    finally:
        counts.ONCE, counts.RUNS, counts.LAST, counts.Named.PASSES = before
        slots_after.cache_clear()
    return got["tokens_per_s"], got["fetches_per_token"]


def checked(flag: str, text: str, read: Callable[[str], Any], wanted: str) -> str:
    """The text, if `read` takes it; else the program ends with a line."""
    try:
        read(text)
    except ValueError:
        raise SystemExit(f"{flag}: {text!r}; {wanted} expected") from None
    return text


def main() -> None:
    """Print a line for each weights, and save all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, metavar="ONCE,RUNS,LAST,PASSES")
    args = parser.parse_args()
    cells = [
        checked("--cells", c, cell_of, "PLATFORM/MODEL/SHARE/REQUESTS of covey simulate --list")
        for c in args.cells.split(",")
    ]
    for w in args.weights:
        checked("--weights", w, weights_of, "ONCE,RUNS,LAST,PASSES, whole numbers,")
    figures: dict[str, dict[str, Any]] = {}
    for weights in args.weights:
        found = {c: run(cell_of(c), weights) for c in cells}
        base = figures[args.weights[0]]["cells"] if figures else found
        over = [found[c][0] / base[c][0] for c in cells]
        reads = [found[c][1] / base[c][1] for c in cells]
        figures[weights] = {"cells": found, "speed": geometric_mean(over),
                            "speed_least": min(over), "reads": geometric_mean(reads)}  # fmt: skip
        print(f"{weights:12s} tokens/s {geometric_mean(over):.3f} (least {min(over):.3f}, most "
              f"{max(over):.3f}), reads {geometric_mean(reads):.3f}", flush=True)  # fmt: skip
    write_result("counting", {"weights": figures})


if __name__ == "__main__":
    main()
