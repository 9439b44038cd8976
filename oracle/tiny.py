"""Small seeded models of every family: a config.json as a dict, to be changed key by key."""

from __future__ import annotations

from typing import Any

from oracle.checkpoint_writer import write_checkpoint

__all__ = ["FAMILIES", "sized_config", "tiny_config", "write_checkpoint"]

_MLA = {
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 2.5,
}
_GROUPED = {"n_group": 4, "topk_group": 2}
_SPARSE = {"num_local_experts": 8, "num_experts_per_tok": 2}

_BASE: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64},
    "mistral": {"architectures": ["MistralForCausalLM"], "intermediate_size": 64},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 64, "head_dim": 8},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "intermediate_size": 32, **_SPARSE},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": 8,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **_MLA,
        **_GROUPED,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **_MLA, **_GROUPED},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "head_dim": 8,
    },
    "dots1": {
        "architectures": ["Dots1ForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "head_dim": 8,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "intermediate_size": 16,
        "head_dim": 8,
        "rotary_dim": 4,
        **_SPARSE,
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "intermediate_size": 16,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        **_SPARSE,
    },
    "phimoe": {
        "architectures": ["PhimoeForCausalLM"],
        "intermediate_size": 16,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
        **_SPARSE,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 32,
        "head_dim": 8,
        "sliding_window": 7,
        "swiglu_limit": 0.8,
        **_SPARSE,
    },
}
FAMILIES = tuple(_BASE)
"""Every family that there is a tiny model of."""


def tiny_config(family: str, *, spelling: str = "new", **overrides: Any) -> dict[str, Any]:
    """A small config.json of a family as a dict; `overrides` are config.json keys.

    spelling   "new": rope_parameters and dtype; "old": rope_theta, rope_scaling and torch_dtype
    rope       in `overrides`: a rope table without theta, put where the spelling has it
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
    kind = dict(overrides.pop("rope", {"rope_type": "default"}))
    if spelling == "new":
        config["rope_parameters"] = {**kind, "rope_theta": theta}
        config["dtype"] = "float32"
    else:
        scaling = None if kind == {"rope_type": "default"} else {"type": kind.pop("rope_type")}
        config.update(rope_theta=theta, rope_scaling=scaling and {**kind, **scaling})
        config["torch_dtype"] = "float32"
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
