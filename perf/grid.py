"""Every scheduler on platforms that are not here: the grid, in virtual time.

    python -m perf.grid --cells ci|curves|all|slice|PLATFORM|MODEL|PLATFORM/MODEL --json OUT
        [--schedulers ci|shown|all|NAME,NAME] [--processes 2] [--csv FILE] [--pictures FOLDER]
        [--fresh]

Each cell is written to OUT when it is done, and not done again by a later run of the same code
(GRID-7). `ci` is a fixed spread of 44 cells with the schedulers that the ratios need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from perf.grid_cells import Cell, chosen, impossible
from perf.grid_report import ratios, summary, table, write_csv
from perf.grid_run import run_cell
from perf.record import setting

ROOT = Path(__file__).parents[1]
SOURCES = ("reference/control", "reference/vocab", "reference/simulator", "reference/prediction")


def code() -> str:
    """A digest of what the figures depend on: results of other code are not mixed in."""
    digest = hashlib.sha256()
    files = [p for folder in SOURCES for p in (ROOT / folder).rglob("*")]
    files += [ROOT / "perf" / f"grid_{part}.py" for part in ("cells", "run")]
    for path in sorted(files):
        if path.suffix in (".py", ".toml"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cost(cell: Cell) -> float:
    """A guess at how long a cell takes, for order and estimates: visits, and what they miss."""
    from reference.simulator import models

    model = models.load(cell.model)
    per_visit = 1.0 + 0.5 * model.top_k * (1.0 - cell.cache_share)
    return len(model.moe_layers) * (10 + max(24, 8 * cell.requests) * per_visit)


class Output:
    """The JSON file, whole after every cell."""

    def __init__(self, path: Path, names: str, fresh: bool) -> None:
        self.path = path
        self.began = time.time()
        command = " ".join(["python", "-m", "perf.grid", *sys.argv[1:]])
        self.setting = setting() | {"command": command}
        self.head = {"code": code(), "schedulers": names}
        self.cells: dict[Cell, dict[str, Any]] = {}
        self.spent = 0.0
        if path.exists() and not fresh:
            old = json.loads(path.read_text())
            if {k: old.get(k) for k in self.head} == self.head:
                self.spent = old.get("seconds", 0.0)
                for c in old["cells"]:
                    self.cells[_cell(c)] = c
            else:
                print(f"{path}: of other code or schedulers; begun anew", file=sys.stderr)

    def add(self, found: dict[str, Any]) -> None:
        """A cell is done."""
        self.cells[_cell(found)] = ratios(found)

    def document(self, wanted: Iterable[Cell], skipped: list[dict[str, Any]]) -> dict[str, Any]:
        """Everything, cells in the order in which they were asked for."""
        done = [self.cells[c] for c in wanted if c in self.cells]
        return {
            **self.setting, **self.head,
            "seconds": self.spent + time.time() - self.began,
            "processor_seconds": sum(c["processor_seconds"] for c in done),
            "summary": summary(done), "skipped": skipped, "cells": done,
        }  # fmt: skip

    def write(self, document: dict[str, Any]) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(self.path.suffix + ".part")
        part.write_text(_text(document))
        os.replace(part, self.path)


def _text(document: dict[str, Any]) -> str:
    """JSON, a line a scheduler of a cell; six digits."""
    head = {k: v for k, v in document.items() if k != "cells"}
    cells = []
    for c in document["cells"]:
        rows = [f"{json.dumps(n)}: {json.dumps(_short(s))}" for n, s in c["schedulers"].items()]
        own = json.dumps({k: v for k, v in c.items() if k != "schedulers"})
        inside = ",\n    ".join(rows)
        cells.append(f'  {own[:-1]}, "schedulers": {{\n    {inside}\n  }}}}')
    every = ",\n".join(cells)
    return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n{every}\n ]\n}}\n'


def _short(x: Any) -> Any:
    """Floats to six digits."""
    if isinstance(x, dict):
        return {k: _short(v) for k, v in x.items()}
    if isinstance(x, float):
        return float(f"{x:.6g}")
    return x


def _cell(found: dict[str, Any]) -> Cell:
    return Cell(found["platform"], found["model"], found["cache_share"], found["requests"])


def run(
    cells: list[Cell], path: Path, names: str = "ci", processes: int = 2, fresh: bool = False,
    say: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Run what is not there yet; the whole document, also written to `path`."""
    reasons = {c: impossible(c) for c in cells}
    skipped = [c.as_dict() | {"reason": r} for c, r in reasons.items() if r]
    cells = [c for c in cells if not reasons[c]]
    out = Output(path, names, fresh)
    todo = sorted((c for c in cells if c not in out.cells), key=cost, reverse=True)
    left, began, done = sum(map(cost, todo)), time.time(), 0.0
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(run_cell, c, names): c for c in todo}
        for n, job in enumerate(as_completed(jobs), 1):
            cell = jobs[job]
            out.add(job.result())
            out.write(out.document(cells, skipped))
            done += cost(cell)
            took = time.time() - began
            if say:
                print(f"{n}/{len(todo)} {cell.platform} {cell.model} {cell.cache_share} "
                      f"x{cell.requests}: {took:.0f} s, about {took * (left - done) / done:.0f} s "
                      "left", file=say, flush=True)  # fmt: skip
    document = out.document(cells, skipped)
    out.write(document)
    return document


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.grid", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cells", default="ci")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--schedulers", default="")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--fresh", action="store_true", help="do all cells again")
    args = parser.parse_args(argv)
    names = args.schedulers or {"slice": "slice", "curves": "shown"}.get(args.cells, "ci")
    found = run(chosen(args.cells), args.json, names, args.processes, args.fresh, sys.stderr)
    print(table(found))
    if args.csv:
        write_csv(args.csv, found["cells"])
    if args.pictures:
        from perf.grid_pictures import draw

        for path in draw(found, args.pictures):
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
