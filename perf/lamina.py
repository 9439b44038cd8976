"""Monolithic against pooled attention, with long contexts, on this machine.

    python -m perf.lamina [--contexts 1024,4096,16384] [--repeats 5] [--parts steps,handoff]

Both pools are CPU devices here: they share cores and memory, so nothing can become faster than the
bound of one machine; what is measured is what offloading costs, what Q-first hides, how many bytes
go over, and how far each is from that bound. KV is filled with random numbers, not by prefill.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import numpy as np

from jax_impl.attention_pool.devices import Offloaded
from jax_impl.attention_pool.engine import LaminaEngine
from jax_impl.attention_pool.wire import Wire
from jax_impl.kv import Table
from jax_impl.model import JaxModel
from oracle.tiny import tiny_config, write_checkpoint
from perf.record import write_result
from reference.control.attention_rotation import replicas_of
from reference.control.attention_wire import WireBytes
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request

BLOCK, TILE = 64, 8
SCRATCH = np.ones(64 << 20, np.float32)


def model(folder: Path, kv_heads: int, longest: int) -> Path:
    """A dense decoder: 4 layers, hidden 512, 8 heads of 64."""
    config = tiny_config(
        "llama", hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=64, intermediate_size=1536, vocab_size=1024,
        max_position_embeddings=longest + 64,
    )  # fmt: skip
    return write_checkpoint(folder / f"kv{kv_heads}", config, seed=1)


def read_rate() -> float:
    """Bytes/s at which one thread reads memory here."""
    best = min(_timed(lambda: SCRATCH.sum()) for _ in range(3))
    return SCRATCH.nbytes / best


def _timed(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Steps:
    """Decode steps of `rows` requests at one context length, again and again at one position."""

    def __init__(self, ckpt: Checkpoint, make: Any, rows: int, context: int) -> None:
        each = -(-(context + 1) // BLOCK)
        self.model = make(
            ckpt, rows=rows, kv_blocks=rows * each, max_len=each * BLOCK, kv_block=BLOCK,
            texts=rows, tile=TILE, wide=0, compute="f32", kv_dtype="f32",
        )  # fmt: skip
        self.model.compile()
        tables = [Table((tuple(range(r * each, (r + 1) * each)),)) for r in range(rows)]
        ids = [(17 * r) % 900 for r in range(rows)]
        self._args = (list(range(rows)), ids, [context] * rows, tables, [True] * rows)

    def step(self) -> float:
        """Seconds of one step."""
        return _timed(lambda: self.model.enter(*self._args).get())


def fill(pools: list[Any], seed: int) -> None:
    """Random keys and values in place of zeros."""
    rng = np.random.default_rng(seed)
    for i, pool in enumerate(pools):
        one = rng.normal(size=(min(64, pool.shape[0]), *pool.shape[1:])).astype(np.float32)
        many = np.resize(one, pool.shape)
        pools[i] = jax.device_put(many, next(iter(pool.devices())))


def steps(folder: Path, contexts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Step times of the same requests, monolithic, pooled with and without Q first."""
    out = []
    for kv_heads in (2, 8):
        for context in contexts:
            for rows in (8, 16):
                held = rows * context * kv_heads * 64 * 2 * 4 * 4
                if held > 1.2e9:  # three copies are held
                    continue
                with Checkpoint.open(model(folder, kv_heads, max(contexts))) as ckpt:
                    out.append(_compare(ckpt, kv_heads, context, rows, repeats))
                print(out[-1], flush=True)
    return out


def _compare(
    ckpt: Checkpoint, kv_heads: int, context: int, rows: int, repeats: int
) -> dict[str, Any]:
    """The three in turn, round after round, so that other work on the machine meets all alike."""
    weights = sum(ckpt.tensor(role).nbytes for role in ckpt.roles)
    cached = rows * context * kv_heads * 64 * 2 * 4 * 4
    wire = WireBytes([s.attention for s in ckpt.config.layers], ckpt.config.hidden)
    pools = {name: Offloaded(1, overlap=name == "q_first", timed=True, wire=Wire())
             for name in ("q_first", "plain")}  # fmt: skip
    runs = {"monolithic": Steps(ckpt, JaxModel, rows, context)}
    runs |= {name: Steps(ckpt, made, rows, context) for name, made in pools.items()}
    held = [runs["monolithic"].model, *(made.pool.devices[0] for made in pools.values())]
    for place in held:
        fill(place._keys if place is held[0] else place.keys, 1)
        fill(place._values if place is held[0] else place.values, 2)
    logits = {name: run.model.enter(*run._args).get().logits for name, run in runs.items()}
    sent = {name: made.wire.attention for name, made in pools.items() if made.wire}
    before = {name: _busy(made.pool.devices[0]) for name, made in pools.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    rates = []
    for _ in range(repeats):
        rates.append(read_rate())
        for name, run in runs.items():
            times[name].append(run.step())
    row: dict[str, Any] = {
        "kv_heads": kv_heads, "context": context, "requests": rows, "weight_bytes": weights,
        "kv_bytes": cached, "read_bytes_per_s": max(rates),
        "bound_s": (weights + cached) / max(rates),
        "limited_by": "reading the cache" if cached > weights else "reading weights",
        "bytes_formula": wire.attention(rows),
    }  # fmt: skip
    for name, found in times.items():
        row[f"{name}_s"], row[f"{name}_median_s"] = min(found), statistics.median(found)
    for name, made in pools.items():
        assert made.wire is not None
        row[f"{name}_bytes"] = (made.wire.attention - sent[name]) // repeats
        row[f"{name}_same_bits"] = all(
            logits[name][i].tobytes() == logits["monolithic"][i].tobytes() for i in range(rows)
        )
        busy = _busy(made.pool.devices[0])
        attend = busy[0] - before[name][0]
        row[f"{name}_attention_s"] = attend / repeats
        row[f"{name}_hidden_share"] = (busy[1] - before[name][1]) / attend
    for run in runs.values():
        run.model.end()
    return row


def _busy(device: Any) -> tuple[float, float]:
    return device.busy.attend_s, device.busy.hidden_s


def rotation(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """LaminaEngine with one to three batches in flight, real prompts: tokens/s while decoding."""
    path = model(folder, 2, 1024)
    prompt, new = 512, 24
    requests = [
        Request(f"r{n}", tuple((31 * n + 7 * i) % 1000 for i in range(prompt)), new)
        for n in range(12)
    ]
    out = []
    for batches in (1, 2, 3):
        with LaminaEngine.open(
            path, batches=batches, memory_devices=1, max_batch=12 // batches, chunk=64,
            kv_tokens=12 * 640, ignore_eos=True, timed=True,
        ) as engine:  # fmt: skip
            rates = []
            for _ in range(max(1, repeats // 2)):
                handles = engine.submit_all(requests)
                results = [h.result(1200.0) for h in handles]
                first = max(r.token_s[0] for r in results)
                last = min(r.token_s[-1] for r in results)
                tokens = sum(first < t <= last for r in results for t in r.token_s)
                rates.append(tokens / (last - first) if last > first else 0.0)
            turns = [e - b for w in engine.workers for _, k, b, e in w.history if 0 < k < 4]
            told = engine.totals()
            attend = told["attend_s"] / max(1, told["asks"])
        out.append({
            "batches": batches, "replicas": replicas_of(batches), "tokens_per_s": max(rates),
            "slice_s": statistics.median(turns), "attention_tile_s": attend, "wire": told["wire"],
        })  # fmt: skip
        print(out[-1], flush=True)
    return out


def handoff(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Time between tokens of requests that decode while long prompts come in: none, through the
    batches, or from a prefill worker whose keys and values are pulled in the gaps."""
    path = model(folder, 2, 1024)
    out = []
    for way in ("nothing", "batches", "worker"):
        with LaminaEngine.open(
            path, batches=2, memory_devices=1, max_batch=8, chunk=32, kv_tokens=14 * 640,
            prefill=int(way == "worker"), ignore_eos=True, timed=True,
        ) as engine:  # fmt: skip
            gaps: list[float] = []
            for turn in range(max(1, repeats // 2)):
                steady = [Request(f"d{turn}.{n}", (n + 1,) * 64, 160) for n in range(4)]
                prompts = [Request(f"p{turn}.{n}", tuple((31 * n + 7 * i) % 1000
                           for i in range(512)), 2) for n in range(6)]  # fmt: skip
                since = time.monotonic()
                decoding = engine.submit_all(steady)
                for handle in decoding:
                    for _ in zip(range(8), handle, strict=False):
                        pass
                began, ended = time.monotonic() - since, 1e9
                if way != "nothing":
                    for handle in engine.submit_all(prompts):
                        handle.result(1200.0)
                    ended = time.monotonic() - since
                for handle in decoding:
                    times = [t for t in handle.result(1200.0).token_s if began < t <= ended]
                    gaps += [b - a for a, b in itertools.pairwise(times)]
            told = engine.totals()
        out.append({
            "prompts": way, "token_s_median": statistics.median(gaps), "token_s_max": max(gaps),
            "tokens": len(gaps), "pulls": told["pulls"], "wire": told["wire"],
        })  # fmt: skip
        print(out[-1], flush=True)
    return out


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="steps,rotation,handoff")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    contexts = [int(c) for c in args.contexts.split(",")]
    with tempfile.TemporaryDirectory(prefix="covey-lamina-") as folder:
        made = {
            "steps": lambda: steps(Path(folder), contexts, args.repeats),
            "rotation": lambda: rotation(Path(folder), args.repeats),
            "handoff": lambda: handoff(Path(folder), args.repeats),
        }
        figures = {name: made[name]() for name in args.parts.split(",")}
    after = os.getloadavg()[0]
    write_result("lamina", {"load_before": load, "load_after": after, **figures})


if __name__ == "__main__":
    main()
