"""One changed line in a copy of a shipped module, loaded under another name.

The shipped modules stay untouched. Control's modules import one another, so their whole package
is copied; another module is copied alone. A patch whose text is not there exactly once is an
error: a fault that no longer applies must be seen, not passed over.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

CONTROL = "reference.control"


class PatchFailed(Exception):
    """The text that a fault changes is not there exactly once."""


@dataclass(frozen=True)
class Mutant:
    """`old` -> `new` in `module`; `declared` must break: in one of `scopes`, or in a run."""

    name: str
    module: str
    old: str
    new: str
    declared: str
    scopes: tuple[str, ...] = ()


class _Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves modules from source texts by name."""

    def __init__(self, alias: str, sources: dict[str, str]) -> None:
        self.alias, self.sources = alias, sources

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.sources:
            return None
        package = fullname == self.alias and len(self.sources) > 1
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        exec(compile(self.sources[name], f"<{name}>", "exec"), module.__dict__)


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise PatchFailed(f"there is no module {module}")
    return Path(spec.origin)


def _patch(mutant: Mutant, text: str) -> str:
    count = text.count(mutant.old)
    if count != 1:
        raise PatchFailed(f"{mutant.name}: {mutant.module} has {mutant.old!r} {count} times")
    return text.replace(mutant.old, mutant.new)


def sources(mutant: Mutant, alias: str) -> dict[str, str]:
    """Source texts by module name under `alias`. Raises PatchFailed."""
    file = _file(mutant.module)
    if not mutant.module.startswith(CONTROL + "."):
        return {alias: _patch(mutant, file.read_text(encoding="utf-8"))}
    out = {}
    for other in sorted(file.parent.glob("*.py")):
        text = other.read_text(encoding="utf-8")
        if other == file:
            text = _patch(mutant, text)
        name = alias if other.stem == "__init__" else f"{alias}.{other.stem}"
        out[name] = text.replace(CONTROL, alias)
    return out


@contextmanager
def mutated(mutant: Mutant) -> Iterator[ModuleType]:
    """The module with the fault in it, importable while the context lasts."""
    alias = "covey_mutant_" + mutant.name.replace("-", "_")
    texts = sources(mutant, alias)
    finder = _Sources(alias, texts)
    sys.meta_path.insert(0, finder)
    try:
        whole = len(texts) > 1
        yield importlib.import_module(f"{alias}.scheduler" if whole else alias)
    finally:
        sys.meta_path.remove(finder)
        for name in texts:
            sys.modules.pop(name, None)


def planted(mutant: Mutant) -> None:
    """From now on, in this process, the module has the fault under its own name, and everything of
    this project that was imported before is imported anew. Raises PatchFailed."""
    serve(mutant.module, _patch(mutant, _file(mutant.module).read_text(encoding="utf-8")))


def serve(module: str, source: str) -> None:
    """From now on, in this process, the module has this source; all of this project is imported
    anew."""
    ours = ("reference", "oracle", "jax_impl", "property_tests")
    for name in [n for n in sys.modules if n.split(".")[0] in ours]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Sources("", {module: source}))
