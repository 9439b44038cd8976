"""Lamina's staggered rotation: n batches in turn on n - 1 replicas, one memory pool behind them.

The formulas first (LAMINA-6), then `Rotation`, the same as a state machine that any executor can
drive: it is told when a slice has ended and when an attention has come back, and says which slice
starts where. A token is `layers` turns: slice k opens with the attention of layer k - 1 and ends
with the queries, keys and values of layer k; the last slice of a token (feed-forward, LM head,
sampling) and the first of the next one (embedding, projections) are one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from reference.vocab.errors import BadInput, IllegalEvent

Order = Literal["rotation", "queue"]
ORDERS: tuple[Order, ...] = ("rotation", "queue")


def replicas_of(batches: int) -> int:
    """n batches need n - 1 copies of the weights; one batch needs one."""
    return max(1, batches - 1)


def replica_of(batch: int, turn: int, batches: int) -> int:
    """The replica, from 0, on which turn `turn` of a batch runs: (j + k) mod (n - 1)."""
    return (batch + turn) % replicas_of(batches)


def slot_of(batch: int, turn: int, batches: int) -> int:
    """When it starts, in units of one attention, where an attention takes 1/(n - 1) of a slice."""
    return batch + turn * batches


def context_moves(batches: int) -> bool:
    """Whether a batch's residual stream goes to another replica between turns."""
    return replicas_of(batches) > 1


@dataclass(frozen=True)
class Steady:
    """The rotation in steady state; seconds.

    slice_s      one slice of one batch on one replica (t_m)
    attention_s  one attention of one batch on the whole pool (t_a)
    network_s    what of the wire is not hidden behind either (t_net)
    """

    batches: int
    slice_s: float
    attention_s: float
    network_s: float = 0.0

    @property
    def period_s(self) -> float:
        """Time from a batch's slice to its next one: the replicas', the pool's, or its own way."""
        n, r = self.batches, replicas_of(self.batches)
        return max(
            n * self.slice_s / r,
            n * self.attention_s,
            self.slice_s + self.attention_s + self.network_s,
        )

    @property
    def replicas_busy(self) -> float:
        """Share of the time in which a replica computes."""
        return self.batches * self.slice_s / (replicas_of(self.batches) * self.period_s)

    @property
    def pool_busy(self) -> float:
        """Share of the time in which the memory pool attends."""
        return self.batches * self.attention_s / self.period_s

    @property
    def bubble_s(self) -> float:
        """Idle time of a replica in a period."""
        return self.period_s - self.batches * self.slice_s / replicas_of(self.batches)

    def token_s(self, layers: int, head_s: float = 0.0) -> float:
        """Time between tokens of one request."""
        return layers * self.period_s + head_s

    def tokens_per_s(self, layers: int, batch: float, head_s: float = 0.0) -> float:
        """Throughput with `batch` requests in each of the batches."""
        return self.batches * batch / self.token_s(layers, head_s)


class Run(NamedTuple):
    """Start turn `turn` of `batch` on `replica`; its context lies on `held` (-1: nowhere yet)."""

    batch: int
    turn: int
    replica: int
    held: int


IDLE, READY, RUNNING, AWAY = 0, 1, 2, 3
"""Without requests; its next turn may start; its turn runs; its attention is at the pool."""


class Rotation:
    """Which batch's turn starts on which replica. Pure; one owner.

    rotation   a replica starts turns in the order of `slot_of` and waits for the one whose slot
               it is, even when another batch is ready (LAMINA-6): right when turns take equally
               long
    queue      a replica starts whatever has been ready longest, and a batch takes any free
               replica, the one that holds its context first (LAMINA-7): for turns of uneven length
    """

    __slots__ = ("held", "order", "ready", "replicas", "running", "state", "turn")

    def __init__(self, batches: int, order: Order = "rotation") -> None:
        if batches < 1:
            raise BadInput(f"batches: {batches}; at least 1 expected")
        if order not in ORDERS:
            raise BadInput(f"order: unsupported {order!r}; supported: {', '.join(ORDERS)}")
        self.order = order
        self.replicas = replicas_of(batches)
        self.state = [IDLE] * batches
        self.turn = [0] * batches
        self.held = [-1] * batches
        self.running: list[int | None] = [None] * self.replicas
        self.ready: list[int] = []

    @property
    def batches(self) -> int:
        return len(self.state)

    def resting(self, batch: int) -> bool:
        """The batch has no requests."""
        return self.state[batch] == IDLE

    def between(self, batch: int) -> bool:
        """The batch's next turn may start, and has not."""
        return self.state[batch] == READY

    def opened(self, batch: int) -> None:
        """An idle batch has got requests. It joins where the most advanced batch is, so that
        nobody has to wait until it has caught up."""
        self._expect(batch, IDLE, "opened")
        busy = [self.turn[j] for j in range(self.batches) if self.state[j] != IDLE]
        self.turn[batch] = max([self.turn[batch], *busy])
        self.held[batch] = -1
        self._ready(batch)

    def emptied(self, batch: int) -> None:
        """A batch's last requests have left at the end of a token."""
        self._expect(batch, READY, "emptied")
        self.state[batch] = IDLE
        self.ready.remove(batch)

    def slice_done(self, batch: int) -> None:
        """The turn is over: its attention is at the pool, and its replica is free."""
        self._expect(batch, RUNNING, "slice_done")
        self.running[self.running.index(batch)] = None
        self.state[batch] = AWAY
        self.turn[batch] += 1

    def token_done(self, batch: int) -> None:
        """The turn ended a token. The first slice of the next one belongs to the same turn, on the
        same replica, and comes before anything else."""
        self._expect(batch, RUNNING, "token_done")
        self.running[self.running.index(batch)] = None
        self.state[batch] = READY
        self.ready.insert(0, batch)

    def restart(self, batch: int) -> None:
        """What the batch was doing is void, wherever it was: its next turn may start."""
        if self.state[batch] == IDLE:
            raise IllegalEvent(f"restart({batch}) of a resting batch")
        if self.state[batch] == RUNNING:
            self.running[self.running.index(batch)] = None
        if self.state[batch] != READY:
            self._ready(batch)
        self.held[batch] = -1

    def attention_done(self, batch: int) -> None:
        """The attention has come back: the next turn may start."""
        self._expect(batch, AWAY, "attention_done")
        self._ready(batch)

    def next_runs(self) -> list[Run]:
        """The turns to start now; each is running from here on."""
        runs: list[Run] = []
        for batch in list(self.ready):
            replica = self._place(batch)
            if replica is None:
                continue
            self.ready.remove(batch)
            self.state[batch] = RUNNING
            self.running[replica] = batch
            runs.append(Run(batch, self.turn[batch], replica, self.held[batch]))
            self.held[batch] = replica
        return runs

    def _place(self, batch: int) -> int | None:
        if self.order == "queue":
            free = [r for r, running in enumerate(self.running) if running is None]
            return self.held[batch] if self.held[batch] in free else free[0] if free else None
        replica = replica_of(batch, self.turn[batch], self.batches)
        if self.running[replica] is not None:
            return None
        mine = slot_of(batch, self.turn[batch], self.batches)
        for other in range(self.batches):
            if other == batch or self.state[other] == IDLE:
                continue
            # The next turn of `other` on this very replica, if its slot comes first, is awaited.
            turn = self.turn[other]
            while replica_of(other, turn, self.batches) != replica:
                turn += 1
            if slot_of(other, turn, self.batches) < mine:
                return None
        return replica

    def _ready(self, batch: int) -> None:
        self.state[batch] = READY
        self.ready.append(batch)

    def _expect(self, batch: int, state: int, event: str) -> None:
        if not 0 <= batch < self.batches or self.state[batch] != state:
            raise IllegalEvent(f"{event}({batch}) does not fit the batch's state")
