"""What test_house.py checks, as functions over sources, so that each can be shown to fail."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("reference", "jax_impl", "oracle")
MODULE_LINES_MAX = 400
MODULE_LINES_GOOD = 300
STDLIB = frozenset(sys.stdlib_module_names) - {"__future__"}


@dataclass(frozen=True)
class Arrow:
    """Modules under `where` may import, of the three packages, only what is under `allowed`.

    `outside` names the third-party packages allowed. The longest matching `where` decides.
    """

    where: str
    allowed: tuple[str, ...]
    outside: tuple[str, ...]


ARROWS = (
    # The shared words know nothing but themselves.
    Arrow("reference.vocab", ("reference.vocab",), ()),
    # Control is pure: it sees the words and itself.
    Arrow("reference.control", ("reference.vocab", "reference.control"), ()),
    Arrow("reference.sampling", ("reference.vocab",), ("numpy",)),
    Arrow("reference.numerics", ("reference.vocab", "reference.files", "reference.numerics"),
          ("numpy",)),
    # safetensors here only writes and cross-checks.
    Arrow("reference.files", ("reference.vocab", "reference.files"), ("numpy", "safetensors")),
    Arrow("reference.prediction", ("reference.vocab", "reference.files", "reference.prediction"),
          ("numpy",)),
    Arrow("reference.simulator", ("reference.vocab", "reference.control", "reference.files",
                                  "reference.prediction", "reference.simulator"), ("numpy",)),
    Arrow("reference", ("reference",), ("numpy",)),
    # Fast numerics share nothing with the readable ones: else comparing them proves nothing.
    Arrow("jax_impl", ("reference.vocab", "reference.control", "reference.files",
                       "reference.sampling", "reference.handle", "reference.prediction",
                       "jax_impl"),
          ("numpy", "jax", "jaxlib", "ml_dtypes")),
    # The command ties everything together; tokenizers only where text is wanted, matplotlib only
    # for pictures.
    Arrow("jax_impl.app", ("reference.vocab", "reference.control", "reference.files",
                           "reference.sampling", "reference.handle", "reference.engine",
                           "reference.simulator", "reference.prediction", "jax_impl", "oracle"),
          ("numpy", "jax", "tokenizers", "jinja2", "matplotlib")),
    # The judge of control shares nothing with it.
    Arrow("oracle.checkers", ("reference.vocab", "reference.files", "oracle.checkers"), ("numpy",)),
    Arrow("oracle", ("reference", "jax_impl", "oracle"),
          ("numpy", "jax", "safetensors", "hypothesis", "torch", "transformers")),
)
IMPURE = frozenset(
    {"time", "datetime", "threading", "_thread", "multiprocessing", "concurrent", "asyncio",
     "queue", "sched", "signal", "select", "selectors", "socket", "subprocess", "random",
     "secrets", "uuid", "os", "io", "pathlib", "shutil", "tempfile", "logging", "numpy", "jax",
     "platform", "sys"}
)
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "id", "hash", "__import__"})


def module_name(path: str) -> str:
    """'reference/vocab/ids.py' -> 'reference.vocab.ids'; a package's own file is the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, name: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in `source`, also inside functions.

    `from a.b import c` gives a.b.c: whether c is a module or a name of a.b, the rule is a prefix.
    """
    base = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else []
            stem = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def under(module: str, prefix: str) -> bool:
    """Whether `module` is `prefix` or inside it."""
    return module == prefix or module.startswith(prefix + ".")


def arrow_faults(path: str, source: str) -> list[str]:
    """Imports of the module at `path` that ARROWS does not allow."""
    name = module_name(path)
    rule = max((a for a in ARROWS if under(name, a.where)), key=lambda a: len(a.where))
    faults = []
    for line, target in imports(source, name, path.endswith("/__init__.py")):
        top = target.split(".")[0]
        if top in PACKAGES:
            # `from reference import vocab` is an arrow to reference.vocab.
            good = any(under(target, allowed) for allowed in rule.allowed)
        else:
            good = top in STDLIB or top == "__future__" or top in rule.outside
        if not good:
            faults.append(f"{path}:{line}: {rule.where} may not import {target}")
    return faults


def purity_faults(path: str, source: str) -> list[str]:
    """Clocks, threads, randomness, I/O and arrays in a module that must have none."""
    faults = [
        f"{path}:{line}: control imports {target}"
        for line, target in imports(source, module_name(path), path.endswith("/__init__.py"))
        if target.split(".")[0] in IMPURE
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in IMPURE_CALLS:
                faults.append(f"{path}:{node.lineno}: control calls {node.func.id}()")
        elif isinstance(node, ast.Global):
            faults.append(f"{path}:{node.lineno}: control keeps state in a module")
    return faults


def shadowing(paths: Iterable[str]) -> list[str]:
    """Modules or packages whose own name is that of a standard library module."""
    faults = []
    for path in paths:
        for part in module_name(path).split("."):
            if part in STDLIB:
                faults.append(f"{path}: {part} shadows the standard library")
    return faults


def size_faults(lines: dict[str, int]) -> tuple[list[str], list[str]]:
    """(too long, longer than is good) among modules given with their number of lines."""
    over = [f"{p}: {n} lines, at most {MODULE_LINES_MAX}" for p, n in sorted(lines.items())
            if n > MODULE_LINES_MAX]
    warn = [f"{p}: {n} lines" for p, n in sorted(lines.items())
            if MODULE_LINES_GOOD < n <= MODULE_LINES_MAX]
    return over, warn


def wheel_faults(names: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """What a wheel lacks of the packages' `tracked` files, and what it holds beyond them."""
    names = set(names)
    ours = {t for t in tracked if t.split("/")[0] in PACKAGES}
    rest = {n for n in names if ".dist-info/" not in n}
    faults = [f"the wheel lacks {n}" for n in sorted(ours - names)]
    faults += [f"the wheel holds {n}" for n in sorted(rest - ours)]
    faults += [f"the wheel has no {p}/py.typed" for p in PACKAGES if f"{p}/py.typed" not in names]
    if not any(n.endswith(".dist-info/licenses/LICENSE") for n in names):
        faults.append("the wheel has no licence")
    if not any(n.endswith(".dist-info/entry_points.txt") for n in names):
        faults.append("the wheel has no `covey` command")
    return faults


def python_files(root: Path) -> dict[str, str]:
    """Path (from `root`, with '/') -> source of every module of the three packages."""
    return {
        p.relative_to(root).as_posix(): p.read_text(encoding="utf-8")
        for package in PACKAGES
        for p in sorted((root / package).rglob("*.py"))
    }
