"""This host as costs for the simulator: what a step and a load of the JAX engine take here.

A probe runs the model with every expert in memory, for several numbers of requests, and fits what
lies between the starts of two steps: a constant for each kind of step, a part for each expert, for
each request and for each further tile of rows. A short run with few slots and one request tells
what a load takes beyond its bytes. Nothing is fitted to what is to be predicted
(SIM-13).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import numpy as np

from jax_impl.engine import JaxEngine
from jax_impl.readers import ThrottledReader
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.sampling import uniform
from reference.simulator.costs import Work
from reference.vocab.actions import Compute
from reference.vocab.ids import ENTRY

T = TypeVar("T")
TILE = 8
CROWDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class HostCosts:
    """A step costs, in seconds, by what it ends in (entry: the first router, router: a later one,
    head), plus expert_s for each tile of rows of an expert, part_s for each request, tile_s for
    each further tile of rows that go on; all of it times `slowed` while loads are in flight.

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
    slowed: float = 1.0
    depth: int = 4

    def step(self, action: Compute, work: Work) -> float:
        """Seconds from a step's start until the next could start."""
        features = features_of(
            action.layer, self.last_layer, len(action.slots), work.pairs, len(action.parts),
            work.rows)  # fmt: skip
        values = (self.entry_s, self.router_s, self.head_s, self.expert_s, self.part_s, self.tile_s)
        seconds = sum(a * b for a, b in zip(features, values, strict=True))
        return seconds * (self.slowed if work.loading else 1.0)

    def paced(self, factor: float) -> HostCosts:
        """With reads paced to `factor` of the probed rate; rarer loads slow steps less."""
        return replace(self, bytes_per_s=self.bytes_per_s * factor,
                       slowed=1.0 + (self.slowed - 1.0) * factor)  # fmt: skip

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


@dataclass(frozen=True)
class Step:
    """A step of a log: what its duration hangs on, seconds until it was told, until the next step
    began, and loads that were in flight when it began."""

    features: tuple[float, ...]
    told_s: float
    next_s: float
    loading: int


def steps_of(records: Sequence[dict[str, Any]], chunk: int, prompt: int) -> list[Step]:
    """The steps of a run, but for the last one."""
    last = records[0]["options"]["layers"][-1]
    found: list[Step] = []
    begun: dict[str, Any] | None = None
    named: dict[int, list[list[int]]] = {}
    features: tuple[float, ...] = ()
    told, in_flight, loading = 0.0, 0, 0
    for record in records[1:]:
        if record.get("action") == "Load":
            in_flight += 1
        elif record.get("event") == "Loaded":
            in_flight -= 1
        elif record.get("event") == "Computed":
            told = record["t"]
        elif record.get("event") == "Routed":
            named[record["visit"][0]] = record["experts"]
        if record.get("action") != "Compute":
            continue
        if begun is not None:
            found.append(Step(features, told - begun["t"], record["t"] - begun["t"], loading))
        begun, loading = record, in_flight
        features = features_of(record["layer"], last, len(record["slots"]),
                               *_work(record, named, chunk, prompt))  # fmt: skip
    return found


def _work(
    record: dict[str, Any], named: dict[int, list[list[int]]], chunk: int, prompt: int
) -> tuple[int, int, int]:
    """(products of row and expert, requests, rows that go on) of a step."""
    pairs = rows = 0
    for (request, number, _), experts, ends in record["parts"]:
        if experts:
            pairs += sum(e in experts for row in named[request] for e in row)
        if ends:
            rows += min(chunk, prompt - number * chunk) if number * chunk < prompt else 1
    return pairs, len(record["parts"]), rows


def slowed_by(loaded: Sequence[Step], alone: Sequence[Step]) -> float:
    """How much longer steps take, until they are told, while loads are in flight."""
    values = fit([(s.features, s.told_s) for s in alone])
    some = [s for s in loaded if s.loading]
    took = sum(s.told_s for s in some)
    wanted = sum(float(np.dot(s.features, values)) for s in some)
    return max(1.0, took / wanted) if wanted else 1.0


def fit(samples: Sequence[tuple[tuple[float, ...], float]]) -> np.ndarray:
    """The six parameters, none below 0: least squares, relative errors, on the mean of each kind of
    step. A mean, since what is wanted is how long many steps take together; of twenty and more the
    longest twentieth is left out (a compilation, a pause of the machine)."""
    groups: dict[tuple[float, ...], list[float]] = {}
    for features, seconds in samples:
        groups.setdefault(features, []).append(seconds)
    a = np.array(list(groups))
    y = np.array([mean(sorted(v)[: len(v) - len(v) // 20]) for v in groups.values()])
    weight = np.sqrt(np.array([len(v) for v in groups.values()])) / y  # relative errors count
    free = np.ones(a.shape[1], bool)
    values = np.zeros(a.shape[1])
    while True:
        solved = np.linalg.lstsq(a[:, free] * weight[:, None], y * weight, rcond=None)[0]
        if (solved >= 0).all():
            values[free] = solved
            return values
        free[np.flatnonzero(free)[solved.argmin()]] = False


def random_requests(vocab: int, count: int, prompt: int, new: int, seed: int) -> list[Request]:
    """Requests of random token ids whose texts are sampled, so that they do not fall into loops;
    the same, token for token, for the same seed."""
    return [
        Request(f"r{n}", tuple(int(uniform(1000 * seed + n, i) * vocab) for i in range(prompt)),
                new, temperature=1.0, seed=1000 * seed + n)
        for n in range(count)
    ]  # fmt: skip


def delay_s() -> float:
    """Seconds for which the threads of this process were ready and others had the processor, all
    threads together; 0 where the system does not tell."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            pass
    return total / 1e9


@contextmanager
def no_collection() -> Iterator[None]:
    """The garbage of engines before (a tenth of a second of it) is collected before, not within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_once(
    model: Path, requests: int, new: int, prompt: int, memory: str, rate: float | None,
    seed: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """One engine from opening to close: requests that come together; tokens/s of all of them from
    then to the last token, the log's records, the bytes that were read, and how long its threads
    waited for a processor, as a share of the time.

    Where everything is in memory, as many requests of two tokens go before and count in nothing
    of this: an engine's first steps take ten times as long, and would be all that is seen."""
    reader = ThrottledReader(rate) if rate else None
    given = {"keep_log": True, "ignore_eos": True, "wide": 0, "kv_tokens": 64 * 64} | options
    with JaxEngine.open(model, memory=memory, reader=reader, **given) as engine:
        vocab = engine.config.vocab
        if memory == "100%":
            for handle in engine.submit_all(random_requests(vocab, requests, prompt, 2, seed + 1)):
                handle.result()
        earlier, told = len(engine.records), engine.totals()
        with no_collection():
            before = delay_s()
            handles = engine.submit_all(random_requests(vocab, requests, prompt, new, seed))
            results = [handle.result() for handle in handles]
            delayed = delay_s() - before
        records = engine.records
        totals = engine.totals()
    seconds = max(r.token_s[-1] for r in results)
    return {
        "tokens_per_s": sum(len(r.tokens) for r in results) / seconds, "seconds": seconds,
        "records": [records[0], *records[max(1, earlier) :]],
        "totals": {n: totals[n] - told[n] for n in ("loads", "steps", "compute_s")},
        "read_bytes": reader.bytes if reader else None, "delayed": delayed / seconds,
    }  # fmt: skip


class Probe:
    """Runs that tell the costs of a model on this host, reads paced to `rate` bytes a second; call
    `round` as often as you like and `costs` at the end."""

    def __init__(self, model: Path, rate: float, prompt: int = 8, new: int = 16, **options: Any):
        self.model, self.rate, self.prompt, self.new = model, rate, prompt, new
        self.options = {"chunk": 16} | options
        with Checkpoint.open(model) as ckpt:
            layers, experts = ckpt.config.moe_layers, ckpt.config.experts
            self.expert_bytes = ckpt.expert_bytes()
        self.last_layer = layers[-1]
        self.everything = [(layer, e) for layer in layers for e in range(experts)]
        self.alone: list[tuple[float, int, list[Step]]] = []
        self.loaded: list[tuple[float, list[Step]]] = []
        self.late: list[tuple[float, float]] = []
        self.per_load: list[float] = []

    def round(self, crowds: Sequence[int] = CROWDS) -> None:
        """With everything resident, `crowds` of requests; with few slots, one request in lock-step
        (what a load takes) and three interleaved (what loads in flight do to steps)."""
        chunk = self.options["chunk"]
        for crowd in crowds:
            got = run_once(self.model, crowd, self.new, self.prompt, "100%", None,
                           warm=self.everything, **self.options)  # fmt: skip
            steps = steps_of(got["records"], chunk, self.prompt)
            self.alone.append((got["delayed"], crowd, steps))
        got = run_once(self.model, 1, 4, self.prompt, "30%", self.rate,
                       scheduler="lockstep-blocking", **self.options)  # fmt: skip
        self.per_load.append(got["read_bytes"] / got["totals"]["loads"])
        late = latency_of(got["records"], self.per_load[-1] / self.rate)
        self.late.append((got["delayed"], late))
        got = run_once(self.model, 3, self.new // 2, self.prompt, "40%", self.rate,
                       **self.options)  # fmt: skip
        self.loaded.append((got["delayed"], steps_of(got["records"], chunk, self.prompt)))

    def costs(self) -> HostCosts:
        """What the calmest half of the rounds says, for each kind of run by itself."""
        crowds = dict.fromkeys(crowd for _, crowd, _ in self.alone)
        alone = [step for crowd in crowds for steps in calmest(
            [(d, steps) for d, c, steps in self.alone if c == crowd]) for step in steps]
        loaded = [step for steps in calmest(self.loaded) for step in steps]
        values = fit([(s.features, s.next_s) for s in alone])
        return HostCosts(
            *map(float, values), bytes_per_s=self.rate * self.expert_bytes / median(self.per_load),
            latency_s=median(calmest(self.late)), last_layer=self.last_layer,
            slowed=slowed_by(loaded, alone),
        )  # fmt: skip


def calmest(found: Sequence[tuple[float, T]]) -> list[T]:
    """The half of the runs, rounded up, whose threads waited least for a processor."""
    ordered = sorted(range(len(found)), key=lambda i: found[i][0])
    return [found[i][1] for i in ordered[: -(-len(found) // 2)]]


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
    return max(0.0, mean(late)) if late else 0.0
