"""`covey simulate --platform this`: this host as a platform, by a probe of a model.

Reads and the kernel of an expert are measured as `covey plan` does it. What a step costs beside its
experts is what short runs of the engine take, with one request and with eight, beyond what the
simulator says of their bytes and operations: launching, attention, handing over, deciding.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from jax_impl.app import builtin, estimate
from reference.files.budget import available_memory
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.simulator.models import ModelShape
from reference.simulator.platforms import Arithmetic, Channel, Memory, Overhead, Platform
from reference.simulator.run import control, routes_for, simulate
from reference.vocab.errors import BadInput

RUN_S = 0.5
"""Seconds of each of the two runs, after as long to warm up."""
CROWD, NEW = 8, 48
"""Requests of the second run; tokens that each may generate."""
MEMORY_PART = 4
"""The runs hold at most one part in so many of the memory that is free."""


def this_host(word: str, model: ModelShape, share: float) -> Platform:
    """This host as a platform, by a probe of MODEL with `share` of its experts in memory.
    Raises BadInput where there are no weights to read, and what an engine's `open` raises."""
    path = builtin.model(word)
    if not (path / "config.json").is_file():
        raise BadInput(f"--platform this: --model {word}: a folder with weights, or demo, expected")
    with Checkpoint.open(path) as ckpt:
        speeds = estimate.probe(ckpt, "f32", 4, None)
    if speeds.disk is None or speeds.expert_s is None:
        raise BadInput(f"--platform this: {word}: nothing could be measured: {speeds.how}")
    kernel = f"measured: one expert of {model.name} on {estimate.TILE} rows"
    sources = {
        "channel.bytes_per_s": f"measured: experts of {model.name}, four at a time, {speeds.how}",
        "memory.bytes_per_s": kernel, "compute.flops_per_s": kernel,
    }  # fmt: skip
    plain = Platform(
        "this", f"this host ({speeds.how} reads, {speeds.expert_s * 1e3:.2g} ms an expert",
        Channel(speeds.disk, 1e-4, 4, 1 << 30),
        Memory(model.bytes_of() / speeds.expert_s, available_memory(), 1.0),
        Arithmetic(2 * model.expert_params * estimate.TILE / speeds.expert_s, 1.0),
        Overhead(0.0, 0.0, 0.0, 0.0), sources=sources,
    )  # fmt: skip
    alone, crowd = (measured_step(path, model, n, share) for n in (1, CROWD))
    over = overhead(plain, model, share, alone, crowd)
    told = f"measured: the engine's steps with 1 and {CROWD} requests of {model.name} in lock-step"
    return replace(
        plain, overhead=over,
        title=f"{plain.title}, {over.step_s * 1e3:.2g} ms a step, {over.row_s * 1e3:.2g} ms a row)",
        sources=sources | {"overhead.step_s": told, "overhead.row_s": told},
    )  # fmt: skip


def overhead(
    plain: Platform, model: ModelShape, share: float, alone: float, crowd: float
) -> Overhead:
    """What steps of `alone` and `crowd` seconds, with 1 and CROWD requests, take beyond those of
    `plain`, which has no overhead: a part a step and a part a row, none below 0."""
    first, last = (max(0.0, took - step(plain, model, n, share))
                   for n, took in ((1, alone), (CROWD, crowd)))
    row = max(0.0, last - first) / (CROWD - 1)
    return Overhead(max(0.0, first - row), 0.0, row, 0.0)


def measured_step(path: Path, model: ModelShape, requests: int, share: float) -> float:
    """Seconds of a step of the engine in blocking lock-step without the waiting for experts."""
    from jax_impl.engine import JaxEngine

    with Checkpoint.open(path) as ckpt:
        vocab, longest = ckpt.config.vocab, ckpt.config.max_position
    budget = min(share * model.all_experts * model.bytes_of(), available_memory() / MEMORY_PART)
    least = 2 * model.top_k * model.bytes_of()
    new = max(1, min(NEW, longest - 1))
    options = {"scheduler": "lockstep-blocking", "max_running": CROWD, "kv_tokens": CROWD * 64}
    with JaxEngine.open(path, int(max(budget, least)), ignore_eos=True, **options) as engine:
        seconds = steps = 0.0
        for counts in (False, True):
            before, end = engine.totals(), time.monotonic() + RUN_S
            while time.monotonic() < end:
                handles = engine.submit_all(
                    Request(f"p{n}", ((7 * n + 1) % vocab,), new, temperature=1.0, seed=n)
                    for n in range(requests))
                for handle in handles:
                    handle.wait(max(0.0, end - time.monotonic()))
                    handle.cancel()
                for handle in handles:
                    handle.wait()
            after = engine.totals()
            if counts:
                seconds = sum(after[k] - before[k] for k in ("compute_s", "other_s"))
                steps = after["steps"] - before["steps"]
    return seconds / max(1.0, steps)


def step(platform: Platform, model: ModelShape, requests: int, share: float) -> float:
    """The same in virtual time."""
    options = control(model, share, requests, grouping="lockstep-blocking")
    got = simulate(platform, model, routes_for(model), options, requests=requests,
                   tokens=4 * requests, warm_up=requests, new_tokens=NEW)  # fmt: skip
    layers = len(model.moe_layers)
    steps = sum(got.batches.values()) * (layers + 1) / layers  # and one into the first router
    return got.compute_busy * got.seconds / max(1.0, steps)
