"""The JAX model: fixed-shape, jit-compiled stages over a bank of token rows on the device.

A *row* is one token of one request, from the step that embeds it until its chunk has left the last
layer. The engine hands out row numbers 0..rows-1 and KV block numbers 0..kv_blocks-1 and takes
them back; nothing here allocates. Every device call works on one tile of `tile` rows, so more rows
are more calls of the same executable and no compiled shape depends on the batch (JAX-1).

How the engine drives one chunk of a model with expert layers m1 < m2 < ...:

    out = model.enter(rows, tokens, positions, tables, want).get()     # topk for layer out.layer
    model.experts(out.layer, [ExpertTask(handle, rows, ranks), ...])   # in any order, any split
    out = model.advance(out.layer, rows, positions, tables, want).get()
    ...                                                                # until out.layer is None

Thread rule: one thread, the dispatch thread, calls everything but the constructor and `compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Compute = Literal["f32", "bf16"]
KvDtype = Literal["f32", "bf16", "f16"]


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


class Pending(Protocol):
    """A dispatched stage. `get` blocks until it is done; call it once, on the dispatch thread."""

    def get(self) -> StageOut: ...


class JaxModel:
    """The forward pass of one checkpoint on one device.

    ckpt       a `reference.files.checkpoint.Checkpoint`; non-expert tensors are read here
    rows       token rows in flight (R); the bank holds R + 1, the last one for padding
    kv_blocks  KV blocks; the pools hold one more, for padding
    max_len    longest prompt + max_new_tokens of a request (fixes the width of a block table)
    kv_block   tokens a KV block
    tile       rows a device call
    compute    f32: weights widened exactly, float32 throughout; bf16: inputs of matrix products
               rounded to bfloat16, float32 accumulation
    kv_dtype   what K and V are rounded to when they are written

    Raises Unsupported for a description that has no kernel here, BadInput for a bad size.
    """

    tile: int
    non_expert_bytes_held: int
    """Bytes of the resident weights and rope tables as held on the device."""
    kv_bytes: int
    """Bytes of all KV pools."""
    bank_bytes: int
    """Bytes of the row bank."""

    def __init__(
        self,
        ckpt: Any,
        *,
        rows: int,
        kv_blocks: int,
        max_len: int,
        kv_block: int = 64,
        tile: int = 8,
        compute: Compute = "f32",
        kv_dtype: KvDtype = "f32",
    ) -> None:
        raise NotImplementedError

    def compile(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Compile every executable that a request can need; `progress` gets one line for each."""
        raise NotImplementedError

    def enter(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Sequence[int]],
        want_logits: Sequence[bool],
    ) -> Pending:
        """Embed tokens and run to the first router (or, in a dense model, to the LM head).

        All five have one entry a row. `tables[i]` lists the KV block numbers of row i's request,
        covering at least position[i]; rows of one request may share one list object. Rows of one
        request must be in ascending position, and every earlier position must have entered before
        or be in this call. `want_logits` matters only when no router follows.
        """
        raise NotImplementedError

    def experts(self, layer: int, tasks: Sequence[ExpertTask]) -> None:
        """Run routed experts of `layer`; out[row, rank] is written for every row of every task.

        Returns when dispatched. The handles' memory may be overwritten only after `wait` or after
        `get` of a later `advance`.
        """
        raise NotImplementedError

    def advance(
        self,
        layer: int,
        rows: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Sequence[int]],
        want_logits: Sequence[bool],
    ) -> Pending:
        """Combine the K expert outputs of each row at `layer` in rank order and run on to the next
        router or the LM head. All K outputs of each row must have been written by `experts`.
        Same conditions on rows, positions and tables as `enter`.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Block until everything dispatched so far is done (nothing reads a slot any more)."""
        raise NotImplementedError


def kv_block_bytes(config: Any, kv_block: int = 64, kv_dtype: KvDtype = "f32") -> int:
    """Bytes that one KV block takes over all layers (for sizing `kv_blocks` before the model)."""
    raise NotImplementedError
