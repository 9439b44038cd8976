"""The forward pass with its attention elsewhere: the compute pool, one row after another.

Everything is `Model`'s but the order of one thing: q is sent before k and v are made (LAMINA-2).
A request's state on this side is a `RemoteState`, which holds no keys and no values (LAMINA-11).
"""

from __future__ import annotations

from reference.attention_offload.devices import MemoryPool, RemoteKV, RemoteState
from reference.control.attention_wire import Opened
from reference.numerics.formats import Array
from reference.numerics.model import Hidden, Model, Want
from reference.vocab.errors import RequestFailed, Unsupported


class OffloadedModel(Model):
    """`Model` on a memory pool. Start requests with `admit`, end them with `pool.drop`."""

    pool: MemoryPool

    def on(self, pool: MemoryPool) -> OffloadedModel:
        """Use this pool; returns the model.

        Raises Unsupported for compressed keys and values, for sinks, which no message carries, and
        for ropes that follow the prompt.
        """
        for i, layer in enumerate(self.config.layers):
            a = layer.attention
            if a.kind != "gqa" or a.sinks or (a.rope is not None and a.rope.by_prompt):
                what = f"{a.kind} attention with {'sinks' if a.sinks else 'such a rope'}"
                known = "grouped attention without sinks, with a rope of the position alone"
                raise Unsupported(f"layer {i}", what, known)
        self.pool = pool
        return self

    def admit(self, request: int, tokens: int) -> RemoteState:
        """A new request of at most so many tokens. Raises RequestFailed without room for it."""
        owners = self.pool.admit(request, tokens, self.dtype)
        if owners is None:
            raise RequestFailed(f"memory pool: no room for {tokens} tokens")
        return RemoteState(self.pool, request, owners)

    def _from_layer(  # type: ignore[override]
        self, first: int, state: RemoteState, residual: Array, position: int, logits: Want
    ) -> Hidden:
        """Each row is a tile of its own, from here to the next router or the end."""
        end = next((m + 1 for m in self.config.moe_layers if m >= first), len(self.config.layers))
        state.tiles = {}
        for p in range(position, position + len(residual)):
            if first < end:
                state.tiles[p] = self.pool.tiles
                self.pool.record(Opened(self.pool.tiles, state.owners, first, end))
                self.pool.tiles += 1
        return super()._from_layer(first, state, residual, position, logits)  # type: ignore[arg-type]

    def _attention(  # type: ignore[override]
        self, i: int, kv: RemoteKV, row: Array, position: int, prompt: int
    ) -> Array:
        x = self.attention_input(i, row)
        asked = kv.ask(self.query(i, x, position), position)
        answers = kv.tell(asked, *self.key_value(i, x, position), position)
        return self.attention_output(i, answers)
