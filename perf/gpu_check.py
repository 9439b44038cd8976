"""Covey on the device that JAX finds: bits, transfers, overlap, the engine. See gpu_check.sh.

python -m perf.gpu_check OUT.json [--quick] [--seconds N] [--bytes SIZE] [--folder DIR]

OUT is written anew after each part, so that a run that is cut off leaves what it had. A part that
fails is told in it and the next goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_impl.backend import backend
from jax_impl.engine import JaxEngine
from jax_impl.head import versions
from oracle.tiny import sized_config, tiny_config, write_checkpoint
from perf.gpu_bits import check_bits
from perf.gpu_transfers import check_overlap, check_transfers
from reference.files.budget import parse_size
from reference.files.requests import Request

SHARES = (25, 50, 100)
"""Device slots in percent of all experts; host memory holds them all."""
TOTALS = ("wall_s", "compute_s", "waiting_s", "other_s", "channel_s", "tokens", "loads",
          "host_loads", "bytes", "disk_bytes")  # fmt: skip


def check_engine(
    folder: Path, quick: bool, nbytes: int, left: Callable[[], float]
) -> dict[str, Any]:
    """A generated checkpoint under three device budgets, with all experts in host memory.

    The first round fills host memory from the disk and is told as `cold`; the second is measured.
    bound_s   the greater of the time with a step and the time with a load in flight
    same      tokens and logits of every request are those with every expert on the device
    """
    if quick:
        config, dtype = tiny_config("qwen3_moe"), "F32"
    else:
        config, dtype = sized_config(nbytes, layers=8, experts=32, hidden=1024), "BF16"
    path = write_checkpoint(folder / "engine", config, dtype=dtype, pattern=not quick)
    count, new = (3, 4) if quick else (8, 16)
    asked = [
        Request(f"r{i}", tuple((7 * i + 3 * j) % 90 + 3 for j in range(5 + 3 * i)), new)
        for i in range(count)
    ]
    rows: list[dict[str, Any]] = []
    truth: list[Any] = []
    for share in sorted(SHARES, reverse=True):
        if rows and left() <= 0:
            break
        began = time.monotonic()
        with JaxEngine.open(
            path, f"{share}%", host_memory="100%", max_running=8, max_rows=8, chunk=8,
            kv_tokens=1024, kv_block=16, ignore_eos=True, compile_cache=folder / "compiled",
        ) as engine:  # fmt: skip
            ready = time.monotonic() - began
            rounds, before, told = [], dict.fromkeys(TOTALS, 0), []
            for _ in range(2):
                handles = engine.submit_all(asked, logits=True)
                results = [h.result(300.0) for h in handles]
                told = [
                    (r.error, tuple(r.tokens), None if r.logits is None else r.logits.tobytes())
                    for r in results
                ]
                now = engine.totals()
                rounds.append({name: now[name] - before[name] for name in TOTALS})
                before = {name: now[name] for name in TOTALS}
            sizes = engine.sizes
        truth = truth or told
        row = rounds[1] | {
            "device_share": share, "slots": sizes.slots, "host_slots": sizes.host_slots,
            "expert_bytes": sizes.expert, "device_budget_bytes": sizes.budget,
            "host_budget_bytes": sizes.host, "ready_s": ready, "cold": rounds[0],
            "tokens_per_s": rounds[1]["tokens"] / rounds[1]["wall_s"],
            "same": told == truth and all(error is None for error, *_ in told),
        }  # fmt: skip
        row["bound_s"] = max(row["compute_s"], row["channel_s"])
        row["bound_tokens_per_s"] = row["tokens"] / row["bound_s"] if row["bound_s"] else None
        rows.append(row)
    return {"rows": rows, "ok": all(row["same"] for row in rows)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perf.gpu_check", description=__doc__)
    parser.add_argument("out", type=Path, help="JSON is written here")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing after these")
    parser.add_argument("--bytes", default="2GiB", help="experts of the generated checkpoint")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    args = parser.parse_args(argv)
    began = time.monotonic()
    found = backend()
    report: dict[str, Any] = {
        "gpu_check": 1, "quick": args.quick, "platform": found.platform,
        "backend": found.record(), "versions": versions(), "parts": {}, "ok": True,
    }  # fmt: skip

    def until(share: float) -> Callable[[], float]:
        """Seconds left of the time up to this share of the whole."""
        return lambda: share * args.seconds - (time.monotonic() - began)

    with tempfile.TemporaryDirectory(dir=args.folder, prefix="covey-check-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "transfers": lambda: check_transfers(args.quick, until(0.2)),
            "overlap": lambda: check_overlap(args.quick, until(0.3)),
            "engine": lambda: check_engine(
                folder, args.quick, parse_size(args.bytes), until(0.7)
            ),
            "bits": lambda: check_bits(folder, args.quick, until(1.0)),
        }
        for part, check in parts.items():
            start = time.monotonic()
            try:
                told = check()
            except Exception as error:
                told = {"ok": False, "error": f"{type(error).__name__}: {error}",
                        "trace": traceback.format_exc().splitlines()[-12:]}  # fmt: skip
            told["seconds"] = time.monotonic() - start
            report["parts"][part] = told
            report["ok"] = report["ok"] and told["ok"]
            report["seconds"] = time.monotonic() - began
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{part}: {'good' if told['ok'] else 'FAILED'}, {told['seconds']:.1f} s"
                  f"{': ' + told['error'] if 'error' in told else ''}", file=sys.stderr)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
