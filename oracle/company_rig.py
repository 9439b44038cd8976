"""Runs for faults that show in results: the readable engine, the same requests in other company.

`engine` runs a tiny model four times: each request alone; all together in little memory; together
with one that is cancelled; together with one whose numbers turn out to be no numbers. `decided`
runs a scheduler twice over reads that fail and requests that are cancelled. Both give the
violations of each run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import reference.engine
from oracle.checkers import Book, Violation, check_log, check_logs
from oracle.checkers.records import view
from oracle.checkpoint_edit import edited
from oracle.rigs import EXPERT_BYTES, Records
from oracle.tiny import tiny_config, write_checkpoint
from reference.engine import ReferenceEngine
from reference.files.requests import Request
from reference.handle import RequestHandle
from reference.simulator.costs import CostModel
from reference.simulator.loop import Fault, VirtualLoop
from reference.simulator.routes import RoutedExecutor, random_routes
from reference.vocab.events import Arrived, Cancelled
from reference.vocab.options import ControlOptions

POISON = 95
"""The token whose embedding is not a number."""
A = Request("a", (5, 6, 7), 4, temperature=1.0, seed=3)
B = Request("b", (9,), 5, temperature=0.8, seed=4)
C = Request("c", (11, 12, 13, 14, 15), 3)
CANCELLED, POISONED = Request("x", (21, 22), 9), Request("d", (POISON, 2), 3)
OPTIONS = ControlOptions(
    layers=(0, 1, 2), experts=6, top_k=2, slots=8, chunk=2, max_rows=8, kv_block=4, kv_tokens=256,
    max_lag=1,
)  # fmt: skip
SHAPES = tuple((1 + n % 3, 2 + n % 4) for n in range(12))


def row_of(handle: RequestHandle) -> dict[str, Any]:
    """What the caller of a request that has ended got, as `covey run --json` would have it."""
    result = handle.result(0)
    return {
        "id": result.id, "number": handle.number, "tokens": list(result.tokens),
        "finish_reason": result.finish_reason, "prompt_tokens": len(handle.request.prompt),
        "max_new_tokens": handle.request.max_new_tokens,
    }  # fmt: skip


def _model(path: Path) -> Path:
    """A checkpoint of two layers, in the folder `path`."""
    write_checkpoint(path / "clean", tiny_config("qwen3_moe", num_hidden_layers=2))

    def poison(tensors: dict[str, np.ndarray]) -> None:
        table = tensors["model.embed_tokens.weight"].copy()
        table[POISON] = np.full(table.shape[1], np.nan, "<f4").view(table.dtype)
        tensors["model.embed_tokens.weight"] = table

    return edited(path / "clean", path / "model", poison)


@contextmanager
def _planted(module: ModuleType) -> Iterator[type[ReferenceEngine]]:
    """The engine with a copy of its executor, or a copy of the engine itself."""
    if hasattr(module, "ReferenceEngine"):
        yield module.ReferenceEngine
        return
    shipped = reference.engine.NumpyExecutor
    reference.engine.NumpyExecutor = module.NumpyExecutor  # type: ignore[misc]
    try:
        yield ReferenceEngine
    finally:
        reference.engine.NumpyExecutor = shipped  # type: ignore[misc]


def engine(module: ModuleType) -> list[list[Violation]]:
    """The four runs, with `reference.executor` or `reference.engine` as in `module`."""
    together: Sequence[Request] = (C, B, A)
    settings: list[tuple[Sequence[Request], dict[str, Any]]] = [
        ((A, B, C), {"memory": "100%", "max_running": 1}),
        (together, {"memory": "25%", "readiness": "expert"}),
        ((CANCELLED, *together), {"memory": "50%"}),
        ((POISONED, *together), {"memory": "50%"}),
    ]
    book, out = Book(), []
    with _planted(module) as kind, tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder))
        for number, (requests, options) in enumerate(settings):
            more = {"chunk": 2, "kv_block": 4, "kv_tokens": 64, "ignore_eos": True}
            with kind.open(model, keep_log=True, **more, **options) as run:
                handles = [run.submit(request) for request in requests]
                if requests[0] is CANCELLED:
                    next(iter(handles[0]))
                    handles[0].cancel()
                for handle in handles:
                    handle.wait()
            found = check_log(run.records, outputs=map(row_of, handles))
            found += book.add(view(run.records, True), f"run {number}")
            out.append(sorted(found, key=lambda v: v.line))
    assert book.compared > 20, "nothing was compared"
    return out


def decided(module: ModuleType) -> list[list[Violation]]:
    """Runs of the scheduler in `module`, each twice: judged alone, then by S16."""
    out = []
    for seed in range(6):
        logs = {f"run {seed}, time {i}": _disturbed(module.Scheduler, seed) for i in range(2)}
        found = check_log(next(iter(logs.values()))) + [v for _, v in check_logs(logs)]
        out.append(sorted(found, key=lambda v: v.line))
    return out


def _disturbed(make: Callable[[ControlOptions], Any], seed: int) -> list[dict[str, Any]]:
    """Twelve requests, of which every third is cancelled, while every third read fails."""
    routes = random_routes(OPTIONS.experts, OPTIONS.top_k, seed)
    executor = RoutedExecutor(
        routes, OPTIONS.layers, OPTIONS.chunk, OPTIONS.slots, SHAPES.__getitem__, lambda: 0.0
    )
    log = Records(executor, OPTIONS)
    faults = {ticket: Fault() for ticket in range(1, 400, 3)}
    costs = CostModel(bytes_per_s=4e7, depth=2)
    loop = VirtualLoop(make(OPTIONS), executor, EXPERT_BYTES, costs, log, faults)
    for number, shape in enumerate(SHAPES):
        arrival, cancel = Arrived(number, *shape), Cancelled(number)
        loop.at(number * 1e-4, lambda e=arrival: [e])
        if number % 3 == 0:
            loop.at(number * 1e-4 + 1e-3, lambda e=cancel: [e])
    loop.run()
    return log.whole()
