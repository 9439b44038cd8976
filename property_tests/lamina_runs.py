"""What `lamina_child` runs: engines over pools and the monolithic one, and what they are told to
find out. Imported by that process alone, whose first argument is a folder for models and logs.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jax_impl.attention_pool.devices import Offloaded
from jax_impl.attention_pool.engine import LaminaEngine
from jax_impl.attention_pool.wire import Wire
from jax_impl.engine import JaxEngine
from oracle.checkers import check_log
from oracle.tiny import tiny_config, write_checkpoint
from reference.control.attention_wire import Protocol, WireBytes, event_of
from reference.files.requests import Request
from reference.vocab.errors import BadInput

FOLDER = Path(sys.argv[1])
COMMON = {"kv_block": 8, "chunk": 4, "ignore_eos": True, "compile_cache": FOLDER / "compiled"}
REQUESTS = [
    Request(str(n), tuple((n * 7 + 13 * i + i * i) % 90 + 3 for i in range(2 + 3 * n)), 4 + n,
            temperature=0.7 * (n % 2), seed=n)
    for n in range(6)
]
PROMPT_ROWS = sum(len(r.prompt) for r in REQUESTS)
ROWS = sum(len(r.prompt) + (r.max_new_tokens or 0) - 1 for r in REQUESTS)


LOGS = FOLDER / "logs"
LOGS.mkdir(exist_ok=True)
COUNT = itertools.count()


def model(name: str, family: str = "llama", **overrides: Any) -> Path:
    return write_checkpoint(FOLDER / name, tiny_config(family, **overrides), seed=3)


def monolithic(path: Path, **options: Any) -> list[Any]:
    """Each request's result from the ordinary engine, everything resident."""
    sizes = {"max_running": 6, "max_rows": 8, "kv_tokens": 512} | COMMON | options
    with JaxEngine.open(path, "100%", **sizes) as engine:
        handles = engine.submit_all(REQUESTS, logits=True)
        return [h.result(120.0) for h in handles]


def same(found: list[Any], want: list[Any]) -> bool:
    """Tokens and logits, bit for bit."""
    return all(
        f.error is None and f.tokens == w.tokens and f.logits.tobytes() == w.logits.tobytes()
        for f, w in zip(found, want, strict=True)
    )


class Loss:
    """Lets a device be lost when its request has two tokens and needs more."""

    def __init__(self, engine: LaminaEngine, request: Request, lose: list[tuple[str, int]]) -> None:
        self.engine, self.at, self.what = engine, len(request.prompt), lose[0]
        self.done = False

    def __call__(self, position: int, row: np.ndarray) -> None:
        if position == self.at and not self.done:
            self.done = True
            self.engine.lose(*self.what)


def pooled(
    path: Path, want: list[Any], arrivals: list[int], lose: list[tuple[str, int]] = [],  # noqa: B006
    fail: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The same requests on pools, in the given order of arrival; then once more while devices are
    lost, one in the middle of each of the first requests."""
    sizes = {"max_batch": 2, "kv_tokens": 256, "check": True, "timed": True} | COMMON | options
    log = sizes.setdefault("log", LOGS / f"{next(COUNT)}.jsonl")
    with LaminaEngine.open(path, **sizes) as engine:
        programs = [w.replica.programs for w in engine.workers]
        handles = engine.submit_all([REQUESTS[i] for i in arrivals], logits=True)
        found = {h.id: h.result(120.0) for h in handles}
        told = engine.totals()
        assert not any(f.error for f in found.values()), [f.error for f in found.values()]
        wire = WireBytes([s.attention for s in engine.config.layers], engine.config.hidden)
        by_device = dict(engine.wire.by_device)
        rows = ROWS - (PROMPT_ROWS if "prefill" in options else 0)
        out = {
            "same": same([found[str(n)] for n in range(6)], want),
            "measured": sum(told["wire"][k] for k in ("q", "kv", "a")),
            "formula": wire.attention(rows), "to_memory": told["wire"]["q"] + told["wire"]["kv"],
            "to_memory_formula": wire.to_memory(rows),
            "context": told["wire"].get("context", 0),
            "context_formula": wire.context(rows, engine.options.batches),
            "by_device": [by_device[d] for d in sorted(by_device)],
            "quiet": engine.wire._protocol.quiet, "rows": told["rows"], "early": told["early"],
            "asks": told["asks"], "hidden_s": told["hidden_s"], "attend_s": told["attend_s"],
            "loads": told["loads"],
            "resident": max(w.experts.resident for w in engine.workers),
            "log": str(log), "missing": engine.missing(), "failure": repr(engine.failure),
            "compute_kv": sum(w.replica.kv_bytes for w in engine.workers),
            "compute_pools": sum(len(w.replica._keys) for w in engine.workers),
            "memory_kv": engine.pool.kv_bytes,
            "replicas": len(engine.workers), "turns": sum(len(w.history) for w in engine.workers),
        }  # fmt: skip
        if "prefill" in options:
            out |= handed_over(engine, want)
            told = engine.totals()
        if lose:
            handles = [
                engine.submit(r, logits=True, on_logits=Loss(engine, r, lose[i:])) if i < len(lose)
                else engine.submit(r, logits=True)
                for i, r in enumerate(REQUESTS)
            ]
            again = [h.result(120.0) for h in handles]
            out |= {"lost_same": same(again, want), "lost_missing": engine.missing(),
                    "lost_rows": engine.totals()["rows"] - told["rows"]}  # fmt: skip
        if fail:
            out |= ended_by_the_caller(engine, want)
            out |= failing(engine, want)
        out["no_new_programs"] = programs == [w.replica.programs for w in engine.workers]
    return out


def handed_over(engine: LaminaEngine, want: list[Any]) -> dict[str, Any]:
    """Prompts that a prefill worker runs: what was pulled, when, and what was under way then; then
    cancels and losses in the middle of it."""
    pool, layers = engine.pool, [s.attention for s in engine.config.layers]
    # While a device pulls, nothing that it was asked may wait for its answer.
    busy, pulls, between = 0, 0, 0
    for device in pool.devices:
        for _, _, began, _ in device.pulls:
            asked = sum(t <= began for t in device.asked)
            answered = sum(t <= began for t in device.answered)
            pulls += 1
            busy += asked > answered
            between += 0 < asked == answered < len(device.answered)
    told = engine.totals()
    want_bytes = sum(
        4 * a.cache_heads * (a.cache_key_dim + a.cache_value_dim)
        * sum(min(len(r.prompt), a.window or 1 << 30) for r in REQUESTS) for a in layers
    )
    out = {
        "pulled": told["wire"]["pull"], "pulled_formula": want_bytes,
        "pulls": pulls, "pulls_while_busy": busy, "pulls_between": between,
        "late": told["pulls"]["late"], "late_s": told["pulls"]["late_s"],
        "prompt_rows": told["prompt_rows"], "pull_bytes": told["pulls"]["bytes"],
    }  # fmt: skip
    lost = [("prefill", 0), ("memory", 0), ("prefill", 0), ("memory", len(pool.devices) - 1)]
    for what in lost:
        handles = engine.submit_all(REQUESTS, logits=True)
        while not pool.devices[what[1]].backlog and not all(h.done for h in handles):
            time.sleep(0.0002)
        engine.lose(*what)
        found = [h.result(120.0) for h in handles]
        out.setdefault("lost_handover_same", []).append(same(found, want))
    handles = engine.submit_all(REQUESTS, logits=True)
    handles[0].cancel()  # perhaps before its prompt runs, the others at some time of the hand-off
    for handle in handles[1:4]:
        while not pool.devices[0].backlog and not all(h.done for h in handles):
            time.sleep(0.0002)
        handle.cancel()
    found = [h.result(120.0) for h in handles]
    out["cancelled_kept"] = same(found[4:], want[4:])
    out["cancelled_reasons"] = sorted({f.finish_reason for f in found[:4]})
    engine.submit(REQUESTS[0]).result(120.0)  # what was dropped is over by the time this is
    out["handover_missing"] = engine.missing()
    return out


def ended_by_the_caller(engine: LaminaEngine, want: list[Any]) -> dict[str, Any]:
    """One request ends at its third token because `stop_at` says so; another's `stop_at` raises."""
    heard: list[int] = []

    def third(token: int) -> bool:
        heard.append(token)
        return len(heard) == 3

    def broken(token: int) -> bool:
        raise RuntimeError("the caller's own")

    asked: list[Any] = [third, broken, *[None] * (len(REQUESTS) - 2)]
    handles = [engine.submit(r, logits=True, stop_at=s)
               for r, s in zip(REQUESTS, asked, strict=True)]
    cut, bad, *rest = [h.result(120.0) for h in handles]
    return {
        "stop_heard": list(cut.tokens) == heard == list(want[0].tokens[:3]),
        "stop_reasons": [cut.finish_reason, bad.finish_reason], "stop_error": bad.error,
        "stop_others": same(rest, want[2:]), "stop_missing": engine.missing(),
    }


def failing(engine: LaminaEngine, want: list[Any]) -> dict[str, Any]:
    """A memory device fails at one tile, and a caller gives up: the others' bits, then all's."""
    device = engine.pool.devices[0]
    finish, left = device._finish, [7]

    def broken(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is on fire")
        finish(*args)

    device._finish = broken  # type: ignore[method-assign]
    handles = engine.submit_all(REQUESTS, logits=True)
    handles[5].cancel()
    found = [h.result(120.0) for h in handles]
    device._finish = finish  # type: ignore[method-assign]
    good = [(f, w) for f, w in zip(found, want, strict=True) if f.error is None]
    ended = [(f, w) for f, w in good if f.finish_reason != "cancelled"]
    again = [h.result(120.0) for h in engine.submit_all(REQUESTS, logits=True)]
    return {
        "errors": sorted({f.error for f in found if f.error}), "unharmed": len(ended),
        "unharmed_same": same([f for f, _ in ended], [w for _, w in ended]),
        "cancelled": found[5].finish_reason, "then_same": same(again, want),
        "then_missing": engine.missing(),
    }  # fmt: skip


def offloaded(path: Path, want: list[Any], memory: str, pools: Offloaded) -> dict[str, Any]:
    """A mixture over its budget, attention elsewhere, under the engine's scheduler."""
    sizes = {"max_running": 6, "max_rows": 8, "kv_tokens": 512, "keep_log": True} | COMMON
    pools.wire = Wire(keep=True)
    with JaxEngine.open(path, memory, model=pools, **sizes) as engine:
        handles = engine.submit_all(REQUESTS, logits=True)
        found = [h.result(120.0) for h in handles]
        loads = engine.totals()["loads"]
    protocol = Protocol()
    for record in engine.records:
        for plain in record.get("wire", ()):
            protocol.take(event_of(plain))
    wire = WireBytes([s.attention for s in engine.config.layers], engine.config.hidden)
    return {
        "same": same(found, want), "measured": pools.wire.attention, "loads": loads,
        "formula": wire.attention(ROWS), "quiet": protocol.quiet, "tiles": protocol.finished,
        "failure": repr(engine.failure), "violations": check_log(engine.records, complete=True)[:3],
        "kv_bytes": pools.pool.kv_bytes, "missing": engine._loop.missing(),
    }  # fmt: skip


def refused(what: Callable[[], Any]) -> str:
    """What an attempt that must fail says."""
    try:
        what()
    except BadInput as error:
        return str(error)
    return "not refused"
