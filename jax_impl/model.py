"""The JAX model: fixed-shape, jit-compiled stages over a bank of token rows on the device.

A *row* is one token of one request, from the step that embeds it until its chunk has left the last
layer. The engine hands out row numbers 0..rows-1 and, for each kind of KV, block numbers
0..kind.blocks-1 and takes them back; nothing here allocates. Every device call works on one tile
of `tile` rows, so more rows are more calls of the same executable and no compiled shape depends on
the batch (JAX-1).

How the engine drives one chunk of a model with expert layers m1 < m2 < ...:

    out = model.enter(rows, tokens, positions, tables, want).get()     # topk for layer out.layer
    model.experts(out.layer, [ExpertTask(handle, rows, ranks), ...])   # in any order, any split
    out = model.advance(out.layer, rows, positions, tables, want).get()
    ...                                                                # until out.layer is None

Thread rule: one thread, the dispatch thread, calls everything but the constructor and `compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.expert_calls import CallShape, expert_calls
from jax_impl.kv import KV_DTYPES, KvDtype, KvKind, Table, kv_bytes, kv_kinds, make_pools
from jax_impl.layers import Bank, Layers, Piece
from jax_impl.next_gate import NextGates
from jax_impl.probe import tiles_differ
from jax_impl.programs import ExpertForm, Program, Programs, Progress, expert_forms
from jax_impl.resident import Resident
from jax_impl.stages import (
    ExpertTask,
    Pending,
    PlaceShape,
    Plan,
    StageOut,
    padded,
    places,
    row_turns,
    stage_plan,
    tiles,
)
from jax_impl.supported import require_sizes, require_supported
from reference.vocab.config import ModelConfig, MoeSpec, RopeSpec
from reference.vocab.errors import Unsupported
from reference.vocab.ids import ENTRY

__all__ = ["ExpertTask", "JaxModel", "Pending", "StageOut", "Table"]

Compute = Literal["f32", "bf16"]
FUSED = 4
"""Expert tiles that one call runs when that many are there (experts_v1)."""
AHEAD = 64 << 20
"""Bytes of temporaries that calls in flight may hold together (JAX-17)."""


class JaxModel:
    """The forward pass of one checkpoint on one device.

    ckpt       a `reference.files.checkpoint.Checkpoint`; non-expert tensors are read here
    rows       token rows in flight (R); the bank holds R + 1, the last one for padding
    kv_blocks  KV blocks granted to all requests together; pools hold one more, for padding, and
               those of layers with a window fewer (kv.py)
    texts      most requests that hold KV at a time (None: only kv_blocks bounds them)
    max_len    longest prompt + max_new_tokens of a request (fixes the width of a block table)
    kv_block   tokens a KV block
    tile       rows a device call
    wide       rows of a second, larger tile for prompts and many requests, or 0. It is used only if
               the probe in `compile` finds the bits of the small one for every shape of this
               checkpoint; afterwards `wide` is 0 if it did not, or if so many rows never meet
    compute    f32: weights widened exactly, float32 throughout; bf16: inputs of matrix products
               rounded to bfloat16, float32 accumulation
    kv_dtype   what K and V are rounded to when they are written
    ahead      how many experts to ask the next router for, early (PREDICT-4); 0: it is not asked

    Raises Unsupported for a description that has no kernel here, BadInput for a bad size.
    """

    tile: int
    kinds: tuple[KvKind, ...]
    """The kinds of KV, in the order of a table's lists of blocks."""
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
        texts: int | None = None,
        tile: int = 8,
        wide: int = 0,
        compute: Compute = "f32",
        kv_dtype: KvDtype = "f32",
        ahead: int = 0,
    ) -> None:
        config: ModelConfig = ckpt.config
        where = str(ckpt.path)
        require_supported(config, where)
        counts = {"rows": rows, "kv_blocks": kv_blocks, "max_len": max_len, "kv_block": kv_block}
        require_sizes(tile, wide, counts)
        if compute not in ("f32", "bf16") or kv_dtype not in KV_DTYPES:
            known = "compute f32, bf16; kv_dtype f32, bf16, f16"
            raise Unsupported(where, f"compute {compute}, kv_dtype {kv_dtype}", known)
        self.config, self.rows, self.tile, self.max_len = config, rows, tile, max_len
        self.kv_block = kv_block
        self.kinds = kv_kinds(
            config,
            kv_block=kv_block,
            kv_blocks=kv_blocks,
            max_len=max_len,
            tile=max(tile, wide),
            texts=texts or kv_blocks,
        )
        self._kind_of = {i: k for k, kind in enumerate(self.kinds) for i in kind.layers}
        self._shapes = [PlaceShape(3 + kind.ring, rows, kind.blocks) for kind in self.kinds]
        self._forms = expert_forms(ckpt)
        self._only = self._forms[0] if len(self._forms) == 1 else None
        self._roles = tuple(ckpt.expert_roles)
        self._held = Resident(ckpt, max_len, compute)
        self.non_expert_bytes_held = self._held.nbytes
        self._make_pools(kv_dtype)
        # A dense model has neither expert inputs nor outputs.
        banked, k = (rows + 1, config.top_k) if config.top_k else (1, 1)
        self._bank = Bank(
            jnp.zeros((rows + 1, config.hidden), jnp.float32),
            jnp.zeros((banked, config.hidden), jnp.float32),
            jnp.zeros((banked, k), jnp.float32),
        )
        self._out = jnp.zeros((banked, k, config.hidden), jnp.float32)
        self.bank_bytes = sum(a.nbytes for a in (*self._bank, self._out))
        self._ahead = 0
        self._plan = {start: stage_plan(config, start) for start in (ENTRY, *config.moe_layers)}
        self._programs = Programs(Layers(config, compute, kv_dtype))
        self._gates = None
        if ahead and config.moe_layers:
            self._gates = NextGates(config, compute, self._held.layers, ahead, rows + 1)
        # Before the probe only the small tile is used. A tile of as many rows as there are
        # positions, rows or KV slots at most: the probe runs one text of that length.
        self._candidate = wide if tile < wide <= min(rows, max_len, kv_blocks * kv_block) else 0
        self.wide = 0

    def _make_pools(self, kv_dtype: KvDtype) -> None:
        """KV pools of all layers, a block of padding in each."""
        made = [
            make_pools(spec.attention, self.kinds[self._kind_of[i]], self.kv_block, kv_dtype)
            for i, spec in enumerate(self.config.layers)
        ]
        self._keys: list[jax.Array] = [keys for keys, _ in made]
        self._values: list[jax.Array | None] = [values for _, values in made]
        self.kv_bytes = kv_bytes(self.config, self.kinds, self.kv_block, kv_dtype)

    def compile(self, progress: Progress = lambda text: None) -> None:
        """Compile every executable that a request can need; `progress` gets one line for each."""
        self._compile(self.tile, progress)
        if self._candidate:
            self._compile(self._candidate, progress)
            fault = tiles_differ(self, self._candidate)
            self.wide = 0 if fault else self._candidate
            told = (
                f"differ in {fault} and are not used" if fault else f"give the bits of {self.tile}"
            )
            progress(f"tiles of {self._candidate} rows {told}")

    def _compile(self, tile: int, progress: Progress) -> None:
        for plan in self._plan.values():
            for piece, layer in plan.pieces:
                self._piece(tile, piece, layer, progress)
            if plan.head is not None:
                self._piece(tile, plan.head, None, progress)
        self._compile_experts(tile, progress)
        if self._gates is not None:
            self._gates.compile(tile, progress)

    def _compile_experts(self, tile: int, progress: Progress) -> None:
        for form in self._forms:
            self._programs.experts(tile, form, 1, self._out, self._bank.x, progress)
            if tile == self.tile and self._fused(form):
                self._programs.experts(tile, form, FUSED, self._out, self._bank.x, progress)

    @property
    def programs(self) -> int:
        """Executables so far; after `compile` this number stays (JAX-1)."""
        return self._programs.count + (self._gates.count if self._gates else 0)

    def enter(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Table],
        want_logits: Sequence[bool],
    ) -> Pending:
        """Embed tokens and run to the first router (or, in a dense model, to the LM head).

        All five have one entry a row. `tables[i]` holds the KV block numbers of row i's request,
        enough for positions up to position[i]. Rows of one request must be in ascending position,
        and every earlier position must have entered before or be in this call. `want_logits`
        matters only when no router follows.
        """
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.config.vocab:
            raise ValueError(f"token outside 0..{self.config.vocab - 1}")
        return self._stage(ENTRY, rows, tokens, positions, tables, want_logits)

    def experts(self, layer: int, tasks: Sequence[ExpertTask]) -> None:
        """Run routed experts of `layer`; out[row, rank] is written for every row of every task.

        Returns when dispatched. The handles' memory may be overwritten only after `wait` or after
        `get` of a later `advance`.
        """
        moe = self.config.layers[layer].feed_forward
        assert isinstance(moe, MoeSpec)
        shape = CallShape(self.tile, self.wide, self.rows, FUSED)
        calls = expert_calls(moe, self._roles, tasks, shape, self._fused, self._only)
        for form, where, handles in calls:
            count, _, size = where.shape
            run = self._programs.experts(size, form, count, self._out, self._bank.x)
            self._make_room(run)
            # JAX-10: donated, so the old handle is dead once the call returns.
            self._out = run(self._out, self._bank.x, where, handles)

    def advance(
        self,
        layer: int,
        rows: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Table],
        want_logits: Sequence[bool],
    ) -> Pending:
        """Combine the K expert outputs of each row at `layer` in rank order and run on to the next
        router or the LM head. All K outputs of each row must have been written by `experts`.
        Same conditions on rows, positions and tables as `enter`.
        """
        return self._stage(layer, rows, None, positions, tables, want_logits)

    def _fused(self, form: ExpertForm) -> bool:
        """Whether several experts of a form may run in one call."""
        one = self._programs.experts(self.tile, form, 1, self._out, self._bank.x)
        return one.temporaries * FUSED <= AHEAD

    def _make_room(self, program: Program) -> None:
        """Wait before the temporaries of calls in flight grow beyond AHEAD (JAX-17): XLA sets a
        call's aside when it is dispatched, not when it runs."""
        if self._ahead + program.temporaries > AHEAD:
            self.wait()
        self._ahead += program.temporaries

    def wait(self) -> None:
        """Block until everything dispatched so far is done (nothing reads a slot any more)."""
        jax.block_until_ready((self._bank, self._out, self._keys, self._values))
        self._ahead = 0

    def told(self) -> dict[str, Any]:
        """What the model has to say in the log with the step that has ended: nothing here."""
        return {}

    def end(self) -> None:
        """Stop what the model runs of its own: nothing here."""

    def _stage(
        self,
        start: int,
        rows: Sequence[int],
        tokens: Sequence[int] | None,
        positions: Sequence[int],
        tables: Sequence[Table],
        want_logits: Sequence[bool],
    ) -> Pending:
        plan, told, logits = self._plan[start], [], []
        split = tiles(len(rows), self.tile, self.wide)
        ahead = None
        if plan.pieces:
            at = places(rows, tokens, positions, tables, self._shapes, split)
            turns = self._row_turns(plan, positions, tables, len(at[0]))
            for piece, i in plan.pieces:
                told += self._layer(piece, i, at[self._kind_of[i]], turns, split)
            ahead = self._ask_ahead(plan.layer, at[0][:, 0], split)
        wanted: list[int] = []
        if plan.head is not None:
            wanted = [i for i, want in enumerate(want_logits) if want]
            split = tiles(len(wanted), self.tile, self.wide)
            at = padded([rows[i] for i in wanted], sum(size for _, size in split), self.rows)
            for first, size in split:
                run = self._piece(size, plan.head, None)
                there = at[first : first + size, None]
                logits.append(run(there, *self._arguments(plan.head, None)))
        return Pending(plan.layer, len(rows), told, logits, wanted, self.wait, ahead)

    def _ask_ahead(
        self, layer: int | None, rows: np.ndarray, split: Sequence[tuple[int, int]]
    ) -> tuple[int, list[jax.Array]] | None:
        """Ask the router behind `layer`, where that is wanted and there is one."""
        if self._gates is None or layer not in self._gates.next:
            return None
        said = []
        for first, size in split:
            run, weights = self._gates.program(layer, size)
            self._make_room(run)
            said.append(run(rows[first : first + size], self._bank.residual, weights))
        return self._gates.next[layer], said

    def _row_turns(
        self, plan: Plan, positions: Sequence[int], tables: Sequence[Table], length: int
    ) -> dict[RopeSpec, np.ndarray]:
        """The rows' angles of each rope in the plan that follows the prompt's length."""
        found = {p.layer.attention.rope for p, _ in plan.pieces if p.layer is not None}
        ropes = [r for r in found if r is not None and r.by_prompt]
        return {r: row_turns(r, positions, tables, length) for r in ropes}

    def _layer(
        self,
        piece: Piece,
        i: int,
        at: np.ndarray,
        turns: dict[RopeSpec, np.ndarray],
        split: Sequence[tuple[int, int]],
    ) -> list[jax.Array]:
        """Run one layer for all tiles of a call; what its router told."""
        told = []
        mine = turns.get(self.config.layers[i].attention.rope)  # type: ignore[arg-type]
        for first, size in split:
            part = slice(first, first + size)
            run = self._piece(size, piece, i)
            self._make_room(run)
            # JAX-10: donated, so the old handles are dead once the call returns.
            self._bank, self._keys[i], self._values[i], spoken = run(
                at[part], *self._arguments(piece, i, None if mine is None else mine[part])
            )
            if spoken is not None:
                told.append(spoken)
        return told

    def _arguments(
        self, piece: Piece, i: int | None, turns: np.ndarray | None = None
    ) -> tuple[Any, ...]:
        """What a piece's program takes after `at`; `turns` where the rows bring their own."""
        held = self._held
        out = self._out if piece.source == "combine" else None
        if i is None:
            return self._bank, out, held.top
        embed = held.embed if piece.source == "embed" else None
        own = held.turns[i] if turns is None else turns
        return self._bank, self._keys[i], self._values[i], out, held.layers[i], embed, own

    def _piece(
        self, tile: int, piece: Piece, i: int | None, progress: Progress | None = None
    ) -> Program:
        """The executable of a piece for tiles of so many rows."""
        if i is None:
            return self._programs.piece(tile, piece, i, 1, self._arguments(piece, i), progress)
        spec, turns = self.config.layers[i].attention.rope, None
        if spec is not None and spec.by_prompt:
            turns = np.zeros((tile, spec.dims), np.float32)
        width = self._shapes[self._kind_of[i]].width
        arguments = self._arguments(piece, i, turns)
        return self._programs.piece(tile, piece, i, width, arguments, progress)
