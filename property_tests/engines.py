"""The JAX engine under test: opened, watched, and judged by the checkers when it closes."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jax_impl.app.replay import replay
from jax_impl.engine import JaxEngine
from oracle.tiny import tiny_config, write_checkpoint
from property_tests.witness import violations
from reference.files.event_log import Log
from reference.files.requests import Request
from reference.handle import RequestHandle, Result

FOLDER = Path(tempfile.mkdtemp(prefix="covey-tests-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
COMPILED = FOLDER / "compiled"
LIMIT_S = 60.0

SMALL: dict[str, Any] = {
    "compile_cache": COMPILED, "chunk": 4, "max_running": 8, "max_rows": 8, "kv_tokens": 1024,
    "kv_block": 16, "keep_log": True, "ignore_eos": True,
}  # fmt: skip
"""Options that all small tests share, so that they share compiled code too."""


@functools.cache
def checkpoint(family: str = "qwen3_moe", **overrides: Any) -> Path:
    """A tiny seeded checkpoint of the family, written once a session."""
    name = "-".join([family, *(f"{k}={v}" for k, v in sorted(overrides.items()))])
    dtype = overrides.pop("dtype", "F32")
    pattern = overrides.pop("pattern", False)
    path = FOLDER / name
    return write_checkpoint(path, tiny_config(family, **overrides), dtype=dtype, pattern=pattern)


@contextmanager
def opened(
    path: Path | None = None,
    memory: str | int = "50%",
    *,
    broken: bool = False,
    judged: bool = True,
    **options: Any,
) -> Iterator[JaxEngine]:
    """An engine with SMALL options. On leaving: it did not crash (unless `broken`), nothing it
    handed out is missing, and no checker objects to its log (unless not `judged`)."""
    engine = JaxEngine.open(path or checkpoint(), memory, **(SMALL | options))
    handles = handles_of(engine)
    try:
        yield engine
    finally:
        engine.close()
    if engine.failure is not None and not broken:
        raise engine.failure
    if not broken:
        assert not any(engine._loop.missing().values()), engine._loop.missing()
        most = min(engine.options.threads, engine.sizes.host_slots or engine.options.threads)
        assert engine._loop.transfers.idle in (0, most)
    ear = engine._loop._ear
    if ear is not None and type(ear.predictor).__module__.startswith("reference."):
        assert not ear.failed
    if judged:
        judge(engine, complete=not broken, handles=handles)


def handles_of(engine: JaxEngine) -> list[RequestHandle]:
    """The handles that the engine gives from now on."""
    given: list[RequestHandle] = []
    submit = engine._loop.submit

    def submitting(make: Any) -> list[RequestHandle] | None:
        handles = submit(make)
        given.extend(handles or ())
        return handles

    engine._loop.submit = submitting
    return given


def judge(
    engine: JaxEngine, complete: bool = True, handles: Iterable[RequestHandle] = ()
) -> None:
    """The engine's own event log passes every checker, with what callers got, also held against
    the logs of all other tests; and control decides the same again (S16)."""
    found = violations(engine.records, complete, handles)
    assert not found, "\n".join(map(str, found[:5]))
    head, *records = engine.records
    seen = replay(Log(head, records), "the log")
    assert not seen.difference, f"line {seen.line}: {seen.difference}"
    assert seen.complete == ("end" in records[-1] if records else False)


def request(name: str | int, prompt: int, new: int = 6, **more: Any) -> Request:
    """A request with a prompt of so many ids, which depend on its name alone."""
    start = sum(map(ord, str(name)))
    ids = tuple((start * 7 + 13 * i + i * i) % 90 + 3 for i in range(prompt))
    return Request(str(name), ids, new, **more)


CROWD = [request(i, 3 + 4 * i, 5 + i % 3) for i in range(6)]
MINIMUM = 2 * 3 * 32 * 16 * 4
"""Bytes of K experts of `checkpoint()`: three float32 matrices of 32 x 16 each."""


def results_of(engine: JaxEngine, requests: list[Request]) -> list[Result]:
    """Submitted together, with logits, and waited for."""
    handles = engine.submit_all(requests, logits=True)
    return [h.result(LIMIT_S) for h in handles]


def alone(asked: Request, path: Path | None = None, **options: Any) -> tuple[Any, np.ndarray]:
    """(tokens, logits) of the request run by itself with every expert resident."""
    return _alone(asked, path or checkpoint(), tuple(sorted(options.items())))


@functools.cache
def _alone(asked: Request, path: Path, options: tuple[tuple[str, Any], ...]) -> Any:
    with opened(path, "100%", **dict(options)) as engine:
        result = engine.submit(asked, logits=True).result(LIMIT_S)
    assert result.error is None and result.logits is not None
    return result.tokens, result.logits


def same(result: Any, expected: tuple[Any, np.ndarray]) -> bool:
    """Tokens and logits of a finished request, bit for bit."""
    tokens, logits = expected
    return (
        result.error is None
        and result.tokens == tokens
        and result.logits.tobytes() == logits.tobytes()
    )


def events(engine: JaxEngine, name: str) -> list[dict[str, Any]]:
    """The event or action records of one kind."""
    return [r for r in engine.records[1:] if name in (r.get("event"), r.get("action"))]


def statm() -> int:
    """Anonymous memory of this process, resident or swapped out, in bytes."""
    text = Path("/proc/self/status").read_text()
    kb = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if "kB" in line}
    return (int(kb["RssAnon"]) + int(kb["VmSwap"])) * 1024
