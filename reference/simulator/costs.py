"""How long things take: one channel, one compute unit, all in seconds (SIM-1, SIM-7).

Two kinds of costs with one face: `CostModel`, a few constants, and `Roofline`, which follows from a
platform's rates and a model's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from reference.simulator.models import ModelShape
from reference.simulator.platforms import Platform
from reference.vocab.actions import Compute
from reference.vocab.ids import ENTRY


class Work(NamedTuple):
    """What a step has to do.

    spans   of each part that ends its visit, the positions [start, end) of its rows: they go on
            to the next router or the head
    pairs   (row, expert) products over all parts
    loading transfers that are outstanding when it starts: they may slow it
    """

    spans: Sequence[tuple[int, int]]
    pairs: int
    loading: int = 0

    @property
    def rows(self) -> int:
        """Token rows that go on."""
        return sum([end - start for start, end in self.spans])


class Costs(Protocol):
    """Durations in seconds; `depth` transfers may be outstanding."""

    @property
    def depth(self) -> int: ...

    def step(self, action: Compute, work: Work) -> float:
        """The compute unit is taken for this long."""
        ...

    def transfer(self, nbytes: int) -> float:
        """The channel is taken for this long."""
        ...

    def delay(self, nbytes: int) -> float:
        """From the start of a transfer until its end is told, at least `transfer(nbytes)`."""
        ...


@dataclass(frozen=True)
class CostModel:
    """bytes_per_s, latency_s: the channel moves one transfer after another at this rate and tells
    of each `latency_s` after its last byte; `depth` transfers may be outstanding.
    step_s, row_s, expert_s: a step costs step_s + row_s a token row that goes on to the next router
    or the head + expert_s a distinct expert (its weights are read once for all rows of the step).
    """

    bytes_per_s: float = 1e9
    latency_s: float = 0.0
    depth: int = 2
    step_s: float = 1e-4
    row_s: float = 1e-5
    expert_s: float = 2e-5

    def step(self, action: Compute, work: Work) -> float:
        """Seconds that the step takes."""
        return self.step_s + self.row_s * work.rows + self.expert_s * len(action.slots)

    def transfer(self, nbytes: int) -> float:
        """Seconds that the channel is taken by a transfer."""
        return nbytes / self.bytes_per_s

    def delay(self, nbytes: int) -> float:
        """Seconds from a transfer's start until its end is told."""
        return nbytes / self.bytes_per_s + self.latency_s


@dataclass(frozen=True)
class Reading:
    """How an engine reads an expert: `depth` experts at a time, each as requests of at most
    `block_bytes`, `queue` of them at a time (0: all of an expert's at once).

    The default is what this project's engine does: four whole experts at a time. A page fault of a
    memory-mapped file is Reading(1, 128 KiB, 1) where the system reads 128 KiB ahead.
    """

    depth: int = 4
    block_bytes: int = 1 << 30
    queue: int = 0


class _Stage(NamedTuple):
    """What lies between the experts of a layer (or the entry) and the next router or the head."""

    weights: int
    flops_row: float
    attention: tuple[tuple[int, float, int, int], ...]
    """(bytes of K and V a token, FLOPs a row and token attended, window or 0, layers alike)"""
    layers: int


class Roofline:
    """A step takes the longer of moving its bytes and of its operations, for its experts, the
    weights that every row goes through and the attention one after another, plus what launching
    costs (SIM-7).

    Weights are read once a step whatever its rows, K and V once for each of its parts.
    """

    def __init__(
        self, platform: Platform, model: ModelShape, reading: Reading | None = None,
        stored: str = "",
    ) -> None:  # fmt: skip
        """`stored` names the format of the experts, "" the model's own. Errors: BadInput."""
        reading = reading or Reading()
        self.platform, self.model, self.reading = platform, model, reading
        self.depth = reading.depth
        self.expert_bytes = model.bytes_of(stored)
        channel, memory, compute = platform.channel, platform.memory, platform.compute
        self._channel = channel
        self._byte_s = 1.0 / (memory.bytes_per_s * memory.share)
        self._flop_s = 1.0 / (compute.flops_per_s * compute.share)
        self._over = platform.overhead
        self._expert_flops = 2.0 * model.expert_params
        self._stages = {layer: _stage(model, layer) for layer in (ENTRY, *model.moe_layers)}

    def step(self, action: Compute, work: Work) -> float:
        """Seconds of a step."""
        byte_s, flop_s, over = self._byte_s, self._flop_s, self._over
        distinct = len(action.slots)
        seconds = over.step_s
        if distinct:
            seconds += over.expert_s * distinct + max(
                distinct * self.expert_bytes * byte_s, work.pairs * self._expert_flops * flop_s
            )
        if work.spans:
            stage = self._stages[action.layer]
            rows = work.rows
            seconds += over.layer_s * stage.layers + over.row_s * rows
            seconds += max(stage.weights * byte_s, rows * stage.flops_row * flop_s)
            for kv, flops, window, layers in stage.attention:
                read, pairs = _attended(work.spans, window)
                seconds += layers * max(kv * read * byte_s, flops * pairs * flop_s)
        return seconds

    def transfer(self, nbytes: int) -> float:
        """Seconds that the channel is taken."""
        return nbytes / self._channel.bytes_per_s

    def delay(self, nbytes: int) -> float:
        """Seconds from a transfer's start until its end is told (SIM-8)."""
        return self._channel.alone(nbytes, self.reading.block_bytes, self.reading.queue)


def _stage(model: ModelShape, layer: int) -> _Stage:
    """The stage after the experts of a layer, or after the embedding."""
    weights, moe = 0, set(model.moe_layers)
    attention: dict[tuple[int, float, int], int] = {}
    if layer != ENTRY:
        weights += model.layers[layer].shared
    count = 0
    for i in range(layer + 1, len(model.layers)):
        spec = model.layers[i]
        weights += spec.attention + spec.router + spec.dense
        kind = (spec.kv_bytes, spec.attend_flops, spec.window)
        attention[kind] = attention.get(kind, 0) + 1
        count += 1
        if i in moe:
            break
    else:
        weights += model.head
    per_weight = 2.0 / model.weight_bytes
    return _Stage(
        weights, weights * per_weight, tuple((*k, n) for k, n in attention.items()), max(1, count)
    )


def _attended(spans: Sequence[tuple[int, int]], window: int) -> tuple[int, int]:
    """(tokens whose K and V are read, (row, token) products), over the parts of a step."""
    read = pairs = 0
    for start, end in spans:
        rows = end - start
        if not window or end <= window:
            read += end
            pairs += rows * (start + end + 1) // 2
        else:
            read += min(end, window + rows - 1)
            pairs += rows * window  # at most: the first rows of a text see fewer
    return read, pairs
