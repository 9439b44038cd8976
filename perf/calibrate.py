"""This host as costs for the simulator: what a step and a load of the JAX engine take here.

A probe runs the model with every expert in memory, for several numbers of requests, and fits what
lies between the starts of two steps: a constant for each kind of step, a part for each expert, for
each request and for each further tile of rows. A short run with few slots and one request tells
what a load takes beyond its bytes. Nothing is fitted to what is to be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from jax_impl.engine import JaxEngine
from jax_impl.readers import ThrottledReader
from perf.routing_stats import random_requests
from reference.simulator.costs import Work
from reference.vocab.actions import Compute
from reference.vocab.ids import ENTRY

TILE = 8
CROWDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class HostCosts:
    """A step costs, in seconds, by what it ends in (entry: the first router, router: a later one,
    head), plus expert_s for each tile of rows of an expert, part_s for each request, tile_s for
    each further tile of rows that go on.

    bytes_per_s, latency_s, depth   the channel, as in CostModel
    last_layer   the model's last layer with experts
    """

    entry_s: float
    router_s: float
    head_s: float
    expert_s: float
    part_s: float
    tile_s: float
    bytes_per_s: float
    latency_s: float
    last_layer: int
    depth: int = 4

    def step(self, action: Compute, work: Work) -> float:
        """Seconds from a step's start until the next could start."""
        features = features_of(
            action.layer, self.last_layer, len(action.slots), work.pairs, len(action.parts),
            work.rows)  # fmt: skip
        values = (self.entry_s, self.router_s, self.head_s, self.expert_s, self.part_s, self.tile_s)
        return float(sum(a * b for a, b in zip(features, values, strict=True)))

    def transfer(self, nbytes: int) -> float:
        """Seconds that the channel is taken."""
        return nbytes / self.bytes_per_s

    def delay(self, nbytes: int) -> float:
        """Seconds until its end is told."""
        return nbytes / self.bytes_per_s + self.latency_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def features_of(
    layer: int, last_layer: int, distinct: int, pairs: int, parts: int, rows: int
) -> tuple[float, ...]:
    """What the six parameters of a step are multiplied with."""
    tiles = -(-rows // TILE)
    return (
        float(layer == ENTRY), float(layer not in (ENTRY, last_layer)), float(layer == last_layer),
        float(max(distinct, -(-pairs // TILE))), float(parts), float(max(0, tiles - 1)),
    )  # fmt: skip


def step_times(
    records: Sequence[dict[str, Any]], chunk: int, prompt: int
) -> list[tuple[tuple[float, ...], float]]:
    """(features, seconds until the next step began) of every step but the last ones of a run with
    everything resident; no gap in it is a wait."""
    head = records[0]
    last = head["options"]["layers"][-1]
    k = head["options"]["top_k"]
    found = []
    before: dict[str, Any] | None = None
    prompt_chunks = -(-prompt // chunk)
    for record in records[1:]:
        if record.get("action") != "Compute":
            continue
        if before is not None:
            rows = sum(
                min(chunk, prompt - visit[1] * chunk) if visit[1] < prompt_chunks else 1
                for visit, _, _ in before["parts"]
            )
            pairs = rows * k if before["layer"] != ENTRY else 0
            features = features_of(before["layer"], last, len(before["slots"]), pairs,
                                   len(before["parts"]), rows)  # fmt: skip
            found.append((features, record["t"] - before["t"]))
        before = record
    return found


def fit(samples: Sequence[tuple[tuple[float, ...], float]]) -> np.ndarray:
    """The six parameters, none below 0: least squares on the median of each kind of step."""
    groups: dict[tuple[float, ...], list[float]] = {}
    for features, seconds in samples:
        groups.setdefault(features, []).append(seconds)
    a = np.array(list(groups))
    y = np.array([median(v) for v in groups.values()])
    weight = np.sqrt(np.array([len(v) for v in groups.values()])) / y  # relative errors count
    free = np.ones(a.shape[1], bool)
    values = np.zeros(a.shape[1])
    while True:
        solved = np.linalg.lstsq(a[:, free] * weight[:, None], y * weight, rcond=None)[0]
        if (solved >= 0).all():
            values[free] = solved
            return values
        free[np.flatnonzero(free)[solved.argmin()]] = False


def run_once(
    model: Path, requests: int, new: int, prompt: int, memory: str, rate: float | None,
    seed: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """One engine from opening to close: requests that come together; tokens/s of all of them from
    then to the last token, the log's records and the bytes that were read."""
    reader = ThrottledReader(rate) if rate else None
    given = {"keep_log": True, "ignore_eos": True, "wide": 0, "kv_tokens": 64 * 64} | options
    with JaxEngine.open(model, memory=memory, reader=reader, **given) as engine:
        vocab = engine.config.vocab
        handles = engine.submit_all(random_requests(vocab, requests, prompt, new, seed))
        results = [handle.result() for handle in handles]
        records = engine.records
        totals = engine.totals()
    seconds = max(r.token_s[-1] for r in results)
    return {
        "tokens_per_s": sum(len(r.tokens) for r in results) / seconds, "seconds": seconds,
        "records": records, "totals": totals, "read_bytes": reader.bytes if reader else None,
    }  # fmt: skip


def probe(
    model: Path, rate: float, prompt: int = 8, new: int = 12, rounds: int = 2, **options: Any
) -> HostCosts:
    """Costs of this host for a model whose reads are paced to `rate` bytes a second."""
    options = {"chunk": 16} | options
    chunk = options["chunk"]
    samples = []
    for _ in range(rounds):
        for crowd in CROWDS:
            got = run_once(model, crowd, new, prompt, "100%", None,
                           warm=everything(model), **options)  # fmt: skip
            samples += step_times(got["records"], chunk, prompt)
    values = fit(samples)
    slow = run_once(model, 1, 4, prompt, "30%", rate, scheduler="lockstep-blocking",
                    **options)  # fmt: skip
    per_load = slow["read_bytes"] / slow["totals"]["loads"]
    latency = latency_of(slow["records"], per_load / rate)
    last = slow["records"][0]["options"]["layers"][-1]
    stated = slow["records"][0]["expert_bytes"]
    return HostCosts(*(float(v) for v in values), bytes_per_s=rate * stated / per_load,
                     latency_s=latency, last_layer=last)  # fmt: skip


def everything(model: Path) -> list[tuple[int, int]]:
    """Every expert, to be read before the first request."""
    from reference.files.checkpoint import Checkpoint

    with Checkpoint.open(model) as ckpt:
        config = ckpt.config
        return [(layer, e) for layer in config.moe_layers for e in range(config.experts)]


def latency_of(records: Sequence[dict[str, Any]], seconds: float) -> float:
    """What the channel's end is told later than its bytes take: for every run of loads that began
    on an idle channel, the end of the last one that was begun at once."""
    late: list[float] = []
    started: list[float] = []
    open_ = 0
    for record in records[1:]:
        if record.get("action") == "Load":
            if not open_:
                started = []
            open_ += 1
            started.append(record["t"])
        elif record.get("event") == "Loaded":
            open_ -= 1
            if not open_ and started:
                late.append(record["t"] - started[0] - len(started) * seconds)
    return max(0.0, median(late)) if late else 0.0
