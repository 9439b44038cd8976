"""The examples of README.md and docs/: which there are, as (where, language, text)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.M)
IMPORTS = re.compile(r"(from [\w.]+ import |import \w)")


class Example(NamedTuple):
    """`line` is that of its first line."""

    page: str
    line: int
    language: str
    text: str


def examples(page: str, text: str) -> Iterator[Example]:
    """Fenced blocks with their language, and indented ones that begin with an import: Python."""
    for found in FENCED.finditer(text):
        yield Example(page, text.count("\n", 0, found.start(2)) + 1, *found.groups())
    plain = FENCED.sub(lambda m: re.sub("[^\n]", "", m[0]), text)
    for found in INDENTED.finditer(plain):
        block = textwrap.dedent(found[0]).strip("\n")
        if IMPORTS.match(block):
            at = found.start() + found[0].index(block.split("\n")[0])
            yield Example(page, plain.count("\n", 0, at) + 1, "python", block + "\n")


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head: cells, stripped."""
    part = text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line[1:-1].split("|") for line in part.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]
