"""Tiny checkpoints of the further families, ropes and packed formats, one respect each.

Together with oracle.variants these are what every engine is compared on.
"""

from __future__ import annotations

from typing import Any

from oracle.tiny import FAMILIES
from oracle.variants import VARIANTS, Variant

SMALL: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MSCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 3.5, 6.0], "original_max_position_embeddings": 20,
}  # fmt: skip
PHI_LONGROPE = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
FP8 = {"quant_method": "fp8", "weight_block_size": [12, 20], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}
SLIDING, FULL = "sliding_attention", "full_attention"


def _v(name: str, config: dict[str, Any] | None = None, **stored: Any) -> Variant:
    family = max((f for f in FAMILIES if name.startswith(f + "-")), key=len)
    if family == "ernie4_5_moe":
        stored["as_rows"] = ("selection_bias",)  # as the published files have it
    return Variant(name, family, SMALL | (config or {}), stored)


FAMILY_VARIANTS: tuple[Variant, ...] = (
    # Ropes, in both spellings
    _v("mistral-linear", {"rope": LINEAR}),
    _v("mistral-linear-old", {"rope": LINEAR, "spelling": "old", "rope_theta": 1e3}),
    _v("mistral-dynamic", {"rope": DYNAMIC, "max_position_embeddings": 24}),
    _v("mistral-dynamic-old", {
        "rope": DYNAMIC, "max_position_embeddings": 20, "spelling": "old", "head_dim": 16}),
    _v("mistral-dynamic-within", {"rope": DYNAMIC}),
    _v("mistral-yarn", {"rope": YARN}),
    _v("mistral-yarn-old", {"rope": YARN, "spelling": "old", "rope_theta": 1e5}),
    _v("mistral-yarn-factor-stated", {"rope": {**YARN, "attention_factor": 0.8}}),
    _v("mistral-yarn-not-truncated", {"rope": {**YARN, "truncate": False}, "head_dim": 24}),
    _v("mistral-yarn-truncated", {"rope": YARN, "head_dim": 24}),
    _v("mistral-yarn-mscales", {"rope": MSCALED}),
    _v("mistral-yarn-one-mscale", {"rope": {**YARN, "mscale": 0.5}}),
    _v("mistral-yarn-betas", {
        "rope": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5,
                 "original_max_position_embeddings": 512}, "head_dim": 16}),
    _v("mistral-llama3", {"rope": LLAMA3}),
    _v("mistral-llama3-old", {"rope": LLAMA3, "spelling": "old", "rope_theta": 5e5}),
    _v("mistral-longrope", {"rope": LONGROPE, "max_position_embeddings": 60}),
    _v("mistral-longrope-old", {"rope": {**LONGROPE, "factor": 8.0}, "spelling": "old"}),
    _v("mistral-longrope-factor-stated", {"rope": {**LONGROPE, "attention_factor": 1.4}}),
    _v("llama-yarn-mscales-old", {"rope": MSCALED, "spelling": "old"}),
    _v("qwen3_moe-yarn", {"rope": YARN}),
    _v("mixtral-llama3", {"rope": LLAMA3}),
    # Dense
    _v("mistral-plain"),
    _v("mistral-window", {"sliding_window": 5}, seed=8),
    _v("mistral-no-window", {"sliding_window": None}),
    _v("mistral-tied-bf16", {"tie_word_embeddings": True, "head_dim": 12}, dtype="BF16", shards=2),
    _v("qwen3-plain"),
    _v("qwen3-window-from-1", {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
        "num_hidden_layers": 3}),
    _v("qwen3-window-unused", {"sliding_window": 6, "max_window_layers": 0}),
    _v("qwen3-layer-types", {
        "use_sliding_window": True, "sliding_window": 6, "layer_types": [SLIDING, FULL]}),
    _v("qwen3-biases-tied", {"attention_bias": True, "tie_word_embeddings": True}, seed=8),
    _v("qwen3-fp8", {"quantization_config": FP8, "head_dim": 16}, dtype="BF16", shards=2),
    # olmoe
    _v("olmoe-plain"),
    _v("olmoe-clipped", {"clip_qkv": 0.9}),
    _v("olmoe-renormalised", {"norm_topk_prob": True}),
    _v("olmoe-biases-mha", {"attention_bias": True, "num_key_value_heads": ...}),
    _v("olmoe-fused-bf16", {"num_experts_per_tok": 1}, dtype="BF16", experts="fused"),
    # qwen2_moe
    _v("qwen2_moe-plain"),
    _v("qwen2_moe-renormalised", {"norm_topk_prob": True, "shared_expert_intermediate_size": 40}),
    _v("qwen2_moe-no-biases", {"qkv_bias": False}),
    _v("qwen2_moe-sparse-step", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    _v("qwen2_moe-dense-first", {"mlp_only_layers": [0], "num_hidden_layers": 3}),
    _v("qwen2_moe-window", {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3,
        "num_hidden_layers": 4}),
    _v("qwen2_moe-layer-types", {
        "use_sliding_window": True, "sliding_window": 6, "layer_types": [FULL, SLIDING]}),
    _v("qwen2_moe-fused-f16", dtype="F16", experts="fused", shards=3),
    # deepseek_v2
    _v("deepseek_v2-plain"),
    _v("deepseek_v2-greedy", {"topk_method": "greedy"}),
    _v("deepseek_v2-method-absent", {"topk_method": ..., "n_group": None, "topk_group": None}),
    _v("deepseek_v2-no-q-rank", {"q_lora_rank": None}),
    _v("deepseek_v2-biases", {"attention_bias": True, "mlp_bias": True}),
    _v("deepseek_v2-biases-no-q-rank", {"attention_bias": True, "q_lora_rank": None}),
    _v("deepseek_v2-yarn", {"rope": MSCALED}),
    _v("deepseek_v2-yarn-old", {
        "rope": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "spelling": "old"}),
    _v("deepseek_v2-all-routed-bf16", {"first_k_dense_replace": 0}, dtype="BF16"),
    # deepseek_v3
    _v("deepseek_v3-plain"),
    _v("deepseek_v3-no-q-rank", {"q_lora_rank": None}),
    _v("deepseek_v3-half-split", {"rope_interleave": False}),
    _v("deepseek_v3-not-renormalised", {"norm_topk_prob": False}),
    _v("deepseek_v3-one-group", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}),
    _v("deepseek_v3-biases", {"attention_bias": True}),
    _v("deepseek_v3-yarn-old", {"rope": MSCALED, "spelling": "old"}, seed=8),
    _v("deepseek_v3-all-groups", {"n_group": 4, "topk_group": 4, "num_hidden_layers": 3}),
    _v("deepseek_v3-mixed-types", dtype="BF16", wide=("selection_bias",), shards=2),
    _v("deepseek_v3-fp8", {"quantization_config": FP8},
       dtype="BF16", wide=("selection_bias",), shards=3),
    _v("deepseek_v3-fp8-bf16-scales", {"quantization_config": {**FP8, "fmt": "e4m3"}},
       dtype="BF16", scale_dtype="BF16", unpacked=("kv_b", "shared_down")),
    # glm4_moe
    _v("glm4_moe-plain"),
    _v("glm4_moe-normed", {"use_qk_norm": True}),
    _v("glm4_moe-no-biases", {"attention_bias": False, "tie_word_embeddings": True}),
    _v("glm4_moe-quarter-old", {
        "spelling": "old", "partial_rotary_factor": 0.25, "head_dim": 16}),
    _v("glm4_moe-whole-head", {"partial_rotary_factor": 1.0}),
    _v("glm4_moe-grouped", {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7}),
    _v("glm4_moe-not-renormalised", {"norm_topk_prob": False, "first_k_dense_replace": 0}),
    _v("glm4_moe-yarn", {"rope": YARN, "head_dim": 16}),
    # dots1
    _v("dots1-plain"),
    _v("dots1-window-from-1", {
        "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3}),
    _v("dots1-layer-types", {"sliding_window": 6, "layer_types": [SLIDING, FULL]}, seed=8),
    _v("dots1-biases", {"attention_bias": True}),
    _v("dots1-grouped", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    _v("dots1-fp8", {"quantization_config": FP8}, dtype="BF16", shards=2),
    # minimax_m2
    _v("minimax_m2-plain"),
    _v("minimax_m2-whole-head", {"rotary_dim": ...}),
    _v("minimax_m2-share", {"rotary_dim": ..., "partial_rotary_factor": 0.25, "head_dim": 16}),
    _v("minimax_m2-fused-mixed-types", dtype="BF16", experts="fused", wide=("router",)),
    _v("minimax_m2-fp8", {"quantization_config": FP8, "num_experts_per_tok": 3},
       dtype="BF16", wide=("router", "selection_bias")),
    # ernie4_5_moe
    _v("ernie4_5_moe-plain"),
    _v("ernie4_5_moe-tied-by-default", {"tie_word_embeddings": ...}),
    _v("ernie4_5_moe-biases", {"use_bias": True}),
    _v("ernie4_5_moe-interval", {"moe_layer_interval": 2, "num_hidden_layers": 4}),
    _v("ernie4_5_moe-start-end", {
        "moe_layer_start_index": 1, "moe_layer_end_index": 1, "num_hidden_layers": 3}),
    _v("ernie4_5_moe-no-shared", {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
    _v("ernie4_5_moe-least-sum", {"moe_norm_min": 0.8}),
    _v("ernie4_5_moe-mixed-types", dtype="BF16", wide=("selection_bias",)),
    # granitemoe
    _v("granitemoe-plain"),
    _v("granitemoe-biases", {"attention_bias": True}),
    _v("granitemoe-multipliers-absent", dict.fromkeys((
        "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        ...)),
    _v("granitemoe-tied-f16", {"tie_word_embeddings": True}, dtype="F16"),
    _v("granitemoe-fused", {"num_experts_per_tok": 4}, experts="fused"),
    # phimoe
    _v("phimoe-plain"),
    _v("phimoe-longrope", {"rope": PHI_LONGROPE}),
    _v("phimoe-longrope-old", {
        "rope": PHI_LONGROPE, "spelling": "old", "original_max_position_embeddings": 12,
        "num_hidden_layers": 1}),
    _v("phimoe-no-biases", {"attention_bias": False, "lm_head_bias": False}),
    _v("phimoe-little-jitter", {"router_jitter_noise": ...}, seed=8),
    _v("phimoe-window", {"sliding_window": 6}),
    _v("phimoe-fused-bf16", dtype="BF16", experts="fused"),
    # gpt_oss
    _v("gpt_oss-plain"),
    _v("gpt_oss-rope-absent", {"rope_parameters": ..., "head_dim": 16}),
    _v("gpt_oss-rope-null", {
        "spelling": "old", "rope_theta": 150000.0, "head_dim": 16, "swiglu_limit": ...}),
    _v("gpt_oss-layer-types", {"layer_types": [FULL, SLIDING]}),
    _v("gpt_oss-no-biases", {"attention_bias": False, "num_hidden_layers": 3}),
    _v("gpt_oss-wide-window", {"sliding_window": 30, "num_experts_per_tok": 4}),
    _v("gpt_oss-bf16-sharded", {"rope": YARN}, dtype="BF16", shards=2),
    _v("gpt_oss-mxfp4", {"quantization_config": MXFP4}, dtype="BF16"),
    _v("gpt_oss-mxfp4-wide", {
        "quantization_config": MXFP4, "hidden_size": 64, "intermediate_size": 96,
        "rope_parameters": ...}, dtype="BF16", shards=3),
)  # fmt: skip


def by_name(name: str) -> Variant:
    """The variant of that name, of either set; KeyError if there is none."""
    return {v.name: v for v in (*VARIANTS, *FAMILY_VARIANTS)}[name]
