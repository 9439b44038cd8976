"""Measure schedulers side by side on a model: budgets, requests at a time, wins and losses.

Every scheduler has an engine of its own; in each round they run the same requests in a new order,
and every token is compared. Experts are read around the page cache where the file system takes it,
else the model's pages are dropped before each run; the bytes that really came from the disk stand
beside the bytes that were loaded.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jax_impl.app import bench_picture, builtin, engines
from jax_impl.app.machine import disk_bytes, drop_pages, setting
from jax_impl.app.output import Progress, WholeFile, write_json
from reference.files.budget import available_memory, show_size
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.sampling import uniform
from reference.vocab.errors import BadInput
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, PREFETCHERS, READINESS, SCHEDULERS

BUDGETS = "75%,50%,25%"
CROWDS = "1,4,8,16"
ROUNDS, PROMPT, NEW = 3, 16, 32
WORDS: dict[str, tuple[str, ...]] = {
    "scheduler": SCHEDULERS, "cache": EVICTIONS, "readiness": READINESS,
    "fetch_order": FETCH_ORDERS, "prefetch": tuple(p for p in PREFETCHERS if p != "none"),
}  # fmt: skip
"""Engine options that a word of a scheduler's specification may set, with the words."""

COMPARED = (
    f"{engines.SCHEDULER}/{engines.CACHE},interleaved,lockstep,lockstep-blocking/global"
)
"""What covey run takes, the paper's mode, the strong baseline and the ordinary way."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey bench`."""
    parser.add_argument("model", metavar="MODEL", type=builtin.model,
                        help="folder with config.json and safetensors files, or demo: built in")
    parser.add_argument("--memory", metavar="SIZES", default=BUDGETS,
                        help=f"budgets for routed experts (default: {BUDGETS})".replace("%", "%%"))
    parser.add_argument("--requests", metavar="N,...", type=counts, default=CROWDS,
                        help=f"requests at a time (default: {CROWDS})")
    parser.add_argument("--schedulers", metavar="S,...", default=COMPARED,
                        help="what is compared, each as SCHEDULER[/WORD...] with the words of "
                             "covey run's --scheduler, --cache, --readiness and --prefetch: "
                             f"lockstep/global (default: {COMPARED})")
    parser.add_argument("--compute", **engines.one_of(("f32", "bf16")), default="f32",
                        help="precision of matrix products (default: f32)")
    parser.add_argument("--prompt-tokens", metavar="N", type=engines.positive, default=PROMPT,
                        help=f"tokens of a prompt, drawn at random (default: {PROMPT})")
    parser.add_argument("--new-tokens", metavar="N", type=engines.positive, default=NEW,
                        help=f"tokens that each request generates, greedily (default: {NEW})")
    parser.add_argument("--rounds", metavar="N", type=engines.positive, default=ROUNDS,
                        help=f"times that each scheduler is measured (default: {ROUNDS})")
    parser.add_argument("--io", **engines.one_of(("auto", "direct", "buffered")), default="auto",
                        help="around the page cache or through it (default: auto)")
    parser.add_argument("--threads", type=engines.positive, metavar="N", default=4,
                        help="reads at a time (default: 4)")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write all figures here")
    parser.add_argument("--png", metavar="OUT", type=Path, help="draw them (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def counts(words: str) -> tuple[int, ...]:
    """argparse type: different positive integers, ascending."""
    try:
        found = sorted({engines.positive(word) for word in words.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{words}; numbers with commas expected") from None
    return tuple(found)


def contender(words: str) -> Any:
    """What is measured, from SCHEDULER[/WORD...]. Raises BadInput for a word that there is not
    (BENCH-4)."""
    from jax_impl.app.contest import Contender

    options: dict[str, str] = {}
    name, *more = words.split("/")
    if name not in SCHEDULERS:
        raise BadInput(f"--schedulers: unsupported {name!r}; supported: {', '.join(SCHEDULERS)}")
    options["scheduler"] = name
    for word in more:
        names = [option for option, allowed in WORDS.items()
                 if word in allowed and option not in options]
        if not names:
            allowed = ", ".join(w for option in WORDS if option not in options
                                for w in WORDS[option])
            raise BadInput(f"--schedulers: {words!r}: unsupported {word!r}; supported: {allowed}")
        options[names[0]] = word
    return Contender(words, options.get("cache", EVICTIONS[0]), options)


def random_requests(vocab: int, count: int, prompt: int, new: int, seed: int = 0) -> list[Request]:
    """Requests of token ids drawn at random, greedy; the same for the same seed."""
    return [
        Request(f"s{seed}r{n}", tuple(int(uniform(n + (seed << 20), i) * vocab)
                                      for i in range(prompt)), new)
        for n in range(count)
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0 when all tokens of all runs were the same, 1 otherwise (BENCH-2)."""
    model = engines.model_of(args)
    contenders = [contender(words) for words in args.schedulers.split(",")]
    if len({c.name for c in contenders}) < len(contenders):
        raise BadInput(f"--schedulers: {args.schedulers}: one is named twice")
    crowds = counts(args.requests) if isinstance(args.requests, str) else args.requests
    memories = args.memory.split(",")
    with Checkpoint.open(model) as ckpt:
        options = engine_options(args, ckpt, max(crowds))
        room = sizes_of(ckpt, memories, options)
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--json", args.json)) if args.json else None
        png = stack.enter_context(WholeFile("--png", args.png, "wb")) if args.png else None
        if png:
            bench_picture.ready()
        document = Bench(args, model, ckpt, contenders, crowds, options).sweep(memories, room)
        if out:
            write_json(out, document)
        if png:
            bench_picture.draw(document, png)
            png.commit()
    for what in document["different"][:8]:
        print(f"differs: {what}")
    same = document["comparisons"] > 0 and not document["different"]
    print(f"{document['comparisons']} results compared with the first of their request, "
          f"{document['seconds']:.0f} s in all")
    print(f"same tokens: {'yes' if same else 'no' if document['different'] else 'nothing to say'}")
    return 1 if document["different"] else 0


def engine_options(args: argparse.Namespace, ckpt: Checkpoint, most: int) -> dict[str, Any]:
    """Options of every engine. Raises BadInput for a model or lengths that cannot be measured."""
    config = ckpt.config
    if not config.moe_layers:
        raise BadInput(f"{ckpt.path}: a dense model has no experts to schedule")
    total = args.prompt_tokens + args.new_tokens
    if total > config.max_position:
        raise BadInput(f"--prompt-tokens {args.prompt_tokens} and --new-tokens {args.new_tokens}: "
                       f"{total} together; the model takes {config.max_position}")
    if args.new_tokens < 2:
        raise BadInput("--new-tokens: 1; at least 2 are needed to measure decoding")
    block = 64
    return {"compute": args.compute, "io": args.io, "threads": args.threads, "ignore_eos": True,
            "max_running": most, "kv_block": block, "kv_tokens": most * -(-total // block) * block}


def sizes_of(ckpt: Checkpoint, memories: list[str], options: dict[str, Any]) -> dict[str, int]:
    """What an engine holds with each budget, bytes; refuses here what an engine would refuse."""
    from jax_impl.options import EngineOptions, plan_sizes

    return {memory: plan_sizes(ckpt, EngineOptions.of(memory=memory, **options))[0].total
            for memory in memories}


class Bench:
    """One measurement of a model, budget after budget."""

    def __init__(
        self, args: argparse.Namespace, model: Path, ckpt: Checkpoint, contenders: list[Any],
        crowds: tuple[int, ...], options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.args, self.model, self.config = args, model, ckpt.config
        self.ckpt, self.contenders, self.crowds = ckpt, contenders, crowds
        self.options = options
        self.progress = Progress(args.quiet)
        self.order = random.Random(0)
        self.io = "?"

    def sweep(self, memories: list[str], room: dict[str, int]) -> dict[str, Any]:
        """Measures everything; what --json holds (BENCH-1)."""
        from jax_impl.app import bench_table
        from jax_impl.app.contest import Contest

        began = time.monotonic()
        document: dict[str, Any] = {
            **setting(), "command": " ".join(["covey", *sys.argv[1:]]),
            "model": builtin.name_of(self.model), "shape": bench_table.shape_of(self.ckpt),
            "options": {k: v for k, v in self.options.items() if k != "ignore_eos"},
            "prompt_tokens": self.args.prompt_tokens, "new_tokens": self.args.new_tokens,
            "rounds": self.args.rounds, "rows": [],
        }
        for line in bench_table.opening(document):
            print(line)
        with Contest(self.model, self.options, None, logits=False) as contest:
            for memory in memories:
                document["rows"] += self.budget(contest, memory, room[memory])
            same = contest.same
        return document | {
            "io": self.io, "comparisons": same.comparisons, "different": same.different,
            "load_after": setting()["machine"]["load"], "seconds": time.monotonic() - began,
        }

    def budget(self, contest: Any, memory: str, room: int) -> list[dict[str, Any]]:
        """All numbers of requests with one budget."""
        from jax_impl.app import bench_table
        from jax_impl.app.contest import Figures

        disk = self.disk_rate(memory)
        together = self.fit(room)
        entries = self.enter(contest, memory) if together else []
        rows = []
        print(bench_table.heading(memory, disk, self.io, together), flush=True)
        for crowd in self.crowds:
            figures = {c.name: Figures(None) for c in self.contenders}
            disk_read = dict.fromkeys(figures, 0)
            for turn in range(self.args.rounds):
                order = self.contenders[:]
                self.order.shuffle(order)
                for one in order:
                    self.progress.show(f"{memory}, {crowd} requests, round {turn + 1} of "
                                       f"{self.args.rounds}: {one.name}")
                    mine = ([e for e in entries if e.contender is one]
                            or self.enter(contest, memory, one))
                    disk_read[one.name] += self.once(contest, mine[0], crowd, turn,
                                                     figures[one.name])
                    if not together:
                        contest.leave(mine)
            self.progress.clear()
            found = {name: bench_table.told(figures[name], disk_read[name], disk)
                     for name in figures}
            rows.append({"memory": memory, "requests": crowd, "disk_bytes_per_s": disk,
                         "schedulers": found})
            print("\n".join(bench_table.lines_of(rows[-1])), flush=True)
        contest.leave(entries)
        return rows

    def enter(self, contest: Any, memory: str, *only: Any) -> list[Any]:
        """Engines, each warmed up with requests that are not measured."""
        entries = contest.enter(list(only) or self.contenders, memory)
        for entry in entries:
            self.progress.show(f"{memory}: first run, {entry.contender.name}")
            contest.run(entry, self.requests(max(self.crowds), self.args.rounds))
            self.io = entry.engine.totals()["io"]
        return entries

    def requests(self, crowd: int, turn: int) -> list[Request]:
        """The requests of a round; fewer of them are the first of more."""
        return random_requests(self.config.vocab, crowd, self.args.prompt_tokens,
                               self.args.new_tokens, turn)

    def once(self, contest: Any, entry: Any, crowd: int, turn: int, figures: Any) -> int:
        """One run; the bytes that came from the disk."""
        if self.io != "direct":
            drop_pages(self.model)
        before = disk_bytes() or 0
        contest.measure(entry, self.requests(crowd, turn), figures)
        return (disk_bytes() or 0) - before

    def disk_rate(self, memory: str) -> float | None:
        """Bytes/s of the engine's own loads of random experts, nothing else going on."""
        from jax_impl.app import estimate

        del memory
        with Checkpoint.open(self.model) as ckpt:
            drop_pages(self.model)
            self.progress.show("reading experts, for the bound")
            rate, self.io = estimate.read_rate(ckpt, self.args.threads, seconds=1.0)
        self.progress.clear()
        return rate

    def fit(self, room: int) -> bool:
        """Engines of all contenders at once; else one after another, each warmed up anew."""
        try:
            free = available_memory()
        except BadInput:
            return True
        if 1.1 * room > free:
            raise BadInput(f"--memory: an engine would hold {show_size(room)}; "
                           f"{show_size(free)} are free")
        return 1.1 * room * len(self.contenders) < free
