"""The rotation played in virtual time: the same control object that drives the engine, durations
instead of devices (LAMINA-6, LAMINA-7, LAMINA-12, LAMINA-19, LAMINA-20)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from reference.control.attention_handoff import HandOff
from reference.control.attention_rotation import Order, Rotation

Duration = Callable[[int, int], float]
"""(batch, turn) -> seconds."""


@dataclass
class Played:
    """When each turn began, and how long things were busy. Seconds."""

    starts: list[list[float]]
    replica_s: list[float]
    pool_s: float = 0.0
    seconds: float = 0.0
    moved: int = 0
    pulled: int = 0
    backlog: list[int] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return sum(map(len, self.starts))

    @property
    def replicas_busy(self) -> float:
        """Share of the time in which a replica computes."""
        return sum(self.replica_s) / (len(self.replica_s) * self.seconds)

    @property
    def pool_busy(self) -> float:
        return self.pool_s / self.seconds

    def period(self, skip: int = 5) -> float:
        """Mean time between two turns of a batch, without the first ones."""
        spans = [(s[-1] - s[skip]) / (len(s) - 1 - skip) for s in self.starts]
        return sum(spans) / len(spans)


@dataclass(frozen=True)
class Ingress:
    """Prompts that come in over the memory pool's receiving port.

    rate          bytes/s of the port;  receive_s  the port is taken so long by each attention's
    queries, keys and values;  offer_bytes every `every` attentions a prompt of so many bytes
    piece_bytes   most bytes of one pull
    """

    rate: float
    receive_s: float
    offer_bytes: int
    every: int
    piece_bytes: int


def play(
    batches: int,
    turns: int,
    slice_s: Duration,
    attention_s: Duration,
    network_s: float = 0.0,
    order: Order = "rotation",
    ingress: Ingress | None = None,
) -> Played:
    """Each batch makes so many turns. The pool attends to one batch at a time, first come first
    served. With `ingress` the pool also pulls prompts, but only while its port has nothing to
    receive, and only what will be there before the next message is due."""
    control = Rotation(batches, order)
    out = Played([[] for _ in range(batches)], [0.0] * control.replicas)
    port = _Port(ingress) if ingress else None
    due: list[tuple[float, int, str, int]] = []
    now, free = 0.0, 0.0

    def later(at: float, what: str, batch: int) -> None:
        heapq.heappush(due, (at, out.turns * 2 + (what == "slice"), what, batch))

    for j in range(batches):
        control.opened(j)
    while True:
        for run in control.next_runs():
            took = slice_s(run.batch, run.turn)
            out.replica_s[run.replica] += took
            out.moved += run.held not in (-1, run.replica)
            out.starts[run.batch].append(now)
            later(now + took, "slice", run.batch)
        if not due:
            break
        if port:
            # The next message cannot come before the next thing that happens.
            port.until(now, due[0][0])
        now, _, what, batch = heapq.heappop(due)
        if what == "slice":
            control.slice_done(batch)
            if len(out.starts[batch]) == turns:
                control.attention_done(batch)
                control.emptied(batch)
                continue
            arrived = port.receive(now) if port else now
            begin = max(arrived, free)
            took = attention_s(batch, control.turn[batch] - 1)
            free = begin + took
            out.pool_s += took
            later(free + network_s, "attention", batch)
        else:
            control.attention_done(batch)
    out.seconds = now
    if port:
        out.pulled, out.backlog = port.pulled, port.history
    return out


class _Port:
    """The receiving port of the memory pool: messages first, pulls in the gaps."""

    def __init__(self, ingress: Ingress) -> None:
        self.told = ingress
        self.handoff = HandOff(1, ingress.piece_bytes)
        self.free, self.count, self.pulled = 0.0, 0, 0
        self.history: list[int] = []

    def receive(self, now: float) -> float:
        """Queries, keys and values begin to come; when they have come."""
        if self.count % self.told.every == 0:
            self.handoff.offer(self.count // self.told.every, 0, self.told.offer_bytes, 1)
        self.count += 1
        self.history.append(self.handoff.backlog)
        self.free = max(now, self.free) + self.told.receive_s
        return self.free

    def until(self, now: float, due: float) -> None:
        """Nothing comes before `due`: pull what will be over by then."""
        self.free = max(self.free, now)
        while self.free < due:
            piece = self.handoff.next_pull(int((due - self.free) * self.told.rate))
            if piece is None:
                return
            self.free += piece.bytes / self.told.rate
            self.pulled += piece.bytes
            self.handoff.pulled()


def with_misses(
    compute_s: float, expert_s: float, needed: int, miss: float, seed: int = 0
) -> Duration:
    """A slice whose experts are partly elsewhere: each of `needed` is missing with chance `miss`
    and then takes `expert_s` on the channel. Depends on (seed, batch, turn) only."""

    def slice_s(batch: int, turn: int) -> float:
        rng = Random(f"{seed}/{batch}/{turn}")
        return compute_s + expert_s * sum(rng.random() < miss for _ in range(needed))

    return slice_s


def ingress_needed(tokens_per_s: float, prompt: float, output: float, kv_token: float) -> float:
    """Bytes/s of prompts' KV that a pool takes in which makes so many tokens a second."""
    return tokens_per_s / output * prompt * kv_token


def ingress_room(tokens_per_s: float, to_memory_token: float, rate: float, ports: int) -> float:
    """Bytes/s that the memory pool's ports have left beside what decoding sends them."""
    return rate * ports - tokens_per_s * to_memory_token
