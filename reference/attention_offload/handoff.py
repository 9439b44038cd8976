"""Prefill elsewhere: a worker runs the prompt, the memory pool pulls what it left (LAMINA-12)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.attention_offload.devices import MemoryPool
from reference.attention_offload.model import OffloadedModel
from reference.control.attention_handoff import HandOff, Piece
from reference.control.attention_partition import head_share
from reference.control.attention_wire import Sent
from reference.numerics.formats import Array
from reference.numerics.model import Model, State
from reference.numerics.naive import remembering, run_chunk


class PrefillWorker:
    """Holds whole KV for as long as it takes to be pulled. Its sums are those of decoding."""

    def __init__(self, model: Model, handoff: HandOff, element_bytes: int = 4) -> None:
        self.model, self.handoff, self.element_bytes = model, handoff, element_bytes
        self.states: dict[int, State] = {}

    def prefill(self, request: int, prompt: Sequence[int]) -> Array:
        """Run the prompt and offer it layer by layer; the logits [V] of its last token."""
        state = self.states[request] = self.model.start(drop=False)
        logits = run_chunk(self.model, state, prompt, 0, remembering(self.model))
        assert logits is not None
        for i, spec in enumerate(self.model.config.layers):
            a = spec.attention
            width = a.kv_heads * (a.head_dim + a.v_head_dim)
            self.handoff.offer(request, i, len(prompt), width * self.element_bytes)
        return logits[-1]

    def read(self, request: int, layer: int, position: int) -> tuple[Array, Array]:
        """k [G, D] and v [G, Dv] of one position."""
        kv = self.states[request].layers[layer]
        b, offset = divmod(position, kv.block)
        return kv.keys[b][:, offset], kv.values[b][:, offset]


def pull(piece: Piece, worker: PrefillWorker, pool: MemoryPool, owners: Sequence[int]) -> None:
    """Copy a piece to the devices that own the request, to each its share of the heads."""
    heads = pool.config.layers[piece.layer].attention.kv_heads
    for i, d in enumerate(owners):
        share = head_share(i, len(owners), heads)
        kv = pool.devices[d].cached[piece.request, piece.layer]
        size = 0
        for position in range(piece.first, piece.first + piece.tokens):
            k, v = worker.read(piece.request, piece.layer, position)
            k, v = k[share.start : share.stop], v[share.start : share.stop]
            kv.write(position, k, v)
            size += (k.size + v.size) * pool.element_bytes
        pool.record(Sent("pull", piece.request, piece.layer, d, piece.tokens, size))


def decode_with_handoff(
    worker: PrefillWorker, model: OffloadedModel, prompts: Sequence[Sequence[int]],
    new: int, room_bytes: int,
) -> list[list[int]]:  # fmt: skip
    """Greedy tokens of each prompt: prefill, then, after every decoded token of the others (a
    gap), pull what fits into `room_bytes`; a request decodes once all of its KV has come.

    The scheduler of this page is the plainest one: it shows that pulling beside decoding changes
    no token. Raises AssertionError when nothing can move any more.
    """
    states, tokens, decoding = {}, {}, []
    for r, prompt in enumerate(prompts):
        states[r] = model.admit(r, len(prompt) + new)
        tokens[r] = [int(np.argmax(worker.prefill(r, prompt)))]
    while len(decoding) < len(prompts) or any(len(t) < new for t in tokens.values()):
        moved = False
        for r in decoding:
            if len(tokens[r]) < new:
                at = len(prompts[r]) + len(tokens[r]) - 1
                states[r].length = at
                logits = run_chunk(model, states[r], tokens[r][-1:], at, remembering(model))  # type: ignore[arg-type]
                assert logits is not None
                tokens[r].append(int(np.argmax(logits[-1])))
                moved = True
        room = room_bytes
        while (piece := worker.handoff.next_pull(room)) is not None:
            pull(piece, worker, model.pool, states[piece.request].owners)
            room -= piece.bytes
            moved = True
            done = worker.handoff.pulled()
            if done is not None:
                del worker.states[done]
                decoding.append(done)
        assert moved, "the gaps are too small for a single piece"
    for r in range(len(prompts)):
        model.pool.drop(r)
    return [tokens[r] for r in range(len(prompts))]
