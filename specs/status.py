"""Which rule is written where: the table of specs/STATUS.md, printed to standard output.

A rule is defined by a line `**ROUTE-3** text` in specs/*.md. Code cites it by its id in a comment
or a string; a test declares it with `@pytest.mark.rule("ROUTE-3")`. A rule is explored by the
modules of the explorer that cite it or return its property ("S4" is SAFE-4), and in the scopes
where a seeded fault of it is found; its mutants are the faults that break it, or die by it.
`problems` says what does not fit together; property_tests/test_house.py fails on each.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("reference", "jax_impl", "oracle", "perf")
EXPLORERS = ("any_policy", "bypass", "explorer", "graph", "judge", "sometimes", "walks", "world")
"""Modules of oracle/ that judge every state of a small world, or go through all of them."""
FAULTS = "oracle/fault_rules.py"
"""Its citations are of what breaks a rule, not of what obeys it."""

DEFINITION = re.compile(r"^(?:[-*] )?\*\*([A-Z]{2,}-\d+)\*\*\s*(.*)$")
CITATION = re.compile(r"(?<![A-Za-z0-9_-])([A-Z]{2,}-\d+)(?![A-Za-z0-9_])")
NOT_RULES = frozenset({"UTF", "SHA", "ISO", "CRC", "MD", "RFC", "IEEE", "GPT", "BF", "FP", "PEP"})


@dataclass
class Rules:
    """What was found, by id: texts, citing files, marking tests, what explores, seeded faults."""

    texts: dict[str, str] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    cited: dict[str, set[str]] = field(default_factory=dict)
    tested: dict[str, set[str]] = field(default_factory=dict)
    explored: dict[str, set[str]] = field(default_factory=dict)
    mutants: dict[str, set[str]] = field(default_factory=dict)
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


class Fault(NamedTuple):
    """A seeded fault: what it breaks or dies by, and the scopes in which exploring finds it."""

    name: str
    rules: tuple[str, ...]
    scopes: tuple[str, ...] = ()


def rule_of(name: str) -> str:
    """The rule of a property: S4 is SAFE-4, L2 is LIVE-2; a rule's id is its own."""
    found = re.fullmatch(r"([SL])(\d+)", name)
    return f"{'SAFE' if found[1] == 'S' else 'LIVE'}-{found[2]}" if found else name


def judged(source: str) -> set[str]:
    """The rules whose properties an explorer's `source` names or whose ids it cites."""
    said = {
        rule_of(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[SL]\d+", node.value)
    }
    return said | citations(source)


def collect(
    specs: Iterable[tuple[str, str]],
    code: Iterable[tuple[str, str]],
    tests: Iterable[tuple[str, str]],
    faults: Iterable[Fault] = (),
) -> Rules:
    """Reads (name, text) pairs of the specs, the packages' modules and the test modules."""
    rules = Rules()
    specs, code = list(specs), list(code)
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
    for name, text in code:
        module = name.removeprefix("oracle/").removesuffix(".py")
        if name.startswith("oracle/") and module in EXPLORERS:
            for ident in judged(text):
                rules.explored.setdefault(ident, set()).add(module)
    for fault in faults:
        for ident in fault.rules:
            rules.mutants.setdefault(ident, set()).add(fault.name)
            if fault.scopes:
                rules.explored.setdefault(ident, set()).update(fault.scopes)
    for into, verb in ((rules.cited, "cites"), (rules.tested, "tests"), (rules.mutants, "breaks")):
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
        ((name, text) for name, text in read(
            p for package in PACKAGES for p in (root / package).rglob("*.py")) if name != FAULTS),
        read((root / "property_tests").glob("test_*.py")),
        seeded(),
    )


def seeded() -> Iterator[Fault]:
    """The named faults of this tree."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from oracle.fault_rules import RULE_OF
    from oracle.faults import ALL
    from property_tests.rule_mutants import RULE_MUTANTS

    known = {m.name for m in ALL}
    if lost := sorted(RULE_OF.keys() - known):
        raise ValueError(f"{FAULTS} names faults that are none: {', '.join(lost)}")
    for m in ALL:
        own = (RULE_OF[m.name],) if m.name in RULE_OF else ()
        yield Fault(m.name, (rule_of(m.declared), *own), m.scopes)
    for m in RULE_MUTANTS:
        yield Fault(m.name, (m.declared,))


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
        "of each package that cite the rule; property, the test files that declare it; explored,",
        "the modules of the explorer that judge it in every state, and the scopes in which",
        "exploring finds its faults; mutant, the seeded faults that break it or die by it.",
        "",
        f"{len(rules.texts)} rules, {sum(1 for i in rules.texts if i in rules.cited)} cited by "
        f"code, {sum(1 for i in rules.texts if i in rules.tested)} declared by a test, "
        f"{sum(1 for i in rules.texts if i in rules.explored)} explored, "
        f"{sum(1 for i in rules.texts if i in rules.mutants)} with a mutant.",
        "",
        "| rule | in | reference | jax | oracle | perf | property | explored | mutant |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ident in sorted(rules.texts, key=order):
        tests = ", ".join(
            Path(n).stem.removeprefix("test_") for n in sorted(rules.tested.get(ident, ()))
        )
        home = Path(rules.homes[ident]).name
        more = (", ".join(sorted(x.get(ident, ()))) or "-" for x in (rules.explored, rules.mutants))
        places = (modules(ident, p) for p in PACKAGES)
        cells = [ident, f"[{home}]({home})", *places, tests or "-", *more]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render(of_tree()))
