"""What `covey pack` gains: loads of experts from the same model as it comes and packed.

    python -m perf.pack --work FOLDER [--rounds 7] [--experts 24]

Writes a generated mixture (two layers, experts of 6 MiB, BF16) and its packed copy into FOLDER,
then loads every expert of both with the engine's own transfers, round by round in turn, directly
and buffered, and compares the slots' bytes. Writes perf/results/pack-DATE.json.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from jax_impl.app.main import main as covey
from jax_impl.slots import SlotPool
from jax_impl.spans import Io
from jax_impl.transfer import Transferred, Transfers
from oracle.tiny import tiny_config, write_checkpoint
from perf.record import write_result
from reference.files.budget import slot_size
from reference.files.checkpoint import Checkpoint
from reference.vocab.ids import ExpertKey

LAYERS, HIDDEN = 2, 1024


class Side:
    """One of the two models, with threads and slots ready. `sums`: checksums of all experts."""

    def __init__(self, model: Path, io: Io, threads: int) -> None:
        self.ckpt = Checkpoint.open(model)
        c = self.ckpt.config
        self.keys = [ExpertKey(layer, e) for layer in c.moe_layers for e in range(c.experts)]
        size = slot_size(self.ckpt.expert(*key) for key in self.keys)
        self.pool = SlotPool(threads, size)
        self.done: SimpleQueue[Transferred] = SimpleQueue()
        self.transfers = Transfers(
            self.pool, lambda key: self.ckpt.expert(*key), self.keys, self.done.put,
            threads=threads, io=io,
        )  # fmt: skip
        self.ticket = 0

    def round(self, check: bool = False) -> tuple[dict[str, float], list[int]]:
        """Loads every expert once. Seconds, processor seconds, bytes; with `check` checksums."""
        free, waiting, sums, nbytes = list(range(self.pool.count)), list(self.keys), {}, 0
        cpu, began = _cpu(), time.perf_counter()
        while waiting or len(free) < self.pool.count:
            while free and waiting:
                self.transfers.start(self.ticket, waiting.pop(), free.pop())
                self.ticket += 1
            end = self.done.get()
            if end.error:
                raise SystemExit(end.error)
            if check:
                sums[end.key] = self.pool.checksum(end.slot, self.transfers.places(end.key))
            free.append(end.slot)
            nbytes += end.nbytes
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cpu_s": _cpu() - cpu, "bytes": nbytes}, [
            sums[key] for key in sorted(sums)]

    def close(self) -> None:
        self.transfers.close()
        self.ckpt.close()


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--experts", type=int, default=24, help="experts a layer")
    parser.add_argument("--threads", type=int, default=4)
    args = parser.parse_args()
    config = tiny_config("mixtral", hidden_size=HIDDEN, intermediate_size=HIDDEN,
                         num_local_experts=args.experts, num_hidden_layers=LAYERS,
                         num_attention_heads=16, num_key_value_heads=4)
    model = write_checkpoint(args.work / "model", config, dtype="BF16", pattern=True)
    if covey(["pack", str(model), str(args.work / "packed"), "--quiet"]):
        raise SystemExit("not packed")
    found: dict[str, Any] = {}
    io: Io
    for io in ("direct", "buffered"):
        sides = {name: Side(args.work / name, io, args.threads) for name in ("model", "packed")}
        sums = {name: side.round(check=True)[1] for name, side in sides.items()}
        if sums["model"] != sums["packed"]:
            raise SystemExit("the packed experts have other bytes")
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                rounds[name].append(side.round()[0])
        figures = {
            name: {"bytes_per_s": median(r["bytes"] / r["seconds"] for r in rs),
                   "cpu_s_per_gb": median(r["cpu_s"] / r["bytes"] * 1e9 for r in rs),
                   "bounce_bytes": sides[name].transfers.bounce_bytes, "rounds": rs}
            for name, rs in rounds.items()
        }  # fmt: skip
        pairs = list(zip(rounds["model"], rounds["packed"], strict=True))
        figures["packed_over_model"] = {
            "speed": median(a["seconds"] / b["seconds"] for a, b in pairs),
            "cpu": median(b["cpu_s"] / a["cpu_s"] for a, b in pairs),
        }
        found[io] = figures
        for side in sides.values():
            side.close()
        speed, cpu = figures["packed_over_model"].values()
        print(f"{io}: {figures['model']['bytes_per_s'] / 1e6:.0f} -> "
              f"{figures['packed']['bytes_per_s'] / 1e6:.0f} MB/s ({speed:.2f} times), "
              f"{figures['model']['cpu_s_per_gb']:.2f} -> {figures['packed']['cpu_s_per_gb']:.2f} "
              f"processor seconds a GB ({cpu:.2f} times)")
    write_result("pack", {"experts": LAYERS * args.experts, "expert_bytes": 6 * HIDDEN * HIDDEN,
                          "threads": args.threads, "io": found})


if __name__ == "__main__":
    main()
