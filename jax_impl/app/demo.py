"""`make demo`: a small random mixture, made on the spot, runs under half of its experts' memory.

Eight requests of different lengths go at their own pace; the commands are those of the README, and
their output is theirs. Exits with the first status that is not 0.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from jax_impl.app.main import main
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.event_log import read_log
from reference.files.requests import Request, write_requests

CONFIG = tiny_config(
    "qwen3_moe", hidden_size=64, num_hidden_layers=6, num_experts=32, num_experts_per_tok=4,
    moe_intermediate_size=64, vocab_size=512,
)
REQUESTS = [
    Request(f"r{n}", tuple((31 * n + 7 * i * i + i) % 512 for i in range(4 + 9 * n)), 12 + 3 * n)
    for n in range(8)
]


def interleaving(log: Path) -> str:
    """How far apart the requests were: from the parts of each step of the event log."""
    steps = several = 0
    for record in read_log(log).records:
        if record.get("action") == "Compute":
            steps += 1
            several += len({visit[0] for visit, _, _ in record["parts"]}) > 1
    return f"{steps} steps, {several} of them for several requests at once"


def show() -> int:
    """Runs the demonstration; its exit status."""
    with tempfile.TemporaryDirectory(prefix="covey-demo-") as folder:
        place = Path(folder)
        write_checkpoint(place / "model", CONFIG, seed=1)
        write_requests(place / "requests.jsonl", REQUESTS)
        model, log = str(place / "model"), str(place / "events.jsonl")
        for words in (
            ["run", model, "--requests", str(place / "requests.jsonl"), "--memory", "50%",
             "--ignore-eos", "--check", "--log", log],
            ["replay", log],
            ["verify", model, "--engine", "reference", "--rounds", "1", "--quiet"],
        ):
            print(f"\n$ covey {shlex.join(words)}", flush=True)
            if status := main(words):
                return status
            if words[0] == "run":
                print(interleaving(Path(log)))
    return 0


if __name__ == "__main__":
    sys.exit(show())
