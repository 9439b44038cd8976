"""S16, and S14 over two logs: what was heard so far decides what is said next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oracle.checkers.records import Line, LogView, Violation
from reference.files.log_records import FORMS

FIELDS = {kind.__name__: tuple(form) for kind, form in FORMS.items()}
"""The fields of each event and action; what executors add to them (times, sums) is not decided."""

ABSENT = {"ns": 0}
"""What a field that may be left out then means (LOG-2)."""


def check_repeat(log: LogView, earlier: LogView, name: str) -> Iterator[Violation]:
    """SAFE-16: up to the first event that differs, `log` decides as `earlier` (file `name`) does.

    A request that is admitted or refused in one of them only breaks SAFE-14: the logs differ later
    alone, so that was decided by what nobody could know. Nothing follows for other options, nor for
    a scheduler of another kind that claims no grouping of ours: it may have a clock (LOG-8).
    """
    if not log.head.grouping or log.raw.get("options") != earlier.raw.get("options"):
        return
    for new, old in zip(log.lines, earlier.lines, strict=False):
        said, before = _plain(new), _plain(old)
        if said == before:
            continue
        actions = [line for line in (new, old) if line.kind == "action"]
        if actions:
            lifecycle = any(line.name in ("Admit", "Reject") for line in actions)
            text = f"{_words(said)}; after the same events, {name} has at line {old.number} "
            found = "S14" if lifecycle else "S16"
            yield Violation(found, new.number, text + _words(before))
        return


def _plain(line: Line) -> Any:
    record = line.record
    if line.kind == "ask":
        return ("ask", list(record["ask"]))
    if line.kind == "end":
        return ("end",)
    return (line.name, {name: record.get(name, ABSENT.get(name)) for name in FIELDS[line.name]})


def _words(said: Any) -> str:
    if len(said) == 1 or not isinstance(said[1], dict):
        return " ".join(map(str, said))
    return f"{said[0]} " + " ".join(f"{name}={value}" for name, value in said[1].items())
