"""Schedulers in virtual time, on platforms and models that need not be here.

The same scheduler as in covey run, with durations instead of devices: those of a platform's data
sheet and of a model's sizes. `--list` names both, with the source of every figure. Routing is made
up with the statistics of published traces, or recorded (covey trace); requests are always there
(closed loop), or come as a request trace says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_impl.app import builtin, engines
from jax_impl.app.output import WholeFile, write_json
from jax_impl.app.this_host import this_host
from reference.files.budget import show_size
from reference.prediction import simulated
from reference.simulator import models, platforms
from reference.simulator.arrivals import Arrival, read_arrivals, read_lengths
from reference.simulator.run import Result, control, routes_for, simulate
from reference.simulator.servegen import is_servegen
from reference.vocab.errors import BadInput
from reference.vocab.options import EVICTIONS, READINESS, SCHEDULERS


def share(word: str) -> float:
    """argparse type: 0.5 or 50%."""
    value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{word}; above 0 and at most 100% expected")
    return value


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey simulate`."""
    parser.add_argument("--list", action="store_true", help="platforms and models, with sources")
    parser.add_argument("--platform", metavar="P", default="jetson-thor",
                        help="name of a platform, a TOML file like those, or this: this host, by a "
                             "short probe of --model (default: jetson-thor)")
    parser.add_argument("--model", metavar="M", default="qwen3-30b-a3b",
                        help="name of a model, demo, or a folder with config.json "
                             "(default: qwen3-30b-a3b)")
    parser.add_argument("--stored", metavar="F", default="",
                        help="format of the experts: bf16, q8_0, q4_k_m (default: the model's own)")
    parser.add_argument("--share", type=share, default=0.5, metavar="S",
                        help="part of the experts that fits: 0.5 or 50%% (default)")
    parser.add_argument("--requests", type=engines.positive, default=8, metavar="N",
                        help="requests that are always there (default: 8)")
    parser.add_argument("--scheduler", **engines.one_of(SCHEDULERS), action="append",
                        help=f"may be given several times (default: {engines.SCHEDULER})")
    parser.add_argument("--cache", **engines.one_of(EVICTIONS), default=engines.CACHE)
    parser.add_argument("--readiness", **engines.one_of(READINESS), default="visit")
    parser.add_argument("--predict", metavar="WHO", default="none",
                        help="activation, layer, or an oracle that is right so often: 0.8; "
                        "0.8@3: of three layers at a time; or a published accuracy by name")
    parser.add_argument("--prompt", type=engines.positive, default=1, metavar="N",
                        help="prompt tokens of a request (default: 1, decoding alone)")
    parser.add_argument("--new-tokens", type=engines.positive, default=64, metavar="N",
                        help="tokens that a request generates (default: 64)")
    parser.add_argument("--tokens", type=engines.positive, default=256, metavar="N",
                        help="tokens to measure, after a warm-up of a quarter (default: 256)")
    parser.add_argument("--routes", metavar="T", type=Path, help="recorded routing (covey trace)")
    parser.add_argument("--counts", metavar="C", type=Path,
                        help="made-up routing with counted frequencies: an npz of "
                             "'<domain>/counts' [layers, experts]")
    parser.add_argument("--arrivals", metavar="F", type=Path,
                        help="request trace: Azure, BurstGPT, Mooncake and like forms; Vidur's "
                             "lengths; a ServeGen client's trace, or a folder of those")
    parser.add_argument("--rate", type=float, metavar="R",
                        help="requests a second, drawn, for --arrivals that have no times")
    parser.add_argument("--lengths", metavar="F", type=Path,
                        help="the same traces, of which the lengths alone are taken: --requests "
                             "are always there")
    parser.add_argument("--most", type=engines.positive, default=100, metavar="N",
                        help="requests of --arrivals or --lengths (default: 100)")
    parser.add_argument("--divide", type=engines.positive, default=1, metavar="N",
                        help="divides all lengths of --arrivals or --lengths")
    parser.add_argument("--stretch", type=float, default=1.0, metavar="X",
                        help="multiplies all times of --arrivals")
    parser.add_argument("--seed", type=engines.count, default=0, metavar="N")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write all figures here")


def run(args: argparse.Namespace) -> int:
    """0. Raises BadInput for an unknown name and for what does not fit together (SIM-12)."""
    if args.list:
        print("\n".join(listing()))
        return 0
    model = model_of(args.model)
    platform = this_host(args.model, model, args.share) if args.platform == "this" else (
        platform_of(args.platform))
    routes, notes = routes_for(model, args.seed), [f"made-up routing, seed {args.seed}"]
    if args.routes:
        from reference.files.routing_trace import read_trace
        from reference.simulator.routes import RecordedRoutes

        trace = read_trace(args.routes)
        have = (len(trace.layers), trace.experts)
        if have != (len(model.moe_layers), model.experts):
            raise BadInput(f"--routes: {args.routes}: {have[0]} layers of {have[1]} experts; "
                           f"{model.name} has {len(model.moe_layers)} of {model.experts}")
        model = replace(model, top_k=trace.top_k)
        routes, notes = RecordedRoutes(trace), [f"routing of {len(trace.requests)} requests"]
    if args.counts:
        from reference.simulator.frequencies import FrequencyRouter, read_counts

        counts = read_counts(args.counts)
        routes = FrequencyRouter(counts, len(model.moe_layers), model.top_k, args.seed)
        notes = [f"made-up routing with the frequencies of {', '.join(counts)}, seed {args.seed}"]
        if routes.experts != model.experts:
            raise BadInput(f"--counts: {args.counts}: {routes.experts} experts; {model.name} has "
                           f"{model.experts}")
    arrivals, shapes, note = requests_of(args)
    notes += note
    most = max(args.requests, 32) if arrivals else args.requests
    guesses = {"prefetch": model.top_k} if args.predict != "none" else {}
    every = {
        scheduler: control(model, args.share, most, grouping=scheduler, eviction=args.cache,
                           readiness=args.readiness, **guesses)
        for scheduler in args.scheduler or [engines.SCHEDULER]
    }  # fmt: skip
    for options in every.values():
        simulated(args.predict, options, lambda visit: ())  # an unknown one is refused
    if guesses and "lockstep-blocking" in every:
        raise BadInput("--predict: lockstep-blocking reads nothing ahead; leave one of both out")
    size = model.bytes_of(args.stored)
    print(f"{platform.title}\n{model.title}: {model.all_experts} experts of {show_size(size)}, "
          f"{args.share:.1%} of them in memory; {'; '.join(notes)}")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--json", args.json)) if args.json else None
        for scheduler, options in every.items():
            got = simulate(platform, model, routes, options, requests=args.requests,
                           tokens=10**9 if arrivals else args.tokens,
                           warm_up=0 if arrivals else args.tokens // 4, prompt=args.prompt,
                           new_tokens=args.new_tokens, shapes=shapes, arrivals=arrivals,
                           stored=args.stored, predict=args.predict, seed=args.seed)  # fmt: skip
            found[scheduler] = got.as_dict()
            print(line(scheduler, got))
        if out:
            write_json(out, {"platform": platform.name, "model": model.name, "notes": notes,
                             "share": args.share, "requests": args.requests,
                             "schedulers": found})  # fmt: skip
    return 0


def requests_of(
    args: argparse.Namespace,
) -> tuple[list[Arrival] | None, Callable[[int], tuple[int, int]] | None, list[str]]:
    """Arrivals or, for a closed loop, lengths of --arrivals and --lengths, and what is told."""
    if args.arrivals and args.lengths:
        raise BadInput("--lengths: with --arrivals, which has lengths too; one of them expected")
    if args.rate is not None and not args.arrivals:
        raise BadInput(f"--rate: {args.rate:g} without --arrivals F, requests that have no times")
    if args.arrivals:
        arrivals = read_arrivals(args.arrivals, most=args.most, divide=args.divide,
                                 stretch=args.stretch, rate=args.rate, seed=args.seed)
        drawn = "" if args.rate is None else f" at {args.rate:g} a second, seed {args.seed}"
        drawn = f" drawn, seed {args.seed}" if is_servegen(args.arrivals) else drawn
        return arrivals, None, [f"{len(arrivals)} requests of {args.arrivals.name}{drawn}, lengths "
                                f"divided by {args.divide}, times by {1 / args.stretch:g}"]
    if args.lengths:
        found = read_lengths(args.lengths, most=args.most, divide=args.divide, seed=args.seed)
        return None, lambda n: found[n % len(found)], [
            f"lengths of {len(found)} requests of {args.lengths.name}, divided by {args.divide}"
        ]  # fmt: skip
    return None, None, []


def line(name: str, got: Result) -> str:
    """The figures for people; "?" where nothing in the window tells (SIM-10)."""

    def known(value: float | None, form: str) -> str:
        return "?" if value is None else format(value, form)

    def ms(seconds: float | None) -> str:
        return known(None if seconds is None else seconds * 1e3, ".0f")

    refused = f"; {got.refused} requests can never fit and were refused" if got.refused else ""
    stalls = sorted(got.stalls.items(), key=lambda x: -x[1])
    told = ", ".join(f"{reason} {part:.0%}" for reason, part in stalls if part >= 0.01)
    return (f"{name}: {got.tokens_per_s:.2f} tokens/s, {got.bound_share:.0%} of the bound; "
            f"{got.fetches_per_token:.1f} loads a token, channel {got.channel_busy:.0%} and "
            f"compute {got.compute_busy:.0%} busy; {known(got.batch_mean, '.1f')} requests a "
            f"step, hits {known(got.hit_rate, '.0%')} ({known(got.full_hit, '.0%')} full), "
            f"lag at most {got.lag_max_tokens:.1f} tokens, {ms(got.tpot_p50)} ms a token "
            f"(p99 {ms(got.tpot_p99)})" + (f"; {told}" if told else "") + refused)  # fmt: skip


def platform_of(word: str) -> platforms.Platform:
    """A platform by name, or of a TOML file."""
    path = Path(word)
    if path.suffix == ".toml":
        try:
            return platforms.parse(path.stem, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise BadInput(f"{path}: not a text") from None
        except OSError as error:
            raise BadInput(f"--platform: {path}: {error.strerror}") from None
    return platforms.load(word)


def model_of(word: str) -> models.ModelShape:
    """A model by name, or of a folder with config.json (weights are not needed)."""
    if word in models.names():
        return models.load(word)
    path = builtin.model(word)
    if not (path / "config.json").is_file():
        raise BadInput(f"--model: {word!r} is neither a folder with config.json nor one of: "
                       f"{', '.join(models.names())}")
    from reference.files.bare import BareModel, is_bare
    from reference.files.checkpoint import Checkpoint

    found: Any = BareModel.open(path) if is_bare(path) else Checkpoint.open(path)
    if not found.config.moe_layers:
        raise BadInput(f"--model: {word}: no routed experts")
    own = {"own": found.expert_bytes()}
    return models.of_config(found.config, builtin.name_of(path), expert_bytes=own)


def listing() -> list[str]:
    """Every platform with its sources, every model with its sizes."""
    lines = []
    for name in platforms.names():
        p = platforms.load(name)
        lines.append(f"{name}: {p.title}")
        for part in ("channel", "memory", "compute", "overhead", "host"):
            table = getattr(p, part)
            for key, value in vars(table).items() if table else ():
                lines.append(f"  {part}.{key} = {value:g}: {p.sources[f'{part}.{key}']}")
    for name in models.names():
        m = models.load(name)
        sizes = ", ".join(f"{show_size(n)} as {form}" for form, n in m.formats.items())
        lines.append(f"{name}: {len(m.moe_layers)} layers of {m.experts} experts, {m.top_k} a "
                     f"token; an expert takes {sizes}; {m.source}")
    return lines
