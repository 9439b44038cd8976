"""Which device calls run the experts of a step: tiles of rows, several of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_impl.programs import ExpertForm
from jax_impl.stages import ExpertTask, tiles
from reference.vocab.config import MoeSpec


class CallShape(NamedTuple):
    """Rows of a small and of a large tile (0: none), the row that padding gets, and how many small
    tiles a call takes when it takes several."""

    tile: int
    wide: int
    row: int
    fused: int


class _Tile(NamedTuple):
    """Rows [first, first + n) of a task, for one tile; `where` int32 [1, 2, size]."""

    form: ExpertForm
    handle: tuple[Any, ...]
    where: np.ndarray


def expert_calls(
    moe: MoeSpec,
    roles: Sequence[str],
    tasks: Sequence[ExpertTask],
    shape: CallShape,
    fused: Callable[[ExpertForm], bool],
    only: ExpertForm | None = None,
) -> Iterator[tuple[ExpertForm, np.ndarray, tuple[tuple[Any, ...], ...]]]:
    """(form, where int32 [count, 2, rows of a tile], count handles) of each call, in order.

    where holds rows and ranks; padding has the last row and rank 0. Calls of several tiles are
    made of neighbours of one form for which `fused` says that they may be. `only` is the form of
    every expert, where there is but one.
    """
    splits = [tiles(len(rows), shape.tile, shape.wide) for _, rows, _ in tasks]
    narrow = sum(size == shape.tile for split in splits for _, size in split)
    # One block for all small tiles, so that neighbours can be taken together without a copy.
    block = np.zeros((narrow, 2, shape.tile), np.int32)
    block[:, 0] = shape.row
    parts: list[_Tile] = []
    used = 0
    for (handle, rows, ranks), split in zip(tasks, splits, strict=True):
        form = only or ExpertForm.of(moe, roles, handle)
        for first, size in split:
            n = min(size, len(rows) - first)
            if size == shape.tile:
                where = block[used : used + 1]
                used += 1
            else:
                where = np.zeros((1, 2, size), np.int32)
                where[:, 0] = shape.row
            where[0, 0, :n] = rows[first : first + n]
            where[0, 1, :n] = ranks[first : first + n]
            parts.append(_Tile(form, handle, where))
    at = used = 0
    while at < len(parts):
        now = parts[at : at + shape.fused]
        form = now[0].form
        alike = all(p.form is form or p.form == form for p in now)
        small = all(p.where.shape[2] == shape.tile for p in now)
        if len(now) < shape.fused or not alike or not small or not fused(form):
            now = now[:1]
        where = now[0].where
        if where.shape[2] == shape.tile:
            where = block[used : used + len(now)]
            used += len(now)
        yield form, where, tuple(p.handle for p in now)
        at += len(now)
