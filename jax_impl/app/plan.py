"""What a memory budget buys, before anything is read: sizes, slots, and tokens/s to expect.

Sizes come from config.json and the headers of the weights, by the arithmetic that a run uses. The
band comes from half a second of reading and computing; --no-probe leaves it out. A folder that
holds only config.json will do: sizes then follow from what it says.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from jax_impl.app import builtin, engines, estimate
from jax_impl.app.output import WholeFile, write_json
from reference.files.bare import BareModel, is_bare
from reference.files.budget import Sizes, available_memory, parse_size, show_size, show_size_exact
from reference.files.checkpoint import Checkpoint
from reference.vocab.errors import BadInput, BudgetTooSmall, Unsupported


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey plan`."""
    parser.add_argument("model", metavar="MODEL", type=builtin.model,
                        help="folder with config.json, with or without weights, or demo: built in")
    parser.add_argument("--memory", metavar="SIZE", default="auto",
                        help="bytes for routed experts: 4GiB, 40%% of them all, auto (default)")
    parser.add_argument("--host-memory", metavar="SIZE",
                        help="bytes of host memory between disk and device, as in covey run")
    parser.add_argument("--requests", metavar="N", type=engines.positive, default=8,
                        help="requests at a time, for the band (default: 8)")
    parser.add_argument("--max-running", type=engines.positive, metavar="N",
                        help="requests at a time that the KV cache is planned for, as in covey run")
    parser.add_argument("--kv-tokens", type=engines.positive, metavar="N",
                        help="tokens that the KV cache holds, as in covey run")
    parser.add_argument("--chunk", type=engines.positive, metavar="N", help="prompt tokens a visit")
    parser.add_argument("--compute", **engines.one_of(("f32", "bf16")), default="f32",
                        help="precision of matrix products (default: f32)")
    parser.add_argument("--disk", metavar="SIZE",
                        help="bytes a second that the disk gives, instead of measuring: 3.5GB")
    parser.add_argument("--no-probe", action="store_true", help="sizes only, nothing is measured")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write all of it here")


def run(args: argparse.Namespace) -> int:
    """0 for a plan that a run would accept. Raises BudgetTooSmall after showing what is known.
    Weights are read by the probe alone (PLAN-2)."""
    disk = parse_size(args.disk) if args.disk else None
    if disk == 0:
        raise BadInput("--disk: 0 bytes a second")
    model = engines.model_of(args)
    ckpt: Any = BareModel.open(model) if is_bare(model) else Checkpoint.open(model)
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--json", args.json)) if args.json else None
        document, refused = plan(ckpt, args)
        document = {"model": builtin.name_of(model), **document}
        print("\n".join(lines_of(document)))
        if not args.no_probe and not refused:
            document["band"] = estimate_of(ckpt, args, document, disk)
            print("\n".join(band_lines(document["band"])))
        if out:
            write_json(out, document)
    if refused:
        raise refused
    return 0


def plan(ckpt: Any, args: argparse.Namespace) -> tuple[dict[str, Any], BudgetTooSmall | None]:
    """All sizes by name, in bytes unless said otherwise, and the refusal if a run would refuse.

    PLAN-1: the very functions by which an engine sizes itself. Where the budget is too small the
    sizes are those of the least one.
    """
    from jax_impl.kv import KV_DTYPES, block_shapes
    from jax_impl.options import EngineOptions, control_options, plan_sizes
    from jax_impl.supported import require_supported

    given = {name: getattr(args, name) for name in ("max_running", "kv_tokens", "chunk")}
    given = {name: value for name, value in given.items() if value is not None}
    host = {"host_memory": args.host_memory} if args.host_memory else {}
    options = EngineOptions.of(memory=args.memory, compute=args.compute, **given, **host)
    config, refused = ckpt.config, None
    least = config.top_k * slot_of(ckpt)
    try:
        sizes, kv_tokens = plan_sizes(ckpt, options)
    except BudgetTooSmall as error:
        refused = error
        sizes, kv_tokens = plan_sizes(ckpt, EngineOptions.of(
            memory=least, compute=args.compute, **given))
    control_options(ckpt, options, sizes, kv_tokens)
    item = KV_DTYPES[options.kv_dtype].dtype.itemsize
    kv = [item * heads * (width if shape else 0)
          for layer in config.layers for shape in block_shapes(layer.attention, 1)
          for heads, _, width in ([shape] if shape else [])]
    windows = sorted({s.attention.window for s in config.layers if s.attention.window})
    notes = [*getattr(ckpt, "assumed", ()), *ckpt.notes]
    try:
        require_supported(config, str(ckpt.path))
    except Unsupported as error:
        notes.append(f"the fast engine refuses it: {error}")
    try:
        free = available_memory()
    except BadInput:
        free = None
    return {
        "family": config.family, "layers": len(config.layers),
        "moe_layers": len(config.moe_layers), "experts": config.experts, "top_k": config.top_k,
        "non_expert_bytes": ckpt.non_expert_bytes, "expert_bytes": sizes.expert,
        "experts_bytes": ckpt.experts_bytes, "slot_bytes": sizes.slot, "all_experts": sizes.experts,
        "budget_bytes": sizes.budget, "slots": sizes.slots,
        "share": sizes.slots / sizes.experts if sizes.experts else 1.0,
        "least_budget_bytes": least, "kv_bytes_a_token": sum(kv), "kv_tokens": kv_tokens,
        "windows": windows, "max_running": options.max_running,
        "host_bytes": sizes.host, "host_slots": sizes.host_slots,
        "held": held(sizes), "available_bytes": free, "notes": notes,
        "refused": str(refused) if refused else None,
    }, refused  # fmt: skip


def slot_of(ckpt: Any) -> int:
    """Bytes of a slot."""
    from jax_impl.options import expert_keys
    from reference.files.budget import slot_size

    return slot_size(ckpt.expert(*key) for key in expert_keys(ckpt))


def held(sizes: Sizes) -> dict[str, int]:
    """What a run holds from beginning to end, by part, in bytes."""
    return {"experts": sizes.slots * sizes.slot, "host": sizes.host_slots * sizes.slot,
            "weights": sizes.resident, "kv": sizes.kv,
            "rows": sizes.rows, "total": sizes.total}


def lines_of(d: dict[str, Any]) -> list[str]:
    """The sizes for people."""
    def line(name: str, text: str) -> str:
        return f"{name:18}{text}"

    lines = [line("model", f"{d['model']}: {d['family']}, {d['layers']} layers, "
                           f"{d['moe_layers']} with {d['experts']} experts, {d['top_k']} a token")]
    lines += [line("note", note) for note in d["notes"]]
    parts = d["held"]
    lines.append(line("other weights", f"{show_size(d['non_expert_bytes'])} stored, "
                                       f"{show_size(parts['weights'])} held"))
    if d["all_experts"]:
        lines += [
            line("experts", f"{d['all_experts']} of {show_size(d['expert_bytes'])}, "
                            f"{show_size(d['experts_bytes'])} in all; a slot takes "
                            f"{show_size(d['slot_bytes'])}"),
            line("smallest budget", f"{show_size_exact(d['least_budget_bytes'])}: {d['top_k']} "
                 f"slots, since a token needs {d['top_k']} experts of a layer at once"),
            line("if it were that" if d["refused"] else "this budget",
                 f"{show_size(d['budget_bytes'])}: {d['slots']} slots, "
                 f"{d['share']:.0%} of the experts, {d['slots'] / d['moe_layers']:.1f} a layer"),
        ]
        if d["host_slots"]:
            lines.append(line("host memory", f"{show_size(d['host_bytes'])}: {d['host_slots']} "
                              "experts between disk and device; the band leaves it out"))
    else:
        lines.append(line("experts", "none: any budget will do, nothing is fetched"))
    window = (f"; a layer with a window of {', '.join(map(str, d['windows']))} keeps no more"
              if d["windows"] else "")
    lines += [
        line("KV", f"{show_size(d['kv_bytes_a_token'])} a token{window}; room for "
                   f"{d['kv_tokens']} tokens of up to {d['max_running']} requests"),
        line("held in all", f"{show_size(parts['total'])}: experts {show_size(parts['experts'])}, "
             + (f"host memory {show_size(parts['host'])}, " if parts["host"] else "") +
             f"other weights {show_size(parts['weights'])}, KV {show_size(parts['kv'])}, "
             f"rows {show_size(parts['rows'])}"),
    ]
    if (free := d["available_bytes"]) is not None:
        fits = "fits" if parts["total"] < free else "does not fit"
        lines.append(line("", f"{fits} into the {show_size(free)} that are free here, beside the "
                              "interpreter and compiled code"))
    return lines


def estimate_of(
    ckpt: Any, args: argparse.Namespace, document: dict[str, Any], disk: float | None
) -> dict[str, Any]:
    """The band with what it rests on; `tokens_per_s` is None where it cannot be given."""
    speeds = estimate.probe(ckpt, args.compute, document["slots"], disk)
    dense = sum(ckpt.tensor(role).nbytes for role in ckpt.roles
                if role != "embed" or ckpt.config.tied)
    found: dict[str, Any] = {"requests": args.requests, **asdict(speeds), "tokens_per_s": None,
                             "assumed": list(estimate.ASSUMED)}
    try:
        band = estimate.band(ckpt.config, document["expert_bytes"] or _feed_forward(ckpt), dense,
                             document["share"], speeds, args.requests)
    except ValueError:
        return found
    return found | {"tokens_per_s": [band.low, band.high], "limit": band.limit,
                    "compute_s": list(band.compute_s), "fetch_s": list(band.fetch_s)}


def band_lines(b: dict[str, Any]) -> list[str]:
    """The band for people, with its assumptions (PLAN-3)."""
    disk = f"{b['disk'] / 1e6:.0f} MB/s ({b['how']})" if b["disk"] else b["how"]
    expert = f"{b['expert_s'] * 1e3:.3f} ms" if b["expert_s"] else "no kernel for it"
    lines = [f"{'probe':18}reads {disk}; a feed-forward on {estimate.TILE} rows: {expert}"]
    if b["tokens_per_s"] is None:
        return [*lines, f"{'expected':18}unknown: --disk SIZE states what was not measured"
                if b["expert_s"] else f"{'expected':18}unknown"]
    low, high = b["tokens_per_s"]
    lines.append(f"{'expected':18}{speed(low)} to {speed(high)} tokens/s over {b['requests']} "
                 f"requests; {b['limit']} bounds the upper end")
    for text in b["assumed"]:
        lines += wrap(text, 100, initial_indent=" " * 18, subsequent_indent=" " * 20)
    return lines


def speed(rate: float) -> str:
    """Three digits, and never an exponent: '0.0123', '12.3', '1234'."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}" if rate >= 1e-4 else f"{rate:.6f}"


def _feed_forward(ckpt: Any) -> int:
    """Bytes of what the probe runs in a dense model: the first layer's feed-forward."""
    return sum(ckpt.tensor(f"layers.0.{role}").nbytes for role in ("gate", "up", "down"))
