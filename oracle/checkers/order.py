"""S10: each request's own order: chunk after chunk, layer after layer, every expert once."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.checkers.records import ENTRY, Head, Line, LogView, Record, Violation, parts_of


class _Walk:
    """Where one request stands.

    stage   ready: its visit (chunk, layer) may compute    part: some of it is in a step
            done: its last part is in a step               routed | sampled: that result is owed
            over: nothing more may come                    lost: out of the judgement (it failed)
    """

    def __init__(self, head: Head, prompt_len: int, max_new: int) -> None:
        self.head = head
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.chunk = 0
        self.layer = ENTRY
        self.stage = "ready"
        self.routed: set[int] = set()
        self.ran: set[int] = set()
        self.tokens = 0

    @property
    def visit(self) -> tuple[int, int]:
        return (self.chunk, self.layer)

    def next_layer(self) -> int | None:
        """The layer after this visit's, or None when the LM head follows."""
        later = [layer for layer in self.head.layers if layer > self.layer]
        return later[0] if later else None

    def start(self, chunk: int, layer: int, experts: tuple[int, ...], last: bool) -> str:
        """Put a part into a step; return what is wrong with it."""
        if self.stage == "lost":
            return ""
        if self.stage != "ready":
            return f"the request is not ready ({self.stage} at {self.visit})"
        if (chunk, layer) != self.visit:
            return f"visit {(chunk, layer)}, its next is {self.visit}"
        if len(set(experts)) != len(experts) or list(experts) != sorted(experts):
            return f"experts {list(experts)} are not distinct and ascending"
        if not set(experts) <= self.routed:
            return f"experts {list(experts)} are not all among the routed {sorted(self.routed)}"
        if self.ran & set(experts):
            return f"expert {min(self.ran & set(experts))} runs a second time"
        if not experts and not (last and self.ran == self.routed):
            return "a part without experts"
        self.ran |= set(experts)
        self.stage = "done" if last else "part"
        if last and self.ran != self.routed:
            return f"last={last} with {sorted(self.ran)} of {sorted(self.routed)} run"
        return ""

    def computed(self) -> None:
        """The step of the part ended well."""
        if self.stage == "part":
            self.stage = "ready"
        elif self.stage == "done":
            final = self.chunk >= self.head.prompt_chunks(self.prompt_len) - 1
            if self.next_layer() is not None:
                self.stage = "routed"
            elif final:
                self.stage = "sampled"
            else:
                self._open(self.chunk + 1)

    def _open(self, chunk: int) -> None:
        self.chunk, self.layer, self.stage = chunk, ENTRY, "ready"
        self.routed, self.ran = set(), set()

    def route(self, visit: list[int], experts: list[list[int]]) -> str:
        """The next router spoke."""
        if self.stage == "lost":
            return ""
        expected = [self.chunk, self.next_layer()]
        if self.stage != "routed" or list(visit[1:]) != expected:
            return f"Routed for {list(visit[1:])} while {self.stage} at {self.visit}"
        rows = self.head.rows(self.chunk, self.prompt_len)
        self.layer, self.stage = visit[2], "ready"
        self.routed, self.ran = {e for row in experts for e in row}, set()
        if len(experts) != rows:
            return f"{len(experts)} tokens routed, the chunk has {rows}"
        for row in experts:
            distinct = len(set(row)) == len(row) == self.head.top_k
            if not distinct or not all(0 <= e < self.head.experts for e in row):
                return f"experts {row}: not {self.head.top_k} distinct of {self.head.experts}"
        return ""

    def sample(self, token: int | None, stop: bool) -> str:
        """The LM head's token."""
        if self.stage == "lost":
            return ""
        if self.stage != "sampled":
            return f"Sampled while {self.stage} at {self.visit}"
        if (token is None) != (self.max_new == 0):
            return f"token {token} with max_new_tokens {self.max_new}"
        self.tokens += 1
        if stop or self.tokens >= self.max_new:
            self.stage = "over"
            return "" if stop or self.max_new else "a scored request goes on"
        self._open(self.chunk + 1)
        return ""


class _Barrier:
    """Lock-step: steps run at the front, which goes on, to the nearest layer in the order ENTRY,
    layers, ENTRY, when an ask finds nobody left at it and no result owed."""

    def __init__(self, head: Head) -> None:
        self.places = [ENTRY, *head.layers]
        self.front = ENTRY
        self.asked = False
        self.running: set[int] = set()

    def see(self, line: Line, walks: dict[int, _Walk]) -> None:
        """Called before the line's own effect on the walks."""
        if self.asked and (line.kind != "action" or line.name in ("Load", "Compute")):
            self.asked = False
            self._advance([walks[n] for n in sorted(self.running) if n in walks])
        if line.kind == "ask":
            self.asked = True
        elif line.name == "Admit":
            self.running.add(line.record["request"])
        elif line.kind == "action" and line.name in ("Finish", "Reject"):
            self.running.discard(line.record["request"])

    def _advance(self, walks: list[_Walk]) -> None:
        owed = any(w.stage in ("routed", "sampled") for w in walks)
        layers = {w.layer for w in walks}
        if owed or self.front in layers or not layers:
            return
        here, count = self.places.index(self.front), len(self.places)
        self.front = min(layers, key=lambda x: (self.places.index(x) - here) % count)


def check_s10(log: LogView) -> Iterator[Violation]:
    """SAFE-10: layers and chunks in order, tokens strictly increasing, each routed expert once."""
    walks: dict[int, _Walk] = {}
    steps: dict[int, tuple[int, ...]] = {}
    barrier = _Barrier(log.head) if log.head.grouping.startswith("lockstep") else None
    for line in log.lines:
        record, fault, request = line.record, "", -1
        if barrier:
            barrier.see(line, walks)
            if line.name == "Compute" and record["layer"] != barrier.front:
                text = f"a step at layer {record['layer']}, the barrier stands at {barrier.front}"
                yield Violation("S10", line.number, text)
        if line.name == "Arrived":
            walk = _Walk(log.head, record["prompt_len"], record["max_new_tokens"])
            walks.setdefault(record["request"], walk)
        elif line.name == "Compute":
            steps[record["step"]] = tuple(dict.fromkeys(part[0] for part in parts_of(record)))
            yield from _compute(walks, line)
        elif line.name == "Computed":
            for request in steps.pop(record["step"], ()):
                if request in walks:
                    walks[request].computed()
        elif line.name == "Failed":
            _failed(walks, steps.pop(record["step"], ()), record)
        elif line.name in ("Routed", "Sampled"):
            request = record["visit"][0] if line.name == "Routed" else record["request"]
            walk = walks.get(request)
            if walk and line.name == "Routed":
                fault = walk.route(record["visit"], record["experts"])
            elif walk:
                fault = walk.sample(record["token"], record["stop"])
        elif line.kind == "action" and line.name in ("Finish", "Reject"):
            request = record["request"]
            walk = walks.get(request)
            if walk and record.get("reason") in ("stop", "length") and walk.stage != "over":
                fault = f"finished with reason {record['reason']} while {walk.stage}"
            if walk:
                walk.stage = "lost"
        if fault:
            yield Violation("S10", line.number, f"request {request}: {fault}")


def _compute(walks: dict[int, _Walk], line: Line) -> Iterator[Violation]:
    seen: set[int] = set()
    for request, chunk, layer, experts, last in parts_of(line.record):
        fault = ""
        if layer != line.record["layer"]:
            fault = f"a visit at layer {layer} in a step of layer {line.record['layer']}"
        elif request in seen:
            fault = "two parts in one step"
        elif request in walks:
            fault = walks[request].start(chunk, layer, experts, last)
        seen.add(request)
        if fault:
            yield Violation("S10", line.number, f"request {request}: {fault}")


def _failed(walks: dict[int, _Walk], inside: tuple[int, ...], record: Record) -> None:
    """Blamed requests leave the judgement; for the others the step counts as computed."""
    blamed = set(record["requests"] or inside)
    for request in inside:
        if request in walks and request in blamed:
            walks[request].stage = "lost"
        elif request in walks:
            walks[request].computed()
