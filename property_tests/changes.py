"""Every small change of a module: comparison, boolean, arithmetic, constant, return, statement.

A change is named by its module, the text of its line and what was done, so that names outlive
changes elsewhere. Annotations, `__slots__`, texts and what only types see are left alone.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd,
}  # fmt: skip
Variant = tuple[str, int, Callable[[], None]]
"""(what, line, do)."""
_DELETED = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue,
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """module: dotted name. at: its place among the changes of the module. line: the text of the
    line. what: done to it, numbered where that occurs twice."""

    module: str
    at: int
    line: str
    what: str

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"{self.module.removeprefix('reference.control.')} | {self.line} | {self.what}"

    @property
    def source(self) -> str:
        """The whole new text of the module."""
        tree = ast.parse(file_of(self.module).read_text(encoding="utf-8"))
        _, _, do = next(v for i, v in enumerate(_all(tree)) if i == self.at)
        do()
        return ast.unparse(ast.fix_missing_locations(tree))


def file_of(module: str) -> Path:
    """Where the module lies."""
    return ROOT / (module.replace(".", "/") + ".py")


def changes(module: str) -> list[Change]:
    """Every change of the module, in order of place."""
    text = file_of(module).read_text(encoding="utf-8")
    lines = text.splitlines()
    out: list[Change] = []
    met: Counter[tuple[str, str]] = Counter()
    for at, (what, line, _) in enumerate(_all(ast.parse(text))):
        told = lines[line - 1].strip().replace("|", "¦")
        met[told, what] += 1
        again = met[told, what]
        out.append(Change(module, at, told, f"{what} #{again}" if again > 1 else what))
    return out


def _all(tree: ast.Module) -> Iterator[Variant]:
    inside = [
        node
        for top in tree.body
        if isinstance(top, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
        and not _only_for_types(top)
        for node in ast.walk(top)
    ]
    skip = {id(n) for node in inside for n in _silent(node)}
    for node in inside:
        if id(node) not in skip:
            yield from _variants(node)


def sample(modules: tuple[str, ...], seed: int) -> list[Change]:
    """All changes of the modules in an order drawn from the seed."""
    found = [c for m in modules for c in changes(m)]
    random.Random(seed).shuffle(found)
    return found


def _variants(node: ast.AST) -> Iterator[Variant]:
    def setting(what: str, name: str, new: object, line: int = 0) -> Variant:
        return what, line or getattr(node, "lineno", 1), lambda: setattr(node, name, new)

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
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield setting("return None", "value", ast.Constant(None))
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for i, statement in enumerate(block):
            if isinstance(statement, _DELETED) and not (_is_text(statement) or _slots(statement)):
                new = [*block[:i], ast.copy_location(ast.Pass(), statement), *block[i + 1 :]]
                yield setting("statement deleted", field, new, statement.lineno)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _slots(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets)


def _only_for_types(node: ast.AST) -> bool:
    """`Ready = tuple[...]` and the like."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)


def _silent(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations say nothing at run time, and texts of errors are not judged."""
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield from ast.walk(node.returns)
    if isinstance(node, ast.JoinedStr):
        yield from ast.walk(node)
    if isinstance(node, ast.Raise):  # that it is raised is judged, not what it says
        yield from (n for n in ast.walk(node) if n is not node)
    if _slots(node):
        yield from ast.walk(node)
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: it asserts, no more
        yield from ast.walk(node)
    if isinstance(node, ast.ClassDef):
        for decorator in node.decorator_list:
            yield from ast.walk(decorator)
