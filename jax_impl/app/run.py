"""Generate for a file of requests.

All requests go at their own pace under one memory budget. Prints one line a request, then where
the time went and how far that was from the bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jax_impl.app import engines, residency, sampling_flags
from jax_impl.app.answer import Answer
from jax_impl.app.output import Progress, WholeFile, write_json
from jax_impl.app.stops import checked, watching
from jax_impl.app.text import Text
from jax_impl.app.waiting import Interrupt, run_all
from reference.files.requests import Request
from reference.vocab.sampling import Logprobs

SHOWN_MAX = 24
"""Token ids that a line shows where there is no text."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey run`."""
    engines.arguments(parser)
    parser.add_argument("--requests", metavar="F", type=Path, required=True,
                        help="JSON lines {id, prompt, max_new_tokens, arrival_s, stop, and how "
                             "to choose tokens}, or one document {requests: [...]}")
    parser.add_argument("--max-new-tokens", type=engines.count, metavar="N", default=32,
                        help="for requests that do not say (default: 32)")
    sampling_flags.arguments(parser)
    parser.add_argument("--ignore-eos", action="store_true",
                        help="go on to max_new_tokens whatever is sampled")
    residency.arguments(parser)
    parser.add_argument("--json", metavar="OUT", type=Path, help="write results and totals here")
    parser.add_argument("--log", metavar="EVENTS", type=Path, help="write the event log here")
    parser.add_argument("--check", action="store_true",
                        help="judge the event log at the end; with jax also verify a checksum of "
                             "every expert at every use")


def run(args: argparse.Namespace) -> int:
    """0 when every request ended well, 1 when one failed or the log is faulty (APP-8)."""
    from jax_impl.app.main import INTERRUPTED

    model = engines.model_of(args)
    options = engines.options_of(args)
    progress = Progress(args.quiet)
    text = Text(model)
    requests = requests_of(args, model, text)
    options |= {"ignore_eos": args.ignore_eos, "log": args.log, "keep_log": args.check}
    if args.engine == "jax":
        options |= {"progress": progress.say, "warn": progress.warn, "check": args.check}
    known = residency.before(args, model)
    if known:
        options["warm"] = tuple(known)
    with ExitStack() as stack:
        keep = (stack.enter_context(WholeFile("--save-residency", args.save_residency))
                if args.save_residency else None)
        out = stack.enter_context(WholeFile("--json", args.json)) if args.json else None
        interrupt = stack.enter_context(Interrupt())
        with engines.open_engine(args.engine, model, options) as engine:
            answers: dict[str, Answer] = {}
            handles = run_all(requests, watching(engine.submit, text, answers), progress,
                              interrupt, virtual=args.engine == "reference")
            rows = [record(request, handle, answers.get(request.id), text)
                    for request, handle in zip(requests, handles, strict=True)]
        # Closed: the log has its last record and the totals stand.
        totals = engines.totals_of(engine)
        why = explain(args.engine, totals, rows)
        if keep:
            residency.save(keep, model, engine, known)
        if out:
            write_json(out, {"requests": rows, "totals": totals | {"why": why}})
    for row in rows:
        print(line_of(row))
    print(why)
    status = 1 if any(row["finish_reason"] in ("error", "rejected") for row in rows) else 0
    if args.check:
        from jax_impl.app.check import judge, judge_again
        from reference.files.event_log import Log

        head, *records = engine.records
        log, name = Log(head, records, complete=True), str(args.log or "log")
        status = max(status, judge(log, name, outputs=rows), judge_again(log, name))
    return INTERRUPTED if interrupt.noted else status


def requests_of(args: argparse.Namespace, model: Path, text: Text) -> list[Request]:
    """The requests of --requests with all settled that they leave open. Raises BadInput."""
    requests = engines.requests_of(args.requests, model, text, args.max_new_tokens)
    defaults = sampling_flags.defaults(args, model)
    for request in requests:
        checked(request.stop, text, f"request '{request.id}'")
    return [request.with_defaults(*defaults) for request in requests]


def record(
    request: Request, handle: Any, answer: Answer | None, text: Text
) -> dict[str, Any]:
    """What OUT says of one request; `handle` is None for one that never arrived (APP-8)."""
    if handle is None:
        return {"id": request.id, "tokens": [], "text": text.decode([]),
                "finish_reason": "cancelled", "error": None, "ttft_s": None, "tpot_s": None,
                "token_s": [], "prompt_tokens": len(request.prompt),
                "max_new_tokens": request.max_new_tokens}
    result = handle.result()
    if answer is None:  # with stop texts it grew as the tokens came
        answer = Answer(text)
        for token in result.tokens:
            answer.push(token)
    answer.end()
    tokens, reason = answer.tokens, "stop" if answer.stopped else result.finish_reason
    times = list(result.token_s[: len(tokens)])
    return {
        "id": request.id,
        "tokens": tokens,
        "text": answer.text,
        "finish_reason": reason,
        "error": None if reason == "stop" else result.error,
        "ttft_s": result.ttft_s,
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        "token_s": times,
        "prompt_tokens": len(request.prompt),
        "max_new_tokens": request.max_new_tokens,
    } | logprobs_of(result.logprobs, len(tokens))


def logprobs_of(found: Sequence[Logprobs] | None, count: int) -> dict[str, Any]:
    """The member `logprobs`, one entry a token, where the request asks for it (APP-8)."""
    if found is None:
        return {}
    return {"logprobs": [{"logprob": one.chosen, "top": one.top} for one in found[:count]]}


def line_of(row: dict[str, Any]) -> str:
    """One line for people about one request."""
    if row["error"]:
        said = row["error"]
    elif row["text"] is not None:
        said = repr(row["text"])
    else:
        tokens = row["tokens"]
        said = " ".join(map(str, tokens[:SHOWN_MAX])) + (" ..." if len(tokens) > SHOWN_MAX else "")
    return f"{row['id']}: {row['finish_reason']}, {len(row['tokens'])} tokens: {said}"


def explain(engine: str, totals: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Why it was not faster, as text."""
    if engine == "jax":
        from jax_impl.totals import why

        return why(totals)
    tokens = sum(len(row["tokens"]) for row in rows)
    seconds, bound = totals["seconds"], totals["bound_s"]
    limit = "fetching" if totals["channel_s"] > totals["compute_s"] else "computing"
    return (
        f"{tokens} tokens in {seconds:.6f} s of virtual time: computing {totals['compute_s']:.6f} "
        f"s, fetching {totals['channel_s']:.6f} s ({totals['loads']} loads, {totals['bytes']} "
        f"bytes). {limit.capitalize()} was the limit; with perfect overlap it would have taken "
        f"{bound:.6f} s: {bound / seconds if seconds else 1.0:.0%} of the bound was reached."
    )
