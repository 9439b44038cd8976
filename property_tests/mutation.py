"""Mechanical faults in reference/control: every small change of the syntax tree, and who kills it.

`python -m property_tests.mutation [SEED [COUNT]]` makes each change in a copy of the package
(oracle/patching.py), in a process of its own, and judges it as the tests do: scopes against their
pinned counts, smallest first, then randomised schedules and random runs, then
property_tests/test_control.py. A mutant that none of them notices lives. The order is drawn from
the seed, so any first part is a sample.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oracle.patching import CONTROL, loaded

MODULES = ("cache", "fetch", "grouping", "lifecycle", "requests", "scheduler")
_COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SECONDS = 25
"""CPU time after which a mutant counts as one that hangs."""


@dataclass(frozen=True)
class Change:
    """One change: the module's stem, the line, what was done, and the whole new source."""

    module: str
    line: int
    what: str
    source: str

    @property
    def name(self) -> str:
        """module:line what"""
        return f"{self.module}:{self.line} {self.what}"


def _variants(node: ast.AST) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """(what, do, undo) of each change of one node."""

    def setting(what: str, name: str, new: object) -> tuple:
        old = getattr(node, name)
        return what, lambda: setattr(node, name, new), lambda: setattr(node, name, old)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        op = _COMPARE[type(node.ops[0])]
        yield setting(f"comparison {op.__name__}", "ops", [op(), *node.ops[1:]])
    if isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield setting(f"boolean {type(swapped).__name__}", "op", swapped)
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield setting(f"boolean without operand {i + 1}", "values", rest)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield setting("boolean not not", "operand", ast.UnaryOp(ast.Not(), node.operand))
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        op = _ARITHMETIC[type(node.op)]
        yield setting(f"arithmetic {op.__name__}", "op", op())
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield setting(f"constant {not node.value}", "value", not node.value)
        elif isinstance(node.value, int):
            yield setting(f"constant {node.value + 1}", "value", node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None:
        yield setting("return None", "value", ast.Constant(None))
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            for i, statement in enumerate(block):
                if isinstance(
                    statement,
                    ast.Expr
                    | ast.Assign
                    | ast.AugAssign
                    | ast.Delete
                    | ast.Raise
                    | ast.Break
                    | ast.Continue,
                ) and not _is_text(statement):
                    new = [*block[:i], ast.copy_location(ast.Pass(), statement), *block[i + 1 :]]
                    yield (f"deleted line {statement.lineno}",
                           *setting("", field, new)[1:])  # fmt: skip


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def changes(module: str) -> list[Change]:
    """Every change of a module of reference/control, in order of place."""
    path = Path(__file__).parent.parent / "reference" / "control" / f"{module}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = [
        node
        for top in tree.body
        if isinstance(top, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
        for node in ast.walk(top)
    ]
    out = []
    skip = {id(n) for top in inside for n in _notes(top)}
    for node in inside:
        if id(node) in skip:
            continue
        for what, do, undo in _variants(node):
            do()
            text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
            undo()
            line = getattr(node, "lineno", 0)
            if what.startswith("deleted line"):
                line, what = int(what.split()[-1]), "statement deleted"
            out.append(Change(module, line, what, text))
    return out


def _notes(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations and slots say nothing at run time; texts of errors are not judged."""
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield from ast.walk(node.returns)
    if isinstance(node, ast.JoinedStr):
        yield from ast.walk(node)


def sample(seed: int, modules: tuple[str, ...] = MODULES) -> list[Change]:
    """All changes in an order drawn from the seed."""
    found = [c for m in modules for c in changes(m)]
    random.Random(seed).shuffle(found)
    return found


def judge(change: Change, deep: bool = True, most: int = 2_500) -> str:
    """What kills the change, in a process of its own; "" when nothing does. Not `deep`: only
    scopes of fewer than `most` states and a few randomised schedules."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            verdict = _verdict(change, deep, most)
        except BaseException as error:
            verdict = f"raises {type(error).__name__}"
        os.write(write, verdict.encode()[:200])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        verdict = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return "hangs" if os.WIFSIGNALED(status) else verdict


def _verdict(change: Change, deep: bool, most: int) -> str:
    from oracle.explorer import Explorer
    from oracle.pct import WORLDS, pct
    from oracle.pins import difference, read_pins
    from oracle.scopes import SCOPES

    pins = read_pins()
    alias = "covey_changed"
    with loaded(alias, f"{CONTROL}.{change.module}", change.source) as module:
        most = 12_500 if deep else most
        small = [n for n, p in pins.items() if p["canonical_states"] < most and n[:3] != "any"]
        for name in sorted(small, key=lambda n: pins[n]["canonical_states"]):
            if deep and pins[name]["canonical_states"] > 2_500 and name.startswith("policy"):
                continue
            limit = 2 * pins[name]["canonical_states"] + 1000
            report = Explorer(SCOPES[name], module.Scheduler, limit).run()
            if report.violations:
                return f"{report.violations[0].property} in {name}"
            if difference(report, pins):
                return f"count of {name}"
        for world in WORLDS:
            tally = pct(world, 60 if deep else 10, make=module.Scheduler)
            if tally.fault is not None:
                return f"{tally.fault[0]} in {world.name}"
        return _tests(module) if deep else ""


def _tests(module: object) -> str:
    """test_control.py, and random runs, with the changed scheduler in the shipped one's place."""
    import pytest

    import oracle.swarm as runs
    from oracle.checkers import check_log

    for name, part in list(sys.modules.items()):
        if name.startswith("covey_changed."):
            sys.modules[CONTROL + name.removeprefix("covey_changed")] = part
    sys.modules[CONTROL] = sys.modules["covey_changed"]
    for name in [n for n in sys.modules if n.startswith("property_tests")]:
        del sys.modules[name]
    runs.Scheduler = module.Scheduler  # type: ignore[attr-defined]
    for seed in range(25):
        if check_log(runs.swarm(seed)):
            return "a random run"
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "property_tests/test_control.py"]
    return "test_control" if pytest.main(arguments) else ""


def main(seed: int, count: int | None) -> None:
    """One JSON list a line: module:line and what, and what kills it ("" for one that lives)."""
    import oracle.pct
    import oracle.swarm

    assert oracle.pct and oracle.swarm  # imported once, not in each child
    for change in sample(seed)[:count]:
        killer = judge(change, deep=False) or judge(change)
        print(json.dumps([change.name, killer]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1, int(sys.argv[2]) if sys.argv[2:] else None)
