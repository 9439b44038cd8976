"""A GGUF file of a qwen3_moe or mixtral checkpoint, for llama.cpp: the same weights, nothing lost.

    python -m perf.gguf_file MODEL OUT.gguf

Format: github.com/ggml-org/ggml, docs/gguf.md (version 3). Matrices stay bfloat16, vectors and
routers become float32, the experts of a layer are stacked. The vocabulary is made up (one word a
token): prompts are token ids.
"""

from __future__ import annotations

import argparse
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from reference.files.checkpoint import Checkpoint
from reference.files.safetensors_header import TensorRef
from reference.vocab.config import MoeSpec
from reference.vocab.errors import Unsupported

ALIGN = 32
UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5
F32, BF16 = 0, 30
NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "mlp_norm": "ffn_norm",
    "router": "ffn_gate_inp",
}  # fmt: skip
TOP = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Tensor:
    """One tensor: `pieces` gives its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    pieces: Callable[[], Iterator[bytes]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.kind == F32 else 2)


def write_gguf(model: Path, out: Path) -> Path:
    """Writes the file, expert by expert. Raises Unsupported for another family or stored type."""
    with Checkpoint.open(model) as ckpt, out.open("wb") as file:
        fields = list(_fields(ckpt))
        tensors = list(_tensors(ckpt))
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for name, kind, value in fields:
            file.write(_string(name) + struct.pack("<I", kind) + _value(kind, value))
        offset = 0
        for t in tensors:
            file.write(_string(t.name) + struct.pack("<I", len(t.shape)))
            file.write(struct.pack(f"<{len(t.shape)}Q", *reversed(t.shape)))
            file.write(struct.pack("<IQ", t.kind, offset))
            offset += -(-t.nbytes // ALIGN) * ALIGN
        _pad(file)
        for t in tensors:
            before = file.tell()
            for piece in t.pieces():
                file.write(piece)
            assert file.tell() - before == t.nbytes, t.name
            _pad(file)
        file.flush()
        os.fsync(file.fileno())
    return out


def _pad(file: IO[bytes]) -> None:
    file.write(b"\0" * (-file.tell() % ALIGN))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, v) for v in items)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _fields(ckpt: Checkpoint) -> Iterator[tuple[str, int, Any]]:
    c = ckpt.config
    if c.family not in ("qwen3_moe", "mixtral"):
        raise Unsupported(str(ckpt.path), f"family {c.family}", "qwen3_moe, mixtral")
    layer = c.layers[0]
    a, moe = layer.attention, layer.feed_forward
    if not isinstance(moe, MoeSpec) or len(c.moe_layers) != len(c.layers) or a.rope is None:
        raise Unsupported(str(ckpt.path), "a layer without routed experts", "mixtures throughout")
    if a.window or a.rope.kind != "default" or c.tied:
        raise Unsupported(str(ckpt.path), "a window, scaled rope or tied embedding", "none of them")
    arch = "qwen3moe" if c.family == "qwen3_moe" else "llama"
    yield "general.architecture", STRING, arch
    yield "general.name", STRING, ckpt.path.name
    for name, kind, value in (
        ("block_count", UINT32, len(c.layers)), ("context_length", UINT32, c.max_position),
        ("embedding_length", UINT32, c.hidden), ("feed_forward_length", UINT32, moe.intermediate),
        ("expert_feed_forward_length", UINT32, moe.intermediate),
        ("expert_count", UINT32, c.experts), ("expert_used_count", UINT32, c.top_k),
        ("attention.head_count", UINT32, a.heads), ("attention.head_count_kv", UINT32, a.kv_heads),
        ("attention.key_length", UINT32, a.head_dim),
        ("attention.value_length", UINT32, a.v_head_dim),
        ("attention.layer_norm_rms_epsilon", FLOAT32, c.norm.eps),
        ("rope.freq_base", FLOAT32, a.rope.theta), ("rope.dimension_count", UINT32, a.rope.dims),
        ("vocab_size", UINT32, c.vocab),
    ):  # fmt: skip
        yield f"{arch}.{name}", kind, value
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += [f"\u2581w{n}." for n in range(len(words), c.vocab)]
    types = [2, 3, 3, *[6] * 256]  # unknown, control, control, bytes; the others are words
    types += [1] * (c.vocab - len(types))
    yield "tokenizer.ggml.model", STRING, "llama"
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, words[: c.vocab])
    yield "tokenizer.ggml.scores", ARRAY, (FLOAT32, [-float(n) for n in range(c.vocab)])
    yield "tokenizer.ggml.token_type", ARRAY, (INT32, types[: c.vocab])
    yield "tokenizer.ggml.bos_token_id", UINT32, 1
    yield "tokenizer.ggml.eos_token_id", UINT32, 2
    yield "tokenizer.ggml.add_bos_token", BOOL, False


def _tensors(ckpt: Checkpoint) -> Iterator[Tensor]:
    c = ckpt.config
    for role, name in TOP.items():
        yield _one(ckpt, role, f"{name}.weight")
    for i, layer in enumerate(c.layers):
        for role in (r for r in NAMES if ckpt.has(f"layers.{i}.{r}")):
            turned = 0
            if c.family == "mixtral" and role in ("q", "k"):
                turned = layer.attention.heads if role == "q" else layer.attention.kv_heads
            yield _one(ckpt, f"layers.{i}.{role}", f"blk.{i}.{NAMES[role]}.weight", turned)
        for n, role in enumerate(ckpt.expert_roles):
            refs = [ckpt.expert(i, e)[n] for e in range(c.experts)]
            yield Tensor(f"blk.{i}.ffn_{role}_exps.weight", (len(refs), *refs[0].shape), BF16,
                         lambda refs=refs: (_raw(ckpt, ref).tobytes() for ref in refs))


def _raw(ckpt: Checkpoint, ref: TensorRef) -> np.ndarray:
    if ref.dtype != "BF16":
        raise Unsupported(str(ref.file), f"stored type {ref.dtype}", "BF16")
    return ckpt.read(ref)


def _one(ckpt: Checkpoint, role: str, name: str, turned: int = 0) -> Tensor:
    """A resident tensor; `turned` heads: their entries for llama.cpp's rope of neighbours, which
    for this architecture takes the place of the rope of halves."""
    ref = ckpt.tensor(role)
    wide = len(ref.shape) == 1 or role.endswith("router")

    def pieces() -> Iterator[bytes]:
        bits = _raw(ckpt, ref)
        if turned:
            bits = bits.reshape(turned, 2, -1, bits.shape[1]).swapaxes(1, 2)
        if wide:
            yield (bits.astype(np.uint32) << 16).tobytes()
        else:
            yield np.ascontiguousarray(bits).tobytes()

    return Tensor(name, tuple(ref.shape), F32 if wide else BF16, pieces)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(write_gguf(args.model, args.out))


if __name__ == "__main__":
    main()
