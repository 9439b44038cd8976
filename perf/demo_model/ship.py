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
from perf.demo_model.export import rounded, write_model
from perf.demo_model.measure import held_out_loss, routing_statistics
from perf.demo_model.network import Params, Shape, forward
from perf.demo_model.texts import END, HELD_OUT, Texts, read_texts, stream
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.numerics.naive import naive_logits

SAMPLES = (
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
        "routing": routing_statistics(small, rows, shape),
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


def samples(model: Path, tokenizer: Tokenizer) -> list[str]:
    """Three texts from the fast engine."""
    with JaxEngine.open(model, memory="100%", ignore_eos=True, max_running=4) as engine:
        handles = [
            engine.submit(Request(f"s{n}", tuple(tokenizer.encode(prompt).ids), SAMPLE_TOKENS,
                                  temperature=temperature, seed=seed))
            for n, (prompt, temperature, seed) in enumerate(SAMPLES)
        ]  # fmt: skip
        results = [handle.result() for handle in handles]
    return [
        prompt + tokenizer.decode(list(result.tokens))
        for (prompt, _, _), result in zip(SAMPLES, results, strict=True)
    ]


def card(figures: dict[str, Any], log: list[dict[str, Any]], texts: list[str]) -> str:
    """README.md of the model."""
    head = next(line for line in log if "shape" in line)
    steps = [line for line in log if "nats" in line]
    looks = [line for line in log if "held_out_slice" in line]
    marks = {s["step"] for s in steps[:: max(1, len(steps) // 8)]} | {steps[-1]["step"]}
    routing = "\n".join(
        f"| {r['layer']} | {r['entropy']:.3f} | {r['busiest']:.2f} | {r['unused']} | "
        f"{r['sureness']:.3f} | {r['top_mass']:.2f} | {r['overlap']:.3f} | {r['chance']:.3f} |"
        for r in figures["routing"]
    )
    curve = "\n".join(
        f"| {line['step']} | {line['nats']:.3f} | {line['dropped']:.3f} |"
        for line in steps if line["step"] in marks
    )  # fmt: skip
    looked = ", ".join(f"{x['held_out_slice']:.3f} at {x['step']}" for x in looks)
    shown = "\n\n".join(
        f"Prompt `{prompt!r}`, temperature {t}, seed {seed}:\n\n" + _quoted(text)
        for (prompt, t, seed), text in zip(SAMPLES, texts, strict=True)
    )
    return CARD.format(
        head=head, steps_run=figures["steps"], curve=curve, looked=looked, routing=routing,
        shown=shown, book=HELD_OUT, sample_tokens=SAMPLE_TOKENS,
        per_token=figures["held_out_bytes"] / figures["held_out_tokens"], **figures,
    )  # fmt: skip


def _quoted(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


CARD = """# The built-in demonstration model

A small mixture of experts, trained from scratch on texts in the public domain, so that Covey has
something real to run without a download. It writes English of the right shape and little sense.

| | |
|---|---|
| architecture | qwen3_moe: {head[shape][layers]} layers, {head[shape][experts]} experts a layer, \
{head[shape][top_k]} a token |
| sizes | hidden {head[shape][hidden]}, expert {head[shape][intermediate]}, \
{head[shape][heads]} query and {head[shape][kv_heads]} key/value heads of {head[shape][head_dim]}, \
embedding tied |
| parameters | {parameters:,}, stored in BF16; {bytes:,} bytes with the tokenizer |
| vocabulary | {head[shape][vocab]}, byte-level BPE: every text encodes and comes back |
| texts | ten public-domain books less `{book}`, tinyshakespeare, US inaugural addresses |
| held-out loss | **{loss:.3f} nats a byte** on the whole of `{book}`, windows of 256 tokens \
({held_out_bytes:,} bytes, {held_out_tokens:,} tokens, {per_token:.2f} bytes each) |
| the same in float32 before rounding | {loss_f32:.4f} (rounded: {loss:.4f}) |
| logits against the readable engine | within {network_error:.1e} |
| windows of 512, twice what it was trained on | {loss_512:.4f} |

The weights of this directory and this page may be used under the project's own licence; the texts
are in the public domain in the USA.

## Training

{steps_run} steps of 2,048 tokens, Adam (peak rate {head[peak]}, betas 0.9 and 0.95, decoupled decay
0.1, gradient clipped at 1), 100 steps of warm-up, the rate held until 60 % and then a cosine to 0;
windows of 128 tokens, of 256 from 75 % on. A load-balancing loss of weight 0.02 a layer; an expert
takes 1.25 times its even share of a batch and what exceeds it is dropped, in training only. Seed
{head[seed]}, jax {head[jax]}, two CPU cores. The command is in `perf/train_demo.py`. Nothing was
chosen by the held-out book: it was looked at, and the last state is what ships.

| step | training loss, nats a token | assignments dropped |
|---|---|---|
{curve}

Held-out loss on the book's first 8,192 tokens on the way, nats a byte: {looked}.

## Routing

On the first 4,096 tokens of the held-out book.

| layer | entropy | busiest | unused | sureness | top mass | overlap | by chance |
|---|---|---|---|---|---|---|---|
{routing}

entropy: of the experts' shares, over log 32 (1: all used alike). busiest: greatest share over the
even share. sureness: 1 less the mean entropy of a token's router probabilities over log 32 (0: a
uniform router). top mass: probability of the chosen four. overlap: share of a token's experts
that the token before it had at the same layer; by chance: the same if tokens drew their experts
independently with the layer's shares.

## Three samples

{sample_tokens} tokens each, from the fast engine.

{shown}
"""
