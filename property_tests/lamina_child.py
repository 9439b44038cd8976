"""Runs engines over several CPU devices, in a process of its own; prints what happened as JSON.

`JAX_NUM_CPU_DEVICES=7 python -m property_tests.lamina_child FOLDER [every]`; `every`: all that
`matrix` has, and nothing else.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.attention_pool.converter import attention, convert
from jax_impl.attention_pool.devices import Offloaded
from jax_impl.attention_pool.engine import LaminaEngine
from jax_impl.attention_pool.function import PooledFunction
from jax_impl.engine import JaxEngine
from property_tests.lamina_runs import (
    COMMON,
    REQUESTS,
    model,
    monolithic,
    offloaded,
    pooled,
    refused,
)
from property_tests.shared_programs import share


def held(path: Path) -> dict[str, Any]:
    """What lies on each device when requests have run: all arrays of this process, in bytes."""
    with LaminaEngine.open(path, batches=3, memory_devices=2, kv_tokens=256, **COMMON) as engine:
        for handle in engine.submit_all(REQUESTS):
            handle.result(120.0)
        gc.collect()
        found: Counter[int] = Counter()
        for array in jax.live_arrays():
            for device in array.devices():
                found[device.id] += array.nbytes
        queries = sum(4 * 8 * s.attention.heads * s.attention.head_dim for s in
                      engine.config.layers)  # of one tile
        return {
            "compute": [(found[r.device.id], r.non_expert_bytes_held + r.bank_bytes)
                        for r in (w.replica for w in engine.workers)],
            "memory": [(found[d.device.id], d.kv_bytes) for d in engine.pool.devices],
            "queries": queries,
        }  # fmt: skip


@attention
def my_attention(q: Any, k: Any, v: Any, cache: Any, at: Any) -> Any:
    """A user's own: q, k, v [R, D]; cache [2, R, S, D]."""
    cache = cache.at[:, jnp.arange(len(q)), at].set(jnp.stack([k, v]))
    score = jnp.einsum("rd,rsd->rs", q, cache[0])
    seen = jnp.arange(cache.shape[2])[None] <= at[:, None]
    return jnp.einsum("rs,rsd->rd", jax.nn.softmax(jnp.where(seen, score, -1e30)), cache[1]), cache


def my_step(w: Any, at: Any, cache: Any, x: Any) -> Any:
    """A user's own step: two layers."""
    new = []
    for i in range(2):
        a, one = my_attention(jnp.tanh(x @ w[i]), x @ w[i].T, x * 2, cache[i], at)
        x, new = jnp.sin(x + a @ w[i]), [*new, one]
    return x, new


def function() -> dict[str, Any]:
    """A user's function over two devices, three steps, each with the cache of the one before."""
    draw = np.random.default_rng(0)
    w = [draw.normal(size=(6, 6)).astype(np.float32) for _ in range(2)]
    cache = [draw.normal(size=(2, 4, 8, 6)).astype(np.float32) for _ in range(2)]
    x = draw.normal(size=(4, 6)).astype(np.float32)
    at = np.array([2, 3, 0, 4], np.int32)
    c = convert(my_step, (w, at, cache, x), free=(0, 1), cache=(2,))
    here, there, local, equal, moved = jax.devices()[0], jax.devices()[1], cache, True, True
    with PooledFunction(c, here, there) as pooled:
        for step in range(3):
            got, want = (f(w, at + step, k, x) for f, k in ((pooled.run, cache), (c.run, local)))
            equal &= all(np.asarray(a).tobytes() == np.asarray(b).tobytes()
                         for a, b in zip(got, want, strict=True))
            moved &= got[0].devices() == {here} and got[1].devices() == {there}
            x, cache, local = np.asarray(got[0]), list(got[1:]), list(want[1:])
        return {"same": equal, "placed": moved, "measured": pooled.wire.attention,
                "formula": 3 * 2 * 4 * x.nbytes, "kept": c.weights, "stream": x.nbytes}


ATTENTIONS: dict[str, tuple[str, dict[str, int], list[tuple[str, int]]]] = {
    # name: family, heads, (partition, memory devices)
    "mha": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
            [("head", 1), ("head", 2), ("head", 4), ("request", 2), ("request", 3)]),
    "gqa": ("llama", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8},
            [("head", 1), ("head", 2), ("request", 2), ("request", 3)]),
    "mqa": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
            [("head", 1), ("request", 2), ("request", 3)]),
    "mla": ("deepseek_v2", {}, [("head", 1), ("request", 2), ("request", 3)]),
}  # fmt: skip
"""Every legal number of memory devices up to four for heads; for whole requests any will do."""


def matrix(every: bool) -> dict[str, dict[str, Any]]:
    """Whole engines for each attention, partition, number of batches and with and without overlap:
    all 120, or three of the eight kinds of pipeline for each partition, in turn."""
    out: dict[str, dict[str, Any]] = {}
    kinds = [(n, overlap) for n in (1, 2, 3, 4) for overlap in (True, False)]
    turn = 0
    for name, (family, heads, partitions) in ATTENTIONS.items():
        path = model(f"every {name}", family, num_hidden_layers=2, **heads)
        want = monolithic(path)
        for partition, devices in partitions:
            mine = kinds if every else [kinds[(turn + 3 * i) % 8] for i in range(3)]
            turn += 1
            for n, overlap in mine:
                told = pooled(
                    path, want, [5, 0, 3, 1, 4, 2], batches=n, max_batch=12 // n, overlap=overlap,
                    memory_devices=devices, partition=partition, timed=False,
                )  # fmt: skip
                title = f"{name} {partition} {devices}, n={n}{'' if overlap else ', no overlap'}"
                keys = "same", "measured", "formula", "quiet", "missing", "failure", "early"
                out[title] = {k: told[k] for k in keys} | {"overlap": overlap}
    return out


def main(every: bool = False) -> dict[str, Any]:
    assert len(jax.devices()) == 7
    share()
    if every:
        return {"matrix": matrix(True)}
    gqa = model("gqa", num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2,
                head_dim=8)
    out: dict[str, Any] = {"held": held(gqa)}  # first, while the process has no other arrays
    out["matrix"] = matrix(False)
    mha = model("mha", num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2)
    want = monolithic(mha)
    out["mha head 2, n=3"] = pooled(
        mha, want, [0, 1, 2, 3, 4, 5], batches=3, memory_devices=2,
        lose=[("replica", 0), ("memory", 1), ("replica", 1), ("memory", 0)],
    )  # fmt: skip
    want = monolithic(gqa)
    out["gqa request 2, n=4, queue"] = pooled(
        gqa, want, [5, 3, 1, 0, 2, 4], batches=4, memory_devices=2, partition="request",
        order="queue", kv_tokens=64, lose=[("memory", 0), ("replica", 2)],
    )  # fmt: skip
    out["gqa head 2, n=2, no overlap"] = pooled(
        gqa, want, [2, 0, 1, 5, 4, 3], batches=2, memory_devices=2, overlap=False, fail=True
    )
    mqa = model("mqa", num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=1)
    out["mqa request 2, n=1"] = pooled(
        mqa, monolithic(mqa), [0, 1, 2, 3, 4, 5], memory_devices=2, partition="request"
    )
    moe = model("moe", "qwen3_moe", num_hidden_layers=2)
    want = monolithic(moe)
    out["moe 50%, head 2"] = offloaded(moe, want, "50%", Offloaded(2))
    out["moe resident, n=2"] = pooled(moe, want, [4, 2, 0, 1, 3, 5], batches=2)
    out["moe slots, n=3, queue"] = pooled(
        moe, want, [4, 2, 0, 1, 3, 5], batches=3, order="queue", expert_slots=10, lose=[]
    )
    out["moe 50%, request 3"] = offloaded(moe, want, "50%", Offloaded(3, partition="request"))
    mla = model("mla", "deepseek_v2", num_hidden_layers=2)
    want = monolithic(mla)
    out["mla 40%, no overlap"] = offloaded(mla, want, "40%", Offloaded(1, overlap=False))
    out["mla 40%, request 2"] = offloaded(mla, want, "40%", Offloaded(2, partition="request"))
    out["mla request 2, n=3, prefill"] = pooled(
        mla, want, [3, 1, 0, 2, 5, 4], batches=3, memory_devices=2, partition="request", prefill=1,
        pull_bytes=1000, lose=[("memory", 1), ("replica", 1)],
    )  # fmt: skip
    windows = model("windows", "gpt_oss", num_hidden_layers=2, sliding_window=9)
    want = monolithic(windows)
    out["windows head 2, n=2, prefill"] = pooled(
        windows, want, [0, 1, 2, 3, 4, 5], batches=2, memory_devices=2, prefill=1, pull_bytes=300
    )
    out["function"] = function()
    out["refused"] = {
        "heads": refused(lambda: LaminaEngine.open(gqa, memory_devices=3, **COMMON)),
        "mla heads": refused(lambda: JaxEngine.open(mla, "100%", model=Offloaded(2))),
        "devices": refused(lambda: LaminaEngine.open(gqa, memory_devices=2, batches=8, **COMMON)),
        "option": refused(lambda: LaminaEngine.open(gqa, batch=3)),
        "order": refused(lambda: LaminaEngine.open(gqa, order="random")),
        "slots": refused(lambda: LaminaEngine.open(moe, expert_slots=2, **COMMON)),
        "kv": refused(lambda: LaminaEngine.open(gqa, kv_tokens=3)),
    }
    return out


if __name__ == "__main__":
    found = main("every" in sys.argv[2:])
    print(json.dumps(found, default=lambda x: x.item() if isinstance(x, np.generic) else str(x)))
