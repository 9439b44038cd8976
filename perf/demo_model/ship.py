"""The newest state of a training run -> the shipped directory with its card."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jax_impl.engine import JaxEngine
from perf.demo_model.card import Sample, card
from perf.demo_model.export import rounded, write_model
from perf.demo_model.measure import held_out_loss, routing_statistics
from perf.demo_model.network import Params, Shape, forward
from perf.demo_model.texts import END, Texts, read_texts, stream
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.numerics.naive import naive_logits

PROMPTS = (
    ("Once upon a time there was a little girl who", 0.7, 1),
    ("ROMEO:\nWhat", 0.7, 2),
    ("Fellow-citizens, the government of the United States", 0.7, 3),
)
"""(prompt, temperature, seed)."""
SAMPLE_TOKENS = 110


def ship(args: argparse.Namespace, shape: Shape, params: Params, step: int) -> None:
    """Writes the model, measures what was written and writes README.md beside it."""
    work, to = Path(args.work), Path(args.to)
    words = (work / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(words)
    end = tokenizer.token_to_id(END)
    assert end is not None
    write_model(params, shape, words, end, to)
    texts = read_texts(Path(args.texts))
    figures = measure(params, shape, tokenizer, texts, to)
    figures |= {"steps": step, "bytes": sum(f.stat().st_size for f in to.glob("*.json"))
                + (to / "model.safetensors").stat().st_size}  # fmt: skip
    lines = [json.loads(x) for x in (work / "log.jsonl").read_text("utf-8").splitlines()]
    (to / "README.md").write_text(card(figures, lines, samples(to, tokenizer)), encoding="utf-8")
    print(json.dumps(figures))


def measure(
    params: Params, shape: Shape, tokenizer: Tokenizer, texts: Texts, to: Path
) -> dict[str, Any]:
    """Losses in nats a byte and the routing of the rounded weights on the held-out book."""
    held = stream(tokenizer, [texts.held_out])[:-1]
    size = len(texts.held_out.encode())
    small = rounded(params)
    rows = held[: 16 * 256].reshape(16, 256)
    return {
        "network_error": network_error(small, shape, held[:200], to),
        "loss": held_out_loss(small, held, size, shape, window=256),
        "loss_f32": held_out_loss(params, held, size, shape, window=256),
        "loss_512": held_out_loss(small, held, size, shape, window=512),
        "held_out_bytes": size,
        "held_out_tokens": len(held) - 1,
        "parameters": int(sum(np.size(v) for v in params.values())),
        "layers": routing_statistics(small, rows, shape),
    }


def network_error(small: Params, shape: Shape, ids: np.ndarray, model: Path) -> float:
    """Greatest difference between the trained network's logits and those of the readable model.

    Raises SystemExit where they are not the same function.
    """
    ours = forward(small, jnp.asarray(ids[None]), shape, shape.experts / shape.top_k).logits[0]
    theirs = naive_logits(Checkpoint.open(model), ids.tolist())
    error = float(np.abs(np.asarray(ours) - theirs).max())
    if not error < 1e-3:
        raise SystemExit(f"{model}: logits differ by {error:.3g} from the trained network's")
    return error


def samples(model: Path, tokenizer: Tokenizer) -> list[Sample]:
    """A text for each of PROMPTS, from the fast engine."""
    with JaxEngine.open(model, memory="100%", ignore_eos=True, max_running=4) as engine:
        handles = [
            engine.submit(Request(f"s{n}", tuple(tokenizer.encode(prompt).ids), SAMPLE_TOKENS,
                                  temperature=temperature, seed=seed))
            for n, (prompt, temperature, seed) in enumerate(PROMPTS)
        ]  # fmt: skip
        return [
            Sample(*asked, asked[0] + tokenizer.decode(list(handle.result().tokens)))
            for asked, handle in zip(PROMPTS, handles, strict=True)
        ]
