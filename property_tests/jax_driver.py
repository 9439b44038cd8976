"""Drives a JaxModel without an engine: every expert at hand, any grouping that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.model import ExpertTask, JaxModel, StageOut, Table
from jax_impl.stored import dtype_of


def handles(ckpt: Any) -> dict[tuple[int, int], tuple[jax.Array, ...]]:
    """Every routed expert as the slots of an engine would hold it."""
    return {
        (layer, e): tuple(
            jax.device_put(ckpt.read(r).view(dtype_of(r.dtype, "expert")))
            for r in ckpt.expert(layer, e)
        )
        for layer in ckpt.config.moe_layers
        for e in range(ckpt.config.experts)
    }


@dataclass
class Text:
    """One request, teacher-forced: `tokens` in chunks of the given sizes (the last one repeats).
    `table` lists KV blocks for all of them; each kind of KV takes as many as it needs.

    told collects, for each position, the bytes of its experts and weights at every layer and of
    its logits."""

    tokens: Sequence[int]
    chunks: Sequence[int]
    table: Sequence[int]
    done: int = 0
    turn: int = 0
    told: dict[int, list[bytes]] = field(default_factory=dict)
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    bad: bool = False

    def next_chunk(self) -> range:
        size = self.chunks[min(self.turn, len(self.chunks) - 1)]
        self.turn += 1
        start, self.done = self.done, min(self.done + size, len(self.tokens))
        return range(start, self.done)

    def place(self, model: JaxModel) -> Table:
        """The table of this text's rows; its prompt is the whole of it."""
        blocks = tuple(
            [b % kind.blocks for b in self.table[: kind.held(len(self.tokens), model.kv_block)]]
            for kind in model.kinds
        )
        return Table(blocks, len(self.tokens))


def poison(model: JaxModel) -> None:
    """NaN in every row, free or padding, and in every KV block."""
    nan = lambda a: jnp.full_like(a, jnp.nan)  # noqa: E731
    model._bank = jax.tree.map(nan, model._bank)
    model._out = nan(model._out)
    model._keys = [nan(a) for a in model._keys]
    model._values = jax.tree.map(nan, model._values)


def run_together(model: JaxModel, experts: dict, texts: Sequence[Text], rng: Random) -> None:
    """All texts to their end: their rows share tiles in random places, in random order of texts,
    with each layer's expert tasks in random order and randomly split over calls."""
    while live := [t for t in texts if t.done < len(t.tokens) and not t.bad]:
        free = list(range(model.rows))
        rng.shuffle(free)
        queues = [[(t, p) for p in t.next_chunk()] for t in live]
        part: list[tuple[Text, int]] = []
        while queues := [q for q in queues if q]:
            part.append(rng.choice(queues).pop(0))
        _chunks(model, experts, part, [free.pop() for _ in part], rng)


def _chunks(
    model: JaxModel, experts: dict, part: list[tuple[Text, int]], rows: list[int], rng: Random
) -> None:
    where = [p for _, p in part]
    tables = [t.place(model) for t, _ in part]
    want = [True] * len(part)
    out = model.enter(rows, [t.tokens[p] for t, p in part], where, tables, want).get()
    _note(part, out)
    while out.layer is not None:
        layer = out.layer
        chosen: dict[int, list[tuple[int, int]]] = {}
        for i, row in enumerate(rows):
            for rank, e in enumerate(out.topk[i]):
                chosen.setdefault(int(e), []).append((row, rank))
        tasks = []
        for e, pairs in chosen.items():
            rng.shuffle(pairs)
            cut = rng.randrange(len(pairs) + 1)
            for some in (pairs[:cut], pairs[cut:]):
                if some:
                    handle = experts[layer, e]
                    tasks.append(ExpertTask(handle, [r for r, _ in some], [k for _, k in some]))
        rng.shuffle(tasks)
        cut = rng.randrange(len(tasks) + 1)
        model.experts(layer, tasks[:cut])
        model.experts(layer, tasks[cut:])
        out = model.advance(layer, rows, where, tables, want).get()
        _note(part, out)


def _note(part: list[tuple[Text, int]], out: StageOut) -> None:
    for i, (text, p) in enumerate(part):
        text.bad = text.bad or bool(out.bad[i])
        told = text.told.setdefault(p, [])
        if out.layer is None:
            text.logits[p] = np.array(out.logits[i])
            told.append(text.logits[p].tobytes())
        else:
            told.append(out.topk[i].tobytes() + out.weights[i].tobytes())
