"""Replay of a log of attention in another pool: its events through a new `Serving` (LAMINA-27)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_impl.app.replay import Replayed
from reference.control.attention_serving import Serving, ServingAction, ServingOptions
from reference.files.event_log import Log
from reference.files.log_records import plain
from reference.files.pools_log import ACTIONS
from reference.vocab.errors import BadInput, IllegalEvent

Record = dict[str, Any]


def replay_pools(log: Log, name: str) -> Replayed:
    """Stops at the first difference. Raises BadInput for options that no `Serving` takes."""
    options = log.head["options"]
    try:
        serving = Serving(ServingOptions(**options | {"kv_heads": tuple(options["kv_heads"])}))
    except BadInput as error:
        raise BadInput(f"{name}:1: {error}") from None
    events = asks = actions = 0
    decided: list[Record] = []
    for line, record in enumerate(log.records, start=2):
        if "action" in record:
            written = {f: record[f] for f in ("action", *ACTIONS[record["action"]])}
            if not decided or decided[0] != written:
                found = decided[0] if decided else "nothing more"
                text = f"the log has {written}, control decides {found}"
                return Replayed(events, asks, actions, False, text, line)
            del decided[0]
            actions += 1
            continue
        if decided:
            text = f"the log lacks {decided[0]}, which control decides"
            return Replayed(events, asks, actions, False, text, line)
        if "event" in record:
            events += 1
            try:
                TELL[record["event"]](serving, record)
            except (IllegalEvent, KeyError, IndexError) as error:
                text = f"the engine broke the protocol: {error!r}"
                return Replayed(events, asks, actions, False, text, line)
        elif "ask" in record:
            asks += 1
            decided = [record_of(action) for action in serving.next_actions()]
    return Replayed(events, asks, actions, log.complete)


def record_of(action: ServingAction) -> Record:
    """An action as the log has it."""
    name = type(action).__name__
    return plain({"action": name} | {f: getattr(action, f) for f in ACTIONS[name]})


TELL: dict[str, Callable[[Serving, Record], Any]] = {
    "Arrived": lambda s, e: s.arrived(e["request"], e["prompt_len"], e["max_new_tokens"]),
    "Cancelled": lambda s, e: s.cancelled(e["request"], e["reason"], e["error"]),
    "Prefilled": lambda s, e: s.prefilled(e["worker"], e["request"], e["stopped"]),
    "Pulled": lambda s, e: s.pulled(e["request"]),
    "SliceDone": lambda s, e: s.slice_done(e["batch"]),
    "AttentionDone": lambda s, e: s.attention_done(e["batch"]),
    "TokenDone": lambda s, e: s.token_done(e["batch"], frozenset(e["stopped"])),
    "Redo": lambda s, e: s.redo(e["batch"]),
    "LostMemory": lambda s, e: s.lost(e["device"]),
    "LostWorker": lambda s, e: s.lost_worker(e["worker"]),
}
"""What each event of a log tells control."""
