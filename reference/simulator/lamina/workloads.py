"""Models and request lengths as data, with sources; readers for request traces."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reference.files.layout import layer_roles
from reference.vocab.config import AttentionSpec, ModelConfig, MoeSpec
from reference.vocab.errors import BadInput, Unsupported

PAPER = "Lamina, arXiv 2405.01814v2: tables of models and of traces"


@dataclass(frozen=True)
class Shape:
    """What costs depend on. Bytes.

    weights  all of them;  layers L;  hidden: width of the residual stream
    q, kv, a a token at one layer: query, cached, attended
    kv_proj  weights of the K and V projections of one layer
    experts, top_k, expert: routed experts a layer (0: dense), a token, bytes of one
    head_shares  numbers of memory devices that heads can be shared out over (LAMINA-3)
    """

    name: str
    weights: float
    layers: int
    hidden: int
    q: int
    kv: int
    a: int
    kv_proj: float
    head_shares: tuple[int, ...]
    element: int = 2
    experts: int = 0
    top_k: int = 0
    expert: float = 0.0
    source: str = PAPER

    @property
    def kv_token(self) -> int:
        """KV bytes of a token over all layers."""
        return self.kv * self.layers

    @property
    def wire_token(self) -> int:
        """Bytes between the pools for a token over all layers (LAMINA-5)."""
        return (self.q + self.kv + self.a) * self.layers

    @property
    def group(self) -> float:
        """Twice the query bytes over the cached ones: the G of the paper where keys and values
        are as wide as queries."""
        return 2 * self.q / self.kv

    @property
    def flops_token(self) -> float:
        """2 a weight that takes part."""
        idle = self.layers * (self.experts - self.top_k) * self.expert if self.experts else 0.0
        return 2 * (self.weights - idle) / self.element

    def read(self, batch: float) -> float:
        """Weight bytes that a step of `batch` tokens reads: all, but of the experts only those
        that somebody chose, with choices that are independent and even."""
        if not self.experts:
            return self.weights
        idle = (1 - self.top_k / self.experts) ** batch
        return self.weights - self.layers * self.experts * self.expert * idle


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(b for b in range(1, n + 1) if n % b == 0)


def _dense(name: str, gigabytes: float, layers: int, d: int, heads: int, group: int) -> Shape:
    e = 2
    return Shape(
        name, gigabytes * 1e9, layers, d, e * d, 2 * e * d // group, e * d,
        2 * e * d * (d // group), _divisors(heads // group),
    )  # fmt: skip


MODELS = {
    m.name: m
    for m in (
        _dense("33B", 64.7, 60, 6656, 52, 1),
        _dense("65B", 130.1, 80, 8192, 64, 1),
        _dense("70B", 137.5, 80, 8192, 64, 8),
    )
}


def shape_of(config: ModelConfig, name: str, element: int = 2) -> Shape:
    """The shape of one of our own models, its weights and KV in elements of so many bytes.

    Latent attention (MLA) in its absorbed form, as it is sent and cached (LAMINA-5): one KV head of
    kv_rank + rope_dim, queries as wide, attended values kv_rank wide. A window is not taken into
    account: KV counts whole contexts. Raises Unsupported for layers of different attention.
    """
    a = config.layers[0].attention
    if len({_widths(s.attention) for s in config.layers}) > 1:
        raise Unsupported(name, "layers of different attention", "one shape for all layers")
    h, e = config.hidden, element
    q, kv, out = _widths(a)
    weights = config.vocab * h * (1 if config.tied else 2)
    expert = 0
    for s in config.layers:
        weights += sum(rows[0] * rows[1] for _, rows in layer_roles(config, s) if len(rows) == 2)
        f = s.feed_forward
        if isinstance(f, MoeSpec):
            expert = 3 * h * f.intermediate
            weights += f.experts * expert
    made = {"k", "v", "kv_a"}  # what a layer's keys and values are made with
    kv_proj = sum(
        rows[0] * rows[1] for role, rows in layer_roles(config, config.layers[0]) if role in made
    )
    moe = len(config.moe_layers)
    return Shape(
        name, e * weights, len(config.layers), h, e * q, e * kv, e * out, e * kv_proj,
        _divisors(a.cache_heads), e, config.experts, config.top_k,
        # Layers without experts are rare; their share is spread over all, so that L counts them.
        e * expert * moe / len(config.layers), f"config.json of {name}",
    )  # fmt: skip


def _widths(a: AttentionSpec) -> tuple[int, int, int]:
    """Elements of a token at one layer: queries, what is cached, what is attended."""
    value = a.cache_value_dim or a.kv_rank
    cached = a.cache_heads * (a.cache_key_dim + a.cache_value_dim)
    return a.heads * a.cache_key_dim, cached, a.heads * value


@dataclass(frozen=True)
class Lengths:
    """Mean prompt and output tokens of a trace."""

    name: str
    prompt: float
    output: float
    requests: int
    source: str = PAPER

    @property
    def context(self) -> float:
        """Mean length while decoding: the prompt and half of the output."""
        return self.prompt + self.output / 2


TRACES = {
    t.name: t
    for t in (
        Lengths("azure-conv", 1154.7, 211.1, 19366),
        Lengths("azure-code", 2047.8, 27.9, 8819),
        Lengths("kimi-conv", 12035.1, 342.6, 12031),
        Lengths("kimi-ta", 8560.0, 182.1, 23608),
    )
}
FILES = {
    "azure-conv": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "azure2023/AzureLLMInferenceTrace_code.csv",
    "kimi-conv": "mooncake-fast25/conversation_trace.jsonl.gz",
}
"""Where the public traces lie in a directory of traces, as their authors name them."""


def read_trace(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request of an Azure CSV or a Mooncake JSON-lines file
    (either gzipped or not), in order. Raises BadInput naming file and line."""
    name = path.name.removesuffix(".gz")
    if not name.endswith((".csv", ".jsonl")):
        raise BadInput(f"{path}: a trace is .csv or .jsonl, or either with .gz")
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8", newline="") as lines:
            pairs = _azure(lines) if name.endswith(".csv") else _mooncake(lines)
            found = []
            for number, pair in pairs:
                if pair is None or pair[0] < 1 or pair[1] < 0:
                    raise BadInput(f"{path}:{number}: not a request with two token counts")
                found.append(pair)
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise BadInput(f"{path}: cannot be read: {e}") from None
    if not found:
        raise BadInput(f"{path}: no request in it")
    return found


def _azure(lines: Iterable[str]) -> Iterable[tuple[int, tuple[int, int] | None]]:
    for number, row in enumerate(csv.reader(lines), 1):
        if number == 1:
            if row[-2:] != ["ContextTokens", "GeneratedTokens"]:
                yield number, None
            continue
        try:
            yield number, (int(row[-2]), int(row[-1]))
        except (ValueError, IndexError):
            yield number, None


def _mooncake(lines: Iterable[str]) -> Iterable[tuple[int, tuple[int, int] | None]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            yield number, (int(row["input_length"]), int(row["output_length"]))
        except (ValueError, KeyError, TypeError):
            yield number, None


def lengths_of(requests: list[tuple[int, int]], name: str) -> Lengths:
    """The means of a trace that was read."""
    n = len(requests)
    return Lengths(name, sum(p for p, _ in requests) / n, sum(g for _, g in requests) / n, n, name)
