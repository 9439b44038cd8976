"""The examples of the rules hold, and a changed one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from property_tests.spec_examples import KINDS, Block, blocks, event, faults

SPECS = Path(__file__).resolve().parent.parent / "specs"
BLOCKS = [b for file in sorted(SPECS.glob("*.md"))
          for b in blocks(file.name, file.read_text(encoding="utf-8"))]  # fmt: skip


@pytest.mark.rule(
    "ADMIT-2", "ADMIT-3", "ADMIT-4", "CANCEL-1", "CACHE-2", "CACHE-4", "CACHE-5", "CACHE-8",
    "CACHE-9", "FETCH-6", "SCHED-1", "SCHED-2", "SCHED-3", "SCHED-4", "SCHED-10", "SCHED-11",
    "LOG-3", "LOG-6", "LOG-7", "ATTN-3", "NUM-2", "NUM-4", "NUM-5", "NUM-6", "NUM-7", "NUM-15",
    "NUM-18", "NUM-19", "ROUTE-2", "ROUTE-4", "ROUTE-5", "ROUTE-6", "ROUTE-7", "SAMPLE-1",
    "SAMPLE-2", "SAMPLE-4", "SAMPLE-5", "SAMPLE-7", "FILE-2", "FILE-5", "FILE-6", "FILE-11",
    "FILE-12",
)  # fmt: skip
@pytest.mark.parametrize("block", BLOCKS, ids=[f"{b.file}:{b.line}" for b in BLOCKS])
def test_the_example_holds(block: Block) -> None:
    assert faults(block) == []


def test_control_log_numbers_and_files_have_examples() -> None:
    for kind in KINDS:
        assert sum(len(b.lines) for b in BLOCKS if b.file == f"{kind}.md") >= 15, kind
    assert sum(b.kind == "control" for b in BLOCKS) >= 6


def altered(block: Block) -> list[Block]:
    """The block with one of its expectations changed or left out, for each of them."""
    out = []
    for i, line in enumerate(block.lines):
        if block.kind == "control" and line.startswith(" "):
            out.append([*block.lines[:i], *block.lines[i + 1 :]])
            out.append([*block.lines[:i], line + "7", *block.lines[i + 1 :]])
        elif block.kind == "log" and line.startswith("-> "):
            out.append([*block.lines[:i], line + "x"])
        elif block.kind in ("numbers", "files"):
            out.append([line + "x"])
            if " -> refused" in line:
                out.append([line.split(" -> ")[0] + " -> accepted"])
    return [block._replace(lines=lines) for lines in out]


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{b.file}:{b.line}" for b in BLOCKS])
def test_a_changed_example_does_not_hold(block: Block) -> None:
    others = altered(block)
    assert others
    for other in others:
        assert faults(other), other.lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nx\n```\n", "known are control"),
        ("```control\nArrived 0 prompt 1 new 1\n```\n", "options come first"),
        ("```control\noptions layers=0 experts=2 top_k=1 slots=1\nArrived 0\n```\n", "no event"),
    ],
)
def test_what_is_no_example_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        faults(next(blocks("x.md", text)))


def test_an_unknown_word_and_a_block_that_asks_nothing_are_no_examples() -> None:
    for text in ("```numbers\nbf17 1 -> 2\n```\n", "```numbers\nbf16 1\n```\n",
                 "```control\noptions layers=none experts=0 top_k=0 slots=0\nDrain\n```\n"):
        (block,) = blocks("x.md", text)
        assert faults(block)
    with pytest.raises(ValueError, match="no event"):
        event("Exploded 3")
