"""`covey demo --lamina`: the built-in model with its attention in another pool.

The same requests three times: everything on one device; three batches in rotation over two replicas
with all KV on two memory devices; half of the experts' memory under the interleaved scheduler with
all KV on two memory devices. Tokens and logits are compared bit by bit, bytes with the formula.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_impl.attention_pool.devices import Offloaded
from jax_impl.attention_pool.engine import LaminaEngine
from jax_impl.attention_pool.wire import Wire
from jax_impl.engine import JaxEngine
from reference.control.attention_wire import WireBytes
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.vocab.config import ModelConfig

BATCHES, MEMORY, NEW, COUNT = 3, 2, 24, 6
COMMON: dict[str, Any] = {"chunk": 16, "kv_block": 64, "ignore_eos": True}
WAIT_S = 600.0


def show() -> int:
    """Print the demonstration; 0 when all bits and bytes are as they should be."""
    from jax_impl.app import builtin, demo_text
    from jax_impl.app.text import Text

    enough_devices(BATCHES - 1 + MEMORY)
    path = builtin.folder()
    with_text = Text(path)
    with Checkpoint.open(path) as checkpoint:
        config = checkpoint.config
    requests = demo_text.requests(with_text, config.vocab, COUNT, NEW)
    rows = sum(len(r.prompt) + NEW - 1 for r in requests)
    wire = WireBytes([s.attention for s in config.layers], config.hidden)
    formula = wire.attention(rows)
    print(
        f"{builtin.name_of(path)}: {len(config.layers)} layers; {COUNT} requests, {rows} token "
        f"rows; {wire.attention(1)} bytes a row to attention and back: "
        f"{shares(config)}"
    )
    whole = monolithic(path, requests)
    same, equal = True, True
    for line, results, measured in (pooled(path, requests, config), offloaded(path, requests)):
        same &= alike(results, whole)
        equal &= measured == formula
        print(line)
        print(
            f"bytes: measured {measured}, formula {formula}, "
            f"{'equal' if measured == formula else 'not equal'}"
        )
    print(f"same tokens and logits: {'yes' if same else 'no'}")
    return 0 if same and equal else 1


def enough_devices(count: int) -> None:
    """On the CPU, as many devices as are needed; before jax has made any."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # jax has started: what there is has to do


def shares(config: ModelConfig) -> str:
    """The parts of a row's bytes at one layer."""
    layer = WireBytes([config.layers[0].attention], config.hidden).layers[0]
    return f"{layer.q} of queries, {layer.kv} cached, {layer.a} attended, at each layer"


def progress(text: str) -> None:
    """One line at a time, on standard error."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def done() -> None:
    """Nothing more to say on standard error."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def monolithic(path: Path, requests: list[Request]) -> list[Any]:
    """Everything on one device, every expert resident."""
    with JaxEngine.open(
        path, "100%", max_running=COUNT, max_rows=16, kv_tokens=COUNT * 128, progress=progress,
        **COMMON,
    ) as engine:  # fmt: skip
        handles = engine.submit_all(requests, logits=True)
        results = [h.result(WAIT_S) for h in handles]
    done()
    return results


def pooled(
    path: Path, requests: list[Request], config: ModelConfig
) -> tuple[str, list[Any], int]:  # fmt: skip
    """(what ran, results, measured bytes) of the rotation."""
    with LaminaEngine.open(
        path, batches=BATCHES, memory_devices=MEMORY, max_batch=2, kv_tokens=COUNT * 128,
        timed=True, check=True, progress=progress, **COMMON,
    ) as engine:  # fmt: skip
        handles = engine.submit_all(requests, logits=True)
        results = [h.result(WAIT_S) for h in handles]
        told = engine.totals()
    done()
    hidden = told["hidden_s"] / told["attend_s"] if told["attend_s"] else 0.0
    line = (
        f"{BATCHES} batches in rotation over {BATCHES - 1} replicas, KV on {MEMORY} memory "
        f"devices: {hidden:.0%} of attention ran before its own keys had come, "
        f"{told['wire'].get('context', 0)} bytes moved between replicas"
    )
    return line, results, sum(told["wire"][k] for k in ("q", "kv", "a"))


def offloaded(path: Path, requests: list[Request]) -> tuple[str, list[Any], int]:
    """(what ran, results, measured bytes) of the mixture over its budget."""
    pools = Offloaded(MEMORY, wire=Wire())
    with JaxEngine.open(
        path, "50%", max_running=COUNT, max_rows=16, kv_tokens=COUNT * 128, model=pools,
        progress=progress, **COMMON,
    ) as engine:  # fmt: skip
        handles = engine.submit_all(requests, logits=True)
        results = [h.result(WAIT_S) for h in handles]
        loads = engine.totals()["loads"]
    done()
    assert pools.wire is not None
    line = (
        f"half of the experts' memory, interleaved, KV on {MEMORY} memory devices: {loads} experts "
        "read"
    )
    return line, results, pools.wire.attention


def alike(found: list[Any], want: list[Any]) -> bool:
    """Tokens and logits, bit for bit."""
    return all(
        f.error is None
        and f.tokens == w.tokens
        and np.asarray(f.logits).tobytes() == np.asarray(w.logits).tobytes()
        for f, w in zip(found, want, strict=True)
    )
