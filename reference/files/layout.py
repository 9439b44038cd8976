"""Which tensors a model must have, by role, with their shapes; and names for people (MODEL-10).

A role says what a tensor is for ("layers.3.q"), whatever the checkpoint calls it. Shapes follow
from the `ModelConfig` alone; matrices are [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from reference.vocab.config import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    PackedSpec,
    SharedExpertSpec,
)

Shape = tuple[int, ...]
Roles = Iterator[tuple[str, Shape]]

SCALE = "_scale"
"""What the role of a packed matrix's scale adds to the role of the matrix."""


def top_roles(config: ModelConfig) -> Roles:
    """Roles outside the layers. A tied model has no "lm_head": "embed" serves for both."""
    yield "embed", (config.vocab, config.hidden)
    yield from _norm(config, "final_norm")
    if not config.tied:
        yield "lm_head", (config.vocab, config.hidden)
    if config.head_bias:
        yield "lm_head_bias", (config.vocab,)


def layer_roles(config: ModelConfig, layer: LayerSpec) -> Roles:
    """Roles of one layer but for its routed experts, without the "layers.{i}." in front.

    A packed matrix has a further role, see `scale_shape`.
    """
    yield from _norm(config, "attn_norm")
    attention = _mla_roles if layer.attention.kind == "mla" else _gqa_roles
    yield from attention(layer.attention, config.hidden)
    yield from _norm(config, "mlp_norm")
    ff = layer.feed_forward
    if isinstance(ff, MoeSpec):
        yield "router", (ff.experts, config.hidden)
        if ff.router.bias:
            yield "router_bias", (ff.experts,)
        if ff.router.selection_bias:
            yield "selection_bias", (ff.experts,)
        if ff.shared is not None:
            yield from _dense_roles(ff.shared, config.hidden, "shared_")
            if ff.shared.gated:
                yield "shared_router", (1, config.hidden)
    else:
        yield from _dense_roles(ff, config.hidden)


def _norm(config: ModelConfig, role: str) -> Roles:
    yield role, (config.hidden,)
    if config.norm.kind == "layer":
        yield role + "_bias", (config.hidden,)


def _gqa_roles(a: AttentionSpec, hidden: int) -> Roles:
    queries, keys, values = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.v_head_dim
    yield "q", (queries, hidden)
    yield "k", (keys, hidden)
    yield "v", (values, hidden)
    yield "o", (hidden, a.heads * a.v_head_dim)
    if a.qkv_bias:
        yield "q_bias", (queries,)
        yield "k_bias", (keys,)
        yield "v_bias", (values,)
    if a.o_bias:
        yield "o_bias", (hidden,)
    if a.qk_norm != "none":
        head = a.qk_norm == "head"
        yield "q_norm", (a.head_dim if head else queries,)
        yield "k_norm", (a.head_dim if head else keys,)
    if a.sinks:
        yield "sinks", (a.heads,)


def _mla_roles(a: AttentionSpec, hidden: int) -> Roles:
    """ATTN-8: what is made of one row is q [N * (nope + rope)] and kv_a [kv_rank + rope]."""
    queries, latent = a.heads * a.head_dim, a.kv_rank + a.rope_dim
    if a.q_rank:
        yield "q_a", (a.q_rank, hidden)
        if a.qkv_bias:
            yield "q_a_bias", (a.q_rank,)
        yield "q_a_norm", (a.q_rank,)
        yield "q_b", (queries, a.q_rank)
    else:
        yield "q", (queries, hidden)
    yield "kv_a", (latent, hidden)
    if a.qkv_bias:
        yield "kv_a_bias", (latent,)
    yield "kv_a_norm", (a.kv_rank,)
    yield "kv_b", (a.heads * (a.nope_dim + a.v_head_dim), a.kv_rank)
    yield "o", (hidden, a.heads * a.v_head_dim)
    if a.o_bias:
        yield "o_bias", (hidden,)


def _dense_roles(ff: DenseSpec | SharedExpertSpec, hidden: int, of: str = "") -> Roles:
    yield of + "gate", (ff.intermediate, hidden)
    yield of + "up", (ff.intermediate, hidden)
    yield of + "down", (hidden, ff.intermediate)
    if ff.bias:
        yield of + "gate_bias", (ff.intermediate,)
        yield of + "up_bias", (ff.intermediate,)
        yield of + "down_bias", (hidden,)


def scale_shape(packed: PackedSpec, shape: Shape) -> Shape:
    """Shape of the scales of a matrix of `shape`: the last block of an axis may be partial."""
    return tuple(-(-n // b) for n, b in zip(shape, packed.block, strict=True))


def expert_shapes(config: ModelConfig, moe: MoeSpec) -> dict[str, Shape]:
    """Shapes of one routed expert's tensors as stored, by role, in the order of a slot."""
    wide = {
        "gate": (moe.intermediate, config.hidden),
        "up": (moe.intermediate, config.hidden),
        "gate_up": (2 * moe.intermediate, config.hidden),
        "down": (config.hidden, moe.intermediate),
    }
    shapes: dict[str, Shape] = {}
    packed = moe.storage.packed
    for role in moe.storage.matrices:
        rows, cols = wide[role]
        if packed is None:
            shapes[role] = (cols, rows) if moe.storage.transposed else (rows, cols)
        else:
            grid = scale_shape(packed, (rows, cols))
            # NUM-19: a byte of mxfp4 holds two numbers
            shapes[role] = (*grid, 16) if packed.kind == "mxfp4" else (rows, cols)
            shapes[role + SCALE] = grid
        if moe.expert_bias:
            shapes[role + "_bias"] = (rows,)
    return shapes


def summarise(names: Iterable[str], limit: int = 1500) -> str:
    """All names on one line: numbers that differ only are folded, "layers.{0-3}.q.weight"."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(n) for n in re.findall(r"\d+", name))
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(numbers)
    lines: list[str] = []
    for template, rows in sorted(groups.items()):
        for spans in _fold(sorted(set(rows))):
            parts = iter(spans)
            lines.append(re.sub("#", lambda _, parts=parts: next(parts), template))
    text = ", ".join(lines)
    return text if len(text) <= limit else text[: limit - 14] + "... (and more)"


def _fold(rows: list[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Sorted distinct rows of numbers as products of ranges, exactly."""
    if not rows or not rows[0]:
        return [()]
    by_rest: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for first, group in groupby(rows, key=lambda row: row[0]):
        rest = tuple(_fold([row[1:] for row in group]))
        by_rest.setdefault(rest, []).append(first)
    return [(_ranges(firsts), *tail) for rest, firsts in by_rest.items() for tail in rest]


def _ranges(numbers: list[int]) -> str:
    """Ascending integers as "3" or "{0-3,7}"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    if len(numbers) == 1:
        return str(numbers[0])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"
