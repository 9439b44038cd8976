"""Two whole logs that every checker accepts, and for each property ways to break one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
Log = list[Record]

HEAD: Record = {
    "log": 1,
    "options": {
        "layers": [0, 2],
        "experts": 4,
        "top_k": 1,
        "slots": 2,
        "chunk": 2,
        "grouping": "interleaved",
        "readiness": "visit",
        "fetch_order": "least-progress",
        "eviction": "per-layer",
        "bulk_slots": 0,
        "bulk_every": 2,
        "max_lag": 0,
        "max_running": 2,
        "max_rows": 4,
        "kv_tokens": 16,
        "kv_block": 4,
        "retries": 2,
    },
    "model": {},
    "engine": "simulator",
    "versions": {},
    "expert_bytes": 8,
    "budget_bytes": 20,
    "slot_bytes": 10,
}


def ev(name: str, **fields: Any) -> Record:
    return {"t": 0.0, "event": name, **fields}


def act(name: str, **fields: Any) -> Record:
    return {"t": 0.0, "action": name, **fields}


def ask(channels: int = 1, compute: int = 1, **fields: Any) -> Record:
    return {"t": 0.0, "ask": [channels, compute], **fields}


def load(ticket: int, layer: int, expert: int, slot: int) -> Record:
    return act("Load", ticket=ticket, key=[layer, expert], slot=slot, guess=False, bytes=8)


def step(number: int, layer: int, parts: list[Any], slots: list[Any], **fields: Any) -> Record:
    return act("Compute", step=number, layer=layer, parts=parts, slots=slots, **fields)


def good() -> Log:
    """Two requests. 0: a prompt of 3 in two chunks, 1 new token. 1: scored, its load fails once."""
    return [
        HEAD,
        ev("Arrived", request=0, prompt_len=3, max_new_tokens=1, id="a"),
        ev("Arrived", request=1, prompt_len=1, max_new_tokens=0, id="b"),
        ask(),
        act("Admit", request=0),
        act("Admit", request=1),
        step(1, -1, [[[0, 0, -1], [], True], [[1, 0, -1], [], True]], []),
        ev("Computed", step=1),
        ev("Routed", visit=[0, 0, 0], experts=[[1], [2]]),
        ev("Routed", visit=[1, 0, 0], experts=[[1]]),
        ask(),
        load(1, 0, 1, 0),
        ev("LoadFailed", ticket=1, error="short read", drained=False),
        ask(),
        load(2, 0, 1, 1),
        ev("Loaded", ticket=2, sum=71),
        ask(1, 1, slots=[0, 0, 1, 1]),
        step(2, 0, [[[0, 0, 0], [1], False], [[1, 0, 0], [1], True]], [[1, 1]], sum=[71]),
        ev("Loaded", ticket=1),
        ask(1, 0, slots=[1, 0, 1, 0]),
        load(3, 0, 2, 0),
        ev("Computed", step=2),
        ev("Routed", visit=[1, 0, 2], experts=[[3]]),
        ask(0, 1),
        ev("Loaded", ticket=3),
        ask(),
        load(4, 2, 3, 1),
        step(3, 0, [[[0, 0, 0], [2], True]], [[2, 0]]),
        ev("Loaded", ticket=4),
        ev("Computed", step=3),
        ev("Routed", visit=[0, 0, 2], experts=[[3], [3]]),
        ask(),
        step(4, 2, [[[0, 0, 2], [3], True], [[1, 0, 2], [3], True]], [[3, 1]]),
        ev("Computed", step=4),
        ev("Sampled", request=1, token=None, stop=True),
        ask(),
        act("Finish", request=1, reason="stop", error=""),
        step(5, -1, [[[0, 1, -1], [], True]], []),
        ev("Computed", step=5),
        ev("Routed", visit=[0, 1, 0], experts=[[2]]),
        ask(),
        step(6, 0, [[[0, 1, 0], [2], True]], [[2, 0]]),
        ev("Computed", step=6),
        ev("Routed", visit=[0, 1, 2], experts=[[3]]),
        ask(),
        step(7, 2, [[[0, 1, 2], [3], True]], [[3, 1]]),
        ev("Computed", step=7),
        ev("Sampled", request=0, token=9, stop=False),
        ask(),
        act("Finish", request=0, reason="length", error=""),
        {"t": 1.0, "end": {"requests": 2}},
    ]


def find(log: Log, **fields: Any) -> int:
    """Index of the first record with these fields."""
    return next(i for i, r in enumerate(log) if all(r.get(k) == v for k, v in fields.items()))


def drop(**fields: Any) -> Callable[[Log], None]:
    def change(log: Log) -> None:
        del log[find(log, **fields)]

    return change


def edit(where: dict[str, Any], **changes: Any) -> Callable[[Log], None]:
    return lambda log: log[find(log, **where)].update(changes)


def insert(where: dict[str, Any], *records: Record, after: int = 0) -> Callable[[Log], None]:
    """Put records before the one found (`after=1`: behind it)."""

    def change(log: Log) -> None:
        at = find(log, **where) + after
        log[at:at] = list(records)

    return change


def option(**changes: Any) -> Callable[[Log], None]:
    return lambda log: log[0]["options"].update(changes)


def both(*changes: Callable[[Log], None]) -> Callable[[Log], None]:
    def change(log: Log) -> None:
        for one in changes:
            one(log)

    return change


def guess(ticket: int, layer: int, expert: int, slot: int) -> Record:
    return load(ticket, layer, expert, slot) | {"guess": True}


def believes_a_late_load(log: Log) -> None:
    """Load 1 failed, comes late and is read; then the step fails, so that nobody gets a result."""
    at = find(log, event="LoadFailed") + 1
    log[at:-1] = [
        ask(0),
        ev("Loaded", ticket=1),
        step(2, 0, [[[0, 0, 0], [1], False], [[1, 0, 0], [1], True]], [[1, 0]]),
        ev("Failed", step=2, error="x", requests=[]),
        ask(),
        act("Finish", request=0, reason="error", error="x"),
        act("Finish", request=1, reason="error", error="x"),
    ]


def one_entry(log: Log) -> None:
    """A host tier of one entry, which the load that was given up still has."""
    log[0].update(host_slots=1, host_budget_bytes=10)
    for record in log:
        if record.get("action") == "Load":
            record.update({"entry": 0, "from": "disk", "disk_bytes": 8})


def wasteful(log: Log) -> None:
    """What load 3 brings is pushed out by the next one before anybody has used it."""
    at = find(log, action="Load", ticket=3)
    for record in log[at:]:
        if "ticket" in record:
            record["ticket"] += 1
    log[at:at] = [load(3, 2, 0, 0), ev("Loaded", ticket=3), ask(1, 0)]


def left_alone(log: Log) -> None:
    """Of `dense`: the lag holds request 0, and nothing is in flight until 2 comes."""
    option(max_lag=1)(log)
    drop(event="Arrived", request=2)(log)
    log[find(log, event="Sampled", request=1) + 1 :] = [
        ev("Cancelled", request=1),
        ask(0),
        act("Finish", request=1, reason="cancelled", error=""),
        ev("Arrived", request=2, prompt_len=1, max_new_tokens=1, id="c", asked="x"),
        ask(0),
        act("Admit", request=2, kv=4),
        step(2, -1, [[[0, 1, -1], [], True], [[2, 0, -1], [], True]], []),
        ev("Computed", step=2),
        ev("Sampled", request=0, token=6, stop=False, sum=60),
        ev("Sampled", request=2, token=5, stop=False, sum=50),
        ask(0),
        act("Finish", request=0, reason="length", error=""),
        act("Finish", request=2, reason="length", error=""),
        {"t": 1.0, "end": {"requests": 4}},
    ]


def overtaken(times: int) -> Callable[[Log], None]:
    """Of `dense`: while request 1 waits for a visit, 0 makes so many."""

    def change(log: Log) -> None:
        option(max_lag=1)(log)
        drop(event="Arrived", request=2)(log)
        edit({"event": "Arrived", "request": 0}, max_new_tokens=1 + times)(log)
        edit({"action": "Admit", "request": 0}, kv=-(-(2 + times) // 4) * 4)(log)
        rest: Log = []
        for i in range(times):
            rest += [
                ask(0),
                step(2 + i, -1, [[[0, 1 + i, -1], [], True]], []),
                ev("Computed", step=2 + i),
                ev("Sampled", request=0, token=6, stop=False),
            ]
        rest += [ask(0), act("Finish", request=0, reason="length", error="")]
        for i in range(2):
            rest += [
                step(2 + times + i, -1, [[[1, 1 + i, -1], [], True]], []),
                ev("Computed", step=2 + times + i),
                ev("Sampled", request=1, token=8, stop=False),
                ask(0),
            ]
        rest += [act("Finish", request=1, reason="length", error="")]
        log[find(log, event="Sampled", request=1) + 1 :] = [
            *rest, {"t": 1.0, "end": {"requests": 3}}
        ]  # fmt: skip

    return change


END = {"end": {"requests": 2}}
BREAKS: list[tuple[str, str, Callable[[Log], None]]] = [
    ("S1", "never ended", drop(action="Finish", request=1)),
    (
        "S1",
        "arrives a second time",
        insert({"ask": [1, 1]}, ev("Arrived", request=1, prompt_len=1, max_new_tokens=0)),
    ),
    ("S1", "unknown", insert({"step": 2}, act("Reject", request=7, reason="none"))),
    ("S1", "totals count 3", edit(END, end={"requests": 3})),
    ("S2", "ended before", insert(END, act("Finish", request=1, reason="stop", error=""))),
    ("S2", "runs already", insert({"step": 2}, act("Admit", request=0))),
    ("S2", "which is over", insert({"step": 2}, act("Finish", request=1, reason="stop", error=""))),
    (
        "S2",
        "came before",
        both(drop(action="Admit", request=0), insert({"step": 1}, act("Admit", request=0))),
    ),
    ("S2", "which is queued", drop(action="Admit", request=1)),
    ("S2", "after its end", insert(END, ev("Sampled", request=1, token=3, stop=False))),
    ("S2", "without its cause", edit({"action": "Finish", "request": 1}, reason="cancelled")),
    ("S2", "without its cause", edit({"action": "Finish", "request": 0}, reason="stop")),
    ("S2", "is none of", edit({"action": "Finish", "request": 0}, reason="bored")),
    ("S2", "cancelled before", insert({"step": 5}, ev("Cancelled", request=0))),
    (
        "S2",
        "whose step failed",
        edit({"event": "Computed", "step": 3}, event="Failed", error="x", requests=[0]),
    ),
    ("S2", "admitted before", edit({"action": "Finish", "request": 0}, action="Reject")),
    ("S2", "no request starts", insert({"action": "Admit"}, ev("Drain"))),
    (
        "S2",
        "after its last token",
        insert({"action": "Finish", "request": 0}, step(8, -1, [[[0, 2, -1], [], True]], [])),
    ),
    ("S3", "Load of (1, 1): layers [0, 2]", insert(END, guess(5, 1, 1, 0), ev("Loaded", ticket=5))),
    ("S3", "Load of (0, 4)", insert(END, guess(5, 0, 4, 0), ev("Loaded", ticket=5))),
    ("S3", "slot 2 of 2", edit({"ticket": 3}, slot=2)),
    ("S3", "only grow", edit({"action": "Load", "ticket": 3}, ticket=2)),
    ("S3", "never completed", drop(event="Loaded", ticket=1)),
    ("S3", "not outstanding", insert({"step": 3}, ev("Loaded", ticket=2))),
    ("S3", "control counts", edit({"slots": [1, 0, 1, 0]}, slots=[0, 0, 1, 1])),
    ("S4", "which does not run", insert(END, ev("Computed", step=7))),
    ("S4", "never ended", drop(event="Computed", step=7)),
    ("S4", "holds experts", edit({"action": "Compute", "step": 6}, slots=[[2, 0], [3, 1]])),
    ("S4", "uses [1, 2]: not in ascending order", both(
        edit({"action": "Compute", "step": 6}, slots=[[2, 0], [1, 1]]),
        edit({"action": "Compute", "step": 6}, parts=[[[0, 1, 0], [1, 2], True]]),
    )),
    ("S4", "a slot twice", edit({"action": "Compute", "step": 6}, slots=[[2, 0], [2, 0]])),
    ("S4", "steps only grow", edit({"action": "Compute", "step": 4}, step=3)),
    ("S5", "is ready in slot 1", edit({"action": "Load", "ticket": 3}, key=[0, 1])),
    ("S5", "is loading in slot 1", insert({"event": "Loaded", "ticket": 2}, load(9, 0, 1, 0))),
    (
        "S5",
        "is ready in slot 1",
        insert(END, guess(5, 2, 3, 0), ev("Loaded", ticket=5)),
    ),
    (
        "S6",
        "which step 7 reads",
        insert({"event": "Computed", "step": 7}, guess(5, 0, 1, 1), ev("Loaded", ticket=5)),
    ),
    (
        "S7",
        "ticket 5 may still write",
        insert(
            END,
            guess(5, 0, 1, 0),
            ev("LoadFailed", ticket=5, error="late", drained=False),
            ask(),
            guess(6, 0, 3, 0),
            ev("Loaded", ticket=6),
            ev("Loaded", ticket=5),
        ),
    ),
    ("S8", "which was stale", believes_a_late_load),
    ("S6", "which step 2 reads", edit({"action": "Load", "ticket": 3}, slot=1)),
    ("S6", "ticket 2 is loading", insert({"event": "Loaded", "ticket": 2}, load(9, 0, 3, 1))),
    ("S7", "may still write", edit({"action": "Load", "ticket": 2}, slot=0)),
    (
        "S8",
        "which was stale",
        both(
            edit({"action": "Compute", "step": 2}, slots=[[1, 0]]),
            drop(action="Load", ticket=2),
            drop(event="Loaded", ticket=2),
            insert({"step": 2}, ev("Loaded", ticket=1)),
        ),
    ),
    ("S9", "which holds", edit({"action": "Compute", "step": 3}, slots=[[2, 1]])),
    (
        "S9",
        "before its load completed",
        insert({"event": "Loaded", "ticket": 3}, step(9, 0, [[[0, 0, 0], [2], True]], [[2, 0]])),
    ),
    ("S9", "loaded was 71", edit({"action": "Compute", "step": 2}, sum=[70])),
    (
        "S9",
        "before it was 71",
        both(
            edit({"action": "Load", "ticket": 4}, key=[0, 1]),
            edit({"event": "Loaded", "ticket": 4}, sum=70),
        ),
    ),
    ("S10", "its next is", edit({"action": "Compute", "step": 5}, parts=[[[0, 2, -1], [], True]])),
    ("S10", "is not ready", drop(event="Routed", visit=[0, 1, 0])),
    (
        "S10",
        "a part without experts",
        edit({"action": "Compute", "step": 3}, parts=[[[0, 0, 0], [], True]]),
    ),
    (
        "S10",
        "last=True",
        edit(
            {"action": "Compute", "step": 2}, parts=[[[0, 0, 0], [1], True], [[1, 0, 0], [1], True]]
        ),
    ),
    ("S10", "Routed for", edit({"action": "Compute", "step": 3}, parts=[[[0, 0, 0], [2], False]])),
    (
        "S10",
        "a second time",
        edit({"action": "Compute", "step": 3}, parts=[[[0, 0, 0], [1, 2], True]]),
    ),
    (
        "S10",
        "not all among",
        edit({"action": "Compute", "step": 6}, parts=[[[0, 1, 0], [3], True]]),
    ),
    (
        "S10",
        "two parts",
        edit({"action": "Compute", "step": 6}, parts=[[[0, 1, 0], [2], True]] * 2),
    ),
    ("S10", "in a step of layer", edit({"action": "Compute", "step": 6}, layer=2)),
    ("S10", "tokens routed", edit({"visit": [0, 0, 0]}, experts=[[1]])),
    ("S10", "not 1 distinct of 4", edit({"visit": [0, 0, 0]}, experts=[[1], [4]])),
    ("S10", "Routed for", edit({"visit": [0, 1, 0]}, visit=[0, 1, 2])),
    ("S10", "Sampled while", insert({"step": 5}, ev("Sampled", request=0, token=9, stop=False))),
    ("S10", "with max_new_tokens", edit({"event": "Sampled", "request": 1}, token=4)),
    (
        "S10",
        "finished with reason length",
        insert({"step": 5}, act("Finish", request=0, reason="length", error="")),
    ),
    (
        "S10",
        "the barrier stands at",
        both(
            option(grouping="lockstep"),
            edit(
                {"action": "Compute", "step": 3},
                layer=2,
                parts=[[[1, 0, 2], [3], True]],
                slots=[[3, 1]],
            ),
        ),
    ),
    ("S11", "a load while a step runs", option(grouping="lockstep-blocking")),
    (
        "S11",
        "a step while a load is under way",
        option(grouping="lockstep-blocking"),
    ),
    ("S11", "bytes into a slot", edit({"action": "Load", "ticket": 3}, bytes=11)),
    ("S11", "9 bytes of expert (0, 2), the largest has 8",
     edit({"action": "Load", "ticket": 3}, bytes=9)),
    ("S11", "7 bytes of expert (0, 1), before it had 8",
     edit({"action": "Load", "ticket": 2}, bytes=7)),
    ("S11", "8 bytes of expert (2, 3), whose layer has experts of 6",
     lambda log: log[0].update(model={"layer_bytes": [None, 6]})),
    ("S11", "load 3 is said to have taken 0.5 s", edit({"event": "Loaded", "ticket": 3},
                                                      seconds=0.5)),
    ("S11", "resident and in flight", lambda log: log[0].update(budget_bytes=19)),
    ("S11", "the budget is 0", lambda log: log[0].update(budget_bytes=0)),
    ("S11", "more loads than", edit({"ask": [1, 0]}, ask=[0, 0])),
    ("S11", "more steps than", insert({"step": 2}, ask(1, 0))),
    ("S11", "a step of 3 rows", option(max_rows=2)),
    ("S11", "KV tokens reserved", option(kv_tokens=7)),
    ("S11", "2 requests run", option(max_running=1)),
    ("L1", "until the end", lambda log: log.__setitem__(
        slice(find(log, action="Load", ticket=1), -1), [])),
    ("L2", "brings (0, 1) as load 5 has", insert(
        END, guess(5, 0, 1, 0), ev("Loaded", ticket=5), ask(), guess(6, 0, 3, 0),
        ev("Loaded", ticket=6), ask(), guess(7, 0, 1, 0), ev("Loaded", ticket=7),
    )),
    ("L3", "(a)", drop(action="Load", ticket=1)),
    ("L3", "(b)", drop(action="Compute", step=2)),
    ("L3", "was not finished", insert({"action": "Finish", "request": 1}, ask(1, 1))),
    (
        "L3",
        "was not finished",
        insert({"event": "Loaded", "ticket": 4}, ev("Cancelled", request=1), ask(1, 0)),
    ),
    ("S11", "0 of 1 channels", edit({"ask": [1, 0]}, ask=[0, 0])),
    ("S11", "2 of 1 channels", edit({"ask": [1, 0]}, ask=[2, 0])),
    ("S11", "1 of 1 channels", edit({"ask": [0, 1]}, ask=[1, 1])),
    ("S11", "0 of 2 channels", lambda log: log[0].update(channels=2)),
    ("S11", "1 of 1 channels", one_entry),
    ("S15", "could not be read for it", both(
        option(retries=0), insert({"ask": [1, 1], "slots": [0, 0, 1, 1]}, ask(0, 0)),
    )),
    ("S15", "where load 1 failed", edit({"step": 2}, slots=[[1, 0]])),
    ("L6", "what load 3 brought there", wasteful),
    ("L6", "which no step has used", insert(END, load(5, 0, 1, 1), ev("Loaded", ticket=5))),
]  # fmt: skip


def dense() -> Log:
    """A model without experts, and all that executors may tell. Two at a time: 0 asks for two
    tokens, 1 is cancelled on the way, 2 asks the same as 0, 3 never fits."""
    options = {**HEAD["options"], "layers": [], "experts": 0, "top_k": 0, "slots": 0}
    head = {**HEAD, "options": {**options, "max_running": 2}, "channels": 0, "budget_bytes": 0}
    return [
        head,
        ev("Arrived", request=0, prompt_len=1, max_new_tokens=2, id="a", asked="x"),
        ev("Arrived", request=1, prompt_len=2, max_new_tokens=3, id="b", asked="y"),
        ask(0),
        act("Admit", request=0, kv=4),
        act("Admit", request=1, kv=8),
        step(1, -1, [[[0, 0, -1], [], True], [[1, 0, -1], [], True]], []),
        ev("Arrived", request=2, prompt_len=1, max_new_tokens=1, id="c", asked="x"),
        ev("Arrived", request=3, prompt_len=9, max_new_tokens=9, id="d", asked="z"),
        ask(0, 0),
        act("Reject", request=3, reason="18 tokens"),
        ev("Computed", step=1),
        ev("Sampled", request=0, token=5, stop=False, sum=50),
        ev("Sampled", request=1, token=7, stop=False, sum=70),
        ask(0),
        step(2, -1, [[[0, 1, -1], [], True], [[1, 1, -1], [], True]], []),
        ev("Cancelled", request=1),
        ask(0, 0),
        ev("Computed", step=2),
        ev("Sampled", request=0, token=6, stop=False, sum=60),
        ask(0),
        act("Finish", request=0, reason="length", error=""),
        act("Finish", request=1, reason="cancelled", error=""),
        act("Admit", request=2, kv=4),
        step(3, -1, [[[2, 0, -1], [], True]], []),
        ev("Failed", step=3, error="NaN", requests=[]),
        ask(0),
        act("Finish", request=2, reason="error", error="NaN"),
        {"t": 1.0, "end": {"requests": 4}},
    ]


def sampled(token: int, sum: int) -> Callable[[Log], None]:
    """Request 2 ends well after all, with this token."""

    def change(log: Log) -> None:
        at = find(log, event="Failed")
        told = ev("Sampled", request=2, token=token, stop=False, sum=sum)
        log[at : at + 1] = [ev("Computed", step=3), told]
        edit({"action": "Finish", "request": 2}, reason="length", error="")(log)

    return change


DENSE_BREAKS: list[tuple[str, str, Callable[[Log], None]]] = [
    ("S11", "1 compute lanes are said to be idle", edit({"ask": [0, 0]}, ask=[0, 1])),
    ("S11", "0 compute lanes are said to be idle", edit({"ask": [0, 1]}, ask=[0, 0])),
    ("S11", "1 of 0 channels", edit({"ask": [0, 0]}, ask=[1, 0])),
    ("S12", "9, it was 5", sampled(9, 50)),
    ("S12", "checksum 51, it was 50", sampled(5, 51)),
    ("S13", "7, it was 5", edit({"event": "Arrived", "request": 1}, asked="x")),
    ("S13", "checksum 70, it was 50", both(
        edit({"event": "Sampled", "request": 1}, token=5),
        edit({"event": "Arrived", "request": 1}, asked="x"),
    )),
    ("S14", "is given 4 KV tokens", edit({"action": "Admit", "request": 1}, kv=4)),
    ("S15", "step 3 failed for it", both(
        edit({"event": "Arrived", "request": 2}, max_new_tokens=2),
        insert({"event": "Failed"}, ev("Sampled", request=2, token=5, stop=False), after=1),
    )),
    ("L1", "while requests [0] wait, until Arrived", left_alone),
    ("L4", "starts 3 visits within one of request 1, the most is 2", overtaken(3)),
    ("L5", "20 KV tokens of 16", both(
        drop(action="Reject"), insert({"action": "Admit", "request": 2},
                                      act("Reject", request=3, reason="18 tokens")),
    )),
    ("L7", "queued after Drain", both(
        insert({"event": "Computed", "step": 1}, ev("Drain"), ask(0, 0)),
        lambda log: log.__setitem__(slice(find(log, action="Admit", request=2), -1), [
            act("Reject", request=2, reason="draining")]),
    )),
    ("L7", "to be closed by 0.5", edit({"event": "Cancelled"}, by=0.5)),
    ("L7", "to be closed by 0.25", edit(END | {"end": {"requests": 4}},
                                        end={"requests": 4, "by": 0.25})),
]  # fmt: skip
"""Ways to break `dense`; each breaks this one property and no other."""
