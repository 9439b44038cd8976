"""Draw what happened when, from an event log (covey run --log, covey demo --logs).

Prints how busy the channel and the processor were. --out writes a trace for https://ui.perfetto.dev
or chrome://tracing: a lane a load, a lane for steps, a track a request. --png draws channel and
compute as lanes and requests as colours. Several logs are drawn one below the other.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jax_impl.app.history import History, history_of
from jax_impl.app.output import WholeFile
from reference.files.event_log import read_log
from reference.vocab.errors import BadInput, CoveyError
from reference.vocab.ids import ENTRY

CHANNEL, COMPUTE, REQUESTS = "channel", "compute", "requests"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey timeline`."""
    parser.add_argument("events", metavar="EVENTS", type=Path, nargs="+",
                        help="event logs of runs (--log)")
    parser.add_argument("--out", metavar="X.json", type=Path, help="write a Perfetto trace here")
    parser.add_argument("--png", metavar="X.png", type=Path,
                        help="write a picture here (needs the extra plot)")
    parser.add_argument("--from", dest="start", metavar="S", type=second, action="append",
                        help="begin so many seconds after the first request arrived; may be given "
                             "once for each log")
    parser.add_argument("--for", dest="length", metavar="S", type=second, default=math.inf,
                        help="draw so many seconds")


def second(word: str) -> float:
    """argparse type: a number of seconds that is not negative."""
    value = float(word)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{word}; seconds, at least 0, expected")
    return value


def run(args: argparse.Namespace) -> int:
    """0 once everything is written (TIME-3)."""
    with ExitStack() as stack:
        out = stack.enter_context(WholeFile("--out", args.out)) if args.out else None
        png = stack.enter_context(WholeFile("--png", args.png, "wb")) if args.png else None
        starts = args.start or [0.0]
        if len(starts) not in (1, len(args.events)):
            raise BadInput(f"--from: {len(starts)} times for {len(args.events)} logs")
        histories = []
        for n, path in enumerate(args.events):
            log = read_log(path)
            if log.warning:
                print(log.warning)
            part = window(history_of(log), starts[n % len(starts)], args.length)
            histories.append((title_of(path, log.head), part))
        for title, history in histories:
            print(f"{title}: {summary(history)}")
        if out:
            try:
                json.dump(trace(histories), out.file, separators=(",", ":"))
            except OSError as error:
                raise CoveyError(f"--out: {out.target}: {error.strerror}") from None
            out.commit()
        if png:
            from jax_impl.app.picture import draw

            draw(histories, png)
            png.commit()
    return 0


def title_of(path: Path, head: dict[str, Any]) -> str:
    """A log's name: what decided in it, and the name of its file where that says more."""
    options = head["options"]
    decider = options.get("scheduler") or options["grouping"]  # of another kind (LOG-8), or ours
    cache = f"{options['eviction']} cache" if "eviction" in options else "cache of its own"
    title = f"{decider}, {cache if options['layers'] else 'dense'}"
    return title if path.stem == decider else f"{path.stem}: {title}"


def window(history: History, after: float, length: float) -> History:
    """The part that --from and --for ask for, counted from the first arrival.

    Raises BadInput for a log in which nothing happened, or not then.
    """
    first = min((life.start for life in history.lives.values()), default=None)
    if first is None:
        raise BadInput("no request arrived in this log: there is nothing to draw")
    start = first + after
    if start >= history.end:
        raise BadInput(f"--from: {after:g} s; the log ends {history.end - first:.3f} s after "
                       "the first request arrived")
    whole = after == 0 and length == math.inf
    return history if whole else history.cut(start, min(history.end, start + length))


def summary(history: History) -> str:
    """Busy shares and counts, on one line."""
    span = max(history.end - history.start, 1e-9)
    channel, compute = history.busy()
    rows = sum(sum(step.rows.values()) for step in history.steps)
    tokens = sum(len(life.tokens) for life in history.lives.values())
    return (
        f"{span:.3f} s, {len(history.lives)} requests, {tokens} tokens ({tokens / span:.1f}/s); "
        f"channel busy {channel / span:.0%} with {len(history.loads)} loads, compute busy "
        f"{compute / span:.0%} with {len(history.steps)} steps of "
        f"{rows / max(1, len(history.steps)):.1f} rows"
    )


def layer_name(layer: int) -> str:
    """'layer 3', or 'entry' for the visit that opens a chunk."""
    return "entry" if layer == ENTRY else f"layer {layer}"


def trace(histories: list[tuple[str, History]]) -> dict[str, Any]:
    """The Trace Event document of Perfetto and Chrome; its times are microseconds (TIME-1)."""
    events: list[dict[str, Any]] = []
    for index, (title, history) in enumerate(histories):
        prefix = f"{title}: " if len(histories) > 1 else ""
        pids = {name: 3 * index + i + 1 for i, name in enumerate((CHANNEL, COMPUTE, REQUESTS))}
        for name, pid in pids.items():
            events.append(meta("process_name", pid, 0, name=prefix + name))
            events.append(meta("process_sort_index", pid, 0, sort_index=pid))
        events += _channel(history, pids[CHANNEL])
        events += _compute(history, pids[COMPUTE])
        events += _requests(history, pids[REQUESTS])
    return {"displayTimeUnit": "ms", "traceEvents": events}


def meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    """A naming record."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def slice_(name: str, pid: int, tid: int, start: float, end: float, zero: float,
           **args: Any) -> dict[str, Any]:
    """An interval of a track."""
    begin = round((start - zero) * 1e6, 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin,
            "dur": max(0.0, round((end - zero) * 1e6 - begin, 3)), "args": args}


def _channel(h: History, pid: int) -> Iterator[dict[str, Any]]:
    for lane in range(h.lanes):
        yield meta("thread_name", pid, lane + 1, name=f"lane {lane + 1}")
    for x in h.loads:
        more = {"error": x.error} if x.error else {}
        yield slice_(f"{x.layer}/{x.expert}", pid, x.lane + 1, x.start, x.end, h.start,
                     ticket=x.ticket, slot=x.slot, bytes=x.nbytes, guess=x.guess,
                     waited_for_by=[h.lives[n].id for n in x.wanted if n in h.lives], **more)


def _compute(h: History, pid: int) -> Iterator[dict[str, Any]]:
    yield meta("thread_name", pid, 1, name="steps")
    for x in h.steps:
        rows = sum(x.rows.values())
        more = {"error": x.error} if x.error else {}
        yield slice_(f"{layer_name(x.layer)}: {rows} row{'s' * (rows != 1)}", pid, 1, x.start,
                     x.end, h.start, step=x.number, experts=x.experts,
                     requests={h.lives[n].id: k for n, k in x.rows.items() if n in h.lives},
                     **more)


def _requests(h: History, pid: int) -> Iterator[dict[str, Any]]:
    for life in h.lives.values():
        yield meta("thread_name", pid, life.number + 1, name=life.id)
        for x in life.states:
            name = x.what if x.what == "queued" else f"{x.what}: {layer_name(x.layer)}"
            yield slice_(name, pid, life.number + 1, x.start, x.end, h.start)
        for n, t in enumerate(life.tokens):
            yield {"ph": "i", "s": "t", "name": f"token {n + 1}", "pid": pid,
                   "tid": life.number + 1, "ts": round((t - h.start) * 1e6, 3)}
