"""Replay an event log through the scheduler.

Feeds the events of a run's log (--log) to a new scheduler with the options in the log's head and
compares every action with the one that the log has at that place. Equal: the run obeyed this
scheduler. Different: another version or other options made the log, or the engine strayed.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reference.control.scheduler import Scheduler
from reference.files.event_log import Log, action_from_record, event_from_record, read_log
from reference.files.log_head import is_foreign
from reference.files.pools_log import is_pools
from reference.files.strict_json import show
from reference.vocab.actions import Action
from reference.vocab.errors import BadInput, IllegalEvent
from reference.vocab.options import ControlOptions


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey replay`."""
    parser.add_argument("events", metavar="EVENTS", type=Path, help="event log of a run (--log)")


@dataclass(frozen=True)
class Replayed:
    """What a replay saw. `difference` is empty when every action was the same."""

    events: int
    asks: int
    actions: int
    complete: bool
    difference: str = ""
    line: int = 0


def run(args: argparse.Namespace) -> int:
    """0 when every action is the same, 1 otherwise (APP-7)."""
    log = read_log(args.events, pools=True)
    if is_pools(log.head):
        from jax_impl.app.replay_pools import replay_pools

        seen = replay_pools(log, str(args.events))
    else:
        seen = replay(log, str(args.events))
    if seen.difference:
        print(f"{args.events}:{seen.line}: {seen.difference}")
        print(f"differs after {seen.events} events and {seen.actions} equal actions")
        return 1
    tail = "" if seen.complete else " (the log is incomplete)"
    print(f"{seen.events} events, {seen.asks} decisions, {seen.actions} actions: the same{tail}")
    return 0


def options_of(head: dict[str, Any], name: str) -> ControlOptions:
    """The ControlOptions that the head of a log holds. Raises BadInput."""
    given = head.get("options")
    known = {f.name for f in fields(ControlOptions)}
    if not isinstance(given, dict):
        raise BadInput(f"{name}:1: no options in the head of the log")
    if is_foreign(head):
        raise BadInput(f"{name}:1: decided by {show(given['scheduler'], 40)}; only what this "
                       "project's own schedulers decided can be decided again (`covey check` "
                       "judges any)")
    if unknown := sorted(given.keys() - known):
        raise BadInput(f"{name}:1: unknown option {unknown[0]!r}")
    values: dict[str, Any] = {k: _tuples(v) for k, v in given.items()}
    try:
        return ControlOptions(**values)
    except TypeError as error:
        raise BadInput(f"{name}:1: options: {error}") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def replay(log: Log, name: str) -> Replayed:
    """Runs the events of `log` through a fresh Scheduler; stops at the first difference.

    Raises BadInput for a log that is not one; `name` says whose lines are meant.
    """
    scheduler = Scheduler(options_of(log.head, name))
    events = asks = actions = 0
    complete = False
    decided: list[Action] = []  # what the scheduler said at the last ask and the log has yet to

    def outcome(difference: str = "", line: int = 0) -> Replayed:
        return Replayed(events, asks, actions, complete, difference, line)

    for line, record in zip(itertools.count(2), log.records, strict=False):
        if "action" in record:
            written = action_from_record(record)
            if not decided:
                return outcome(f"the log has {written}, the scheduler decides nothing more", line)
            if decided[0] != written:
                return outcome(f"the log has {written}, the scheduler decides {decided[0]}", line)
            decided.pop(0)
            actions += 1
            continue
        if decided:
            if "event" in record or "ask" in record or "end" in record:
                return outcome(f"the log lacks {decided[0]}, which the scheduler decides", line)
        if "event" in record:
            events += 1
            try:
                scheduler.handle(event_from_record(record))
            except IllegalEvent as error:
                return outcome(f"the engine broke the protocol: {error}", line)
        elif "ask" in record:
            asks += 1
            channels, compute = record["ask"]
            decided = list(scheduler.next_actions(channels, compute))
        elif "end" in record:
            complete = True
    return outcome()
