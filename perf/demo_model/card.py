"""README.md of the shipped model, from what was logged and measured."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from perf.demo_model.texts import HELD_OUT

STEP_TOKENS = 2048
ROWS = 10
"""Lines of the loss curve."""


class Sample(NamedTuple):
    """One text: `text` begins with the prompt."""

    prompt: str
    temperature: float
    seed: int
    text: str


def card(figures: dict[str, Any], log: list[dict[str, Any]], samples: list[Sample]) -> str:
    """The page. `figures` are those of ship.py, `log` the lines of WORK/log.jsonl."""
    spent = seconds(log)
    return CARD.format(
        head=next(line for line in log if "shape" in line),
        book=HELD_OUT,
        per_token=figures["held_out_bytes"] / figures["held_out_tokens"],
        minutes=spent / 60,
        rate=STEP_TOKENS * figures["steps"] / spent,
        curve=curve(log),
        looked=", ".join(
            f"{x['held_out_slice']:.3f} at {x['step']}" for x in log if "held_out_slice" in x
        ),
        routing=routing(figures["layers"]),
        shown="\n\n".join(_shown(sample) for sample in samples),
        **figures,
    )


def seconds(log: list[dict[str, Any]]) -> float:
    """Time spent training; the log's clock starts again with each start of the program."""
    starts = [n for n, line in enumerate(log) if "shape" in line] + [len(log)]
    return sum(
        max((line.get("seconds", 0.0) for line in log[a:b]), default=0.0)
        for a, b in pairwise(starts)
    )


def curve(log: list[dict[str, Any]]) -> str:
    """About ROWS lines of the training loss, the last one among them."""
    steps = [line for line in log if "nats" in line]
    every = max(1, len(steps) // ROWS)
    return "\n".join(
        f"| {line['step']} | {line['nats']:.3f} | {line['dropped']:.4f} |"
        for line in reversed(steps[::-1][::every])
    )


def routing(layers: list[dict[str, Any]]) -> str:
    """The table of `routing_statistics`."""
    return "\n".join(
        f"| {r['layer']} | {r['entropy']:.3f} | {r['busiest']:.2f} | {r['unused']} | "
        f"{r['sureness']:.3f} | {r['top_mass']:.2f} | {r['overlap']:.3f} | {r['chance']:.3f} |"
        for r in layers
    )


def _shown(sample: Sample) -> str:
    quoted = "\n".join(("    " + line).rstrip() for line in sample.text.splitlines())
    return (
        f"Prompt `{sample.prompt!r}`, temperature {sample.temperature}, seed {sample.seed}:"
        f"\n\n{quoted}"
    )


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

{steps:,} steps of 2,048 tokens, Adam (peak rate {head[peak]}, betas 0.9 and 0.95, decoupled decay
0.1, gradient clipped at 1), 100 steps of warm-up, the rate held until 60 % and then a cosine to 0;
windows of 128 tokens, of 256 from 75 % on. A load-balancing loss of weight 0.02 a layer; an expert
takes 1.25 times its even share of a batch and what exceeds it is dropped, in training only. Seed
{head[seed]}, jax {head[jax]}; {minutes:.0f} minutes on two cores shared with
other work, {rate:,.0f} tokens a second. The command is in `perf/train_demo.py`. Nothing was chosen
by the held-out book: it was looked at, and the last state is what ships.

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

110 tokens each, from the fast engine.

{shown}
"""
