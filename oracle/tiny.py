"""Small seeded models of every family: a config.json as a dict, to be changed key by key."""

from __future__ import annotations

from typing import Any

from oracle.checkpoint_writer import write_checkpoint

__all__ = ["sized_config", "tiny_config", "write_checkpoint"]

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


def sized_config(
    expert_bytes: int, *, layers: int = 4, experts: int = 32, hidden: int = 256, item: int = 2
) -> dict[str, Any]:
    """A mixtral whose routed experts take at least `expert_bytes` and little more.

    item   bytes a stored value (2: BF16 and F16, 4: F32). Attention and embeddings stay small.
    """
    each = -(-expert_bytes // (layers * experts * item * 3 * hidden))
    return tiny_config(
        "mixtral",
        hidden_size=hidden,
        intermediate_size=-(-each // 8) * 8,
        num_hidden_layers=layers,
        num_local_experts=experts,
    )
