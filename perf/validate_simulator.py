"""Does the simulator, calibrated by a probe on this host, predict what the JAX engine measures?

    python -m perf.validate_simulator [--rounds 3] [--minutes 60] [--big 0.4] [--quick]

Cells: the built-in model and a generated mixture (--big GiB of experts, on disk while this runs),
each with schedulers x requests where reading takes most of the time, where reading and computing
are of like length, and where nothing is read; reads come from the page cache, paced. A round runs
probe and cells in turn, so that what else the machine does meets both. Of each cell and of each
kind of probe the calmest half of the rounds counts, by how long the run's own threads were ready
and had no processor; medians of these are compared. The simulated run has the measured one's
options, arrivals and recorded routing, none of its times.
Writes perf/results/validate-simulator-DATE.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from jax_impl.app import builtin
from jax_impl.app.replay import options_of
from oracle.checkpoint_writer import write_checkpoint
from oracle.tiny import tiny_config
from perf.calibrate import CROWDS, HostCosts, Probe, calmest, run_once
from perf.record import write_result
from reference.files.checkpoint import Checkpoint
from reference.files.routing_trace import RoutingTrace, trace_of_records
from reference.simulator.arrivals import Arrival
from reference.simulator.models import ModelShape
from reference.simulator.routes import RecordedRoutes
from reference.simulator.run import simulate

PROMPT = 8
WITHIN = 0.15
MIXTURE: dict[str, Any] = {
    "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
    "intermediate_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTURE_EXPERT = 3 * 1024 * 512 * 2
"""Bytes of one of its experts."""
SCHEDULERS: dict[str, dict[str, Any]] = {
    "blocking": {"scheduler": "lockstep-blocking", "cache": "global"},
    "overlapped": {"scheduler": "lockstep"},
    "interleaved": {"scheduler": "interleaved"},
    "interleaved, by expert": {"scheduler": "interleaved", "readiness": "expert"},
}
SCHEDULERS["balanced"] = {"scheduler": "balanced"}
ENGINE = {"chunk": 16, "max_running": 16, "max_rows": 64, "io": "buffered"}
REGIMES: dict[str, tuple[float, str, tuple[int, ...]]] = {
    "reading": (0.25, "50%", (2, 6)),
    "both": (1.0, "60%", (2, 8)),
    "computing": (0.0, "100%", (3, 6)),
}
"""Reads paced to so much of the model's own rate, budget, requests at a time. In the last, every
expert is read before the first request, and nothing afterwards."""


@dataclass(frozen=True)
class Cell:
    """What is measured once a round."""

    scheduler: str
    regime: str
    requests: int


def cells(quick: bool) -> list[Cell]:
    """All cells of a model, or a few. Schedulers differ little where nothing is read."""
    found = [Cell(n, regime, r) for n in SCHEDULERS for regime, (_, _, requests) in REGIMES.items()
             for r in requests if regime != "computing" or n in ("overlapped", "balanced")]
    return found[::5] if quick else found


class Study:
    """One model: its probes, its cells, and the predictions at the end."""

    def __init__(self, name: str, folder: Path, rate: float, new: int) -> None:
        self.name, self.folder, self.rate, self.new = name, folder, rate, new
        with Checkpoint.open(folder) as ckpt:
            config, self.expert_bytes = ckpt.config, ckpt.expert_bytes()
        self.shape = ModelShape(name, name, (), config.moe_layers, config.experts, config.top_k, 1,
                                {"own": self.expert_bytes}, 1)  # fmt: skip
        self.probe = Probe(folder, rate, PROMPT, new, **ENGINE)
        self.traces: dict[int, RoutingTrace] = {}
        self.options: dict[Cell, Any] = {}
        self.measured: dict[Cell, list[tuple[float, float]]] = {}
        self.shares: dict[Cell, list[dict[str, Any]]] = {}

    def measure(self, cell: Cell) -> None:
        """One run of the engine."""
        pace, memory, _ = REGIMES[cell.regime]
        warm = () if pace else self.probe.everything
        got = run_once(self.folder, cell.requests, self.new, PROMPT, memory, self.rate * pace,
                       warm=warm, **ENGINE, **SCHEDULERS[cell.scheduler])  # fmt: skip
        self.measured.setdefault(cell, []).append((got["delayed"], got["tokens_per_s"]))
        self.options[cell] = options_of(got["records"][0], self.name)
        totals = got["totals"]
        self.shares.setdefault(cell, []).append(
            {"loads": totals["loads"], "compute_s": totals["compute_s"], "seconds": got["seconds"],
             "steps": totals["steps"]})  # fmt: skip
        if cell.requests not in self.traces:
            self.traces[cell.requests] = trace_of_records(
                got["records"], self.name, self.shape.experts, self.shape.top_k,
                self.shape.moe_layers, self.expert_bytes)  # fmt: skip

    def predict(self, cell: Cell, costs: HostCosts) -> Any:
        """The same run in virtual time."""
        arrivals = [Arrival(0.0, PROMPT, self.new)] * cell.requests
        costs = costs.paced(REGIMES[cell.regime][0] or 1.0)
        routes = RecordedRoutes(self.traces[cell.requests])
        return simulate(None, self.shape, routes, self.options[cell], arrivals=arrivals,
                        tokens=10**9, warm_up=0, warm=False, costs=costs)  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Measured beside predicted."""
        costs = self.probe.costs()
        out = []
        for cell, runs in self.measured.items():
            got = self.predict(cell, costs)
            rates = calmest(runs)
            rate = median(rates)
            seen = self.shares[cell]
            out.append({
                "model": self.name, "scheduler": cell.scheduler, "regime": cell.regime,
                "requests": cell.requests, "measured": rate, "rounds": rates,
                "all_rounds": [r for _, r in runs], "delayed": [d for d, _ in runs],
                "delayed_least": min(d for d, _ in runs),
                "predicted": got.end_to_end_per_s, "error": got.end_to_end_per_s / rate - 1,
                "loads": [s["loads"] for s in seen],
                "predicted_loads": round(got.fetches_per_token * got.tokens),
                "steps": [s["steps"] for s in seen], "predicted_steps": sum(got.batches.values()),
                "compute_share": median([s["compute_s"] / s["seconds"] for s in seen]),
                "predicted_compute_share": got.compute_busy,
                "predicted_channel_share": got.channel_busy,
            })  # fmt: skip
        return out


def show(row: dict[str, Any]) -> str:
    """One line."""
    spread = (max(row["rounds"]) - min(row["rounds"])) / row["measured"]
    return (f"{row['model']:8} {row['scheduler']:23} {row['regime']:9} {row['requests']} requests"
            f"  measured {row['measured']:7.1f} (spread {spread:4.0%})  predicted "
            f"{row['predicted']:7.1f}  {row['error']:+5.1%}  loads {median(row['loads']):.0f} "
            f"{row['predicted_loads']}, waited {row['delayed_least']:.2f}")  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="no round that would end later")
    parser.add_argument("--big", type=float, default=0.4, help="GiB of experts; 0: demo only")
    parser.add_argument("--quick", action="store_true", help="four cells a model, for a look")
    args = parser.parse_args()
    crowds = CROWDS[:3] if args.quick else CROWDS
    with tempfile.TemporaryDirectory() as place:
        studies = [Study("demo", builtin.folder(), 60e6, 12)]
        if args.big:
            layers = max(2, round(args.big * 2**30 / (32 * MIXTURE_EXPERT)))
            config = tiny_config("qwen3_moe", **MIXTURE, num_hidden_layers=layers)
            big = write_checkpoint(Path(place) / "big", config, dtype="BF16")
            studies.append(Study("mixture", big, 800e6, 8))
        loads: list[float] = []
        began = time.monotonic()
        for done in range(args.rounds):
            took = time.monotonic() - began
            if done and took + took / done > 60 * args.minutes:
                break
            for study in studies:
                study.probe.round(crowds)
                for cell in cells(args.quick):
                    study.measure(cell)
                    loads.append(os.getloadavg()[0])
            print(f"round {done + 1}: {time.monotonic() - began:.0f} s", flush=True)
        rows = [row for study in studies for row in study.rows()]
        costs = {study.name: study.probe.costs().as_dict() for study in studies}
    print("\n".join(map(show, rows)))
    errors = np.abs([row["error"] for row in rows])
    good = int((errors <= WITHIN).sum())
    print(f"{good} of {len(rows)} cells within {WITHIN:.0%}; median error {np.median(errors):.1%}, "
          f"greatest {errors.max():.1%}; load average {min(loads):.1f} to {max(loads):.1f}")
    write_result("validate-simulator", {
        "within": good, "cells": len(rows), "median_error": float(np.median(errors)),
        "greatest_error": float(errors.max()), "load_average": [min(loads), max(loads)],
        "prompt": PROMPT, "new_tokens": {s.name: s.new for s in studies}, "costs": costs,
        "regimes": REGIMES, "rows": rows,
    })  # fmt: skip


if __name__ == "__main__":
    main()
