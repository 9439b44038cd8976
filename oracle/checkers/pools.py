"""Judging an engine with its attention in another pool from its event log alone (LAMINA-28).

    P1  the conversation of a tile: layer by layer, each device q, then kv, then a
    P2  bytes: rows times what the head says of a row, shared out; a context moves whole residuals
    P3  a request ends once, and takes part in nothing before it was placed or after its end
    P4  no device holds more blocks than it has; heads lie on all devices alike, requests on one
    P5  turns: a free replica, slices in order, each after its attention; positions without a gap
    P6  a prompt that was run elsewhere decodes when it was run and all of its bytes were pulled
    P7  in rotation a batch's next slice runs on the next of the n - 1 replicas

Knows nothing of control: what is where is rebuilt from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oracle.checkers.records import Violation

TURN = ("q", "kv", "a")


@dataclass
class _Request:
    prompt: int
    new: int
    devices: tuple[int, ...] | None = None
    done: int = 0
    begun: int | None = None
    worker: int | None = None
    run: bool = False
    whole: bool = False
    pulled: int = 0


@dataclass
class _Tile:
    devices: tuple[int, ...]
    layer: int
    end: int
    said: dict[int, int]
    rows: dict[int, int] = field(default_factory=dict)


class Judge:
    """One pass over a log; `found` has the violations."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self.o = o = head["options"]
        self.row, self.windows = head["wire"], head["windows"]
        self.hidden = head["hidden_bytes"]
        self.shares = o["devices"] if o["partition"] == "head" else 1
        self.found: list[Violation] = []
        self.line = 1
        self.live: dict[int, _Request] = {}
        self.ended: set[int] = set()
        self.tiles: dict[int, _Tile] = {}
        self.next_tile = 0
        n = o["batches"]
        self.state = ["rest"] * n
        self.slice, self.where = [0] * n, [0] * n
        self.spans: list[list[list[int]]] = [[] for _ in range(n)]
        self.replica: dict[int, int] = {}
        self.making: dict[int, int] = {}
        self.disturbed = False
        self.take: dict[str, Callable[[Mapping[str, Any]], None]] = {
            name: getattr(self, f"_{name}") for name in (
                "Arrived", "Cancelled", "Prefilled", "Pulled", "SliceDone", "AttentionDone",
                "TokenDone", "Redo", "LostMemory", "LostWorker", "Place", "Prefill", "Turn",
                "Finish", "Reject",
            )
        }  # fmt: skip

    def bad(self, name: str, text: str) -> None:
        self.found.append(Violation(name, self.line, text))

    def need(self, true: bool, name: str, text: str) -> None:
        if not true:
            self.bad(name, text)

    # -- messages

    def message(self, m: list[Any]) -> None:
        """P1, P2."""
        kind, tile = m[0], m[1]
        if kind == "open":
            fresh = tile >= self.next_tile and m[2] and m[3] < m[4] <= self.o["layers"]
            self.need(bool(fresh), "P1", f"tile {tile} opened as {m[2:]}")
            self.next_tile = max(self.next_tile, tile + 1)
            self.tiles[tile] = _Tile(tuple(m[2]), m[3], m[4], dict.fromkeys(m[2], 0))
            return
        layer, device, rows, size = m[2:]
        if kind == "context":  # to a replica, for slice `layer`
            self.need(size == rows * self.hidden, "P2", f"{m}: {self.hidden} bytes a row")
            good = 0 < layer <= self.o["layers"] and device < self.o["batches"] - 1
            return self.need(good, "P1", f"{m}: no such slice or replica")
        if not layer < self.o["layers"] or rows < 1:
            return self.bad("P1", f"{m}: no such layer, or no row")
        q, kv, a = self.row[layer]
        each = {"q": q, "kv": kv, "a": a, "pull": kv}[kind] // self.shares
        self.need(size == rows * each, "P2", f"{m}: {each} bytes a row")
        if kind == "pull":
            return self._pull(m)
        t = self.tiles.get(tile)
        if t is None or t.layer != layer or device not in t.said:
            return self.bad("P1", f"{m}: tile {tile} is not there")
        said = t.said[device]
        if said == len(TURN) or TURN[said] != kind:
            return self.bad("P1", f"{m}: {(*TURN, 'nothing')[said]} comes next")
        self.need(t.rows.setdefault(device, rows) == rows, "P1", f"{m}: other rows than before")
        t.said[device] += 1
        if all(n == len(TURN) for n in t.said.values()):
            t.layer, t.said = t.layer + 1, dict.fromkeys(t.devices, 0)
            if t.layer == t.end:
                del self.tiles[tile]

    def _pull(self, m: list[Any]) -> None:
        """P6: only to a device of the request, while its prompt is on the way."""
        r = self.live.get(m[1])
        if r is None:
            return  # a piece that was under way when the request was given up
        good = r.devices is not None and m[3] in r.devices and r.worker is not None
        self.need(good, "P6", f"{m}: nothing to pull there")
        r.pulled += m[5]

    # -- requests

    def _of(self, record: Mapping[str, Any], name: str = "P3") -> _Request | None:
        r = self.live.get(record["request"])
        if r is None:
            self.bad(name, f"request {record['request']} is not there")
        return r

    def _Arrived(self, e: Mapping[str, Any]) -> None:
        new = e["request"] not in self.live and e["request"] not in self.ended
        self.need(new, "P3", f"request {e['request']} arrived before")
        self.live[e["request"]] = _Request(e["prompt_len"], e["max_new_tokens"])

    def _Cancelled(self, e: Mapping[str, Any]) -> None:
        pass

    def _blocks(self, r: _Request) -> int:
        return -(-(r.prompt + r.new) // self.o["kv_block"])

    def _Place(self, a: Mapping[str, Any]) -> None:
        r = self._of(a)
        if r is None:
            return
        self.need(r.devices is None, "P3", f"request {a['request']} was placed before")
        r.devices = tuple(a["devices"])
        every = tuple(range(self.o["devices"]))
        alone = len(r.devices) == 1 and r.devices[0] in every
        good = r.devices == every if self.o["partition"] == "head" else alone
        self.need(good, "P4", f"request {a['request']} is placed on {r.devices}")
        for d in r.devices:
            held = sum(self._blocks(x) for x in self.live.values() if d in (x.devices or ()))
            self.need(held <= self.o["blocks"], "P4", f"device {d} holds {held} blocks")

    def _end(self, a: Mapping[str, Any]) -> None:
        if self._of(a) is not None:
            request = a["request"]
            aboard = any(s[0] == request for spans in self.spans for s in spans)
            self.need(not aboard, "P3", f"request {request} ends while it is aboard")
            del self.live[request]
            self.ended.add(request)

    _Finish = _end

    def _Reject(self, a: Mapping[str, Any]) -> None:
        r = self.live.get(a["request"])
        if r is not None:
            never = r.devices is None and self._blocks(r) > self.o["blocks"]
            self.need(never, "P4", f"request {a['request']} could have been held")
        self._end(a)

    # -- prompts

    def _Prefill(self, a: Mapping[str, Any]) -> None:
        r = self._of(a)
        self.need(a["worker"] not in self.making, "P6", f"worker {a['worker']} is busy")
        self.need(a["worker"] < self.o["prefill"], "P6", f"no worker {a['worker']}")
        self.making[a["worker"]] = a["request"]
        if r is not None:
            self.need(r.devices is not None, "P3", f"request {a['request']} has no place")
            r.worker, r.run, r.whole, r.pulled = a["worker"], False, False, 0

    def _Prefilled(self, e: Mapping[str, Any]) -> None:
        made = self.making.pop(e["worker"], None)
        self.need(made == e["request"], "P6", f"worker {e['worker']} ran {made}")
        r = self.live.get(e["request"])
        if r is not None:
            r.run = True
            self._ready(r)

    def _Pulled(self, e: Mapping[str, Any]) -> None:
        r = self._of(e, "P6")
        if r is None:
            return
        want = sum(
            kv * min(r.prompt, w or r.prompt)
            for (_, kv, _), w in zip(self.row, self.windows, strict=True)
        )
        text = f"request {e['request']}: {r.pulled} of {want} bytes were pulled"
        self.need(r.worker is not None and r.pulled >= want, "P6", text)
        self.need(self.disturbed or r.pulled == want, "P6", text)
        r.whole = True
        self._ready(r)

    def _ready(self, r: _Request) -> None:
        if r.run and r.whole:
            r.done = r.prompt

    # -- turns

    def _Turn(self, a: Mapping[str, Any]) -> None:
        j, k, replica, spans = a["batch"], a["slice"], a["replica"], a["spans"]
        n = self.o["batches"]
        if j >= n or replica >= max(1, n - 1):
            return self.bad("P5", f"no batch {j} or no replica {replica}")
        self.need(replica not in self.replica, "P5", f"replica {replica} is busy")
        state = "rest" if k == 0 else "back"
        self.need(self.state[j] == state, "P5", f"batch {j}: slice {k} while it is {self.state[j]}")
        self.need(k == self.slice[j], "P5", f"batch {j}: slice {k}, {self.slice[j]} comes next")
        if k == 0:
            self._board(j, spans)
        self.need(spans == self.spans[j], "P5", f"batch {j}: other members within a token")
        if self.o["order"] == "rotation" and k > 0:
            right = (self.where[j] + 1) % max(1, n - 1)
            self.need(replica == right, "P7", f"batch {j}: replica {replica}, {right} comes next")
        held = -1 if k == 0 else self.where[j]
        self.need(a["held"] == held, "P5", f"batch {j}: its context lies on {held}")
        self.replica[replica], self.state[j], self.where[j] = j, "runs", replica

    def _board(self, j: int, spans: list[list[int]]) -> None:
        elsewhere = {s[0] for i, other in enumerate(self.spans) if i != j for s in other}
        self.need(bool(spans) and len(spans) <= self.o["max_batch"] * self.o["batches"], "P5",
                  f"batch {j} has {len(spans)} members")
        for request, start, end in spans:
            r = self.live.get(request)
            if r is None or r.devices is None:
                self.bad("P3", f"request {request} runs and has no place")
                continue
            good = start == r.done < end <= start + self.o["chunk"]
            self.need(good, "P5", f"request {request}: positions {start} to {end} after {r.done}")
            self.need(request not in elsewhere, "P5", f"request {request} is in two batches")
            apart = self.o["prefill"] and not (r.run and r.whole)
            self.need(not apart, "P6", f"request {request} decodes before its prompt is there")
        self.spans[j] = spans

    def _free(self, j: int) -> None:
        for replica in [r for r, batch in self.replica.items() if batch == j]:
            del self.replica[replica]

    def _SliceDone(self, e: Mapping[str, Any]) -> None:
        j = e["batch"]
        self.need(self.state[j] == "runs", "P5", f"batch {j}: a slice ended that did not run")
        self._free(j)
        self.slice[j], self.state[j] = self.slice[j] + 1, "away"
        last = self.slice[j] <= self.o["layers"]
        self.need(last, "P5", f"batch {j}: more slices than layers")

    def _AttentionDone(self, e: Mapping[str, Any]) -> None:
        j = e["batch"]
        self.need(self.state[j] == "away", "P5", f"batch {j}: nothing was away")
        self.state[j] = "back"

    def _TokenDone(self, e: Mapping[str, Any]) -> None:
        j = e["batch"]
        good = self.state[j] == "runs" and self.slice[j] == self.o["layers"]
        self.need(good, "P5", f"batch {j}: a token ended at slice {self.slice[j]}")
        self._free(j)
        for request, _, end in self.spans[j]:
            if request in self.live:
                self.live[request].done = end
        self.spans[j], self.slice[j], self.state[j] = [], 0, "rest"

    # -- losses

    def _void(self, j: int) -> None:
        self._free(j)
        self.spans[j], self.slice[j], self.state[j] = [], 0, "rest"
        self.disturbed = True

    def _Redo(self, e: Mapping[str, Any]) -> None:
        self._void(e["batch"])

    def _LostMemory(self, e: Mapping[str, Any]) -> None:
        self.disturbed = True
        gone = {n for n, r in self.live.items() if e["device"] in (r.devices or ())}
        for n in gone:
            r = self.live[n]
            r.done = 0
            if not (r.run and r.whole):
                r.whole = False
        for j, spans in enumerate(self.spans):
            if gone & {s[0] for s in spans}:
                self._void(j)

    def _LostWorker(self, e: Mapping[str, Any]) -> None:
        self.disturbed = True
        self.making.pop(e["worker"], None)
        for r in self.live.values():
            if r.worker == e["worker"] and not (r.run and r.whole):
                r.run = r.whole = False


def check_pools(log: Any, *, complete: bool = True) -> list[Violation]:
    """All violations of a log that pools_log describes, by line."""
    judge, ended = Judge(log.head), False
    for judge.line, record in enumerate(log.records, start=2):
        for message in record.get("wire", ()):
            judge.message(message)
        name = record.get("event") or record.get("action")
        if name:
            judge.take[name](record)
        ended = "end" in record
    if complete:
        judge.need(ended, "LOG", "no end record: the log is incomplete")
        judge.need(not judge.live, "P3", f"requests {sorted(judge.live)} did not end")
        quiet = judge.disturbed or not judge.tiles
        judge.need(quiet, "P1", f"tiles {sorted(judge.tiles)} did not end")
    return judge.found


CHECKS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7")
