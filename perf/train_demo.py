"""Trains the built-in demonstration model and writes it in the Hugging Face form.

    nice -n 19 python -m perf.train_demo --texts TEXTS --work WORK train
    python -m perf.train_demo --texts TEXTS --work WORK ship --to jax_impl/app/demo_model

TEXTS holds the folders classics, tinyshakespeare and us_inaugural with .txt files in the public
domain; the book wizard_of_oz is held out. `train` writes WORK/tokenizer.json, WORK/log.jsonl and,
every `--save` steps and at the end, WORK/state.npz (parameters, moments, step), from which it goes
on when it is there. `ship` may be run at any time: it takes the newest state. Defaults and seed
are those of the shipped model. Needs jax, numpy, tokenizers and safetensors; no accelerator.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from perf.demo_model.adam import Adam, start, update
from perf.demo_model.measure import held_out_loss
from perf.demo_model.network import Params, Shape, forward, init, token_losses
from perf.demo_model.texts import Windows, read_texts, stream, train_tokenizer

SHAPE = Shape()
BALANCE = 0.02
"""Weight of the load-balancing loss, summed over layers."""
ROOM = 1.25
"""Places an expert gets in a training batch, over its even share."""
PHASES = ((0.75, 16, 128), (1.0, 8, 256))
"""(until this share of the steps, windows a step, tokens a window)."""
WATCH = 8192
"""Held-out tokens looked at during training."""


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(
    options: tuple[Adam, Shape, float], params: Params, moments: Any, batch: jax.Array,
    rate: jax.Array, step: jax.Array, seed: jax.Array,
) -> tuple[Params, Any, dict[str, jax.Array]]:  # fmt: skip
    """One step on ids [B, S + 1]. Returns parameters, moments and what to log."""
    adam, shape, drop = options
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), step)

    def loss(p: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        result = forward(p, batch[:, :-1], shape, ROOM, drop, key)
        nats = token_losses(result.logits, batch[:, 1:]).mean()
        total = nats + BALANCE * result.balance.sum()
        return total, (nats, result.balance, result.dropped)

    (_, (nats, even, dropped)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    params, moments, size = update(adam, params, grads, moments, rate, step)
    return params, moments, {"nats": nats, "balance": even, "dropped": dropped, "gradient": size}


def phase(step: int, steps: int) -> tuple[int, int]:
    """(windows, tokens a window) of a step."""
    return next((rows, length) for until, rows, length in PHASES if step < until * steps)


def save(path: Path, params: Params, moments: Any, step: int) -> None:
    """The whole state in one file that appears whole or not at all."""
    flat: dict[str, Any] = {f"p.{k}": np.asarray(v) for k, v in params.items()}
    for which in ("m", "v"):
        flat |= {f"{which}.{k}": np.asarray(v) for k, v in moments[which].items()}
    flat["step"] = np.int64(step)
    new = path.with_name("new-" + path.name)
    np.savez(new, **flat)
    os.replace(new, path)


def load(path: Path) -> tuple[Params, Any, int]:
    """What `save` wrote."""
    with np.load(path) as file:
        parts: dict[str, Params] = {"p": {}, "m": {}, "v": {}}
        for name in file.files:
            which, _, key = name.partition(".")
            if key:
                parts[which][key] = jnp.array(file[name])
        return parts["p"], {"m": parts["m"], "v": parts["v"]}, int(file["step"])


def train(args: argparse.Namespace) -> None:
    """Trains for `args.steps` steps, from WORK/state.npz where there is one."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    texts = read_texts(Path(args.texts))
    if not (work / "tokenizer.json").exists():
        train_tokenizer(texts, SHAPE.vocab).save(str(work / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    streams = {name: stream(tokenizer, group) for name, group in texts.train.items()}
    held = stream(tokenizer, [texts.held_out])[:-1]
    watched = held[: WATCH + 1]
    watched_bytes = len(tokenizer.decode(watched[1:].tolist()).encode())
    log = (work / "log.jsonl").open("a", encoding="utf-8", buffering=1)

    def note(**fields: Any) -> None:
        line = json.dumps(fields)
        log.write(line + "\n")
        print(line, flush=True)

    sizes = {name: len(ids) for name, ids in streams.items()}
    params, moments, first = init(SHAPE, args.seed), None, 0
    if (work / "state.npz").exists():
        params, moments, first = load(work / "state.npz")
    else:
        moments = start(params)
    note(shape=asdict(SHAPE), parameters=sum(v.size for v in params.values()), tokens=sizes,
         held_out_tokens=len(held) - 1, steps=args.steps, seed=args.seed, peak=args.peak,
         drop=args.drop, first=first, jax=jax.__version__)  # fmt: skip
    adam = Adam(args.peak, args.steps)
    draw = Windows(streams, args.seed)
    began, tokens = time.monotonic(), 0
    for step in range(first, args.steps):
        rows, length = phase(step, args.steps)
        batch = draw.batch(step, rows, length)
        params, moments, told = train_step(
            (adam, SHAPE, args.drop), params, moments, batch, np.float32(adam.rate(step)),
            np.int32(step), np.int32(args.seed),
        )  # fmt: skip
        tokens += rows * length
        done = step + 1
        if done % args.tell == 0 or done == args.steps:
            nats = float(told["nats"])
            seconds = time.monotonic() - began
            note(step=done, nats=round(nats, 4), gradient=round(float(told["gradient"]), 3),
                 balance=round(float(told["balance"].mean()), 3),
                 dropped=round(float(told["dropped"].mean()), 4), seconds=round(seconds, 1),
                 tokens_s=round(tokens / seconds))  # fmt: skip
            if not math.isfinite(nats):
                raise SystemExit("the loss is not finite")
        if done % args.save == 0 or done == args.steps:
            save(work / "state.npz", params, moments, done)
        if done % args.look == 0 or done == args.steps:
            loss = held_out_loss(params, watched, watched_bytes, SHAPE)
            note(step=done, held_out_slice=round(loss, 4))
    note(end=args.steps, seconds=round(time.monotonic() - began, 1))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train or ship the demonstration model.")
    parser.add_argument("--texts", required=True, help="folder with the collections of texts")
    parser.add_argument("--work", required=True, help="folder for tokenizer, state and log")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    one.add_argument("--steps", type=int, default=3000)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--peak", type=float, default=3e-3, help="greatest learning rate")
    one.add_argument("--drop", type=float, default=0.0, help="dropout on the residual")
    one.add_argument("--tell", type=int, default=50, help="steps between lines of the log")
    one.add_argument("--save", type=int, default=100, help="steps between saved states")
    one.add_argument("--look", type=int, default=500, help="steps between held-out looks")
    two = commands.add_parser("ship")
    two.add_argument("--to", required=True, help="folder of the model")
    args = parser.parse_args()
    if args.command == "train":
        train(args)
    else:
        from perf.demo_model.ship import ship

        params, _, step = load(Path(args.work) / "state.npz")
        ship(args, SHAPE, params, step)


if __name__ == "__main__":
    main()
