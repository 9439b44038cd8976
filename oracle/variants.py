"""Tiny checkpoints that differ in one respect each: what every engine is compared on.

A variant is data: a family, changes to its config.json, and how the weights are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oracle.tiny import tiny_config, write_checkpoint


@dataclass(frozen=True)
class Variant:
    """`config` overrides keys of `tiny_config`; `stored` are options of `write_checkpoint`."""

    name: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)

    def write(self, path: str | Path) -> Path:
        """The checkpoint, the same bytes each time."""
        config = tiny_config(self.family, **self.config)
        return write_checkpoint(path, config, **{"seed": 7, **self.stored})


def _v(name: str, config: dict[str, Any] | None = None, **stored: Any) -> Variant:
    family = "qwen3_moe" if name.startswith("qwen3_moe") else name.split("-")[0]
    return Variant(name, family, config or {}, stored)


VARIANTS: tuple[Variant, ...] = (
    _v("mixtral-plain"),
    _v("mixtral-window", {"sliding_window": 5}),
    _v("mixtral-no-window", {"sliding_window": None}),
    _v("mixtral-old-spelling", {"spelling": "old", "rope_theta": 1e6}),
    _v("mixtral-all-defaults", {"rope_parameters": ..., "rms_norm_eps": ...}),
    _v("mixtral-tied", {"tie_word_embeddings": True}),
    _v("mixtral-head-dim", {"head_dim": 16}),
    _v("mixtral-mha-top1", {"num_key_value_heads": 4, "num_experts_per_tok": 1}),
    _v("mixtral-mqa-top4-of-16", {
        "num_key_value_heads": 1, "num_experts_per_tok": 4, "num_local_experts": 16}),
    _v("mixtral-bf16-sharded", shards=3, dtype="BF16"),
    _v("mixtral-f16-fused", dtype="F16", experts="fused"),
    _v("mixtral-small-values", scale=0.1),
    _v("qwen3_moe-plain"),
    _v("qwen3_moe-not-renormalised", {"norm_topk_prob": False}),
    _v("qwen3_moe-renormalise-absent", {"norm_topk_prob": ...}),
    _v("qwen3_moe-sparse-step", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    _v("qwen3_moe-dense-first", {"mlp_only_layers": [0], "num_hidden_layers": 4}),
    _v("qwen3_moe-dense-last", {"mlp_only_layers": [1, 3], "num_hidden_layers": 4}),
    _v("qwen3_moe-biases", {"attention_bias": True}),
    _v("qwen3_moe-window", {"use_sliding_window": True, "sliding_window": 6}),
    _v("qwen3_moe-window-unused", {"use_sliding_window": False, "sliding_window": 6}),
    _v("qwen3_moe-head-dim", {"head_dim": 16, "num_experts_per_tok": 3}),
    _v("qwen3_moe-tied-bf16", {"tie_word_embeddings": True}, dtype="BF16", tied_copy=True),
    _v("qwen3_moe-old-f16-sharded", {"spelling": "old"}, dtype="F16", shards=4, experts="fused"),
    _v("qwen3_moe-resaved", {
        "num_experts": ..., "num_local_experts": 8, "sliding_window": 0}),
    _v("llama-plain"),
    _v("llama-biases", {"attention_bias": True}),
    _v("llama-all-biases", {"attention_bias": True, "mlp_bias": True}),
    _v("llama-tied-bf16", {"tie_word_embeddings": True}, dtype="BF16"),
    _v("llama-head-dim", {"head_dim": 12}),
    _v("llama-old-theta-sharded", {"spelling": "old", "rope_theta": 5e5}, shards=2),
    _v("llama-mha-f16", {"num_key_value_heads": ...}, dtype="F16"),
)  # fmt: skip


def by_name(name: str) -> Variant:
    """The variant of that name, of this set; KeyError if there is none."""
    return {v.name: v for v in VARIANTS}[name]


def prompts(vocab: int) -> list[list[int]]:
    """Token ids of three prompts, of 1, 9 and 33 tokens; those of a vocabulary are always equal."""
    words = np.random.PCG64(20).random_raw(43) % np.uint64(vocab)
    ids = [int(word) for word in words]
    return [ids[:1], ids[1:10], ids[10:]]
