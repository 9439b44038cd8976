"""Does a larger tile give the bits of the small one? Asked of this machine and this checkpoint.

XLA chooses code by shape, so the answer is a fact about shapes: every executable that the larger
tile has is run once on random rows beside the small one's, and everything they store or tell must
be equal. One difference and the larger tile is not used (JAX-12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kv import Table
from jax_impl.stages import places

if TYPE_CHECKING:
    from jax_impl.model import JaxModel

ROUNDS = 2


def _noise(rng: np.random.Generator, a: Any, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.standard_normal(a.shape, np.float32) * scale, a.dtype)


def _bytes(tree: Any) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def tiles_differ(model: JaxModel, wide: int) -> str:
    """The first piece whose bits depend on the tile, or "" if none does.

    The bank and some KV blocks are overwritten; both are as good as new to every later request,
    for each writes what it reads.
    """
    for seed in range(ROUNDS):
        rng = np.random.default_rng(seed)
        fault = _stages_differ(model, wide, rng) or _experts_differ(model, wide, rng)
        if fault:
            return fault
    return ""


def _split(model: JaxModel, wide: int) -> list[list[tuple[int, int]]]:
    """The same rows in small tiles and in one wide one."""
    step = model.tile
    return [[(first, step) for first in range(0, wide, step)], [(0, wide)]]


def _stages_differ(model: JaxModel, wide: int, rng: np.random.Generator) -> str:
    """One text of `wide` tokens, from every stage's start to its end, in both tiles."""
    n = wide
    rows = rng.permutation(model.rows)[:n].tolist()
    blocks = [rng.permutation(k.blocks)[: k.held(n, model.kv_block)].tolist() for k in model.kinds]
    tables = [Table(tuple(blocks), n)] * n
    tokens = rng.integers(0, model.config.vocab, n).tolist()
    bank = jax.tree.map(lambda a: np.asarray(_noise(rng, a)), model._bank)
    out = np.asarray(_noise(rng, model._out))
    positions = list(range(n))
    all_at = places(rows, tokens, positions, tables, model._shapes, [(0, n)])
    seen: set[int] = set()
    for plan in model._plan.values():
        turns = model._row_turns(plan, positions, tables, n)
        for piece, i in [*plan.pieces, *([(plan.head, None)] if plan.head else [])]:
            program = id(model._piece(wide, piece, i))
            if program in seen:
                continue
            seen.add(program)
            both = []
            for split in _split(model, wide):
                model._bank, model._out = jax.tree.map(jnp.array, (bank, out))
                pools = []
                if i is None:
                    told = [
                        model._piece(s, piece, i)(
                            all_at[0][first : first + s, :1], *model._arguments(piece, i)
                        )
                        for first, s in split
                    ]
                else:
                    kind = model._kind_of[i]
                    told = model._layer(piece, i, all_at[kind], turns, split)
                    index = jnp.asarray(blocks[kind])
                    pools = [a[index] for a in (model._keys[i], model._values[i]) if a is not None]
                joined = np.concatenate(told)[:n] if told else np.zeros(0)
                kept = jax.tree.map(lambda a: np.asarray(a)[:-1], model._bank)
                both.append(_bytes((joined, kept, pools)))
            if both[0] != both[1]:
                return f"{piece.source} + " + ("head" if i is None else f"layer {i}")
    return ""


def _experts_differ(model: JaxModel, wide: int, rng: np.random.Generator) -> str:
    """One expert of each form with random weights."""
    rows = rng.permutation(model.rows)[:wide].astype(np.int32)
    x = _noise(rng, model._bank.x)
    for form in model._forms:
        handle = tuple(_values(rng, shape, dtype) for shape, dtype in form.tensors)
        both = []
        for split in _split(model, wide):
            out = jnp.zeros_like(model._out)
            for first, s in split:
                part = rows[first : first + s]
                where = np.stack([part, np.zeros_like(part)])[None]
                run = model._programs.experts(s, form, 1, out, x)
                out = run(out, x, where, (handle,))
            both.append(_bytes(out[:-1]))
        if both[0] != both[1]:
            return "experts of " + " ".join(f"{shape} {dtype}" for shape, dtype in form.tensors)
    return ""


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Random numbers of a tensor of an expert; bytes near those of a scale of one."""
    if dtype == np.uint8:
        return jnp.asarray(rng.integers(118, 130, shape, np.uint8))
    return jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]), dtype)
