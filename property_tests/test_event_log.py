"""The event log: written as it is read, strict in reading, and harmless on a full disk."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from property_tests.refusals import refused
from reference.control.scheduler import Scheduler
from reference.files.event_log import (
    LogWriter,
    action_from_record,
    event_from_record,
    head_of,
    options_of,
    read_log,
    record_of,
)
from reference.files.log_records import FORMS
from reference.vocab.actions import Action, Admit, Compute, Finish, Load, Reason, Reject
from reference.vocab.events import (
    Arrived,
    Cancelled,
    Computed,
    Drain,
    Event,
    Failed,
    Loaded,
    LoadFailed,
    Predicted,
    Routed,
    Sampled,
)
from reference.vocab.ids import ENTRY, ExpertKey, Part, Visit
from reference.vocab.options import ControlOptions

OPTIONS = ControlOptions(layers=(0, 2), experts=8, top_k=2, slots=4)


def head() -> dict[str, Any]:
    return head_of(
        OPTIONS,
        engine="simulator",
        model={"family": "x"},
        versions={"covey": "0"},
        expert_bytes=10,
        budget_bytes=40,
        slot_bytes=10,
    )


def ticks() -> Callable[[], float]:
    """A clock that counts."""
    counter = itertools.count()
    return lambda: next(counter) / 8


small = st.integers(0, 9)
visits = st.builds(Visit, small, small, st.integers(ENTRY, 9))
counts = st.lists(small, max_size=3).map(tuple)
events = st.one_of(
    st.builds(Arrived, small, small, small),
    st.builds(Routed, visits, st.lists(counts, max_size=3).map(tuple)),
    st.builds(
        Predicted, visits, st.lists(st.tuples(small, st.floats(-1, 1)), max_size=3).map(tuple)
    ),
    st.builds(Loaded, st.integers(1, 9)),
    st.builds(LoadFailed, st.integers(1, 9), st.text(max_size=5), st.booleans()),
    st.builds(Computed, st.integers(1, 9)),
    st.builds(Sampled, small, st.none() | small, st.booleans()),
    st.builds(Failed, st.integers(1, 9), st.text(max_size=5), counts),
    st.builds(Cancelled, small),
    st.just(Drain()),
)
parts = st.builds(Part, visits, counts, st.booleans())
actions = st.one_of(
    st.builds(Admit, small),
    st.builds(Load, st.integers(1, 9), st.builds(ExpertKey, small, small), small, st.booleans()),
    st.builds(
        Compute,
        st.integers(1, 9),
        st.integers(ENTRY, 9),
        st.lists(parts, max_size=3).map(tuple),
        st.lists(st.tuples(small, small), max_size=3).map(tuple),
    ),
    st.builds(Finish, small, st.sampled_from(get_args(Reason)), st.text(max_size=5)),
    st.builds(Reject, small, st.text(max_size=5)),
)


@pytest.mark.rule("LOG-2")
def test_every_field_of_every_record_has_a_form() -> None:
    kinds = (*get_args(Event), *get_args(Action))
    assert set(FORMS) == set(kinds)
    for kind in kinds:
        assert list(FORMS[kind]) == [f.name for f in dataclasses.fields(kind)]


@pytest.mark.rule("LOG-2", "LOG-3")
@given(st.lists(st.one_of(events, actions, st.tuples(small, small)), max_size=12))
def test_what_is_written_is_read(tmp_path: Path, items: list[Any]) -> None:
    path = tmp_path / "log"
    with LogWriter(path, head(), ticks(), keep=True) as writer:
        for item in items:
            if isinstance(item, tuple):
                writer.ask(*item)
            elif isinstance(item, get_args(Event)):
                writer.event(item, note="x")
            else:
                writer.action(item, bytes=3)
        writer.end({"tokens": 1})
    log = read_log(path)
    assert (log.head, log.complete, log.warning) == (head(), True, "")
    assert log.records == writer.records == writer.log.records
    assert [record["t"] for record in log.records] == [i / 8 for i in range(len(items) + 1)]
    for item, record in zip(items, log.records, strict=False):
        if isinstance(item, tuple):
            assert record["ask"] == list(item)
        else:
            back = event_from_record if "event" in record else action_from_record
            # only a lone surrogate in an error's text is written in another way
            assert record_of(back(record)) == record_of(item)
            if str(item).isascii():
                assert back(record) == item


@pytest.mark.rule("LOG-1")
def test_the_head_holds_all_options() -> None:
    assert options_of(head()) == OPTIONS
    changed = dataclasses.replace(OPTIONS, grouping="lockstep", readiness="expert", retries=0)
    assert options_of({"options": json.loads(json.dumps(dataclasses.asdict(changed)))}) == changed


def write(path: Path, *records: Any, first: Any = None, raw: bytes = b"") -> Path:
    lines = [head() if first is None else first, *records]
    path.write_bytes(b"".join(json.dumps(x).encode() + b"\n" for x in lines) + raw)
    return path


@pytest.mark.rule("LOG-1", "FILE-1")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log": 2}, "log version 2; 1 is supported"),
        ({"log": True}, "log version True"),
        ({"log": ...}, "not the head"),
        ({"options": ...}, "lacks options"),
        ({"versions": ..., "slot_bytes": ...}, "lacks versions, slot_bytes"),
        ({"model": 3}, "model"),
        ({"engine": 3}, "engine is 3"),
        ({"budget_bytes": -1}, "budget_bytes is -1"),
        ({"expert_bytes": 1.5}, "expert_bytes is 1.5"),
        ({"options": []}, "options"),
        ({"options": {"layers": []}}, "options lack experts"),
        ({"option:slots": "4"}, "options.slots is 4"),
        ({"option:slots": True}, "options.slots is True"),
        ({"option:layers": [2, 0]}, "options.layers is [2, 0]"),
        ({"option:layers": "02"}, "options.layers"),
        ({"option:grouping": "random"}, "options.grouping is random"),
        ({"option:grouping": []}, "options.grouping"),
        ({"option:new": 1}, "unknown option 'new'"),
    ],
)
def test_a_bad_head_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    first = head()
    for key, value in change.items():
        target = first["options"] if key.startswith("option:") else first
        target[key.removeprefix("option:")] = value
    first = {k: v for k, v in first.items() if v is not ...}
    refused(lambda: read_log(write(tmp_path / "log", first=first)), "log:1: ", words)


ARRIVED = {"t": 1.0, "event": "Arrived", "request": 0, "prompt_len": 5, "max_new_tokens": 4}
LOAD = {"t": 1.0, "action": "Load", "ticket": 1, "key": [0, 1], "slot": 0, "guess": False}
COMPUTE = {
    "t": 1.0, "action": "Compute", "step": 1, "layer": 0,
    "parts": [[[0, 0, 0], [1, 2], True]], "slots": [[1, 0], [2, 1]],
}  # fmt: skip
END = {"t": 1.0, "end": {}}


@pytest.mark.rule("LOG-3", "LOG-6", "LOG-7", "LOG-9", "FILE-1")
@pytest.mark.parametrize(
    ("record", "words"),
    [
        (3, "an object is needed, not a number"),
        ({"t": 1.0}, "exactly one of"),
        ({"t": 1.0, "ask": [1, 1], "end": {}}, "exactly one of"),
        ({"ask": [1, 1]}, "t is None"),
        ({"t": "1", "ask": [1, 1]}, "t is 1"),
        ({"t": 0.25, "ask": [1, 1]}, "never go back"),
        ({"t": 1.0, "ask": [1]}, "ask is [1]"),
        ({"t": 1.0, "ask": [1, -1]}, "ask is [1, -1]"),
        ({"t": 1.0, "end": 3}, "end is 3"),
        ({"t": 1e300, "ask": [1, 1]}, "t is 1e+300"),
        ({"t": 1.0, "end": {"by": []}}, "end.by is []; a time in seconds is needed"),
        ({**LOAD, "bytes": 0}, "Load.bytes is 0; at least one byte is needed"),
        ({**LOAD, "bytes": [8]}, "Load.bytes is [8]"),
        ({"t": 1.0, "event": "Loaded", "ticket": 1, "seconds": -5}, "Loaded.seconds is -5"),
        ({"t": 1.0, "event": "Load"}, "event is Load; known: Arrived"),
        ({"t": 1.0, "event": ["Load"]}, "event is"),
        ({"t": 1.0, "action": "Loaded"}, "action is Loaded; known: Admit"),
        ({**ARRIVED, "request": -1}, "Arrived.request is -1; an integer of at least 0"),
        ({**ARRIVED, "request": 1.0}, "Arrived.request is 1.0"),
        ({**ARRIVED, "prompt_len": True}, "Arrived.prompt_len is True"),
        ({k: v for k, v in ARRIVED.items() if k != "prompt_len"}, "Arrived has no prompt_len"),
        ({**LOAD, "ticket": 0}, "Load.ticket is 0; an integer of at least 1"),
        ({**LOAD, "key": [0]}, "Load.key is [0]; [layer, expert]"),
        ({**LOAD, "key": [-1, 0]}, "Load.key"),
        ({**LOAD, "guess": 0}, "Load.guess is 0; true or false"),
        ({**COMPUTE, "parts": [[[0, 0], [1], True]]}, "Compute.parts"),
        ({**COMPUTE, "parts": [[[0, 0, -2], [1], True]]}, "Compute.parts"),
        ({**COMPUTE, "parts": [[[0, 0, 0], [1], 1]]}, "Compute.parts"),
        ({**COMPUTE, "parts": [[[0, 0, 0], [1]]]}, "Compute.parts"),
        ({**COMPUTE, "slots": [[1, 0, 2]]}, "Compute.slots"),
        ({**COMPUTE, "slots": {"1": 0}}, "Compute.slots"),
        ({"t": 1.0, "event": "Routed", "visit": [0, 0, 0], "experts": [1]}, "Routed.experts"),
        (
            {"t": 1.0, "event": "Predicted", "visit": [0, 0, 0], "scores": [[1, "x"]]},
            "Predicted.scores",
        ),
        ({"t": 1.0, "event": "Sampled", "request": 0, "token": -1, "stop": True}, "Sampled.token"),
        ({"t": 1.0, "action": "Finish", "request": 0, "reason": "bored", "error": ""}, "bored"),
        ({"t": 1.0, "action": "Reject", "request": 0, "reason": 3}, "Reject.reason is 3"),
    ],
)
def test_a_bad_record_is_refused(record: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "log", {"t": 0.5, "ask": [1, 1]}, record, END)
    refused(lambda: read_log(path), "log:3: ", words)


@pytest.mark.rule("LOG-6", "LOG-7")
def test_incomplete_logs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = write(path, ARRIVED, LOAD, COMPUTE, END).read_bytes()
    assert read_log(path).complete
    starts = [0, *(i + 1 for i, byte in enumerate(whole) if byte == 10)]
    near = {s + d for s in starts for d in (-2, -1, 0, 1, 2)}
    for cut in sorted({*near, *range(0, len(whole), 5)} & set(range(len(whole)))):
        path.write_bytes(whole[:cut])
        if cut == 0:
            refused(lambda: read_log(path), "empty")
        elif cut < starts[1] - 1:
            refused(lambda: read_log(path), "log:1")
        else:
            log = read_log(path)
            lines = sum(1 for s in starts[2:] if cut >= s - 1)
            assert len(log.records) == lines
            assert log.complete == (lines == 4)
            if not log.complete:
                cut_off = cut not in starts and cut + 1 not in starts
                assert ("cut off" if cut_off else "no end record") in log.warning
    refused(lambda: read_log(write(path, ARRIVED, END, ARRIVED)), "log:4", "after the end")
    refused(lambda: read_log(write(path, ARRIVED, END, raw=b'{"t"')), "log:4")
    path.write_bytes(whole.replace(b'"Arrived"', b'"Arrived', 1))
    refused(lambda: read_log(path), "log:2", "not JSON")
    refused(lambda: read_log(tmp_path / "none"), "none", "No such file")
    refused(lambda: read_log(tmp_path), "directory")


@pytest.mark.rule("LOG-5")
def test_a_full_disk_ends_the_log_and_not_the_run() -> None:
    told: list[str] = []
    writer = LogWriter("/dev/full", head(), ticks(), keep=True, warn=told.append)
    for n in range(3000):
        writer.event(Cancelled(n))
    writer.end({})
    writer.close()
    writer.close()
    assert told == [writer.failed]
    assert told[0] == "/dev/full: No space left on device; the event log is incomplete"
    assert len(writer.records) == 3001


@pytest.mark.rule("LOG-5", "LOG-6")
@pytest.mark.parametrize("nth", [2, 3])
def test_what_was_written_before_stays_readable(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = os.write, 0

    def fill_up(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > nth:
            raise OSError(errno.EDQUOT, "quota")
        return real(fd, memoryview(data)[: max(1, len(data) // 3)])

    path = tmp_path / "log"
    writer = LogWriter(path, head(), ticks())
    monkeypatch.setattr(os, "write", fill_up)
    for n in range(9000):
        writer.event(Cancelled(n))
    writer.end({})
    writer.close()
    monkeypatch.undo()
    assert capsys.readouterr().err.count("the event log is incomplete") == 1
    log = read_log(path)
    assert not log.complete
    assert "incomplete" in log.warning
    assert [r["request"] for r in log.records] == list(range(len(log.records)))
    assert 100 < len(log.records) < 9000


@pytest.mark.rule("LOG-5")
def test_a_log_that_cannot_be_created_is_refused_at_once(tmp_path: Path) -> None:
    refused(lambda: LogWriter(tmp_path / "no" / "log", head(), ticks()), "cannot be written")
    refused(lambda: LogWriter(tmp_path, head(), ticks()), "cannot be written")


@pytest.mark.rule("LOG-2")
def test_numpy_numbers_and_odd_text_are_written_plainly(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with LogWriter(path, head(), ticks(), keep=True) as writer:
        ids = tuple(np.arange(3, dtype=np.int32))
        writer.event(Routed(Visit(0, 0, 2), (ids,)), share=np.float32(0.5))  # type: ignore[arg-type]
        writer.event(LoadFailed(1, "bad name \udcff\x1b é"), sum="ab")
        writer.end({"rows": np.int64(3), "list": (1, 2)})
    log = read_log(path)
    assert log.records == writer.records
    assert event_from_record(log.records[0]) == Routed(Visit(0, 0, 2), ((0, 1, 2),))
    assert log.records[1]["error"] == "bad name \\udcff\x1b é"
    assert log.records[2]["end"] == {"rows": 3, "list": [1, 2]}
    assert path.read_bytes().isascii()


@pytest.mark.rule("LOG-4")
def test_a_log_is_enough_to_decide_again(tmp_path: Path) -> None:
    """A request of two prompt tokens and one more, with one layer of experts, then its replay."""
    options = ControlOptions(layers=(0,), experts=3, top_k=1, slots=2, chunk=2)
    chosen = {0: ((0,), (1,)), 1: ((2,),)}
    scheduler, told = Scheduler(options), []
    path = tmp_path / "log"
    writer = LogWriter(path, head() | {"options": dataclasses.asdict(options)}, ticks())

    def tell(event: Event) -> None:
        writer.event(event)
        scheduler.handle(event)

    tell(Arrived(0, 2, 2))
    while not scheduler.idle:
        writer.ask(2, 1)
        told = scheduler.next_actions(2, 1)
        assert told
        for action in told:
            writer.action(action)
        for action in told:
            if isinstance(action, Load):
                tell(Loaded(action.ticket))
            if isinstance(action, Compute):
                tell(Computed(action.step))
                for visit, _, last in action.parts:
                    if last and visit.layer == ENTRY:
                        tell(Routed(visit._replace(layer=0), chosen[visit.chunk]))
                    elif last:
                        tell(Sampled(0, 7, stop=visit.chunk == 1))
    writer.end({})
    writer.close()
    log = read_log(path)
    names = [r.get("action") for r in log.records if "action" in r]
    assert names.count("Load") == 3
    assert names.count("Finish") == 1
    again, decided = Scheduler(options_of(log.head)), []
    for record in log.records:
        if "event" in record:
            again.handle(event_from_record(record))
        elif "ask" in record:
            assert decided == []
            decided = list(again.next_actions(*record["ask"]))
        elif "action" in record:
            assert decided.pop(0) == action_from_record(record)
    assert decided == []


@pytest.mark.rule("LOG-7")
def test_nothing_follows_the_end(tmp_path: Path) -> None:
    writer = LogWriter(None, head(), ticks(), keep=True)
    with pytest.raises(ValueError, match="ticket"):
        writer.event(Loaded(1), ticket=2)
    writer.end({})
    with pytest.raises(ValueError, match="after the end"):
        writer.ask(1, 1)
    assert writer.log.complete
    silent = LogWriter(None, head(), ticks())
    silent.ask(1, 1)
    assert silent.records == []
