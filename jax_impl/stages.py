"""What goes into a stage and what comes out of it, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_impl.kernels import rope
from jax_impl.kv import Table
from jax_impl.layers import Piece, Source
from reference.vocab.config import ModelConfig, MoeSpec, RopeSpec
from reference.vocab.ids import ENTRY


class ExpertTask(NamedTuple):
    """Some token rows for one expert.

    handle  the expert's tensors in the order of `ckpt.expert_roles`, jax arrays as they are stored,
            one a role (zero-copy from a host slot)
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
    ahead    what the router of a later layer would say now: (layer, experts int32 [R, m] in rank
             order, -1 in a row with a NaN), where it is asked (PREDICT-4)
    """

    layer: int | None
    topk: np.ndarray
    weights: np.ndarray
    bad: np.ndarray
    logits: dict[int, np.ndarray]
    ahead: tuple[int, np.ndarray] | None = None


class Pending:
    """A dispatched stage. `get` blocks until it is done; call it on the dispatch thread.

    layer, count  as StageOut.layer and the number of rows
    told          a call each: int32 [T, 2K + 1], see layers.Layers.layer
    logits        a call each: float32 [T, V] of the rows `wanted`, in order
    wait          blocks until the device is idle, for a stage that told nothing
    ahead         (layer, a call each: int32 [T, m]) of the router that was asked early, if one was
    """

    def __init__(
        self,
        layer: int | None,
        count: int,
        told: list[jax.Array],
        logits: list[jax.Array],
        wanted: list[int],
        wait: Callable[[], None],
        ahead: tuple[int, list[jax.Array]] | None = None,
    ) -> None:
        self._ahead = ahead
        self._layer, self._count, self._wait = layer, count, wait
        self._told, self._logits, self._wanted = told, logits, wanted

    def get(self) -> StageOut:
        """One fetch for everything the stage told (JAX-9)."""
        if not self._told and not self._logits:
            self._wait()
        asked = self._ahead[1] if self._ahead else []
        told, logits, asked = jax.device_get((self._told, self._logits, asked))
        rows = dict(zip(self._wanted, (row for tile in logits for row in tile), strict=False))
        if not told:
            none = np.zeros((self._count, 0), np.int32)
            bad = np.zeros(self._count, bool)
            return StageOut(self._layer, none, none.astype(np.float32), bad, rows)
        all_ = np.concatenate(told)[: self._count]
        k = all_.shape[1] // 2
        mix = np.ascontiguousarray(all_[:, k : 2 * k]).view(np.float32)
        ahead = (self._ahead[0], np.concatenate(asked)[: self._count]) if self._ahead else None
        return StageOut(self._layer, all_[:, :k].copy(), mix, all_[:, 2 * k] != 0, rows, ahead)


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
    """Of a call's `at` for one kind of KV: columns, and the row and block that padding gets
    (JAX-2)."""

    width: int
    row: int
    block: int


def places(
    rows: Sequence[int],
    tokens: Sequence[int] | None,
    positions: Sequence[int],
    tables: Sequence[Table],
    shapes: Sequence[PlaceShape],
    split: list[tuple[int, int]],
) -> list[np.ndarray]:
    """`at` of all calls of `split` together, int32 [their rows, 3 + W], see layers.py; one for each
    kind of KV.

    Fresh arrays each time: the device may read them where they lie.
    """
    n = len(rows)
    length = sum(size for _, size in split)
    base = np.zeros((length, 3), np.int32)
    base[:, 0] = shapes[0].row
    base[:n, 0] = rows
    if tokens is not None:
        base[:n, 1] = tokens
    base[:n, 2] = positions
    found: list[np.ndarray] = []
    for kind, shape in enumerate(shapes):
        at = np.full((length, shape.width), shape.block, np.int32)
        at[:, :3] = base
        for i, table in enumerate(tables):
            blocks = table.blocks[kind]
            at[i, 3 : 3 + len(blocks)] = blocks
        found.append(at)
    return found


def row_turns(
    spec: RopeSpec, positions: Sequence[int], tables: Sequence[Table], length: int
) -> np.ndarray:
    """float32 [length, dims]: the angles of each row, for a rope that follows the prompt's length;
    rows beyond the tables' are zero. A row's depend on its position and its prompt (JAX-14)."""
    out = np.zeros((length, spec.dims), np.float32)
    prompts = np.array([t.prompt for t in tables], np.int64)
    where = np.asarray(positions, np.int64)
    for prompt in np.unique(prompts):
        mine = np.flatnonzero(prompts == prompt)
        out[mine] = rope.turns(spec, where[mine], int(prompt))
    return out
