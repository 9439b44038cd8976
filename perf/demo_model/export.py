"""Trained parameters -> a directory in the Hugging Face form, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from perf.demo_model.network import Params, Shape

LONGEST = 512
"""max_position_embeddings; windows of training are shorter."""
LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
}
EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def config(shape: Shape, end: int) -> dict[str, Any]:
    """config.json of a network."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate * shape.top_k,
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "max_position_embeddings": LONGEST,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 0.02,
        "output_router_logits": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }


def rounded(params: Params) -> Params:
    """The values that are left after a round trip through bfloat16."""
    return {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in params.items()}


def tensors(params: Params, shape: Shape) -> dict[str, np.ndarray]:
    """The parameters in bfloat16 by their names in a checkpoint; a tensor for each matrix."""
    small = {k: np.asarray(v).astype(ml_dtypes.bfloat16) for k, v in params.items()}
    out = {
        "model.embed_tokens.weight": small["embed"],
        "model.norm.weight": small["final_norm"],
    }
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        for role, name in LAYER.items():
            out[f"{prefix}{name}.weight"] = small[f"{i}.{role}"]
        for role, name in EXPERT.items():
            for e in range(shape.experts):
                out[f"{prefix}mlp.experts.{e}.{name}.weight"] = small[f"{i}.{role}"][e].copy()
    return out


def write_model(params: Params, shape: Shape, tokenizer: str, end: int, to: Path) -> None:
    """Writes config.json, generation_config.json, tokenizer.json and model.safetensors."""
    to.mkdir(parents=True, exist_ok=True)
    save_file(tensors(params, shape), to / "model.safetensors", metadata={"format": "pt"})
    (to / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    generation = {"eos_token_id": end, "do_sample": False}
    for name, content in (("config.json", config(shape, end)),
                          ("generation_config.json", generation)):  # fmt: skip
        (to / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    # On one line: the file is a quarter smaller than as the library writes it.
    compact = json.dumps(json.loads(tokenizer), ensure_ascii=False, separators=(",", ":"))
    (to / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
