"""Which rule is written where: the table of specs/STATUS.md, printed to standard output.

A rule is defined by a line `**ROUTE-3** text` in specs/*.md. Code cites it by its id in a comment
or a string; a test declares it with `@pytest.mark.rule("ROUTE-3")`. `problems` says what does not
fit together; property_tests/test_house.py fails on each.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("reference", "jax_impl", "oracle", "perf")

DEFINITION = re.compile(r"^(?:[-*] )?\*\*([A-Z]{2,}-\d+)\*\*\s*(.*)$")
CITATION = re.compile(r"(?<![A-Za-z0-9_-])([A-Z]{2,}-\d+)(?![A-Za-z0-9_])")
NOT_RULES = frozenset({"UTF", "SHA", "ISO", "CRC", "MD", "RFC", "IEEE", "GPT", "BF", "FP", "PEP"})


@dataclass
class Rules:
    """What was found: texts by id, citing files by id and package, marking tests by id."""

    texts: dict[str, str] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    cited: dict[str, set[str]] = field(default_factory=dict)
    tested: dict[str, set[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def definitions(name: str, text: str) -> Iterator[tuple[str, str]]:
    """(id, first line of its text) for each rule that the Markdown `text` defines."""
    del name
    for line in text.splitlines():
        found = DEFINITION.match(line.strip())
        if found:
            yield found.group(1), found.group(2)


def is_rule_like(ident: str) -> bool:
    """Whether `ident` can only be a rule id (UTF-8 and SHA-256 are not)."""
    return ident.split("-")[0] not in NOT_RULES


def mentions(text: str) -> set[str]:
    """Rule ids in prose, a comment or a string."""
    return {ident for ident in CITATION.findall(text) if is_rule_like(ident)}


def citations(source: str) -> set[str]:
    """Rule ids in the comments and strings of Python `source` (not `LEN-1` in an expression)."""
    found: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # Since 3.12 an f-string is several tokens; its text is FSTRING_MIDDLE.
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(
            tokenize, "FSTRING_MIDDLE", -1
        ):
            found |= mentions(token.string)
    return found


def marks(source: str) -> set[str]:
    """Rule ids that the tests in `source` declare with pytest.mark.rule(...)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "rule"
            and isinstance(node.func.value, ast.Attribute)
            and node.func.value.attr == "mark"
        ):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}  # type: ignore[misc]
    return found


def collect(
    specs: Iterable[tuple[str, str]],
    code: Iterable[tuple[str, str]],
    tests: Iterable[tuple[str, str]],
) -> Rules:
    """Reads (name, text) pairs of the specs, the packages' modules and the test modules."""
    rules = Rules()
    specs = list(specs)
    for name, text in specs:
        for ident, line in definitions(name, text):
            if ident in rules.texts:
                rules.problems.append(f"{name}: {ident} is defined again (first in "
                                      f"{rules.homes[ident]})")
            rules.texts[ident], rules.homes[ident] = line, name
    for name, text in specs:
        for ident in sorted(mentions(text) - rules.texts.keys()):
            rules.problems.append(f"{name}: mentions {ident}, which no specs/*.md defines")
    for found_by, into, files in ((citations, rules.cited, code), (marks, rules.tested, tests)):
        for name, text in files:
            for ident in found_by(text):
                into.setdefault(ident, set()).add(name)
    for into, verb in ((rules.cited, "cites"), (rules.tested, "tests")):
        for ident in sorted(into.keys() - rules.texts.keys()):
            for name in sorted(into[ident]):
                rules.problems.append(f"{name}: {verb} {ident}, which no specs/*.md defines")
    for ident in sorted(rules.texts, key=order):
        if ident not in rules.cited:
            rules.problems.append(f"{rules.homes[ident]}: {ident} is cited by no code")
        if ident not in rules.tested:
            rules.problems.append(f"{rules.homes[ident]}: {ident} is declared by no test")
    return rules


def order(ident: str) -> tuple[str, int]:
    """Sort key: ROUTE-2 before ROUTE-10."""
    family, number = ident.rsplit("-", 1)
    return family, int(number)


def of_tree(root: Path = ROOT) -> Rules:
    """The rules of the working tree at `root`."""

    def read(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
        for path in sorted(paths):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")

    return collect(
        read(p for p in (root / "specs").glob("*.md") if p.name != "STATUS.md"),
        read(p for package in PACKAGES for p in (root / package).rglob("*.py")),
        read((root / "property_tests").glob("test_*.py")),
    )


def render(rules: Rules) -> str:
    """The Markdown table: one row a rule, the modules that cite it, the tests that hold it."""

    def modules(ident: str, package: str) -> str:
        names = sorted(rules.cited.get(ident, ()))
        inside = [n[len(package) + 1 : -3] for n in names if n.startswith(package + "/")]
        return ", ".join(inside) or "-"

    lines = [
        "# Status of the rules",
        "",
        "Generated by `make status`; a test fails where it is out of date. Columns: the modules",
        "of each package that cite the rule, and the test files that declare it.",
        "",
        f"{len(rules.texts)} rules, {sum(1 for i in rules.texts if i in rules.cited)} cited by "
        f"code, {sum(1 for i in rules.texts if i in rules.tested)} declared by a test.",
        "",
        "| rule | in | reference | jax_impl | oracle | perf | property_tests |",
        "|---|---|---|---|---|---|---|",
    ]
    for ident in sorted(rules.texts, key=order):
        tests = ", ".join(
            Path(n).stem.removeprefix("test_") for n in sorted(rules.tested.get(ident, ()))
        )
        home = Path(rules.homes[ident]).name
        cells = [ident, f"[{home}]({home})", *(modules(ident, p) for p in PACKAGES), tests or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render(of_tree()))
