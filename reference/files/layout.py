"""Which tensors a model must have, by role, with their shapes; and names for people (MODEL-10).

A role says what a tensor is for ("layers.3.q"), whatever the checkpoint calls it. Shapes follow
from the `ModelConfig` alone; matrices are [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from reference.vocab.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoeSpec

Shape = tuple[int, ...]


def top_roles(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Roles outside the layers. A tied model has no "lm_head": "embed" serves for both."""
    yield "embed", (config.vocab, config.hidden)
    yield "final_norm", (config.hidden,)
    if not config.tied:
        yield "lm_head", (config.vocab, config.hidden)


def layer_roles(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Shape]]:
    """Roles of one layer but for its routed experts, without the "layers.{i}." in front."""
    hidden = config.hidden
    yield "attn_norm", (hidden,)
    yield from _attention_roles(layer.attention, hidden)
    yield "mlp_norm", (hidden,)
    ff = layer.feed_forward
    if isinstance(ff, MoeSpec):
        yield "router", (ff.experts, hidden)
        if ff.router.bias:
            yield "router_bias", (ff.experts,)
    else:
        yield from _dense_roles(ff, hidden)


def _attention_roles(a: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
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


def _dense_roles(ff: DenseSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "gate", (ff.intermediate, hidden)
    yield "up", (ff.intermediate, hidden)
    yield "down", (hidden, ff.intermediate)
    if ff.bias:
        yield "gate_bias", (ff.intermediate,)
        yield "up_bias", (ff.intermediate,)
        yield "down_bias", (hidden,)


def expert_shapes(config: ModelConfig, moe: MoeSpec) -> dict[str, Shape]:
    """Shapes of one routed expert's tensors, by role."""
    return {
        "gate": (moe.intermediate, config.hidden),
        "up": (moe.intermediate, config.hidden),
        "down": (config.hidden, moe.intermediate),
    }


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
