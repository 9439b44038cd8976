"""L8 on a log: which situations occur in it, so that a clean verdict can be weighed (LIVE-8).

The names are those of `oracle/sometimes.py`, which looks for them in small worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from oracle.checkers.records import Line, LogView, parts_of, view
from oracle.checkers.work import Board, has_room


def _needed(board: Board) -> list[tuple[int, int]]:
    return [key for r in board.running() for key in r.needs]


def _lacking(board: Board) -> bool:
    return any(key not in board.resident for key in _needed(board))


def _pinned(board: Board) -> bool:
    """Somebody lacks an expert; each slot is written, read, or holds one that somebody needs."""
    keep = {board.resident[key] for key in _needed(board) if key in board.resident}
    keep |= {board.slot_of[ticket] for ticket in board.loading | board.undrained}
    for line in board.steps.values():
        keep |= {slot for _, slot in line.record["slots"]}
    return _lacking(board) and len(keep) == board.head.slots


def _waited_for_twice(board: Board) -> bool:
    needed = _needed(board)
    return any(needed.count(board.key_of[ticket]) > 1 for ticket in board.loading)


def _stage(board: Board, line: Line) -> str:
    request = board.requests.get(line.record["request"])
    return request.stage if request else ""


EACH_LINE: Mapping[str, Callable[[Board, Line], bool]] = {
    "cancel during load": lambda b, x: x.name == "Cancelled" and bool(b.loading),
    "cancel during compute": lambda b, x: x.name == "Cancelled" and _stage(b, x) == "step",
    "fail then retry ok": lambda b, x: (
        x.name == "Loaded" and b.rows.get(b.key_of.get(x.record["ticket"], (-1, -1)), 0) > 0
    ),
    "fail then give up": lambda b, x: any(
        fails > b.head.retries for r in b.running() for fails in r.fails.values()
    ),
    "quarantine then late completion": lambda b, x: (
        x.name in ("Loaded", "LoadFailed") and x.record["ticket"] in b.undrained
    ),
    "a visit partly run": lambda b, x: (
        x.name == "Compute" and not all(last for *_, last in parts_of(x.record))
    ),
    "two visits in one step": lambda b, x: x.name == "Compute" and len(x.record["parts"]) > 1,
    "a failed step": lambda b, x: x.name == "Failed",
}
"""Seen when a line comes, before it has changed anything."""

DECIDED: Mapping[str, Callable[[Board], bool]] = {
    "cache full": lambda b: 0 < b.head.slots == len(b.resident),
    "all slots pinned": _pinned,
    "double waiter on one load": _waited_for_twice,
    "two transfers at once": lambda b: len(b.loading) > 1,
    "loading while a step runs": lambda b: bool(b.loading and b.steps),
    "no room for a claim": lambda b: _lacking(b) and not has_room(b),
    "draining with requests running": lambda b: b.draining and bool(b.running()),
    "a queue behind the admitted": lambda b: (
        bool(b.running()) and any(r.stage == "queued" for r in b.requests.values())
    ),
}
"""Seen in what an ask and its actions leave."""

SITUATIONS = (*EACH_LINE, *DECIDED)


def situations(log_or_records: Any) -> set[str]:
    """Those of SITUATIONS that occur. Raises ValueError as `check_log`; none in a malformed log."""
    log: LogView = view(log_or_records, complete=False)
    if log.malformed:
        return set()
    board, found, asked = Board(log.head), set[str](), False
    for line in log.lines:
        if asked and line.kind != "action":
            found |= {name for name, is_so in DECIDED.items() if name not in found and is_so(board)}
        asked = line.kind == "ask" or (asked and line.kind == "action")
        found |= {n for n, is_so in EACH_LINE.items() if n not in found and is_so(board, line)}
        board.see(line)
    return found


def not_seen(logs: Iterable[Any]) -> list[str]:
    """What occurs in none of the logs."""
    seen = set().union(*(situations(log) for log in logs))
    return [name for name in SITUATIONS if name not in seen]
