"""Every scheduler on platforms that are not here: the grid, in virtual time.

    python -m perf.grid --cells ci|curves|all|slice|PLATFORM|MODEL|PLATFORM/MODEL --json OUT
        [--schedulers ci|shown|all|NAME,NAME] [--processes 2] [--csv FILE] [--pictures FOLDER]
        [--fresh]

Each cell is written to OUT when it is done, and not done again by a later run of the same code;
cells of earlier runs stay in OUT (GRID-7). `ci` is a fixed spread of 44 cells with the schedulers
that the ratios need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from jax_impl.app.output import WholeFile
from jax_impl.app.signals import ending_as_ctrl_c
from perf.grid_cells import Cell, chosen, impossible
from perf.grid_report import ratios, summary, table, write_csv
from perf.grid_run import run_cell, schedulers
from perf.record import setting
from perf.workers import done_by
from reference.files.strict_json import show
from reference.vocab.errors import BadInput, CoveyError

ROOT = Path(__file__).parents[1]
INTERRUPTED = 130
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
    """The JSON file, whole after every cell. Raises BadInput where it cannot be written, or holds
    what is no result of the grid."""

    def __init__(self, path: Path, names: str, fresh: bool) -> None:
        self.path = path
        self.began = time.time()
        command = " ".join(["python", "-m", "perf.grid", *sys.argv[1:]])
        self.setting = setting() | {"command": command}
        self.head = {"code": code(), "schedulers": names}
        self.cells: dict[Cell, dict[str, Any]] = {}
        self.skipped: dict[Cell, dict[str, Any]] = {}
        self.spent = 0.0
        _place(path)
        if path.is_file() and not fresh:
            old = _saved(path)
            if {k: old.get(k) for k in self.head} == self.head:
                self._resume(old)
            else:
                print(f"{path}: of other code or schedulers; begun anew", file=sys.stderr)

    def _resume(self, old: dict[str, Any]) -> None:
        try:
            self.spent = float(old["seconds"])
            self.skipped = {_cell(c): c for c in old["skipped"]}
            for c in old["cells"]:
                float(c["processor_seconds"])
                if not c["schedulers"]:
                    raise ValueError("a cell without schedulers")
                self.cells[_cell(c)] = ratios(c)
            before = old["command"].split("; ")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            told = show(f"{type(error).__name__}: {error}", 80)
            raise BadInput(f"--json: {self.path}: a damaged result of the grid ({told}); --fresh "
                           "begins anew") from None  # fmt: skip
        commands = dict.fromkeys([*before, self.setting["command"]])
        self.setting["command"] = "; ".join(commands)

    def add(self, found: dict[str, Any]) -> None:
        """A cell is done."""
        self.cells[_cell(found)] = ratios(found)

    def document(self, wanted: Iterable[Cell]) -> dict[str, Any]:
        """Everything: cells in the order in which they are asked for, then those of earlier
        runs."""
        done = [self.cells[c] for c in dict.fromkeys([*wanted, *self.cells]) if c in self.cells]
        return {
            **self.setting, **self.head,
            "seconds": self.spent + time.time() - self.began,
            "processor_seconds": sum(c["processor_seconds"] for c in done),
            "summary": summary(done), "skipped": list(self.skipped.values()), "cells": done,
        }  # fmt: skip

    def write(self, document: dict[str, Any]) -> None:
        """Whole or not at all."""
        with WholeFile("--json", self.path) as out:
            out.file.write(_text(document))
            out.commit()


def _place(path: Path, flag: str = "--json") -> None:
    """Raises BadInput now where a file could not be written in the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{flag}: {path.parent}: {error.strerror}") from None
    with WholeFile(flag, path):
        pass


def _saved(path: Path) -> dict[str, Any]:
    """What a file says. Raises BadInput where it is no JSON object."""
    try:
        old = json.loads(path.read_text())
        if not isinstance(old, dict):
            raise ValueError(f"{show(old, 40)}; an object expected")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"--json: {path}: no result of the grid ({show(str(error), 80)}); "
                       "--fresh begins anew") from None  # fmt: skip
    return old


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
    platform, model, share, requests = (
        found[k] for k in ("platform", "model", "cache_share", "requests"))  # fmt: skip
    if not (isinstance(platform, str) and isinstance(model, str) and type(requests) is int):
        raise ValueError(f"{platform}, {model}, {requests}")
    return Cell(platform, model, float(share), requests)


def run(
    cells: list[Cell], path: Path, names: str = "ci", processes: int = 2, fresh: bool = False,
    say: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Run what is not there yet; the whole document, also written to `path`. Raises BadInput for an
    unknown scheduler, and for a `path` that cannot be written or is no result of the grid."""
    reasons = {c: impossible(c) or _nobody(names, c) for c in cells}
    out = Output(path, names, fresh)
    out.skipped |= {c: c.as_dict() | {"reason": r} for c, r in reasons.items() if r}
    cells = [c for c in cells if not reasons[c]]
    todo = sorted((c for c in cells if c not in out.cells), key=cost, reverse=True)
    left, began, done = sum(map(cost, todo)), time.time(), 0.0
    with closing(done_by(run_cell, [(c, names) for c in todo], processes)) as results:
        for n, ((cell, _), found) in enumerate(results, 1):
            out.add(found)
            out.write(out.document(cells))
            done += cost(cell)
            took = time.time() - began
            if say:
                print(f"{n}/{len(todo)} {cell.platform} {cell.model} {cell.cache_share} "
                      f"x{cell.requests}: {took:.0f} s, about {took * (left - done) / done:.0f} s "
                      "left", file=say, flush=True)  # fmt: skip
    document = out.document(cells)
    out.write(document)
    return document


def _nobody(names: str, cell: Cell) -> str:
    return "" if schedulers(names, cell) else f"schedulers: none of {names} can be there"


def processes(word: str) -> int:
    """argparse type: at least 1."""
    if int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word}; at least 1 expected")
    return int(word)


def main(argv: list[str] | None = None) -> int:
    """The command: 0, or 2 with one line that says what cannot be; 130 when it is told to end."""
    args = arguments().parse_args(argv)
    try:
        with ending_as_ctrl_c():
            execute(args)
        return 0
    except CoveyError as error:
        print(f"perf.grid: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"perf.grid: interrupted; cells that are done are in {args.json}", file=sys.stderr)
        return INTERRUPTED


def arguments() -> argparse.ArgumentParser:
    """Flags of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.grid", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cells", default="ci")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--schedulers", default="")
    parser.add_argument("--processes", type=processes, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--fresh", action="store_true", help="do all cells again")
    return parser


def execute(args: argparse.Namespace) -> None:
    """Run the cells, print the table, write what else is asked for."""
    if args.csv:
        _place(args.csv, "--csv")
    names = args.schedulers or {"slice": "slice", "curves": "shown"}.get(args.cells, "ci")
    found = run(chosen(args.cells), args.json, names, args.processes, args.fresh, sys.stderr)
    print(table(found))
    if args.csv:
        write_csv(args.csv, found["cells"])
    if args.pictures:
        from perf.grid_pictures import draw

        for path in draw(found, args.pictures):
            print(path)


if __name__ == "__main__":
    raise SystemExit(main())
