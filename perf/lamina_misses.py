"""Attention elsewhere and experts partly elsewhere: who goes next when slices are uneven.

    python -m perf.lamina_misses [--rounds 3]

The same requests, the same experts in memory in all, one channel of the same rate:

    rotation   LaminaEngine, three batches on two replicas with half of the slots each
    queue      the same, batches taken as they are ready
    two        LaminaEngine, two batches on one replica with all slots
    scheduler  JaxEngine with Offloaded: the scheduler's own groups, loads while others compute

All run in turn, round after round, in one process: other work on the machine meets all alike.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

from jax_impl.attention_pool.devices import Offloaded
from jax_impl.attention_pool.engine import LaminaEngine
from jax_impl.engine import JaxEngine
from jax_impl.readers import ThrottledReader
from oracle.tiny import tiny_config, write_checkpoint
from perf.record import write_result
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request

LAYERS, EXPERTS, TOP, REQUESTS, PROMPT, NEW = 6, 32, 4, 12, 4, 16
WAIT_S = 600.0
COMMON: dict[str, Any] = {"chunk": 4, "kv_block": 16, "ignore_eos": True, "tile": 8}


def model(folder: Path) -> Path:
    """A mixture: 6 layers of 32 experts, 4 a token; 96 KiB an expert."""
    config = tiny_config(
        "qwen3_moe", hidden_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, moe_intermediate_size=64, num_experts=EXPERTS,
        num_experts_per_tok=TOP, vocab_size=512,
    )  # fmt: skip
    return write_checkpoint(folder / "m", config, seed=1)


def engines(path: Path, share: float, rate: float, expert: int) -> dict[str, Any]:
    """What makes each, for a share of the experts in memory."""
    slots = int(LAYERS * EXPERTS * share)
    each = {"memory_devices": 1, "kv_tokens": REQUESTS * 32, "rate": rate, **COMMON}
    return {
        "rotation": lambda: LaminaEngine.open(
            path, batches=3, max_batch=4, expert_slots=slots // 2, **each
        ),
        "queue": lambda: LaminaEngine.open(
            path, batches=3, max_batch=4, order="queue", expert_slots=slots // 2, **each
        ),
        "two": lambda: LaminaEngine.open(path, batches=2, max_batch=6, expert_slots=slots, **each),
        "scheduler": lambda: JaxEngine.open(
            path, slots * expert, model=Offloaded(1), max_running=REQUESTS, max_rows=16,
            kv_tokens=REQUESTS * 32, reader=ThrottledReader(rate), io="buffered", **COMMON,
        ),
    }  # fmt: skip


def loads_of(engine: Any) -> int:
    """Experts read up to now."""
    return engine.totals()["loads"]


def compare(path: Path, share: float, rate: float, expert: int, rounds: int) -> dict[str, Any]:
    """Tokens/s and loads of each, best of the rounds; the bits of all against each other."""
    requests = [
        Request(f"r{n}", tuple((31 * n + 7 * i) % 500 for i in range(PROMPT)), NEW)
        for n in range(REQUESTS)
    ]
    told: dict[str, Any] = {"share": share, "rate": rate}
    with ExitStack() as stack:
        made = engines(path, share, rate, expert)
        running = {name: stack.enter_context(make()) for name, make in made.items()}
        texts: dict[str, Any] = {}
        for turn in range(rounds + 1):  # the first fills the slots
            for name, engine in running.items():
                before, began = loads_of(engine), time.perf_counter()
                results = [h.result(WAIT_S) for h in engine.submit_all(requests)]
                seconds = time.perf_counter() - began
                tokens = [r.tokens for r in results]
                assert all(r.error is None for r in results)
                assert texts.setdefault("all", tokens) == tokens, f"{name} gave other tokens"
                found = told.setdefault(name, {"tokens_per_s": [], "loads": []})
                if turn:
                    found["tokens_per_s"].append(REQUESTS * NEW / seconds)
                    found["loads"].append(loads_of(engine) - before)
    for name in running:
        found = told[name]
        best = max(range(rounds), key=lambda i: found["tokens_per_s"][i])
        found["best"], found["best_loads"] = found["tokens_per_s"][best], found["loads"][best]
        # Nothing can be faster than its own reads on this channel.
        found["bound"] = REQUESTS * NEW * rate / max(1, found["best_loads"] * expert)
    return told


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=40e6, help="bytes/s of the channel")
    parser.add_argument("--shares", default="0.25,0.5,0.75")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="covey-misses-") as folder:
        path = model(Path(folder))
        with Checkpoint.open(path) as ckpt:
            expert = ckpt.expert_bytes(0)
        rows = []
        for share in map(float, args.shares.split(",")):
            rows.append(compare(path, share, args.rate, expert, args.rounds))
            row = rows[-1]
            print(share, {n: (round(row[n]["best"]), row[n]["best_loads"], round(row[n]["bound"]))
                          for n in ("rotation", "queue", "two", "scheduler")}, flush=True)
    write_result("lamina-misses", {
        "load_before": load, "load_after": os.getloadavg()[0], "expert_bytes": expert, "rows": rows,
    })  # fmt: skip


if __name__ == "__main__":
    main()
