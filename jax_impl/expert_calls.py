"""Which device calls run the experts of a step: tiles of rows, several of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_impl.programs import ExpertForm
from jax_impl.stages import ExpertTask, padded, tiles
from reference.vocab.config import MoeSpec


class CallShape(NamedTuple):
    """Rows of a small and of a large tile (0: none), the row that padding gets, and how many small
    tiles a call takes when it takes several."""

    tile: int
    wide: int
    row: int
    fused: int


def expert_calls(
    moe: MoeSpec,
    roles: Sequence[str],
    tasks: Sequence[ExpertTask],
    shape: CallShape,
    fused: Callable[[ExpertForm], bool],
) -> Iterator[tuple[ExpertForm, np.ndarray, tuple[tuple[Any, ...], ...]]]:
    """(form, where int32 [count, 2, rows of a tile], count handles) of each call, in order.

    where holds rows and ranks; padding has the last row and rank 0. Calls of several tiles are
    made of neighbours of one form for which `fused` says that they may be.
    """
    single: list[tuple[ExpertForm, np.ndarray, tuple[Any, ...]]] = []
    for handle, rows, ranks in tasks:
        split = tiles(len(rows), shape.tile, shape.wide)
        length = sum(size for _, size in split)
        where = np.stack([padded(rows, length, shape.row), padded(ranks, length, 0)])
        form = ExpertForm.of(moe, roles, handle)
        single += [(form, where[:, first : first + size], handle) for first, size in split]
    at = 0
    while at < len(single):
        now = single[at : at + shape.fused]
        form = now[0][0]
        alike = all(f == form and w.shape[1] == shape.tile for f, w, _ in now)
        if len(now) < shape.fused or not alike or not fused(form):
            now = now[:1]
        yield form, np.stack([w for _, w, _ in now]), tuple(handle for _, _, handle in now)
        at += len(now)
