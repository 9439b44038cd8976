"""See it work on the built-in model: texts, then four ways to schedule, measured side by side.

Eight requests share 60 % of the memory that their experts need. The model is tiny, so reads are
paced to a stated ratio between reading an expert and computing a layer; --no-pace reads at the
machine's own speed. Every run computes the same tokens and logits, which is compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jax_impl.app import builtin, demo_text, engines
from jax_impl.app.output import Progress, WholeFile, write_json
from jax_impl.app.text import Text
from reference.files.budget import show_size
from reference.files.checkpoint import Checkpoint
from reference.vocab.errors import BadInput

BUDGET = "60%"
BUDGETS = ("30%", "60%", "80%")
CROWDS = (1, 4, 16)
GROUP = 8
TOKENS, GRID_TOKENS = 32, 12
ROUNDS = 3
GRID_ROUNDS = ((30.0, 5), (80.0, 3), (float("inf"), 1))
"""(until so many seconds have passed, rounds of a cell)."""
EVEN = 0.05
"""A difference of less is no win and no loss."""
OPTIONS: dict[str, Any] = {
    "chunk": 16, "max_running": 16, "max_rows": 16, "kv_tokens": 16 * 64, "ignore_eos": True,
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey demo`."""
    parser.add_argument("--model", metavar="MODEL", type=builtin.model, default=None,
                        help="another model with routed experts (default: the built-in one)")
    parser.add_argument("--pace", metavar="R", type=pace, default=1.0,
                        help="reading an expert takes R times as long as a layer of one request "
                             "computes (default: 1)")
    parser.add_argument("--no-pace", action="store_true", help="read at the machine's own speed")
    parser.add_argument("--rounds", metavar="N", type=engines.positive, default=ROUNDS,
                        help=f"times that each scheduler is measured (default: {ROUNDS})")
    parser.add_argument("--no-table", action="store_true",
                        help="leave out the small table over budgets and requests")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write all figures here")
    parser.add_argument("--logs", metavar="FOLDER", type=Path,
                        help="write an event log a scheduler into this folder")
    parser.add_argument("--lamina", action="store_true",
                        help="show attention offloading instead")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def pace(word: str) -> float:
    """argparse type: a ratio from 0.01 to 100."""
    value = float(word)
    if not 0.01 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{word}; a number from 0.01 to 100 expected")
    return value


def run(args: argparse.Namespace) -> int:
    """0 when all results were the same, 1 otherwise (DEMO-3)."""
    if args.lamina:
        if args.logs or args.json or args.model:
            raise BadInput("--lamina: --model, --json and --logs are of the other demonstration")
        return lamina()
    started = time.monotonic()
    model = args.model or builtin.folder()
    checkpoint = Checkpoint.open(model)
    checkpoint.close()
    if not checkpoint.config.moe_layers:
        raise BadInput(f"{model}: a dense model has no experts to schedule")
    progress = Progress(args.quiet)
    if args.logs:
        try:
            args.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--logs: {args.logs}: {error.strerror}") from None
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--json", args.json)) if args.json else None
        document = show(args, model, checkpoint, progress, started)
        if out:
            write_json(out, document)
    yes = document["same"]
    print(f"same tokens and logits: {'yes' if yes else 'no'}")
    return 0 if yes else 1


def show(
    args: argparse.Namespace, model: Path, checkpoint: Checkpoint, progress: Progress,
    started: float,
) -> dict[str, Any]:
    """The whole demonstration but for its last line; returns what --json holds."""
    from jax_impl.app import contest as c

    text = Text(model)
    requests = demo_text.requests(text, checkpoint.config.vocab, max(CROWDS), TOKENS)
    expert = checkpoint.expert_bytes()
    print(f"{builtin.name_of(model)}: {describe(checkpoint)}")
    if text.why_not:
        print(f"texts are shown as token ids: {text.why_not}")
    progress.say("opening the engine; code is compiled once a machine")
    options = {**OPTIONS, "progress": progress.show}
    with c.Contest(model, options, None) as probe:
        step = c.step_seconds(probe, requests[0])
        same = probe.same
    progress.clear()
    rate = None if args.no_pace else expert / (args.pace * step)
    print(paced(rate, args.pace, step, expert))
    document: dict[str, Any] = {
        "model": describe(checkpoint), "step_s": step, "bytes_per_s": rate,
        "pace": None if args.no_pace else args.pace, "budget": BUDGET,
    }
    with c.Contest(model, options, rate) as contest:
        contest.same = same
        more = {"log": lambda x: args.logs / f"{x.options['scheduler']}.jsonl"} if args.logs else {}
        entries = contest.enter(c.CONTENDERS, BUDGET, **more)
        group = requests[:GROUP]
        for entry in entries[:-1]:
            progress.show(f"first run, {entry.contender.name}")
            contest.run(entry, group)
        progress.clear()
        print(f"\n{GROUP} requests at once, balanced, {BUDGET} of the experts' memory:\n")
        contest.run(entries[-1], group, demo_text.Live(text, group, sys.stdout).watch)
        progress.show(f"{args.rounds} rounds of each scheduler, in turn")
        figures = contest.rounds(entries, group, args.rounds)
        progress.clear()
        document["schedulers"] = table(c.CONTENDERS, figures)
        if not args.no_table:
            document["grid"] = grid(contest, entries, requests, progress, started)
        print(f"\n{look_next(args.logs, builtin.name_of(model))}")
        document |= {"comparisons": same.comparisons, "different": same.different,
                     "same": not same.different and same.comparisons > 0}
    for what in same.different[:8]:
        print(f"differs: {what}")
    print(f"\n{same.comparisons} results compared bit by bit with the first of their request; "
          f"{time.monotonic() - started:.0f} s in all")
    return document


def describe(checkpoint: Checkpoint) -> str:
    """The model in a line."""
    config = checkpoint.config
    return (f"{len(config.layers)} layers, {config.experts} experts a layer, {config.top_k} a "
            f"token; all experts {show_size(checkpoint.experts_bytes)}, "
            f"{show_size(checkpoint.expert_bytes())} each")


def paced(rate: float | None, ratio: float, step: float, expert: int) -> str:
    """What the reads are held to, and what it stands for (DEMO-2)."""
    layer = f"a layer of one request takes {step * 1e3:.2f} ms to compute here"
    if rate is None:
        return f"reads are not paced (--no-pace); {layer}"
    return (
        f"{layer}. This model is tiny, so reads\nare paced to {rate / 1e6:.0f} MB/s, where an "
        f"expert of {show_size(expert)} takes {ratio:g} times as long to read (--pace,\n"
        f"--no-pace): as with a disk of {2.7 / ratio:.1f} GB/s, experts of 2.7 MB (a 30B mixture "
        "at 4 bits)\nand 1 ms a layer."
    )


def table(contenders: Sequence[Any], figures: Sequence[Any]) -> dict[str, Any]:
    """Prints the schedulers side by side; returns the figures by name."""
    from jax_impl.app.contest import gain

    found = {c.name: f.as_dict() | {"cache": c.cache}
             for c, f in zip(contenders, figures, strict=True)}
    print(f"\n{'':44}{'KB a':>6}{'':6}{'full':>6}{'channel':>9}{'compute':>9}{'over the':>10}")
    print(f"{'scheduler (cache)':44}{'token':>6}{'hits':>6}{'hits':>6}{'busy':>9}{'busy':>9}"
          f"{'bound':>10}  tokens/s (rounds)")
    for name, f in found.items():
        rates = f["rounds_tokens_per_s"]
        print(f"{name + ' (' + f['cache'] + ')':44}{f['bytes_per_token'] / 1e3:>6.0f}"
              f"{f['hit_rate']:>6.0%}{f['full_hit_rate']:>6.0%}{f['channel_busy']:>9.0%}"
              f"{f['compute_busy']:>9.0%}{f['over_bound']:>10.0%}  {f['tokens_per_s']:.0f} "
              f"({min(rates):.0f} to {max(rates):.0f})")
    others = [(c.name, gain(figures[-1], f))
              for c, f in zip(contenders[:-1], figures[:-1], strict=True)]
    print("balanced against " + ", ".join(f"{name}: {x:.2f} times" for name, x in others))
    return found


def grid(
    contest: Any, entries: list[Any], requests: Sequence[Any], progress: Progress, started: float
) -> list[dict[str, Any]]:
    """The small table over budgets and requests; wins and losses alike (DEMO-4)."""
    from dataclasses import replace

    short = [replace(request, max_new_tokens=GRID_TOKENS) for request in requests]
    print(f"\n{'':18}{'tokens/s':^47}{'balanced is so many times':^40}{'its':>6}")
    print(f"{'budget  requests':18}{'on-demand':>11}{'overlapped':>12}{'interleaved':>13}"
          f"{'balanced':>11}{'on-demand':>13}{'overlapped':>13}{'interleaved':>14}{'reads':>6}")
    rows: list[dict[str, Any]] = []
    for memory in BUDGETS:
        fresh = memory != BUDGET
        ours = contest.enter([e.contender for e in entries], memory) if fresh else entries
        if fresh:
            for entry in ours:
                contest.run(entry, short[:4])
        for crowd in CROWDS:
            count = rounds_now(time.monotonic() - started)
            progress.show(f"{memory} of the experts' memory, {crowd} requests, {count} rounds")
            figures = contest.rounds(ours, short[:crowd], count)
            progress.clear()
            rows.append(cell(memory, crowd, figures))
        if fresh:
            contest.leave(ours)
    every = [gain for row in rows for gain in row["gains"]]
    won, lost = sum(g >= 1 + EVEN for g in every), sum(g <= 1 - EVEN for g in every)
    print(f"of {len(every)} comparisons balanced wins {won} and loses {lost}; the others are "
          f"within {EVEN:.0%}.")
    if lost:
        print("Last column: its bytes a token against overlapped lock-step's. It loses where what "
              "it measured\nwas not what came, or where its groups were not those that compute "
              "fastest here.")
    return rows


def rounds_now(elapsed: float) -> int:
    """Rounds of a cell of the small table, so that a slow machine ends in time as well."""
    return next(count for until, count in GRID_ROUNDS if elapsed < until)


def cell(memory: str, crowd: int, figures: Sequence[Any]) -> dict[str, Any]:
    """Prints and returns one row of the small table."""
    from jax_impl.app.contest import gain, ratio

    told = [f.as_dict() for f in figures]
    gains = [gain(figures[-1], f) for f in figures[:-1]]
    reads = ratio(told[-1]["bytes_per_token"], told[1]["bytes_per_token"])
    marks = [f"{g:.2f} " + ("wins " if g >= 1 + EVEN else "loses" if g <= 1 - EVEN else "even ")
             for g in gains]
    print(f"{memory:>6}{crowd:>10}  "
          + "".join(f"{f['tokens_per_s']:>{w}.0f}"
                    for f, w in zip(told, (11, 12, 13, 11), strict=True))
          + "".join(f"{m:>{w}}" for m, w in zip(marks, (13, 13, 14), strict=True))
          + f"{reads:>6.2f}", flush=True)
    return {"memory": memory, "requests": crowd, "gains": gains, "reads": reads,
            "rounds": len(figures[0].rates), "figures": told}


def look_next(logs: Path | None, name: str) -> str:
    """Where to go from here with the MODEL of that name."""
    where = logs or Path("FOLDER")
    own = "" if name == builtin.NAME else f" --model {name}"
    lines = [
        (f"covey plan {name} --memory 60%", "what a budget buys, before anything is read"),
        (f"covey run {name} --requests F", "your own prompts (docs/run.md says what F holds)"),
        (f"covey verify {name}", "the same bits under many more settings"),
        (f"covey timeline {where}/*.jsonl --png X.png", "these runs as a picture"),
    ]
    if not logs:
        lines.insert(3, (f"covey demo{own} --logs {where}", "keeps the event logs of these runs"))
    wide = max(len(a) for a, _ in lines)
    return "where to look next:\n" + "\n".join(f"  {a:{wide}}  {b}" for a, b in lines)


def lamina() -> int:
    """The other half: attention in a pool of its own."""
    from jax_impl.attention_pool import lamina_demo

    return lamina_demo.show()
