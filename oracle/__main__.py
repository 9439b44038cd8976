"""The judge from the command line: `python -m oracle explore`, `mutants`, `replay`, `walks`.

Results are JSON (to --json FILE, or to standard output with `-`); what a person reads goes to
standard error. Exit status 0: all as it should be; 1: a violation, a count that differs from the
pinned one, or a fault that lived; 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from oracle import turns
from oracle.cases import case_of, play, read_cases, write_cases
from oracle.checkers import check_log
from oracle.explorer import Report, explorer_of
from oracle.faults import ALL, EQUIVALENT
from oracle.mutants import Verdict, kill_by_name
from oracle.pins import difference, read_pins, write_pins
from oracle.scopes import SCOPES
from oracle.swarm import SWARMS, WIDE, decisions, swarm
from oracle.walks import WALKS, pin, pinned, walk
from reference.control.scheduler import Scheduler
from reference.files.regular import reason
from reference.files.strict_json import place
from reference.vocab.errors import BadInput

X = TypeVar("X")
Y = TypeVar("Y")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m oracle", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explore_p = commands.add_parser("explore", help="explore small worlds whole")
    explore_p.add_argument("--scopes", default="ci", help="ci, long, all, or a scope's name")
    explore_p.add_argument("--pin", action="store_true", help="write the counts instead of judging")
    mutants_p = commands.add_parser("mutants", help="seed faults; each must be noticed")
    mutants_p.add_argument("--only", default="", help="one fault's name")
    mutants_p.add_argument("--keep", action="store_true", help="keep the shortest event lists")
    replay_p = commands.add_parser("replay", help="play kept or printed event lists")
    replay_p.add_argument("file", type=Path, help="one case a line")
    walks_p = commands.add_parser("walks", help="random walks; every decision is a pinned one")
    walks_p.add_argument("--pin", action="store_true", help="write the digests instead of judging")
    for one in (explore_p, mutants_p):
        one.add_argument("--json", default="", metavar="OUT", help="file, or - for stdout")
        one.add_argument("--jobs", type=_jobs, default=2, help="processes (default 2)")
    args = parser.parse_args(argv)
    commands_ = {"explore": explore, "mutants": mutants, "replay": replay, "walks": walks}
    try:
        _check_out(getattr(args, "json", ""))
        return commands_[args.command](args)
    except BadInput as error:
        _err(f"python -m oracle {args.command}: {error}")
        return 2


def _jobs(word: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r}; at least 1 expected")
    return int(word)


def _check_out(where: str) -> None:
    """Raises BadInput for a --json that cannot be written, before anything is worked out."""
    if where not in ("", "-"):
        try:
            Path(where).open("a").close()
        except OSError as error:
            raise BadInput(f"--json {place(where)}: cannot be written: {reason(error)}") from None


def explore(args: argparse.Namespace) -> int:
    """Explore the chosen scopes; compare the counts with the pinned ones."""
    if args.scopes in ("ci", "long", "all"):
        names = [n for n, s in SCOPES.items() if args.scopes in ("all", s.suite)]
    elif args.scopes in SCOPES:
        names = [args.scopes]
    else:
        print(f"--scopes {args.scopes}: known are ci, long, all, {', '.join(SCOPES)}",
              file=sys.stderr)  # fmt: skip
        return 2
    began, pins, bad = time.perf_counter(), read_pins(), 0
    reports = []
    for report in _each(explore_one, names, args.jobs):
        reports.append(report)
        wrong = "" if args.pin else difference(report, pins)
        bad += bool(report.violations or wrong)
        _say(report, wrong)
    seconds = time.perf_counter() - began
    scopes = [_scope_json(r) for r in reports]
    _write(args.json, {"scopes": scopes, "seconds": round(seconds, 3)})
    if args.pin and not bad:
        write_pins(reports, pins)
    states, cpu = sum(r.canonical_states for r in reports), sum(r.cpu_seconds for r in reports)
    moves = sum(r.transitions for r in reports)
    _err(f"{len(reports)} scopes, {states} states, {moves} transitions in {seconds:.1f} s: "
         f"{moves / cpu:.0f} transitions/s a core, {bad} bad")  # fmt: skip
    return 1 if bad else 0


def explore_one(name: str) -> Report:
    """Explore one scope by name (runs in a process of its own)."""
    return explorer_of(SCOPES[name]).run()


def mutants(args: argparse.Namespace) -> int:
    """Kill every fault, or say which one lives or dies of something else than declared."""
    names = [m.name for m in ALL if args.only in ("", m.name)]
    if not names:
        _err(f"--only {args.only}: no such fault; known are {', '.join(m.name for m in ALL)}")
        return 2
    verdicts: list[Verdict] = []
    for verdict in _each(kill_by_name, names, args.jobs):
        verdicts.append(verdict)
        mark = "killed" if verdict.good else "WRONG "
        _err(f"{mark} {verdict.name:28} declared {verdict.declared:4} by {verdict.killed_by} "
             f"also {verdict.also}, trace {verdict.trace_length}, {verdict.seconds:.1f} s"
             f"{verdict.trouble}")  # fmt: skip
    if args.keep and not args.only:
        write_cases(v.case for v in verdicts if v.case is not None)
    _write(args.json, {"mutants": [v.as_json() for v in verdicts], "equivalent": EQUIVALENT})
    bad = sum(not v.good for v in verdicts)
    _err(f"{len(verdicts)} faults, {bad} not killed as declared")
    return 1 if bad else 0


def replay(args: argparse.Namespace) -> int:
    """Play event lists against the shipped scheduler; a fault fails."""
    bad = 0
    for case in read_cases(args.file):
        fault, states = play(case)
        own = fault is not None and not fault[1].startswith("(")
        bad += own
        name = case.get("name", case["scope"])
        _err(f"{name}: {fault if own else 'holds'}, {len(states)} states")
    return 1 if bad else 0


def walks(args: argparse.Namespace) -> int:
    """Take the walks; a fault, or a decision that is not the pinned one, fails."""
    taken = [walk(seed) for seed in range(WALKS)]
    old = dict(enumerate(pinned()))
    faulty = [w for w in taken if w.fault is not None]
    other = [] if args.pin else [w.seed for w in taken if old.get(w.seed) != w.digest]
    for w in faulty:
        _err(f"walk {w.seed}: {w.fault}")
    logs = [swarm(WIDE + i) for i in range(SWARMS)]
    wrong = [i for i, log in enumerate(logs) if check_log(log)]
    found = [decisions(log) for log in logs]
    before = found if args.pin else pinned("swarms")
    astray = [i for i in range(SWARMS) if before[i : i + 1] != found[i : i + 1]]
    plays = [turns.play(seed) for seed in range(turns.PLAYS)]
    lost = [p.seed for p in plays if p.fault]
    known = dict(enumerate(pinned("plays")))
    apart = [] if args.pin else [p.seed for p in plays if known.get(p.seed) != p.digest]
    if args.pin and not faulty and not wrong and not lost:
        pin(taken, found, [p.digest for p in plays])
    _err(f"{len(taken)} walks, {sum(w.steps for w in taken)} steps, {len(faulty)} with a fault, "
         f"{len(other)} decide otherwise than pinned {other[:5] or ''}\n"
         f"{SWARMS} wide runs, {sum(map(len, logs))} records, {len(wrong)} with a fault, "
         f"{len(astray)} decide otherwise than pinned {astray[:5] or ''}\n"
         f"{turns.PLAYS} plays of two pools, {sum(p.events for p in plays)} events, {len(lost)} "
         f"with a fault, {len(apart)} decide otherwise than pinned {apart[:5] or ''}")  # fmt: skip
    return 1 if faulty or other or wrong or astray or lost or apart else 0


def _each(work: Callable[[X], Y], items: list[X], jobs: int) -> Iterator[Y]:
    """Results in the order of the items."""
    if jobs < 2 or len(items) < 2:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(work, items)


def _scope_json(report: Report) -> dict[str, Any]:
    return {
        "name": report.name,
        **report.counts(),
        "violations": [v.as_json() for v in report.violations],
        "seconds": round(report.seconds, 3),
    }


def _say(report: Report, wrong: str) -> None:
    counts = report.counts()
    rate = report.canonical_states / max(report.cpu_seconds, 1e-6)
    _err(f"{report.name:16} {counts['canonical_states']:>8} states (stand for "
         f"{counts['raw_states']}), {counts['transitions']} transitions, depth {counts['depth']}, "
         f"{report.seconds:.1f} s, {rate:.0f} states/s {wrong}")  # fmt: skip
    for found in report.violations:
        _err(f"{report.name}: {found.property}: {found.text}; shortest way there:")
        for line in _lines(found.log):
            _err("  " + line)
        scope = SCOPES[report.name]
        if not scope.any_policy:
            _err(f"{report.name}: the same for `python -m oracle replay FILE`:")
            _err(json.dumps(case_of(report.name, scope, found, Scheduler)))


def _lines(log: Iterable[dict[str, Any]]) -> Iterator[str]:
    for record in log:
        yield json.dumps({k: v for k, v in record.items() if k != "t"})


def _write(where: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1) + "\n"
    if where == "-":
        sys.stdout.write(text)
    elif where:
        Path(where).write_text(text, encoding="utf-8")


def _err(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
