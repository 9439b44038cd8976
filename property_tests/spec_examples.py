"""Runs the examples of specs/*.md: fenced blocks of the kinds that specs/README.md describes.

`blocks` finds them, `faults` runs one and says what is not as it stands there. Kinds: `control`
(told, asked, decided), `log` (lines of an event log), `numbers` and `files` (a word, what it is
given, `->` and what comes out).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oracle.checkers import check_log
from property_tests.spec_words import FILES, NUMBERS
from reference.control import Scheduler
from reference.files.event_log import Log, head_of, read_log
from reference.vocab import actions as act
from reference.vocab import events as ev
from reference.vocab.errors import BadInput, CoveyError
from reference.vocab.ids import ENTRY, Visit
from reference.vocab.options import ControlOptions

KINDS = ("control", "log", "numbers", "files")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One example: the file, its first line there, its kind, its lines without remarks."""

    file: str
    line: int
    kind: str
    lines: list[str]


def blocks(file: str, text: str) -> Iterator[Block]:
    """The examples of a file, in order. ValueError for a fence of an unknown kind."""
    for found in FENCE.finditer(text):
        kind, body = found.groups()
        if kind not in KINDS:
            raise ValueError(f"{file}: a block of kind {kind}; known are {', '.join(KINDS)}")
        lines = [re.split(r"\s{2,}# ", line)[0].rstrip() for line in body.splitlines()]
        yield Block(file, text[: found.start(2)].count("\n") + 1, kind, [x for x in lines if x])


def faults(block: Block) -> list[str]:
    """What does not hold, one line each. ValueError for a line that is no example."""
    if block.kind == "control":
        return _control(block)
    if block.kind == "log":
        return _log(block)
    words = NUMBERS if block.kind == "numbers" else FILES
    return [f for line in block.lines for f in _line(words, line)]


# -- a word and its result


def _line(words: dict[str, Callable[[str], str]], line: str) -> list[str]:
    given, arrow, right = line.rpartition(" -> ")
    word, _, rest = given.partition(" ")
    if not arrow or word not in words:
        return [f"{line}: WORD .. -> RESULT; words are {', '.join(words)}"]
    try:
        found = words[word](rest)
    except CoveyError as error:
        found = f"refused: {error}"
    if right.startswith("refused: "):
        good = found.startswith("refused: ") and right.removeprefix("refused: ") in found
    else:
        good = found == right
    return [] if good else [f"{given} -> {found}"]


# -- control


def _control(block: Block) -> list[str]:
    """`options ..` first; then events, and asks with what is decided below them, indented."""
    first, *rest = block.lines
    s = Scheduler(options(first))
    decided: list[str] = []
    out: list[str] = []
    checked = 0
    for line in [*rest, "end"]:
        if line.startswith(" "):
            said = decided.pop(0) if decided else "nothing more"
            checked += 1
            if said != line.strip():
                out.append(f"{line.strip()}: it is {said}")
            continue
        out += [f"before `{line}`: also {said}" for said in decided]
        decided = []
        if line.startswith("ask "):
            channels, lanes = map(int, line.split()[1:])
            decided = [show(a) for a in s.next_actions(channels, lanes)]
            checked += not decided
        elif line != "end":
            s.handle(event(line))
    return out or ([] if checked else ["nothing is asked"])


def options(line: str) -> ControlOptions:
    """`options layers=0,2 experts=4 ..`: what is not said is the default of ControlOptions."""
    word, *settings = line.split()
    if word not in ("options", "head"):
        raise ValueError(f"{line}: options come first, or the head")
    values: dict[str, Any] = {}
    for name, _, value in (x.partition("=") for x in settings):
        if name == "layers":
            values[name] = tuple(map(int, value.split(","))) if value != "none" else ()
        else:
            values[name] = int(value) if value.isdigit() else value
    return ControlOptions(**values)


EVENTS: list[tuple[str, Callable[..., ev.Event]]] = [
    (r"Arrived (\d+) prompt (\d+) new (\d+)", lambda *x: ev.Arrived(*map(int, x))),
    (r"Routed (\d+)\.(\d+) at (\d+): (.+)", lambda r, c, layer, experts: ev.Routed(
        Visit(int(r), int(c), int(layer)),
        tuple(tuple(map(int, row.split())) for row in experts.split("/")))),
    (r"Loaded (\d+)", lambda t: ev.Loaded(int(t))),
    (r"LoadFailed (\d+)", lambda t: ev.LoadFailed(int(t), "EIO")),
    (r"LoadFailed (\d+), may still write", lambda t: ev.LoadFailed(int(t), "late", False)),
    (r"Computed (\d+)", lambda n: ev.Computed(int(n))),
    (r"Sampled (\d+) token (\d+)( stop)?", lambda r, t, stop: ev.Sampled(
        int(r), int(t), bool(stop))),
    (r"Failed (\d+)", lambda n: ev.Failed(int(n), "error")),
    (r"Failed (\d+) for (.+)", lambda n, rs: ev.Failed(
        int(n), "error", tuple(map(int, rs.split())))),
    (r"Cancelled (\d+)", lambda r: ev.Cancelled(int(r))),
    (r"Drain", ev.Drain),
]  # fmt: skip


def event(line: str) -> ev.Event:
    """An event as examples write it."""
    for form, make in EVENTS:
        if found := re.fullmatch(form, line):
            return make(*found.groups())
    raise ValueError(f"{line}: no event has this form")


def show(action: act.Action) -> str:
    """An action as examples write it."""
    match action:
        case act.Admit(request):
            return f"Admit {request}"
        case act.Load(ticket, (layer, expert), slot, guess):
            return f"Load {ticket}: expert {layer}.{expert} into slot {slot}" + guess * ", a guess"
        case act.Finish(request, reason):
            return f"Finish {request}: {reason}"
        case act.Reject(request):
            return f"Reject {request}"
        case act.Compute(step, layer, parts, slots):
            where = "ENTRY" if layer == ENTRY else str(layer)
            of = [
                f"{p.visit.request}.{p.visit.chunk}"
                + (f" experts {' '.join(map(str, p.experts))}" if p.experts else "")
                + ("" if p.last else " (not the last part)")
                for p in parts
            ]
            held = ", slots " + " ".join(f"{e}={slot}" for e, slot in slots) if slots else ""
            return f"Compute {step} at {where}: {'; '.join(of)}{held}"
    raise ValueError(action)


# -- logs


def _log(block: Block) -> list[str]:
    """`head layers=0,2 ..`, lines as they are, and `->` what reading them comes to."""
    first, *lines, verdict = block.lines
    lines.insert(0, json.dumps(head_of(
        options(first), engine="simulator", model={}, versions={}, expert_bytes=8, slot_bytes=8,
        budget_bytes=8 * options(first).slots,
    )))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        cut = not lines[-1].endswith("}")
        path.write_text("\n".join(lines) + "\n" * (not cut))
        try:
            log = read_log(path)
            found = f"-> accepted, {'complete' if log.complete else 'incomplete'}"
            if log.complete:
                found += f", {broken(log)}"
        except BadInput as error:
            found = f"-> refused, {str(error).removeprefix(f'{path}:')}"
    good = found.startswith(verdict) if "refused" in verdict else found == verdict
    return [] if good else [f"line {block.line}: {found}"]


def broken(log: Log) -> str:
    """Which properties the checkers find broken."""
    found = {v.property for v in check_log(log)}
    return f"breaks {', '.join(sorted(found))}" if found else "breaks nothing"
