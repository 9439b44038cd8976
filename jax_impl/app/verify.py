"""Prove on this model that results do not depend on how they were scheduled.

Runs each request alone, then all of them under budgets from the least that runs, every scheduler,
readiness and eviction, other chunks, orders of arrival and neighbours, and compares tokens and
logits bit by bit. Also scores what was generated: the same logits once more.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_impl.app import builtin, engines, sameness, settings
from jax_impl.app.output import Progress
from jax_impl.app.settings import Setting
from jax_impl.app.text import Text
from jax_impl.app.waiting import Interrupt
from reference.files.budget import show_size, slot_size
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.sampling import uniform

LENGTHS = (1, 3, 9, 24, 16, 41, 6, 70)
"""Prompt lengths of made-up requests: within a chunk, on its edge, over several."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey verify`."""
    engines.arguments(parser, vary=True)
    parser.add_argument("--requests", metavar="F", type=Path,
                        help="requests to verify with (default: made-up token ids)")
    parser.add_argument("--count", type=engines.positive, metavar="N", default=6,
                        help="made-up requests (default: 6)")
    parser.add_argument("--seed", type=engines.count, metavar="N", default=0,
                        help="of the made-up requests (default: 0)")
    parser.add_argument("--max-new-tokens", type=engines.positive, metavar="N", default=8,
                        help="tokens to generate (default: 8)")
    parser.add_argument("--rounds", type=engines.positive, metavar="N", default=2,
                        help="times that each scheduler and readiness is tried (default: 2)")
    parser.add_argument("--only", metavar="SETTING", action="append", type=settings.parse,
                        help="try only this setting, in the form in which a difference is printed")


def run(args: argparse.Namespace) -> int:
    """0 when nothing differs, 1 otherwise."""
    model = engines.model_of(args)
    options = engines.options_of(args)
    memory = str(options.pop("memory", "auto"))
    options |= {"ignore_eos": args.requests is None,
                "max_running": options.get("max_running", 2 * args.count)}
    progress = Progress(args.quiet)
    checkpoint = Checkpoint.open(model)
    checkpoint.close()
    if args.requests:
        text = Text(model)
        requests = [replace(r, stop=(), arrival_s=0.0) for r in
                    engines.requests_of(args.requests, model, text, args.max_new_tokens)]
    else:
        requests = made_up(checkpoint.config.vocab, checkpoint.config.max_position, args.count,
                           args.max_new_tokens, args.seed)

    def open_engine(setting: Setting) -> Any:
        return engines.open_engine(args.engine, model, options | setting.options())

    slots, slot = capacity(args.engine, model, checkpoint, memory, options)
    memories = settings.budgets(slots, checkpoint.config.top_k, slot)
    base = Setting(memories[-1])
    tried = args.only or [replace(base, company="rescored"),
                          *settings.plan(memories, args.rounds)]
    again = ["covey", "verify", builtin.name_of(model), "--engine", args.engine,
             "--max-new-tokens", str(args.max_new_tokens), "--memory", f"{base.memory}B"]
    again += ["--requests", str(args.requests)] if args.requests else [
        "--count", str(args.count), "--seed", str(args.seed)]
    again += [word for name in ("kv_tokens", "threads", "io", "compute", "max_running")
              if (value := getattr(args, name)) is not None
              for word in (engines.NAMES[name], str(value))]
    return verify(open_engine, requests, base, tried, again, progress)


def capacity(
    kind: str, model: Path, checkpoint: Checkpoint, memory: str, options: dict[str, Any]
) -> tuple[int, int]:
    """(slots that `memory` buys, bytes of a slot); both 0 for a dense model. Headers only.

    Raises BudgetTooSmall as an engine would.
    """
    config = checkpoint.config
    keys = [(layer, e) for layer in config.moe_layers for e in range(config.experts)]
    slot = slot_size(checkpoint.expert(*key) for key in keys)
    if kind == "jax":
        from jax_impl.options import EngineOptions, plan_sizes

        sizes, _ = plan_sizes(checkpoint, EngineOptions.of(memory=memory, **options))
        return sizes.slots, slot
    from reference.files.budget import expert_budget, slots_for

    return slots_for(expert_budget(memory, len(keys), slot), len(keys), slot, config.top_k), slot


def made_up(vocab: int, longest: int, count: int, new: int, seed: int) -> list[Request]:
    """`count` requests of ids drawn from `seed`; every other one is sampled at temperature 0.9, and
    every third one pays for what its own text has already (SAMPLE-9)."""
    requests = []
    at = 0
    for number in range(count):
        length = max(1, min(LENGTHS[number % len(LENGTHS)], longest - new))
        ids = tuple(int(uniform(seed, at + i) * vocab) for i in range(length))
        at += length
        again = number % 3 == 2
        requests.append(Request(f"r{number}", ids, new, temperature=0.9 * (number % 2),
                                seed=seed + number, repetition_penalty=1.2 if again else 1.0,
                                frequency_penalty=0.3 if again else 0.0))
    return requests


def verify(
    open_engine: Callable[[Setting], Any],
    requests: Sequence[Request],
    base: Setting,
    tried: Sequence[Setting],
    again: Sequence[str],
    progress: Progress,
) -> int:
    """Compares and prints; 1 if anything differed. `again` is the command without --only."""
    verdict = sameness.Verdict()
    with Interrupt() as interrupt:
        progress.say(f"{len(requests)} requests, each alone, then under {len(tried)} settings")
        for setting, new in sameness.compare(
            open_engine, requests, base, tried, interrupt, verdict
        ):
            for each in new:
                print(f"request '{each.id}' differs: {each.what}")
            if new:
                print(f"  shown again by: {shlex.join([*again, '--only', str(setting)])}")
            state = "DIFFERS" if new else "same bits"
            progress.say(f"{state}: {show_size(setting.memory)}, {setting.scheduler}, readiness "
                         f"{setting.readiness}, cache {setting.cache}, prefetch "
                         f"{setting.prefetch}, chunk {setting.chunk}, {setting.company}")
    bad = len(verdict.differences)
    print(f"{verdict.comparisons} comparisons ({len(requests)} requests, {len(tried)} settings, "
          f"{verdict.tokens} tokens, {verdict.rows} rows of logits): "
          + (f"{bad} differ" if bad else "all the same bits"))
    return 1 if bad else 0
