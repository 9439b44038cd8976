"""Every log checker: one whole log that it accepts, and for each way to break it, the break."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from oracle.checkers import CHECKS, COMPARED, check_log, check_logs
from oracle.checkers.progress import most_passes
from oracle.checkers.records import view
from oracle.checkers.situations import SITUATIONS, not_seen, situations
from oracle.checkers.work import Board
from oracle.sometimes import SITUATIONS as IN_WORLDS
from property_tests.log_breaks import (
    BREAKS,
    DENSE_BREAKS,
    HEAD,
    Log,
    Record,
    act,
    ask,
    both,
    dense,
    drop,
    edit,
    ev,
    good,
    guess,
    insert,
    load,
    option,
    overtaken,
    step,
)

LOADED = {"event": "Loaded", "ticket": 1}
LOAD = {"action": "Load", "ticket": 9, "key": [0, 1], "slot": 0, "guess": False}
BAD_EXTRAS: list[tuple[Record, str]] = [
    ({**LOAD, "bytes": 0}, "Load.bytes is 0"),
    ({**LOAD, "bytes": -5}, "Load.bytes is -5"),
    ({**LOAD, "bytes": "\0"}, "Load.bytes is \\x00"),
    ({**LOAD, "bytes": [8]}, "Load.bytes is [8]"),
    ({**LOAD, "entry": [0], "from": "disk"}, "Load.entry is [0]"),
    ({**LOAD, "from": "tape"}, "Load.from is tape"),
    ({**LOAD, "disk_bytes": -1}, "Load.disk_bytes is -1"),
    ({**LOADED, "seconds": -5}, "Loaded.seconds is -5"),
    ({**LOADED, "seconds": "1"}, "Loaded.seconds is 1"),
    ({**LOADED, "sum": [1]}, "Loaded.sum is [1]"),
    ({"event": "Arrived", "request": 5, "prompt_len": 1, "max_new_tokens": 1, "asked": 7},
     "Arrived.asked is 7"),
    ({"event": "Sampled", "request": 0, "token": 1, "stop": False, "sum": {}}, "Sampled.sum is {}"),
    ({"action": "Admit", "request": 0, "kv": "4"}, "Admit.kv is 4"),
    ({"action": "Compute", "step": 9, "layer": -1, "parts": [], "slots": [], "sum": 3},
     "Compute.sum is 3"),
    ({"event": "Cancelled", "request": 0, "by": [1]}, "Cancelled.by is [1]"),
    ({"event": "Cancelled", "request": 0, "by": 1e300}, "Cancelled.by is 1e+300"),
    ({"ask": [1, 1], "slots": [1, 1]}, "ask.slots is [1, 1]"),
    ({"end": {"by": "x"}}, "end.by is x"),
]  # fmt: skip
"""Lines that are legal but for a field of the executor's (LOG-9), with what is said of them."""


@pytest.mark.rule(
    "SAFE-1", "SAFE-2", "SAFE-3", "SAFE-4", "SAFE-5", "SAFE-6", "SAFE-7", "SAFE-8", "SAFE-9",
    "SAFE-10", "SAFE-11", "SAFE-12", "SAFE-13", "SAFE-14", "SAFE-15", "LIVE-1", "LIVE-2", "LIVE-3",
    "LIVE-4", "LIVE-5", "LIVE-6", "LIVE-7",
)  # fmt: skip
@pytest.mark.parametrize("log", [good, dense])
def test_a_good_log_passes_every_checker(log: Callable[[], Log]) -> None:
    assert check_log(log()) == []


@pytest.mark.rule(
    "SAFE-1", "SAFE-2", "SAFE-3", "SAFE-4", "SAFE-5", "SAFE-6", "SAFE-7", "SAFE-8", "SAFE-9",
    "SAFE-10", "SAFE-11", "SAFE-15", "LIVE-1", "LIVE-2", "LIVE-3", "LIVE-6",
)  # fmt: skip
@pytest.mark.parametrize(("name", "text", "change"), BREAKS)
def test_each_break_is_found(name: str, text: str, change: Callable[[Log], None]) -> None:
    log = copy.deepcopy(good())
    change(log)
    found = check_log(log)
    assert any(v.property == name and text in v.text for v in found), found


@pytest.mark.rule("SAFE-11", "SAFE-12", "SAFE-13", "SAFE-14", "SAFE-15", "LIVE-1", "LIVE-4",
                  "LIVE-5", "LIVE-7")
@pytest.mark.parametrize(("name", "text", "change"), DENSE_BREAKS)
def test_each_break_of_the_dense_log_is_found_by_its_own_checker_alone(
    name: str, text: str, change: Callable[[Log], None]
) -> None:
    log = copy.deepcopy(dense())
    change(log)
    found = check_log(log)
    assert {v.property for v in found} == {name} and text in found[0].text, found


def test_every_checker_fails_alone_on_some_log() -> None:
    alone = {name for name, _, _ in DENSE_BREAKS}
    for _, _, change in BREAKS:
        log = copy.deepcopy(good())
        change(log)
        broken = {v.property for v in check_log(log)}
        alone |= broken if len(broken) == 1 else set()
    assert {name for name, _, _ in BREAKS + DENSE_BREAKS} == set(CHECKS)
    assert alone == set(CHECKS)


@pytest.mark.rule("LIVE-4")
def test_who_waits_may_be_overtaken_as_often_as_the_lag_allows() -> None:
    log = copy.deepcopy(dense())
    overtaken(2)(log)
    assert check_log(log) == []
    for grouping, most in (("interleaved", 2), ("micro-queues", 2), ("lockstep", 1),
                           ("balanced", 2)):  # fmt: skip
        option(grouping=grouping)(log)
        assert most_passes(view(log, True).head) == most


@pytest.mark.rule("LIVE-8")
def test_situations_are_found_in_a_log_where_they_occur() -> None:
    assert set(SITUATIONS) == set(IN_WORLDS)
    seen = situations(good())
    assert seen == {
        "cache full", "double waiter on one load", "fail then retry ok",
        "quarantine then late completion", "loading while a step runs",
        "no room for a claim", "a visit partly run", "two visits in one step", "all slots pinned",
    }  # fmt: skip
    assert situations(dense()) == {
        "two visits in one step", "a failed step", "cancel during compute",
        "a queue behind the admitted",
    }  # fmt: skip
    assert not_seen([good(), dense()]) == [
        "cancel during load", "fail then give up", "two transfers at once",
        "draining with requests running",
    ]  # fmt: skip
    assert situations([HEAD, {"event": "Arrived"}]) == set(), "malformed: nothing is read"
    # A failed load that nobody began, and one that nobody waited for.
    unknown = ev("LoadFailed", ticket=7, error="x", drained=False)
    log = good()
    insert({"action": "Load", "ticket": 1}, unknown, ask())(log)
    assert situations(log) == seen
    failed = ev("LoadFailed", ticket=1, error="x", drained=True)
    idle = [copy.deepcopy(HEAD), ask(), guess(1, 0, 1, 0), failed, ask(), ev("Drain"), ask()]
    option(retries=0)(idle)
    assert situations(idle) == set()


@pytest.mark.rule("LIVE-3")
def test_who_is_over_costs_no_more() -> None:
    board = Board(view(good(), True).head)
    for line in view(good(), True).lines:
        board.see(line)
    assert not board.requests


def test_what_an_idle_channel_is_while_a_write_may_still_land() -> None:
    """Both ways of an executor are right: the channel waits with it, or another takes its place."""
    for channels in (0, 1):
        log = copy.deepcopy(good())
        edit({"ask": [1, 1], "slots": [0, 0, 1, 1]}, ask=[channels, 1])(log)
        assert check_log(log) == []
    edit({"slots": [0, 0, 1, 1]}, ask=[2, 1])(log)
    assert {v.property for v in check_log(log)} == {"S11"}


def test_the_good_log_also_keeps_a_barrier() -> None:
    log = copy.deepcopy(good())
    option(grouping="lockstep")(log)
    assert check_log(log) == []


def test_a_prefix_of_a_good_log_is_good_while_incomplete() -> None:
    log = good()
    for cut in range(1, len(log)):
        assert check_log(log[:cut], complete=False) == []
        if cut < len(log):
            assert [v.property for v in check_log(log[:cut])] == ["LOG"]


@pytest.mark.rule("LOG-9")
@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"t": 0}, "neither"),
        ({"t": 0, "event": "Exploded"}, "unknown event"),
        ({"t": 0, "event": "Loaded", "ticket": "1"}, "Loaded.ticket"),
        ({"t": 0, "event": "Loaded", "ticket": True}, "Loaded.ticket"),
        ({"t": 0, "action": "Load", "ticket": 1, "key": [0], "slot": 0}, "Load.key"),
        (
            {"t": 0, "action": "Compute", "step": 1, "layer": 0, "parts": [[0]], "slots": []},
            "parts",
        ),
        ({"t": 0, "ask": [1]}, "ask is"),
        ([], "not an object"),
        ({"t": 0, "end": 3}, "end is 3"),
        *(({"t": 0, **record}, text) for record, text in BAD_EXTRAS),
    ],
)
def test_malformed_lines_are_told_with_their_number(record: Any, text: str) -> None:
    log = good()
    log.insert(3, record)
    found = check_log(log)
    assert [(v.property, v.line) for v in found] == [("LOG", 4)]
    assert text in found[0].text


@pytest.mark.rule("LOG-1", "LOG-9")
@pytest.mark.parametrize("bad", [
    {"channels": [-1]}, {"channels": -1}, {"host_budget_bytes": [0]}, {"host_slots": [0]},
    {"host_slots": "2"}, {"expert_bytes": None}, {"slot_bytes": 1.5}, {"lanes": [1]},
    {"model": {"layer_bytes": 8}}, {"model": {"layer_bytes": [8]}},
    {"model": {"layer_bytes": [8, 0]}}, {"model": {"layer_bytes": [8, "8"]}},
])  # fmt: skip
def test_a_head_with_a_figure_that_is_none_gets_no_verdict(bad: Record) -> None:
    log = copy.deepcopy(good())
    log[0].update(bad)
    if bad == {"expert_bytes": None}:  # not written: what is said of a load cannot be held to it
        assert check_log(log) == []
        return
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_log(log)


@pytest.mark.parametrize("head", [{}, {"log": 2}, {"log": 1, "options": {"layers": [0]}}])
def test_without_a_head_there_is_no_verdict(head: Record) -> None:
    with pytest.raises(ValueError, match=r"head|options"):
        check_log([head])


@pytest.mark.rule("LIVE-3", "SAFE-2")
def test_who_came_late_to_a_row_of_failures_may_end_with_it() -> None:
    """Request 1 needs expert 1 since its first failure; the second ends both (FETCH-6), this one
    when its step does. Until then nobody has to read for it."""
    options = {**HEAD["options"], "layers": [0], "top_k": 2, "readiness": "expert", "retries": 1}
    failed = {"error": "EIO", "drained": True}
    log = [
        {**HEAD, "options": options},
        ev("Arrived", request=0, prompt_len=1, max_new_tokens=1),
        ev("Arrived", request=1, prompt_len=1, max_new_tokens=1),
        ask(),
        act("Admit", request=0),
        act("Admit", request=1),
        step(1, -1, [[[0, 0, -1], [], True], [[1, 0, -1], [], True]], []),
        ev("Computed", step=1),
        ev("Routed", visit=[0, 0, 0], experts=[[1, 2]]),
        ask(),
        load(1, 0, 1, 0),
        ev("LoadFailed", ticket=1, **failed),
        ev("Routed", visit=[1, 0, 0], experts=[[1, 3]]),
        ask(),
        load(2, 0, 3, 1),
        ev("Loaded", ticket=2),
        ask(),
        load(3, 0, 1, 0),
        step(2, 0, [[[1, 0, 0], [3], False]], [[3, 1]]),
        ev("LoadFailed", ticket=3, **failed),
        ask(1, 0),
        act("Finish", request=0, reason="error", error="EIO"),
        ev("Computed", step=2),
        ask(),
        act("Finish", request=1, reason="error", error="EIO"),
        {"t": 1.0, "end": {"requests": 2}},
    ]
    assert check_log(log) == []
    option(retries=2)(log)  # then there is another attempt to make
    assert {"L3", "S2"} <= {v.property for v in check_log(log)}


# Several runs, and what callers got


def two(change: Callable[[Log], None]) -> list[tuple[str, str]]:
    """(log, property) of what is wrong between the dense log and a changed one."""
    other = copy.deepcopy(dense())
    change(other)
    return [(name, v.property) for name, v in check_logs({"one": dense(), "two": other})]


def arrives_alone(token: int) -> Callable[[Log], None]:
    """Request 1 alone in another run with other slots, to its end, with this first token."""

    def change(log: Log) -> None:
        log[0]["options"]["max_lag"] = 7
        log[1:] = [
            ev("Arrived", request=0, prompt_len=2, max_new_tokens=1, id="b", asked="y"),
            ask(0),
            act("Admit", request=0, kv=4),
            step(1, -1, [[[0, 0, -1], [], True]], []),
            ev("Computed", step=1),
            ev("Sampled", request=0, token=token, stop=False, sum=70),
            ask(0),
            act("Finish", request=0, reason="length", error=""),
            {"t": 1.0, "end": {"requests": 1}},
        ]

    return change


@pytest.mark.rule("SAFE-12", "SAFE-13", "SAFE-14", "SAFE-16")
def test_runs_are_held_against_each_other() -> None:
    assert two(option()) == []
    assert two(arrives_alone(7)) == []
    assert two(arrives_alone(8)) == [("two", "S13")]
    # A score has no token; the logits of its last position are those of the first token.
    for sum, found in ((70, []), (71, [("two", "S13")])):
        score = {"max_new_tokens": 0}, {"token": None, "stop": True, "sum": sum}
        assert two(both(
            arrives_alone(7), edit({"event": "Arrived"}, **score[0]),
            edit({"event": "Sampled"}, **score[1]),
        )) == found  # fmt: skip
    assert two(edit({"event": "Sampled", "request": 0, "token": 6}, sum=61)) == [("two", "S12")]
    assert two(edit({"action": "Compute", "step": 2}, layer=0)) == [("two", "S16")]
    assert two(drop(action="Admit", request=1)) == [("two", "S14")]
    assert two(insert({"step": 1}, act("Reject", request=1, reason="no"))) == [("two", "S14")]
    # Something else was heard before: nothing is said of what follows.
    assert two(insert({"step": 1}, ask(0), after=1)) == []
    assert two(both(option(max_lag=3), drop(action="Admit", request=1))) == []
    assert {"S12", "S13", "S14", "S16"} == set(COMPARED)


@pytest.mark.rule("SAFE-12", "SAFE-13")
def test_runs_of_which_bits_may_differ_are_not_compared() -> None:
    def other(**changes: Any) -> Callable[[Log], None]:
        return both(arrives_alone(8), lambda log: log[0].update(changes))

    for changes in ({"compute": "bf16"}, {"model": {"family": "x"}}, {"engine": "jax"}):
        assert two(other(**changes)) == [], changes
    assert two(both(arrives_alone(8), option(kv_block=2))) == []
    assert two(other(budget_bytes=30)) == [("two", "S13")]


ROWS: list[Record] = [
    {"id": "a", "tokens": [5, 6], "finish_reason": "length", "prompt_tokens": 1,
     "max_new_tokens": 2},
    {"id": "b", "tokens": [7], "finish_reason": "cancelled", "prompt_tokens": 2},
    {"id": "c", "tokens": [], "finish_reason": "error"},
    {"id": "d", "tokens": [], "finish_reason": "rejected", "max_new_tokens": 9},
    {"id": "late", "tokens": [], "finish_reason": "cancelled"},
]  # fmt: skip


@pytest.mark.rule("SAFE-14", "SAFE-15")
@pytest.mark.parametrize(
    ("row", "changes", "property", "text"),
    [
        (0, {"max_new_tokens": 3}, "S14", "it declares 3"),
        (0, {"prompt_tokens": 2}, "S14", "it declares 2"),
        (0, {"tokens": [5, 7]}, "S15", "not those that were sampled"),
        (0, {"tokens": [5]}, "S15", "1 tokens of the 2"),
        (1, {"finish_reason": "length"}, "S15", "told as length, it was cancelled"),
        (2, {"tokens": [0]}, "S15", "not those that were sampled"),
        (2, {"finish_reason": "length"}, "S15", "told as length, it was error"),
        (4, {"tokens": [1]}, "S15", "never arrived"),
    ],
)
def test_what_callers_got_is_what_was_sampled(
    row: int, changes: Record, property: str, text: str
) -> None:
    assert check_log(dense(), outputs=ROWS) == []
    rows = copy.deepcopy(ROWS)
    rows[row].update(changes)
    (found,) = check_log(dense(), outputs=rows)
    assert found.property == property and text in found.text


@pytest.mark.rule("SAFE-15")
def test_a_stop_text_may_take_tokens_away_at_the_end() -> None:
    rows = copy.deepcopy(ROWS)
    rows[0].update(tokens=[5], finish_reason="stop")
    assert check_log(dense(), outputs=rows) == []
