"""Small seeded models of every family, and the table of variants compared with transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.checkpoint_writer import write_checkpoint

__all__ = ["VARIANTS", "Variant", "tiny_config", "write_checkpoint", "write_variant"]

_BASE: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": 8,
    },
}


def tiny_config(family: str, *, spelling: str = "new", **overrides: Any) -> dict[str, Any]:
    """A small config.json of a family as a dict; `overrides` are config.json keys.

    spelling   "new": rope_parameters and dtype; "old": rope_theta, rope_scaling and torch_dtype
    An override of `...` (Ellipsis) removes the key.
    """
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 32,
        "vocab_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_BASE[family],
    }
    theta = overrides.pop("rope_theta", 10000.0)
    if spelling == "new":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        config["dtype"] = "float32"
    else:
        config.update(rope_theta=theta, rope_scaling=None, torch_dtype="float32")
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not ...}


@dataclass(frozen=True)
class Variant:
    """One checkpoint of the table: its config.json and how its weights are stored."""

    config: dict[str, Any]
    dtype: str = "F32"
    shards: int = 1
    experts: str = "separate"
    tied_copy: bool = False


def write_variant(name: str, path: str | Path, *, seed: int = 0) -> Path:
    """Write the variant `name` of VARIANTS to the directory `path`, and return it."""
    v = VARIANTS[name]
    return write_checkpoint(
        path,
        v.config,
        seed=seed,
        dtype=v.dtype,
        shards=v.shards,
        experts=v.experts,
        tied_copy=v.tied_copy,
    )


_mixtral, _qwen, _llama = "mixtral", "qwen3_moe", "llama"

VARIANTS: dict[str, Variant] = {
    # llama: dense
    "llama": Variant(tiny_config(_llama)),
    "llama-old": Variant(tiny_config(_llama, spelling="old", rope_theta=5e5), dtype="BF16"),
    "llama-mha": Variant(tiny_config(_llama, num_key_value_heads=...)),
    "llama-mqa": Variant(tiny_config(_llama, num_key_value_heads=1, head_dim=16)),
    "llama-bias": Variant(tiny_config(_llama, attention_bias=True, mlp_bias=True)),
    "llama-tied": Variant(tiny_config(_llama, tie_word_embeddings=True), dtype="F16"),
    "llama-tied-copy": Variant(tiny_config(_llama, tie_word_embeddings=True), tied_copy=True),
    "llama-sharded": Variant(tiny_config(_llama, num_hidden_layers=4), dtype="BF16", shards=3),
    # mixtral: every layer routed
    "mixtral": Variant(tiny_config(_mixtral)),
    "mixtral-old": Variant(tiny_config(_mixtral, spelling="old", rope_theta=1e6), dtype="BF16"),
    "mixtral-window": Variant(tiny_config(_mixtral, sliding_window=5)),
    "mixtral-mha": Variant(tiny_config(_mixtral, num_key_value_heads=4), dtype="F16"),
    "mixtral-mqa": Variant(tiny_config(_mixtral, num_key_value_heads=1)),
    "mixtral-head": Variant(tiny_config(_mixtral, head_dim=16, hidden_size=48)),
    "mixtral-top1": Variant(tiny_config(_mixtral, num_local_experts=4, num_experts_per_tok=1)),
    "mixtral-sharded": Variant(tiny_config(_mixtral, spelling="old"), dtype="BF16", shards=4),
    "mixtral-tied": Variant(tiny_config(_mixtral, tie_word_embeddings=True)),
    "mixtral-fused": Variant(tiny_config(_mixtral), experts="fused", shards=2),
    # qwen3_moe: routed and dense layers, norms of q and k
    "qwen3": Variant(tiny_config(_qwen)),
    "qwen3-old": Variant(tiny_config(_qwen, spelling="old", rope_theta=1e6), dtype="BF16"),
    "qwen3-unnormed": Variant(tiny_config(_qwen, norm_topk_prob=False)),
    "qwen3-window": Variant(tiny_config(_qwen, use_sliding_window=True, sliding_window=6)),
    "qwen3-unused-window": Variant(tiny_config(_qwen, sliding_window=3), dtype="F16"),
    "qwen3-steps": Variant(tiny_config(_qwen, num_hidden_layers=4, decoder_sparse_step=2)),
    "qwen3-dense-layers": Variant(tiny_config(_qwen, mlp_only_layers=[0, 2])),
    "qwen3-dense-last": Variant(tiny_config(_qwen, mlp_only_layers=[2], norm_topk_prob=False)),
    "qwen3-bias": Variant(tiny_config(_qwen, attention_bias=True)),
    "qwen3-head": Variant(tiny_config(_qwen, head_dim=16, num_key_value_heads=4)),
    "qwen3-top4": Variant(
        tiny_config(_qwen, num_experts=16, num_experts_per_tok=4, hidden_size=64)
    ),
    "qwen3-local": Variant(tiny_config(_qwen, num_experts=..., num_local_experts=8)),
    "qwen3-tied-copy": Variant(
        tiny_config(_qwen, tie_word_embeddings=True), dtype="BF16", tied_copy=True
    ),
    "qwen3-sharded-fused": Variant(tiny_config(_qwen), dtype="BF16", shards=3, experts="fused"),
}
"""Name -> variant. Their weights come from seed 0 in the goldens."""
