"""How far `covey simulate --platform this` is from `covey bench` on this machine.

    python -m perf.probe_beside_bench [MODEL] [--shares 50%,100%] [--rounds 2]

MODEL is demo unless given. For each share the bench measures, then the simulator predicts from a
new probe. The bench begins with the cache that the same requests left, the simulator with random
experts in its slots and with made-up routing: bytes a token stand beside the speeds.
Writes perf/results/probe-beside-bench-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from jax_impl.app.main import main as covey
from perf.record import write_result

SCHEDULERS = ("balanced", "interleaved", "lockstep", "lockstep-blocking")
PROMPT, NEW, CROWDS = 16, 32, (1, 8)


def told(words: list[str], out: Path) -> dict[str, Any]:
    """What a command writes with --json. Raises RuntimeError where it fails."""
    if covey([*words, "--json", str(out)]):
        raise RuntimeError(" ".join(words))
    return json.loads(out.read_text())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--shares", default="50%,100%")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for share in args.shares.split(","):
            measured = told(
                ["bench", args.model, "--memory", share, "--requests", ",".join(map(str, CROWDS)),
                 "--schedulers", ",".join(SCHEDULERS), "--rounds", str(args.rounds),
                 "--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW)], out)  # fmt: skip
            for row in measured["rows"]:
                words = ["simulate", "--platform", "this", "--model", args.model, "--share", share,
                         "--requests", str(row["requests"]), "--prompt", str(PROMPT),
                         "--new-tokens", str(NEW)]  # fmt: skip
                words += [w for name in SCHEDULERS for w in ("--scheduler", name)]
                predicted = told(words, out)["schedulers"]
                for name, figures in row["schedulers"].items():
                    speed = figures["tokens_per_s"]
                    said = predicted[name]["tokens_per_s"]
                    rows.append({"share": share, "requests": row["requests"], "scheduler": name,
                                 "measured": speed, "predicted": said, "ratio": said / speed,
                                 "bytes_per_token": figures["bytes_per_token"],
                                 "predicted_bytes": predicted[name]["bytes_per_token"]})
    for row in rows:
        print(f"{row['share']:5} {row['requests']:2} {row['scheduler']:18} measured "
              f"{row['measured']:6.1f}, predicted {row['predicted']:6.1f}: {row['ratio']:.2f}; MB "
              f"a token {row['bytes_per_token'] / 1e6:.2f}, {row['predicted_bytes'] / 1e6:.2f}")
    ratios = [row["ratio"] for row in rows]
    print(f"median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    write_result("probe-beside-bench", {"model": args.model, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
