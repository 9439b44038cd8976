"""What goes into a stage and what comes out of it, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_impl.layers import Piece, Source
from reference.vocab.config import ModelConfig, MoeSpec
from reference.vocab.ids import ENTRY


class ExpertTask(NamedTuple):
    """Some token rows for one expert.

    handle  the expert's tensors in the order of `ckpt.expert_roles` (gate, up, down), jax arrays
            [out, in] of float32, bfloat16 or float16, one a role (zero-copy from a host slot)
    rows    bank rows that chose this expert
    ranks   for each row, which of its K choices this expert is (0..K-1)
    """

    handle: tuple[Any, ...]
    rows: Sequence[int]
    ranks: Sequence[int]


class StageOut(NamedTuple):
    """What a stage revealed, on the host, one entry a row in the order of the call.

    layer    the layer whose router spoke, or None when the rows have passed the last layer
    topk     [R, K] int32 experts in rank order (K = 0 columns when layer is None)
    weights  [R, K] float32 combining weights
    bad      [R] bool: the row's router scores hold a NaN (topk of such a row means nothing)
    logits   {index in the call: [V] float32} for the rows that wanted them, when layer is None
    """

    layer: int | None
    topk: np.ndarray
    weights: np.ndarray
    bad: np.ndarray
    logits: dict[int, np.ndarray]


class Pending:
    """A dispatched stage. `get` blocks until it is done; call it on the dispatch thread.

    layer, count  as StageOut.layer and the number of rows
    told          a tile each: int32 [T, 2K + 1], see layers.Layers.layer
    logits        a tile each: float32 [T, V] of the rows `wanted`, in order
    wait          blocks until the device is idle, for a stage that told nothing
    """

    def __init__(
        self,
        layer: int | None,
        count: int,
        told: list[jax.Array],
        logits: list[jax.Array],
        wanted: list[int],
        wait: Callable[[], None],
    ) -> None:
        self._layer, self._count, self._wait = layer, count, wait
        self._told, self._logits, self._wanted = told, logits, wanted

    def get(self) -> StageOut:
        """One fetch for everything the stage told (JAX-9)."""
        if not self._told and not self._logits:
            self._wait()
        told, logits = jax.device_get((self._told, self._logits))
        rows = {
            i: logits[j // len(logits[0])][j % len(logits[0])] for j, i in enumerate(self._wanted)
        }
        if not told:
            none = np.zeros((self._count, 0), np.int32)
            bad = np.zeros(self._count, bool)
            return StageOut(self._layer, none, none.astype(np.float32), bad, rows)
        all_ = np.concatenate(told)[: self._count]
        k = all_.shape[1] // 2
        mix = np.ascontiguousarray(all_[:, k : 2 * k]).view(np.float32)
        return StageOut(self._layer, all_[:, :k].copy(), mix, all_[:, 2 * k] != 0, rows)


class Plan(NamedTuple):
    """A stage: pieces with their layers, then the LM head or the router of `layer`."""

    pieces: tuple[tuple[Piece, int], ...]
    head: Piece | None
    layer: int | None


def stage_plan(config: ModelConfig, start: int) -> Plan:
    """The stage that begins behind the experts of layer `start` (ENTRY: with the tokens)."""
    source: Source = "embed" if start == ENTRY else "combine"
    pieces: list[tuple[Piece, int]] = []
    for i in range(start + 1, len(config.layers)):
        pieces.append((Piece(source, config.layers[i]), i))
        source = "load"
        if isinstance(config.layers[i].feed_forward, MoeSpec):
            return Plan(tuple(pieces), None, i)
    return Plan(tuple(pieces), Piece(source, None), None)


def padded(values: Sequence[int], tile: int, fill: int) -> np.ndarray:
    """int32 [tiles, tile]: the values, then `fill` up to a whole number of tiles."""
    out = np.full(-(-len(values) // tile) * tile, fill, np.int32)
    out[: len(values)] = values
    return out.reshape(-1, tile)
