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
    told          a call each: int32 [T, 2K + 1], see layers.Layers.layer
    logits        a call each: float32 [T, V] of the rows `wanted`, in order
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
        rows = dict(zip(self._wanted, (row for tile in logits for row in tile), strict=False))
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


def tiles(n: int, tile: int, wide: int) -> list[tuple[int, int]]:
    """(first row, rows) of the calls that cover n rows: wide ones where at least half of one would
    be used (wide = 0: none), then narrow ones."""
    out: list[tuple[int, int]] = []
    first = 0
    while first < n:
        size = wide if 2 * (n - first) > wide > 0 else tile
        out.append((first, size))
        first += size
    return out


def padded(values: Sequence[int], length: int, fill: int) -> np.ndarray:
    """int32 [length]: the values, then `fill`."""
    out = np.full(length, fill, np.int32)
    out[: len(values)] = values
    return out


class PlaceShape(NamedTuple):
    """Of a call's `at`: columns, and the row and block numbers that padding gets (JAX-2)."""

    width: int
    row: int
    block: int


def places(
    rows: Sequence[int],
    tokens: Sequence[int] | None,
    positions: Sequence[int],
    tables: Sequence[Sequence[int]],
    shape: PlaceShape,
    split: list[tuple[int, int]],
) -> np.ndarray:
    """`at` of all calls of `split` together, int32 [their rows, 3 + W], see layers.py.

    A fresh array each time: the device may read it where it lies.
    """
    n = len(rows)
    at = np.full((sum(size for _, size in split), shape.width), shape.block, np.int32)
    at[:, :3] = (shape.row, 0, 0)
    at[:n, 0] = rows
    if tokens is not None:
        at[:n, 1] = tokens
    at[:n, 2] = positions
    for i, table in enumerate(tables):
        at[i, 3 : 3 + len(table)] = table
    return at
