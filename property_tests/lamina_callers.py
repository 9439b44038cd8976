"""What `test_lamina_callers` runs, in a process with four CPU devices: callbacks that raise, losses
and closes where they cannot be, engines that fail or are refused. Prints what happened as JSON.

`JAX_NUM_CPU_DEVICES=4 python -m property_tests.lamina_callers FOLDER`
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_impl.attention_pool.engine import LaminaEngine
from jax_impl.attention_pool.options import LaminaOptions
from oracle.tiny import tiny_config, write_checkpoint
from property_tests.shared_programs import share
from reference.files.event_log import read_log
from reference.files.requests import Request
from reference.vocab.errors import CoveyError

A, B = Request("a", (5, 6, 7), 6), Request("b", (8, 9, 10, 11), 6)


def said(what: Callable[..., Any], *args: Any, **named: Any) -> str:
    """The error that an attempt ends with, by kind; in 20 s, else it hangs."""
    told: list[str] = []

    def attempt() -> None:
        try:
            what(*args, **named)
            told.append("nothing")
        except BaseException as error:
            told.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(20.0)
    return told[0] if told else "hangs"


def raising(error: BaseException) -> Callable[..., Any]:
    def callback(*args: Any) -> Any:
        raise error

    return callback


def dead(engine: LaminaEngine) -> None:
    """Wait until it is, 10 s at most."""
    end = time.monotonic() + 10.0
    while engine.failure is None and time.monotonic() < end:
        time.sleep(0.01)


class Nobody:
    """True, and no bool."""


def callbacks(engine: LaminaEngine, want: list[Any]) -> dict[str, Any]:
    """One request's callback does something; what it ends with, and whether the other's tokens are
    what they would be."""
    cases: dict[str, dict[str, Any]] = {
        "exit in stop_at": {"stop_at": raising(SystemExit(3))},
        "exit in on_logits": {"on_logits": raising(SystemExit(3))},
        "error in on_logits": {"on_logits": raising(ValueError("the caller's own"))},
        "close in stop_at": {"stop_at": lambda token: engine.close()},
        "close in on_logits": {"on_logits": lambda position, row: engine.close()},
        "lose in stop_at": {"stop_at": lambda token: engine.lose("replica", 0)},
        "true, and no bool": {"stop_at": lambda token: Nobody()},
    }
    out = {}
    for name, asked in cases.items():
        began = time.monotonic()
        bad, good = engine.submit(A, **asked), engine.submit(B)
        ended, other = bad.result(20.0), good.result(20.0)
        out[name] = {
            "reason": ended.finish_reason, "error": ended.error, "other": other.tokens == want[1],
            "quick": time.monotonic() - began < 8.0,
        }  # fmt: skip
    return out


def main(folder: Path) -> dict[str, Any]:
    share()
    common = {"kv_block": 8, "chunk": 4, "ignore_eos": True, "kv_tokens": 64, "max_batch": 2,
              "compile_cache": folder / "compiled"}  # fmt: skip
    path = write_checkpoint(folder / "mix", tiny_config("mixtral", num_hidden_layers=1), seed=3)
    out: dict[str, Any] = {}

    # Refused: no file, no descriptor.
    log, fds = folder / "refused.jsonl", len(os.listdir("/proc/self/fd"))
    for name, bad in {
        "slots": {"expert_slots": 1}, "devices": {"memory_devices": 2, "batches": 9},
    }.items():  # fmt: skip
        out[f"refused {name}"] = said(LaminaEngine.open, path, log=log, **common | bad)
    out["refused fds"] = len(os.listdir("/proc/self/fd")) - fds
    out["refused log"] = log.exists()
    out["options"] = {
        f"{name}={value!r}": said(LaminaOptions.of, **{name: value})
        for name, value in (("max_len", -1), ("rate", 1e-9), ("rate", float("nan")),
                            ("rate", "4"), ("batches", 1.5), ("chunk", "4"), ("tile", True))
    }  # fmt: skip

    threads = threading.active_count()
    for prefill in (0, 1):
        log = folder / f"{prefill}.jsonl"
        engine = LaminaEngine.open(path, prefill=prefill, batches=2, log=log, **common)
        want = [h.result(20.0).tokens for h in engine.submit_all([A, B])]
        mine: dict[str, Any] = {"callbacks": callbacks(engine, want)}
        mine["lose"] = {
            f"{kind} {number!r}": said(engine.lose, kind, number)
            for kind, number in (("replica", 99), ("prefill", prefill), ("memory", "x"),
                                 ("memory", -1), ("nope", 0), (["replica"], 0), ("replica", 0))
        }  # fmt: skip
        mine["after"] = engine.submit(A).result(20.0).tokens == want[0]
        mine["failure"], mine["missing"] = repr(engine.failure), engine.missing()
        closing = [threading.Thread(target=engine.close) for _ in range(3)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(20.0)
        mine["lose closed"] = said(engine.lose, "replica", 0)
        mine["submit closed"] = said(engine.submit, A)
        mine["threads"] = threading.active_count() - threads
        mine["complete"] = read_log(log, pools=True).complete
        out[f"prefill {prefill}"] = mine

    # The engine fails: all that it holds is given back all the same.
    log, fds = folder / "failed.jsonl", len(os.listdir("/proc/self/fd"))
    with LaminaEngine.open(path, log=log, **common) as engine:
        engine.submit(A).result(20.0)
        engine._loop.post(object())  # what no part of it would ever say
        dead(engine)
        out["failed"] = said(engine.submit, A), said(engine.lose, "memory", 0)
    left = read_log(log, pools=True)
    out["failed log"] = len(left.records) > 20 and not left.complete
    out["failed threads"] = threading.active_count() - threads
    out["failed fds"] = len(os.listdir("/proc/self/fd")) - fds

    # A replica's thread dies: it is heard of.
    with LaminaEngine.open(path, **common) as engine:
        worker = engine.workers[0]
        worker.replica.forget = raising(MemoryError("gone"))  # type: ignore[method-assign]
        engine.lose("replica", 0)
        dead(engine)
        out["dead thread"] = said(engine.submit, A)
        out["dead thread failure"] = repr(engine.failure)
    return out


if __name__ == "__main__":
    try:
        print(json.dumps(main(Path(sys.argv[1]))))
    except CoveyError as error:
        sys.exit(str(error))
