"""L1, L2, L4: an engine gets on by itself, wears no expert down, and passes nobody for ever.

On a log these say less than on the graph of all states: what did not happen in it is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import Head, Line, LogView, Violation, parts_of
from oracle.checkers.work import Board

Key = tuple[int, int]
OUTSIDE = ("Arrived", "Cancelled", "Drain")
PROGRESS = (*OUTSIDE, "Routed", "Predicted", "Sampled", "Computed", "Failed", "LoadFailed")


def check_l1(log: LogView) -> Iterator[Violation]:
    """LIVE-1: who waits is not left with nothing in flight until somebody outside does something.

    However many channels and lanes are idle, and whatever holds a request back.
    """
    board = Board(log.head)
    stuck: Line | None = None
    ask: Line | None = None
    for line in log.lines:
        if ask and line.kind != "action":
            stuck = ask if board.waiting() and not board.moving() else None
            ask = None
        if stuck and (line.name in OUTSIDE or line.kind == "end"):
            text = f"nothing is in flight while requests {board.waiting()} wait, until "
            yield Violation("L1", stuck.number, text + (line.name or "the end"))
            stuck = None
        if line.kind == "ask":
            ask = line
        board.see(line)


def check_l2(log: LogView) -> Iterator[Violation]:
    """LIVE-2: without progress between (PROGRESS), no expert is loaded twice.

    Since then nothing has been used, asked for, guessed anew or lost, so it was pushed out in vain.
    """
    loaded: dict[Key, int] = {}
    for line in log.lines:
        if line.kind == "event" and line.name in PROGRESS:
            loaded.clear()
        elif line.name == "Load":
            key = tuple(line.record["key"])
            if key in loaded:
                text = f"load {line.record['ticket']} brings {key} as load {loaded[key]} has, and "
                yield Violation("L2", line.number, text + "nothing has got on between")
            loaded[key] = line.record["ticket"]


def most_passes(head: Head) -> int:
    """B of LIVE-4: visits that another may start within one visit of a decoding request."""
    token = len(head.layers) + 1
    lag = head.max_lag or 4 * token
    if head.grouping in ("interleaved", "micro-queues"):
        return 2 * lag
    return lag + max(lag, token) if head.grouping == "balanced" else token


def check_l4(log: LogView) -> Iterator[Violation]:
    """LIVE-4: within one visit of a request that decodes, no other starts more than B of its own.

    Prompts of several rows are left to the graphs: no lag bound holds them.
    """
    most = most_passes(log.head)
    board = Board(log.head)
    passes: dict[int, dict[int, int]] = {}
    made: dict[int, int] = {}
    at: dict[int, tuple[int, int]] = {}
    for line in log.lines:
        if line.name == "Compute":
            for number, chunk, layer, *_ in parts_of(line.record):
                mover = board.requests.get(number)
                if mover is None or board.bulk(mover) or at.get(number) == (chunk, layer):
                    continue
                at[number] = chunk, layer
                for other, counts in passes.items():
                    if other == number:
                        continue
                    counts[number] = counts.get(number, 0) + 1
                    if counts[number] == most + 1:
                        text = f"request {number} starts {most + 1} visits within one of request "
                        yield Violation("L4", line.number, f"{text}{other}, the most is {most}")
        board.see(line)
        if line.name in ("Admit", "Finish", "Computed", "Failed", "Cancelled", "Sampled"):
            decoding = {
                number: r
                for number, r in board.requests.items()
                if r.stage not in ("queued", "ended") and not r.cancelled
                and not board.bulk(r)
            }  # fmt: skip
            for number, r in decoding.items():
                if number not in passes or made[number] != r.made:
                    passes[number], made[number] = {}, r.made
            for number in passes.keys() - decoding.keys():
                del passes[number]
