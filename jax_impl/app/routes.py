"""Recorded routing: which experts each token chose, as a file for simulators and caches.

`record` runs requests and writes what every router chose; `show` prints what such a file has in it
(or a route trace of BigMoeOnEdge): what tokens and requests share, what a cache would hit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jax_impl.app import builtin, engines, sampling_flags
from jax_impl.app.output import Progress, WholeFile, write_json
from jax_impl.app.run import requests_of
from jax_impl.app.stops import watching
from jax_impl.app.text import Text
from jax_impl.app.waiting import Interrupt, run_all
from reference.files.checkpoint import Checkpoint
from reference.files.routing_trace import RoutingTrace, read_trace, trace_of_records, write_trace
from reference.simulator.traits import cache_hits, distinct, kept, overlap, top_share
from reference.vocab.errors import CoveyError, Unsupported

LAGS = (1, 2, 4, 8, 32)
CROWDS = (1, 2, 4, 8, 16, 32)
SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)
MOST_SHOWN = 512
"""Tokens of a request that `show` looks at."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey trace`."""
    what = parser.add_subparsers(dest="what", required=True, metavar="{record,show}")
    record = what.add_parser("record", help="run requests and write what every router chose")
    engines.arguments(record)
    record.add_argument("--requests", metavar="F", type=Path, required=True,
                        help="requests, as for covey run")
    record.add_argument("-o", "--out", metavar="T", type=Path, required=True,
                        help="npz file to write")
    record.add_argument("--max-new-tokens", metavar="N", type=engines.count, default=128,
                        help="for requests that do not say (default: 128)")
    sampling_flags.arguments(record, "logprobs")
    record.add_argument("--ignore-eos", action="store_true",
                        help="go on to max_new_tokens whatever is sampled")
    show = what.add_parser("show", help="what tokens and requests share, what a cache would hit")
    show.add_argument("trace", metavar="T", type=Path, help="npz, or BigMoeOnEdge's CSV")
    show.add_argument("--json", metavar="OUT", type=Path, help="write all of it here")


def run(args: argparse.Namespace) -> int:
    """0 when all was written or shown; 1 when a request failed on its way (TRACE-4)."""
    return record(args) if args.what == "record" else show(args)


def record(args: argparse.Namespace) -> int:
    """Run the requests with the engine's log in memory, and keep its routers' words."""
    from jax_impl.app.main import INTERRUPTED

    model = engines.model_of(args)
    options = engines.options_of(args)
    progress = Progress(args.quiet)
    text = Text(model)
    requests = requests_of(args, model, text)
    checkpoint = Checkpoint.open(model)
    checkpoint.close()
    config = checkpoint.config
    if not config.moe_layers:
        raise Unsupported(str(model), "model without routed experts", "mixtures of experts")
    options |= {"keep_log": True, "ignore_eos": args.ignore_eos}
    if args.engine == "jax":
        options |= {"progress": progress.say, "warn": progress.warn}
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--out", args.out, "wb"))
        interrupt = stack.enter_context(Interrupt())
        with engines.open_engine(args.engine, model, options) as engine:
            handles = run_all(requests, watching(engine.submit, text, {}), progress, interrupt,
                              virtual=args.engine == "reference")
            results = [handle.result() for handle in handles if handle is not None]
            records = engine.records
        engines.totals_of(engine)
        trace = trace_of_records(records, builtin.name_of(model), config.experts, config.top_k,
                                 config.moe_layers, checkpoint.expert_bytes())
        if not trace.requests:
            raise CoveyError("no request came through all layers; nothing is written")
        try:
            write_trace(out.file, trace)
        except OSError as error:
            raise CoveyError(f"--out: {args.out}: {error.strerror}") from None
        out.commit()
    failed = [f"{r.id}: {r.error}" for r in results if r.error]
    print("\n".join(failed + [summary(trace)]))
    if interrupt.noted:
        return INTERRUPTED
    return int(bool(failed) or len(trace.requests) < len(requests))


def summary(trace: RoutingTrace) -> str:
    """One line: how much there is."""
    tokens = sum(len(r.topk) for r in trace.requests)
    return (f"{trace.model}: {len(trace.requests)} requests, {tokens} tokens, {len(trace.layers)} "
            f"layers of {trace.experts} experts, {trace.top_k} a token")


def show(args: argparse.Namespace) -> int:
    """Print the traits of a trace."""
    trace = read_trace(args.trace)
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--json", args.json)) if args.json else None
        found = traits(trace)
        print(summary(trace))
        for name, value in found.items():
            line = "  ".join(f"{k + ':' if k else ''} {v:.3g}".strip() for k, v in value.items())
            print(f"{name:48}{line}")
        if out:
            write_json(out, {"trace": summary(trace), **found})
    return 0


def traits(trace: RoutingTrace) -> dict[str, dict[str, Any]]:
    """What is worth knowing of decoding tokens; of whole requests where none decodes."""
    texts = [r.topk[r.prompt_len :] for r in trace.requests]
    texts = [t[:MOST_SHOWN] for t in texts if len(t) > 1]
    if not texts:
        texts = [r.topk[:MOST_SHOWN] for r in trace.requests]
    longest = max(map(len, texts))
    together = crowd(texts)
    found: dict[str, dict[str, Any]] = {
        "kept from the token so many before": {
            str(d): float(np.mean([kept(t, d) for t in texts if len(t) > d]))
            for d in LAGS if d < longest
        },
        "chance": {"": trace.top_k / trace.experts},
        "distinct experts of a layer, requests in step": {
            str(n): distinct(together[:n]) for n in CROWDS if n <= len(together)
        },
        "the most used quarter takes": {
            "of all": top_share(np.concatenate(texts), trace.experts, 0.25),
            "of a request": float(np.mean([top_share(t, trace.experts, 0.25) for t in texts])),
        },
    }  # fmt: skip
    if len(together) > 1:
        found["experts of two requests in step that are equal"] = {
            "": overlap(together[0], together[1])}
    for n in sorted({1, len(together)}):
        for share in SHARES:
            hit, full, _ = cache_hits(together[:n], max(1, round(share * trace.experts)))
            for name, value in ("hits", hit), ("full hits", full):
                name = f"{name}, LRU a layer, {n} in step"
                found.setdefault(name, {})[f"{share:.1%}"] = value
    return found


def crowd(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Up to 8 of the longest requests, cut to one length."""
    some = sorted(texts, key=len, reverse=True)[:8]
    return [t[: len(some[-1])] for t in some]
