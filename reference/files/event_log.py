"""The event log: what control was told and what it decided, in order (LOG-1 to LOG-9).

    writer = LogWriter(path, head_of(...), clock)
    writer.event(Loaded(3)); writer.ask(2, 1); writer.action(load, bytes=n); writer.end(totals)
    log = read_log(path)                              # checked line by line

Line 1 is the head. The control plane can be replayed from a log alone, and judged by it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.log_extras import extras_fault, is_seconds
from reference.files.log_head import check_head, head_of, options_of
from reference.files.log_records import action_from_record, event_from_record, plain, record_of
from reference.files.pools_log import check_pools_head, check_pools_record, is_pools
from reference.files.regular import reason
from reference.files.strict_json import kind, place, show
from reference.vocab.actions import Action
from reference.vocab.errors import BadInput
from reference.vocab.events import Event

__all__ = [
    "Log", "LogWriter", "action_from_record", "event_from_record", "head_of", "options_of",
    "read_log", "record_of",
]  # fmt: skip

BUFFER = 1 << 16
MAX_LINE = 64 << 20


@dataclass
class Log:
    """A log that was read: `records[i]` is line i + 2. Complete: its last record is the end.

    `warning` says in one line what is wrong with an incomplete log that is readable all the same.
    """

    head: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    warning: str = ""


class LogWriter:
    """Writes one log; call it from one thread, in the order in which control sees things.

    path     the file, written anew; None: records are only kept
    clock    seconds, never going back; virtual or real
    keep     keep every record in `records`, as `read_log` would give them
    warn     told once, in one line, when the file cannot be written any more (LOG-5): the run goes
             on, the file ends without an end record, `failed` says why
    Errors: BadInput at once if the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        head: dict[str, Any],
        clock: Callable[[], float],
        *,
        keep: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.head = plain(head)
        self.records: list[dict[str, Any]] = []
        self.failed = ""
        self.ended = False
        self._clock, self._keep = clock, keep
        self._warn = warn or (lambda line: print(line, file=sys.stderr))
        self._pending = bytearray()
        self._fd = -1
        if self.path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            try:
                self._fd = os.open(self.path, flags, 0o666)
            except OSError as e:
                where = place(self.path)
                raise BadInput(f"{where}: cannot be written: {reason(e)}") from None
            self._line(self.head)
            self.flush()

    @property
    def log(self) -> Log:
        """What was kept so far, as a Log (needs `keep`)."""
        return Log(self.head, self.records, self.ended)

    @property
    def now(self) -> float:
        """The `t` of a record written now."""
        return round(float(self._clock()), 9)

    def event(self, event: Event, **extra: Any) -> None:
        """One event, just before or after control handles it; `extra` fields are added."""
        if self._wanted():
            self._write(record_of(event), extra)

    def ask(self, idle_channels: int, idle_compute: int) -> None:
        """One call of next_actions; the actions it gave follow (LOG-4)."""
        self._write({"ask": [idle_channels, idle_compute]}, {})

    def action(self, action: Action, **extra: Any) -> None:
        """One action that control gave; `extra` fields are added."""
        if self._wanted():
            self._write(record_of(action), extra)

    def note(self, record: Mapping[str, Any], **extra: Any) -> None:
        """A record of another vocabulary (pools_log); `extra` fields are added."""
        self._write(plain(dict(record)), extra)

    def end(self, totals: Mapping[str, Any]) -> None:
        """The last record; only a log that has it is complete."""
        self._write({"end": dict(totals)}, {})
        self.ended = True
        self.flush()

    def _wanted(self) -> bool:
        """Whether anybody will see a record: else none is made."""
        if self.ended:
            raise ValueError("a record after the end of the log")
        return self._keep or self._fd >= 0

    def _write(self, record: dict[str, Any], extra: dict[str, Any]) -> None:
        wanted = self._wanted()
        if shared := record.keys() & extra.keys():
            raise ValueError(f"extra fields hide the record's own: {sorted(shared)}")
        if not wanted:
            return
        full = {"t": self.now, **record, **plain(extra)}
        if "end" in full:
            full["end"] = plain(full["end"])
        if self._keep:
            self.records.append(full)
        if self._fd >= 0:
            self._line(full)

    def _line(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        self._pending += text.encode() + b"\n"
        if len(self._pending) >= BUFFER:
            self.flush()

    def flush(self) -> None:
        """Hand what is pending to the system; on an error the log is given up (LOG-5)."""
        if self._fd < 0:
            self._pending.clear()
            return
        view = memoryview(bytes(self._pending))
        self._pending.clear()
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        self.failed = f"{place(self.path)}: {reason(error)}; the event log is incomplete"
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError:
            pass  # the reason is already told
        self._warn(self.failed)

    def close(self) -> None:
        """Write what is pending and close the file; without `end` the log stays incomplete."""
        self.flush()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError as e:
                self._fd = -1
                self.failed = f"{place(self.path)}: {reason(e)}; the event log is incomplete"
                self._warn(self.failed)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(path: str | os.PathLike[str], *, pools: bool = False) -> Log:
    """Read and check a log (LOG-6). A last line that was cut off is left out, with a warning.
    pools: it may be one of attention in another pool (pools_log; LAMINA-27).

    Errors: BadInput, one line naming the file and the line, for another version, an incomplete
    head, or a record that is not a legal one.
    """
    where = place(path)
    try:
        with Path(path).open("rb") as file:
            first = file.readline(MAX_LINE)
            if not first:
                raise BadInput(f"{where}: empty; an event log begins with its head")
            head, other = strict_json.parse(first, f"{where}:1"), False
            if is_pools(head):
                other = True
                if not pools:
                    raise BadInput(f"{where}:1: attention in another pool; `covey check` and "
                                   "`covey replay` read such a log")
            check = check_pools_head if other else check_head
            log = Log(check(head, f"{where}:1"))
            last_time = -math.inf
            number = 1
            while line := file.readline(MAX_LINE):
                number += 1
                try:
                    record = strict_json.parse(line, f"{where}:{number}")
                except BadInput:
                    if log.complete or line.endswith(b"\n") or file.read(1):
                        raise
                    log.warning = f"{where}:{number}: cut off; the log is incomplete"
                    return log
                if log.complete:
                    raise BadInput(f"{where}:{number}: a record after the end of the log")
                last_time = _record(record, last_time, f"{where}:{number}", other)
                log.records.append(record)
                log.complete = "end" in record
    except OSError as e:
        raise BadInput(f"{where}: cannot be read: {reason(e)}") from None
    if not log.complete:
        log.warning = f"{where}: no end record; the log is incomplete"
    return log


def _record(record: Any, last_time: float, where: str, pools: bool = False) -> float:
    """Check one record after the head; its time (LOG-3, LOG-7)."""
    if not isinstance(record, dict):
        raise BadInput(f"{where}: an object is needed, not {kind(record)}")
    words = [word for word in ("event", "ask", "action", "end") if word in record]
    if len(words) != 1:
        raise BadInput(f"{where}: exactly one of event, ask, action and end is needed")
    t = record.get("t")
    if not is_seconds(t) or t < last_time:
        raise BadInput(f"{where}: t is {show(t, 30)}; seconds that never go back are needed")
    try:
        if pools:
            check_pools_record(record)
        elif words[0] == "event":
            event_from_record(record)
        elif words[0] == "action":
            action_from_record(record)
    except ValueError as e:
        raise BadInput(f"{where}: {e}") from None
    if words[0] == "ask":
        ask = record["ask"]
        good = isinstance(ask, list) and len(ask) == 2
        if not good or any(type(x) is not int or x < 0 for x in ask):
            raise BadInput(f"{where}: ask is {show(ask, 40)}; [idle_channels, idle_compute]")
    if words[0] == "end" and not isinstance(record["end"], dict):
        raise BadInput(f"{where}: end is {show(record['end'], 40)}; an object is needed")
    if not pools and (fault := extras_fault(record)):
        raise BadInput(f"{where}: {fault}")
    return t
