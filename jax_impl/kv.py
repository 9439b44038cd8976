"""Kinds of KV: which layers share block numbers, and how many blocks a request and a pool hold.

Layers with the same window are of one kind and have the same block numbers. Without a window a
request holds a block for every `kv_block` tokens of its text. With a window w a position is needed
by the next w - 1 only, so a request holds a ring: block b of its text lies where block b - ring
lay, which no later row can see (JAX-13). The pools of such a kind are sized by how many requests
run at a time, and admission, which counts the blocks of whole texts, promises no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reference.vocab.config import AttentionSpec, ModelConfig

KvDtype = Literal["f32", "bf16", "f16"]
KV_DTYPES: dict[str, Any] = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


class Table(NamedTuple):
    """What the model has to know of a row's request: `blocks`, for each kind of KV its block
    numbers in order of position, at most `KvKind.ring` of them; `prompt`, the length of its prompt
    in tokens. Rows of one request may share one object."""

    blocks: tuple[Sequence[int], ...]
    prompt: int = 0


@dataclass(frozen=True)
class KvKind:
    """window: of these layers. layers: their numbers. ring: most blocks that a request holds.
    blocks: blocks in each of their pools, beside the one for padding. parts: a request lies whole
    in one of so many equal parts of the blocks' numbers (attention_pool: a memory device each)."""

    window: int | None
    layers: tuple[int, ...]
    ring: int
    blocks: int
    parts: int = 1

    def held(self, tokens: int, kv_block: int) -> int:
        """Blocks that a text of so many tokens holds."""
        return min(-(-tokens // kv_block), self.ring)


def kv_kinds(
    config: ModelConfig, *, kv_block: int, kv_blocks: int, max_len: int, tile: int, texts: int
) -> tuple[KvKind, ...]:
    """The kinds of a model, in the order of their first layers.

    kv_blocks  blocks that admission grants to all running requests together
    max_len    longest text in tokens; tile  most rows of one request in a device call; texts  most
               requests at a time
    """
    whole = -(-max_len // kv_block)
    by_window: dict[int | None, list[int]] = {}
    for i, spec in enumerate(config.layers):
        by_window.setdefault(spec.attention.window, []).append(i)
    kinds: list[KvKind] = []
    for window, layers in by_window.items():
        ring, blocks = whole, kv_blocks
        if window is not None:
            # A call writes at most `tile` positions p.. and reads back to p - window + 1; in a ring
            # of n positions, q is written over by q + n.
            ring = min(whole, -(-(window + tile - 1) // kv_block))
            blocks = min(kv_blocks, texts * ring)
        kinds.append(KvKind(window, tuple(layers), ring, blocks))
    return tuple(kinds)


def block_shapes(
    a: AttentionSpec, kv_block: int
) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
    """Shapes of a layer's block of keys and of values; no values beside MLA's compressed keys."""
    keys = (a.cache_heads, kv_block, a.cache_key_dim)
    values = (a.cache_heads, kv_block, a.cache_value_dim)
    return keys, values if a.cache_value_dim else None


def make_pools(
    a: AttentionSpec, kind: KvKind, kv_block: int, kv_dtype: KvDtype
) -> tuple[jax.Array, jax.Array | None]:
    """A layer's pools of keys and values [blocks + 1, ..], zeros."""
    keys, values = (
        None if shape is None else jnp.zeros((kind.blocks + 1, *shape), KV_DTYPES[kv_dtype])
        for shape in block_shapes(a, kv_block)
    )
    assert keys is not None
    return keys, values


def kv_bytes(
    config: ModelConfig, kinds: Sequence[KvKind], kv_block: int, kv_dtype: KvDtype = "f32"
) -> int:
    """Bytes of all pools, padding blocks included."""
    item = np.dtype(KV_DTYPES[kv_dtype]).itemsize
    total = 0
    for kind in kinds:
        for i in kind.layers:
            for shape in block_shapes(config.layers[i].attention, kv_block):
                total += 0 if shape is None else item * int(np.prod(shape)) * (kind.blocks + 1)
    return total
