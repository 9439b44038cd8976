"""Makes oracle/goldens/ with transformers: `python -m oracle.make_goldens [families]`.

Needs torch and transformers, which nothing else here does. Float32 on the CPU, eager attention,
whatever dtype the weights are stored in.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from oracle.dequantise import dequantised
from oracle.family_variants import FAMILY_VARIANTS
from oracle.golden import HERE, NEW_TOKENS, SETS, Answer, weights_hash
from oracle.variants import VARIANTS, Variant, prompts
from reference.files.checkpoint import Checkpoint

MARGIN = 1e-3
"""Least distance, in standard deviations, of a greedy token from the next best."""


def transformers_engine(path: Path, texts: list[list[int]], new_tokens: int) -> list[Answer]:
    """The answers of transformers. ImportError without it, ValueError for a greedy near-tie."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(
            dequantised(path, Path(folder)), dtype=torch.float32, attn_implementation="eager"
        )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.eval()
    return [_answer(torch, model, text, new_tokens) for text in texts]


def _answer(torch: Any, model: Any, text: list[int], new_tokens: int) -> Answer:
    """Logits and greedy tokens of one prompt, the tokens by re-scoring: no cache is trusted."""
    ids, first, out = list(text), None, []
    rotary = model.model.rotary_emb
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        if first is None and getattr(rotary, "rope_type", "") == "dynamic":
            # NUM-13: the angles of a text are those of its prompt. Re-scoring would stretch them
            # with every token; from here on the embedding believes to have seen longer texts.
            rotary.max_seq_len_cached = 1 << 30
        first = logits if first is None else first
        second, best = np.sort(logits[-1])[-2:]
        if best - second < MARGIN * logits.std():
            raise ValueError(f"greedy near-tie after {len(ids)} tokens: use another seed")
        out.append(int(logits[-1].argmax()))
        ids.append(out[-1])
    if getattr(rotary, "rope_type", "") == "dynamic":
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        rotary.register_buffer("inv_freq", rotary.original_inv_freq, persistent=False)
    assert first is not None
    return Answer(first.astype(np.float32), out)


def make(which: str, variants: Iterable[Variant]) -> None:
    """Write one set of stored answers anew."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    entries: dict[str, Any] = {}
    logits: dict[str, np.ndarray] = {}
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            path = variant.write(folder)
            texts = prompts(Checkpoint.open(path).config.vocab)
            answers = transformers_engine(path, texts, NEW_TOKENS)
            entries[variant.name] = {
                "weights": weights_hash(path),
                "prompts": texts,
                "tokens": [a.tokens for a in answers],
            }
        logits |= {f"{variant.name}/{n}": a.logits for n, a in enumerate(answers)}
        print(variant.name, flush=True)
    versions = {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    HERE.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
    text = f'{{"versions": {json.dumps(versions)},\n"variants": {{\n{lines}\n}}}}\n'
    (HERE / f"{which}.json").write_text(text, "utf-8")
    save_file(logits, HERE / f"{which}.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:] or SETS:
        make(name, {"variants": VARIANTS, "families": FAMILY_VARIANTS}[name])
