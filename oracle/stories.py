"""A trained language model of 1 MB, recast as a mixture of experts with the same function.

stories260K is a dense Llama (dim 64, 5 layers, feed-forward 172) with a published greedy text. A
silu-gated feed-forward is the sum of its neurons, so it can be cut and copied into experts:

slices  4 slices of 43 neurons, 8 copies of each: 32 experts. The router has one random row a copy
        number, the same for all four slices, so the four greatest logits are always those of one
        copy number: one copy of each slice, with equal weights. Down is stored times 4, so that
        four quarters make one. A wrong, stale or zeroed slice changes the text.
clones  32 copies of the whole feed-forward. Any four of them, weighted to a sum of 1, give it
        back, so the router's rows are all independent.
dense   as it was.

In both mixtures the neurons of every copy are shuffled: equal function, other bytes. Neither engine
knows anything of this: they are ordinary `mixtral` and `llama` checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file

from reference.vocab.errors import BadInput

Layout = Literal["slices", "clones", "dense"]
SOURCE = Path(
    os.environ.get("COVEY_STORIES")
    or Path(__file__).resolve().parents[2] / "shared/data/models/stories260k"
)
"""Where stories260K.bin and tok512.bin lie: beside the checkout, or as the environment says."""
WEIGHTS, TOKENS = "stories260K.bin", "tok512.bin"
SHA256 = {
    WEIGHTS: "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696",
    TOKENS: "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312",
}
EXPERTS, TOP_K, SLICES = 32, 4, 4
BOS = 1
GOLDEN_STEPS = 200
GOLDEN_TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She "
    'said, "I want to play with your ball, but I can\'t find it."\n'
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to "
    "do.\"\nLily didn't want to help her mom, so she"
)
"""The first 200 greedy tokens after BOS, as karpathy/llama2.c's own test has them."""


def available() -> bool:
    """Whether the source files are there."""
    return all((SOURCE / name).is_file() for name in SHA256)


def _read(name: str) -> bytes:
    data = (SOURCE / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256[name]:
        raise BadInput(f"{SOURCE / name}: not the file of 2023 (its sha256 is another)")
    return data


def dense_tensors() -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """(sizes, float32 tensors by their short names), each [layers, out, in] where it has layers."""
    data = _read(WEIGHTS)
    names = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "seq")
    n: dict[str, int] = dict(zip(names, struct.unpack("<7i", data[:28]), strict=True))
    values = np.frombuffer(data, "<f4", offset=28)
    d, h, count = n["dim"], n["hidden"], n["layers"]
    kv = d // n["heads"] * n["kv_heads"]
    shapes = {
        "embed": (n["vocab"], d), "attn_norm": (count, d), "q": (count, d, d),
        "k": (count, kv, d), "v": (count, kv, d), "o": (count, d, d), "mlp_norm": (count, d),
        "gate": (count, h, d), "down": (count, d, h), "up": (count, h, d), "final_norm": (d,),
    }  # fmt: skip
    tensors: dict[str, np.ndarray] = {}
    at = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = values[at : at + size].reshape(shape)
        at += size
    return n, tensors


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k reordered from rope pairs (2i, 2i + 1) to pairs (i, i + D/2), head by head."""
    width = rows.shape[0] // heads
    pairs = rows.reshape(heads, width // 2, 2, -1)
    return pairs.transpose(0, 2, 1, 3).reshape(rows.shape)


class _Draw:
    """Seeded draws from raw words, the same with every NumPy version."""

    def __init__(self, seed: int) -> None:
        self.words = np.random.PCG64(seed)

    def shuffled(self, count: int) -> np.ndarray:
        """A permutation of range(count): the order of as many random words."""
        return np.argsort(self.words.random_raw(count), kind="stable")

    def uniform(self, *shape: int) -> np.ndarray:
        """float32 in [-1, 1)."""
        raw = self.words.random_raw(int(np.prod(shape)))
        return ((raw >> np.uint64(40)).astype(np.float32) / 2.0**23 - 1).reshape(shape)


def _config(n: dict[str, int], layout: Layout) -> dict[str, object]:
    config: dict[str, object] = {
        "model_type": "llama" if layout == "dense" else "mixtral",
        "architectures": ["LlamaForCausalLM" if layout == "dense" else "MixtralForCausalLM"],
        "hidden_size": n["dim"], "intermediate_size": n["hidden"],
        "num_hidden_layers": n["layers"], "num_attention_heads": n["heads"],
        "num_key_value_heads": n["kv_heads"], "vocab_size": n["vocab"],
        "max_position_embeddings": n["seq"], "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "rope_theta": 10000.0, "torch_dtype": "float32",
        "bos_token_id": BOS, "eos_token_id": BOS,  # stories follow each other, BOS between them
    }  # fmt: skip
    if layout != "dense":
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
        config |= {"sliding_window": None}
    if layout == "slices":
        config["intermediate_size"] = n["hidden"] // SLICES
    return config


def _experts(
    gate: np.ndarray, up: np.ndarray, down: np.ndarray, layout: Layout, draw: _Draw
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """One layer's router [32, H] and its experts (gate, up, down), in the order of their ids."""
    if layout == "clones":
        router = draw.uniform(EXPERTS, gate.shape[1])
        orders = [draw.shuffled(gate.shape[0]) for _ in range(EXPERTS)]
        return router, [(gate[o], up[o], down[:, o]) for o in orders]
    width = gate.shape[0] // SLICES
    rows = draw.uniform(EXPERTS // SLICES, gate.shape[1])
    router = np.empty((EXPERTS, gate.shape[1]), np.float32)
    experts = []
    for e, place in enumerate(draw.shuffled(EXPERTS)):
        part, copy = int(place) % SLICES, int(place) // SLICES
        router[e] = rows[copy]
        o = part * width + draw.shuffled(width)
        experts.append((gate[o], up[o], down[:, o] * np.float32(SLICES)))
    return router, experts


def write_stories_moe(path: str | Path, layout: Layout = "slices", seed: int = 0) -> Path:
    """Write the checkpoint directory `path` (5, 21 or 1 MB for slices, clones, dense).

    Errors: OSError without the source files (see `available`), BadInput if they are others.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    n, t = dense_tensors()
    draw = _Draw(seed)
    out = {"model.embed_tokens.weight": t["embed"], "model.norm.weight": t["final_norm"]}
    for i in range(n["layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = t["attn_norm"][i]
        out[p + "post_attention_layernorm.weight"] = t["mlp_norm"][i]
        out[p + "self_attn.q_proj.weight"] = half_split(t["q"][i], n["heads"])
        out[p + "self_attn.k_proj.weight"] = half_split(t["k"][i], n["kv_heads"])
        out[p + "self_attn.v_proj.weight"] = t["v"][i]
        out[p + "self_attn.o_proj.weight"] = t["o"][i]
        if layout == "dense":
            for name in ("gate", "up", "down"):
                out[p + f"mlp.{name}_proj.weight"] = t[name][i]
            continue
        router, experts = _experts(t["gate"][i], t["up"][i], t["down"][i], layout, draw)
        out[p + "block_sparse_moe.gate.weight"] = router
        for e, tensors in enumerate(experts):
            for name, tensor in zip(("w1", "w3", "w2"), tensors, strict=True):
                out[p + f"block_sparse_moe.experts.{e}.{name}.weight"] = tensor
    save_file({k: np.ascontiguousarray(v) for k, v in out.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(_config(n, layout), indent=2) + "\n")
    return path


def vocabulary() -> list[bytes]:
    """The 512 tokens of tok512.bin as bytes; tokens like <0x0A> are that byte."""
    data = _read(TOKENS)
    out: list[bytes] = []
    at = 4  # after the length of the longest token
    while at < len(data):
        _, length = struct.unpack_from("<fi", data, at)
        token = data[at + 8 : at + 8 + length]
        byte = token.startswith(b"<0x") and token.endswith(b">") and len(token) == 6
        out.append(bytes([int(token[3:5], 16)]) if byte else token)
        at += 8 + length
    return out


def decode(tokens: list[int]) -> str:
    """Text of tokens that follow BOS (which is not among them): its first space is dropped."""
    words = vocabulary()
    text = b"".join(words[t] for t in tokens)
    return text.removeprefix(b" ").decode("utf-8", "replace")
