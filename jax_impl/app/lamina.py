"""Attention offloading: how many devices for a model and a load (`covey lamina plan`), what the
paper's tables give when computed again (`covey lamina tables`), and a picture of the pipeline at
work on this machine's CPU (`covey lamina picture`). `covey demo --lamina` shows that it is exact.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path

from jax_impl.app import builtin
from jax_impl.app.output import WholeFile, write_json
from reference.files.bare import BareModel, is_bare
from reference.files.checkpoint import Checkpoint
from reference.simulator.lamina import offloaded, plan, tables
from reference.simulator.lamina.costs import Efficiency
from reference.simulator.lamina.hardware import DEVICES, NETWORKS, device, network
from reference.simulator.lamina.workloads import (
    MODELS,
    TRACES,
    Lengths,
    Shape,
    lengths_of,
    read_trace,
    shape_of,
)
from reference.vocab.errors import BadInput

SHOWN = 12
MOST = {"batches": 64, "memory_devices": 64, "max_compute": 256, "max_memory": 256, "bytes": 8}
"""The most that a count may be."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """`covey lamina WHAT ...`."""
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    p = what.add_parser(
        "plan", help="pool sizes for a model, a load and limits", allow_abbrev=False
    )
    p.add_argument("model", help=f"{', '.join(MODELS)}, or a checkpoint directory "
                   "(headers only; config.json alone will do)")
    p.add_argument(
        "--trace",
        default="azure-conv",
        help=f"{', '.join(TRACES)}; a trace file; or PROMPT,OUTPUT tokens",
    )
    p.add_argument("--compute", default="H100", help=f"compute device: {', '.join(DEVICES)}")
    p.add_argument("--memory", default="H20", help="memory device, likewise")
    p.add_argument("--network", default="fhbn", help=f"{', '.join(NETWORKS)}")
    p.add_argument(
        "--token-ms", type=float, default=float("inf"), help="most milliseconds between tokens"
    )
    p.add_argument("--cost", type=float, default=float("inf"), help="most dollars an hour")
    p.add_argument("--max-compute", type=int, default=8)
    p.add_argument("--max-memory", type=int, default=16)
    p.add_argument("--batches", type=int, default=4, help="most batches in flight")
    p.add_argument("--partition", choices=("head", "request"), default="head")
    p.add_argument("--by", choices=("dollar", "rate"), default="dollar")
    p.add_argument("--usable", type=float, default=0.9, help="share of memory that can be used")
    p.add_argument(
        "--efficiency",
        default="1,1,1",
        help="shares of the peaks that are reached: FLOPS,WEIGHTS,CACHE",
    )
    p.add_argument("--bytes", type=int, default=2, help="bytes of an element of weights and KV")
    p.add_argument("--json", type=Path)
    what.add_parser("tables", help="the paper's tables, computed again", allow_abbrev=False)
    p = what.add_parser(
        "sweep", help="pool sizes on a trace served from a full queue", allow_abbrev=False
    )
    p.add_argument("model", choices=tuple(MODELS))
    p.add_argument("--trace", type=Path, required=True, help="a trace: .csv or .jsonl, or with .gz")
    p.add_argument("--partition", choices=("head", "request"), default="head")
    p = what.add_parser(
        "picture", help="run the built-in model over two pools and draw it", allow_abbrev=False
    )
    p.add_argument("out", type=Path, help="the PNG to write (needs matplotlib)")
    p.add_argument("--batches", type=int, default=3, help="batches in flight")
    p.add_argument("--memory-devices", type=int, default=2)
    p.add_argument("--order", choices=("rotation", "queue"), default="rotation")


def run(args: argparse.Namespace) -> int:
    """Plan or tables; status 1 when no configuration keeps the limits."""
    if args.what == "tables":
        print("\n".join(table_lines()))
        return 0
    if args.what == "sweep":
        print("\n".join(sweep_lines(args.model, read_trace(args.trace), args.partition)))
        return 0
    if args.what == "picture":
        from jax_impl.app import lamina_picture

        _check_counts(args, "batches", "memory_devices")
        with WholeFile("picture", args.out, "wb") as out:
            lamina_picture.run(out.file, args.batches, args.memory_devices, args.order)
            out.commit()
        return 0
    if args.json is None:
        return _plan(args, None)
    with WholeFile("--json", args.json) as out:
        return _plan(args, out)


def _check_counts(args: argparse.Namespace, *names: str) -> None:
    """Each is tried, drawn or run one by one."""
    for name in names:
        if not 1 <= getattr(args, name) <= MOST[name]:
            raise BadInput(f"--{name.replace('_', '-')}: {getattr(args, name)}; from 1 to "
                           f"{MOST[name]} expected")


def _plan(args: argparse.Namespace, out: WholeFile | None) -> int:
    load, shape = load_of(args.trace), shape_named(args.model, args.bytes)
    eff = efficiency_of(args.efficiency)
    _check_counts(args, "max_compute", "max_memory", "batches", "bytes")
    if not 0 < args.usable <= 1:
        raise BadInput(f"--usable: {args.usable}; more than 0 and at most 1 expected")
    for name in ("token_ms", "cost"):
        if not getattr(args, name) > 0:
            raise BadInput(f"--{name.replace('_', '-')}: more than 0 expected")
    limits = plan.Limits(
        args.token_ms / 1e3, args.cost, args.max_compute, args.max_memory, args.batches
    )
    compute, memory, net = device(args.compute), device(args.memory), network(args.network)
    # LAMINA-22: pools beside what the same compute devices do alone, under the same limits.
    found = plan.best(
        plan.choices(shape, load, compute, memory, net, limits, args.usable, eff, args.partition),
        args.by,
    )
    alone = plan.best(
        plan.monolithic_choices(shape, load, compute, limits, args.usable, eff), args.by
    )
    print(
        f"{shape.name}: {shape.weights / 1e9:.1f} GB of weights, {shape.kv_token} KV bytes a token"
        f"; {load.name}: {load.prompt:.0f} + {load.output:.0f} tokens; {args.compute} and "
        f"{args.memory} over {args.network}, {args.usable:.0%} of memory"
    )
    if not found:
        print("no configuration of the two pools keeps these limits")
    for line in rows(found[:SHOWN]):
        print(line)
    if alone:
        print(f"without a memory pool, {args.compute} alone:")
        for line in rows(alone[:3]):
            print(line)
    if out is not None:
        document = {"pools": [asdict(c) for c in found], "monolithic": [asdict(c) for c in alone]}
        write_json(out, document)
    if len(found) > SHOWN:
        print(f"{len(found) - SHOWN} more; --json lists all", file=sys.stderr)
    return 0 if found else 1


def rows(found: list[plan.Choice]) -> list[str]:
    """A table of configurations, best first."""
    lines = [
        "compute  memory  batches  requests  ms/token   tokens/s  $/hour  ktokens/$  "
        "limit    prompts"
    ]
    for c in found:
        s = c.served
        lines.append(
            f"{c.compute:7d}  {c.memory:6d}  {c.batches or '-':>7}  {s.batch:8.1f}  "
            f"{s.token_s * 1e3:8.1f}  {s.tokens_per_s:9.0f}  {s.price:6.2f}  "
            f"{s.tokens_per_dollar / 1e3:9.0f}  {c.limited_by:7}  "
            f"{'fit' if c.prefill_fits else 'exceed the ports'}"
        )
    return lines


def load_of(text: str) -> Lengths:
    """A known trace, a file, or PROMPT,OUTPUT."""
    if text in TRACES:
        return TRACES[text]
    parts = text.split(",")
    if len(parts) == 2 and all(re.fullmatch("[0-9]{1,12}", p.strip()) for p in parts):
        prompt, output = map(int, parts)
        if prompt < 1 or output < 1:
            raise BadInput(f"--trace: {text}; at least 1 token each expected")
        return Lengths(text, prompt, output, 0, "given")
    if not Path(text).is_file():
        raise BadInput(f"--trace: {text!r} is no file; known: {', '.join(TRACES)}")
    return lengths_of(read_trace(Path(text)), text)


def shape_named(text: str, element: int) -> Shape:
    """A model of the paper, or a checkpoint's."""
    if text in MODELS:
        return MODELS[text]
    path = builtin.model(text)
    if not path.is_dir():
        raise BadInput(
            f"model: {text!r} is no directory; known: {builtin.NAME}, {', '.join(MODELS)}"
        )
    ckpt = BareModel.open(path) if is_bare(path) else Checkpoint.open(path)
    return shape_of(ckpt.config, text, element)


def efficiency_of(text: str) -> Efficiency:
    """Three shares."""
    try:
        shares = [float(x) for x in text.split(",")]
        if len(shares) == 3 and all(0 < x <= 1 for x in shares):
            return Efficiency(*shares)
    except ValueError:
        pass
    raise BadInput(f"--efficiency: {text!r}; three shares, each above 0 and at most 1, expected")


def table_lines() -> list[str]:
    """Every table of reference.simulator.lamina.tables as text."""
    out: list[str] = ["Throughput at equal cost (u = 0.9, FHBN, ideal peaks)"]
    out.append(
        "model trace        alone: B  ms/token  tok/s   pools: B  ms/token  tok/s   "
        "B x  tok/s x  one batch x  per $ x"
    )
    for model, trace in tables.CELLS:
        c = tables.cell(model, trace)
        out.append(
            f"{model:5} {trace:10} {c.alone.batch:9.1f} {c.alone.token_s * 1e3:9.1f} "
            f"{c.alone.tokens_per_s:6.0f} {c.two.batch:10.1f} {c.two.token_s * 1e3:9.1f} "
            f"{c.two.tokens_per_s:6.0f} {c.batch_ratio:5.2f} {c.throughput_ratio:8.2f} "
            f"{c.single_ratio:12.2f} {c.per_dollar_ratio:8.2f}"
        )
    out += ["", "Least bandwidth, GB/s, 70B on one H100 and one H20, at most 20 % slower"]
    out.append("context    B = 16     64    100    200    300")
    for length, row in tables.bandwidth_curve().items():
        out.append(f"{length:7d}  " + " ".join(f"{x:6.1f}" for x in row))
    out += ["", "Requests held, over those of the monolithic system at equal cost"]
    for usable in (0.80, 0.85, 0.90, 0.95):
        cells = "  ".join(f"{m} {x:.2f}" for m, x in tables.batch_ratios(usable).items())
        out.append(f"u = {usable:.2f}  {cells}")
    out += ["", "Queries first, share of a layer saved at 4096 tokens"]
    for model, sizes in (("65B", (4, 8, 32)), ("70B", (4, 128, 256))):
        cells = "  ".join(f"B = {n}: {tables.overlap(model, n):.1%}" for n in sizes)
        out.append(f"{model}  {cells}")
    out += [
        "",
        "Parts of a step, ms, 70B at 4096 tokens, one batch",
        "    B  model  attention   wire  sum  observed",
    ]
    for r in tables.breakdown("70B", (4, 32, 128, 256), 4096):
        total = r.model_s + r.attention_s + r.wire_s
        values = (r.model_s, r.attention_s, r.wire_s, total, r.observed_s)
        out.append(f"{r.batch:5d}  " + "  ".join(f"{x * 1e3:6.2f}" for x in values))
    return out + offloaded_lines()


def sweep_lines(model: str, requests: list[tuple[int, int]], partition: str) -> list[str]:
    """Tokens/s (and mean batch) for pairs of pool sizes; heads only over legal numbers."""
    shares = MODELS[model].head_shares
    memory = tuple(b for b in (1, 2, 4, 8) if partition == "request" or b in shares)
    found = tables.trace_sweep(model, requests, (1, 2, 4), memory, partition=partition)
    out = [
        f"{model}, {len(requests)} requests, two batches in flight, H100 and H20: tokens/s "
        "(mean batch)",
        "compute  " + "".join(f"{f'{b} memory':>18}" for b in memory),
    ]
    for a in (1, 2, 4):
        cells = [found[a, b] for b in memory]
        told = [
            "-" if c is None else
            f"{c.tokens_per_s:10.0f} ({c.batch:4.0f})" if c.steps else "short" for c in cells
        ]  # fmt: skip
        out.append(f"{a:7d}  " + "".join(f"{cell:>18}" for cell in told))
    if None in found.values():
        out.append("-: the weights do not fit into so many compute devices")
    if any(c is not None and not c.steps for c in found.values()):
        out.append("short: the trace ends before the pool is full, or nothing of it fits")
    return out


def offloaded_lines() -> list[str]:
    """Two fixed batches in rotation against the scheduler's groups, experts partly elsewhere."""
    s = offloaded.Setting()
    total = s.layers * s.experts
    out = [
        "",
        f"Experts offloaded too: tokens/s of the scheduler's groups over two batches in "
        f"rotation ({s.layers} layers of {s.experts} experts, top {s.top_k}; virtual time)",
        "requests  " + "  ".join(f"{n / total:.0%} of experts" for n in (48, 96, 144, 192)),
    ]
    for requests in (4, 16, 32):
        cells = []
        for slots in (48, 96, 144, 192):
            gain = offloaded.compare(offloaded.Setting(requests=requests, slots=slots)).gain
            cells.append(f"{gain:>13.2f}x")
        out.append(f"{requests:8d}  " + "  ".join(cells))
    return out
