"""The whole model at once, without engine, control plane or slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reference.numerics.experts import FeedForward
from reference.numerics.formats import Array
from reference.numerics.model import Model, State, Want
from reference.vocab.ids import ExpertKey

Experts = Callable[[ExpertKey], tuple[Array, ...] | FeedForward]


def run_chunk(
    model: Model,
    state: State,
    tokens: Sequence[int],
    position: int,
    experts: Experts | None = None,
    logits: Want = "all",
) -> Array | None:
    """One chunk through every layer -> its logits as asked ([T, V], [1, V] or None).

    `experts` gives the tensors of a key; by default they are read from the checkpoint each time.
    """
    read = experts or model.read_expert
    h = model.enter(state, tokens, position, logits)
    while h.layer is not None:
        outputs = [
            [model.expert(h.layer, read(ExpertKey(h.layer, int(e))), x) for e in experts_of_token]
            for x, experts_of_token in zip(h.x, h.topk, strict=True)
        ]
        h = model.advance(state, h, np.array(outputs), logits)
    return h.logits


def remembering(model: Model) -> Experts:
    """Like `model.read_expert`, widened and kept for ever: for models that fit."""
    kept: dict[ExpertKey, FeedForward] = {}

    def read(key: ExpertKey) -> FeedForward:
        if key not in kept:
            kept[key] = model.widen(model.read_expert(key))
        return kept[key]

    return read


def naive_logits(
    ckpt: Any, tokens: Sequence[int], dtype: type[np.floating] = np.float32, kv_block: int = 64
) -> Array:
    """Teacher-forced logits [T, V] of a whole text, as one chunk."""
    model = Model(ckpt, dtype, kv_block)
    logits = run_chunk(model, model.start(len(tokens)), tokens, 0, remembering(model))
    assert logits is not None
    return logits


def naive_greedy(
    ckpt: Any,
    tokens: Sequence[int],
    new_tokens: int,
    dtype: type[np.floating] = np.float32,
    kv_block: int = 64,
) -> list[int]:
    """`new_tokens` greedy continuations of a prompt; ties to the lower id, no stop token."""
    model = Model(ckpt, dtype, kv_block)
    state, experts = model.start(len(tokens)), remembering(model)
    out: list[int] = []
    fed = list(tokens)
    while len(out) < new_tokens:
        logits = run_chunk(model, state, fed, state.length, experts, "last")
        assert logits is not None
        out.append(int(logits[-1].argmax()))
        fed = [out[-1]]
    return out
