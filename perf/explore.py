"""Exploring the large worlds: minutes to hours, by hand, scope by scope.

    python -m perf.explore FILE [--scopes long] [--jobs 1]

Each scope's counts are added to FILE as soon as it has been explored, with the commit, the
processor time and the memory that it took; a scope that FILE has from the same sources of control
and of the explorer is not explored again, so an interrupted run goes on where it stopped. Nothing
is drawn at random: the counts of a commit are the same everywhere. Depth, states and width of each
level go to standard error. Exit status 1 on a violation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jax_impl.head import versions
from oracle.explorer import explorer_of
from oracle.scopes import SCOPES
from perf.record import commit, machine

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("reference/control/*.py", "reference/vocab/*.py", "oracle/explorer.py",
           "oracle/world.py", "oracle/judge.py", "oracle/transitions.py", "oracle/any_policy.py",
           "oracle/seen.py", "oracle/graph.py")  # fmt: skip


def sources() -> str:
    """A digest of everything that decides the counts."""
    sums = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(ROOT.glob(pattern)):
            sums.update(file.name.encode() + file.read_bytes())
    return sums.hexdigest()[:16]


def one(name: str) -> dict[str, Any]:
    """Explore one scope whole (runs in a process of its own)."""
    before = {"name": name, "scope": repr(SCOPES[name]), "commit": commit(), "sources": sources()}
    explorer = explorer_of(SCOPES[name])

    def progress(depth: int, states: int, width: int) -> None:
        print(name, depth, states, width, file=sys.stderr, flush=True)

    explorer.progress = progress
    report = explorer.run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **before, **report.counts(), "violations": [v.as_json() for v in report.violations],
        "seconds": round(report.seconds, 1), "cpu_seconds": round(report.cpu_seconds, 1),
        "peak_bytes": peak,
    }  # fmt: skip


def save(file: Path, scopes: dict[str, dict[str, Any]]) -> None:
    """The whole document, or the one before it."""
    whole = [s for s in scopes.values() if not s["violations"]]
    document = {
        "machine": machine(), "versions": versions(), "command": "python -m perf.explore",
        "seed": None, "canonical_states": sum(s["canonical_states"] for s in whole),
        "raw_states": sum(s["raw_states"] for s in whole),
        "transitions": sum(s["transitions"] for s in whole),
        "cpu_seconds": round(sum(s["cpu_seconds"] for s in whole), 1),
        "scopes": sorted(scopes.values(), key=lambda s: s["name"]),
    }  # fmt: skip
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--scopes", default="long", help="ci, long, all, or names with commas")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    names = [n for n, s in SCOPES.items() if args.scopes in ("all", s.suite)]
    names = names or args.scopes.split(",")
    known: dict[str, dict[str, Any]] = {}
    if args.file.exists():
        known = {s["name"]: s for s in json.loads(args.file.read_text())["scopes"]}
    now = sources()
    same = {n for n, s in known.items()
            if s["sources"] == now and n in SCOPES and s["scope"] == repr(SCOPES[n])}  # fmt: skip
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(one, n) for n in names if n not in same]):
            scope = done.result()
            known[scope["name"]] = scope
            save(args.file, known)
            print(scope["name"], scope["canonical_states"], "states", scope["cpu_seconds"], "s",
                  scope["violations"] or "", flush=True)  # fmt: skip
    return 1 if any(s["violations"] for s in known.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
