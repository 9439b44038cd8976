"""Random plays of attention in another pool, with every decision on the way pinned.

Options, requests, the order of all that happens, cancels and losses are drawn from the seed; what
`Serving` decides goes into a digest, pinned in walks.json beside the walks of the other system. A
legal event may not raise, a batch runs on one replica at a time, and a play must end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from reference.control.attention_partition import imbalance, longest_first
from reference.control.attention_serving import Place, Prefill, Serving, ServingOptions, Turn
from reference.vocab.actions import Finish, Reject

PLAYS = 1000
MOST = 3_000
"""Events after which a play counts as one that does not end."""
Event = tuple[str, int]


@dataclass
class Play:
    """What a play came to. digest: of every decision, in order."""

    seed: int
    digest: str = ""
    events: int = 0
    fault: str = ""


def draw_options(rng: random.Random) -> ServingOptions:
    """Small enough that blocks, batches and workers run out."""
    layers, devices = rng.randint(1, 3), rng.randint(1, 3)
    return ServingOptions(
        layers=layers, kv_heads=tuple(devices * rng.randint(1, 2) for _ in range(layers)),
        batches=rng.randint(1, 4), order=rng.choice(("rotation", "queue")),
        max_batch=rng.randint(1, 3), chunk=rng.randint(1, 4), devices=devices,
        partition=rng.choice(("head", "request")), blocks=rng.randint(3, 12),
        kv_block=rng.randint(1, 4), prefill=rng.choice((0, 0, 1, 2)),
    )  # fmt: skip


@dataclass
class World:
    """What is under way, as the actions told it. runs, away, back: batch -> its turn, while it
    runs, attends, and has come back; making: worker -> request; begun: prompts to be pulled."""

    options: ServingOptions
    serving: Any
    left: list[tuple[int, int]]
    troubles: int
    live: set[int] = field(default_factory=set)
    runs: dict[int, Turn] = field(default_factory=dict)
    away: dict[int, Turn] = field(default_factory=dict)
    back: dict[int, Turn] = field(default_factory=dict)
    making: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    arrived: int = 0

    def obey(self, actions: list[Any]) -> str:
        """Notes what was decided; says what is wrong with it."""
        for a in actions:
            if isinstance(a, Prefill):
                if a.worker in self.making:
                    return f"{a}: the worker is busy"
                self.making[a.worker] = a.request
                self.begun.add(a.request)
            elif isinstance(a, Turn):
                if a.batch in self.runs or a.batch in self.away:
                    return f"{a}: the batch is not there"
                if any(run.replica == a.replica for run in self.runs.values()):
                    return f"{a}: the replica is busy"
                self.runs[a.batch] = a
                self.back.pop(a.batch, None)
            elif isinstance(a, Finish | Reject):
                self.live.discard(a.request)
                self.begun.discard(a.request)
            elif not isinstance(a, Place):
                return f"{a}: no action"
        return ""

    def may(self) -> list[Event]:
        """Everything that can happen now."""
        out: list[Event] = [("arrive", 0)] if self.left else []
        out += [("ran", batch) for batch in self.runs]
        out += [("attended", batch) for batch in self.away]
        out += [("made", worker) for worker in self.making]
        out += [("pulled", request) for request in sorted(self.begun)]
        return out

    def trouble(self, rng: random.Random) -> Event:
        """Something goes wrong, or is given up."""
        kinds: list[Event] = [("cancel", rng.choice(sorted(self.live)))] if self.live else []
        kinds.append(("lose", rng.randrange(self.options.devices)))
        if self.options.prefill:
            kinds.append(("lose worker", rng.randrange(self.options.prefill)))
        void = sorted({*self.runs, *self.away, *self.back})
        kinds += [("redo", rng.choice(void))] if void else []
        return rng.choice(kinds)

    def tell(self, event: Event, rng: random.Random) -> object:
        """Makes it happen; what Serving answered."""
        s, (kind, n) = self.serving, event
        if kind == "arrive":
            prompt, new = self.left.pop(0)
            self.live.add(self.arrived)
            s.arrived(self.arrived, prompt, new)
            self.arrived += 1
        elif kind == "ran":
            turn = self.runs.pop(n)
            if turn.slice < self.options.layers:
                self.away[n] = turn
                s.slice_done(n)
            else:
                s.token_done(n, {x.request for x in turn.spans if rng.random() < 0.1})
        elif kind == "attended":
            self.back[n] = self.away.pop(n)
            s.attention_done(n)
        elif kind == "made":
            s.prefilled(n, self.making.pop(n), rng.random() < 0.1)
        elif kind == "pulled":
            self.begun.discard(n)
            s.pulled(n)
        elif kind == "cancel":
            s.cancelled(n, *rng.choice(((), ("error", "given up"))))
        elif kind == "redo":
            self._void(n)
            s.redo(n)
        elif kind == "lose worker":
            self.making.pop(n, None)
            again = s.lost_worker(n)
            self.begun -= set(again)
            return again
        else:
            gone = s.lost(n)
            for batch, turn in [*self.runs.items(), *self.away.items(), *self.back.items()]:
                if any(x.request in gone for x in turn.spans):
                    self._void(batch)
            if self.options.prefill:
                held = {r for worker in s.prompts.holds for r in worker}
                self.begun |= {r for r in gone if r in held}
            return gone
        return None

    def _void(self, batch: int) -> None:
        for where in (self.runs, self.away, self.back):
            where.pop(batch, None)


def play(seed: int, make: Callable[[ServingOptions], Any] = Serving) -> Play:
    """One play; raises nothing, a fault is in the result."""
    rng = random.Random(f"play {seed}")
    options, out = draw_options(rng), Play(seed)
    sums = blake2b(repr(options).encode(), digest_size=8)
    lengths = [rng.randint(1, 9) for _ in range(6)]
    shares = longest_first(lengths, options.devices)
    sums.update(repr((shares, imbalance(shares))).encode())
    try:
        requests = [(rng.randint(1, 7), rng.choice((0, 1, 2, 5))) for _ in range(rng.randint(1, 9))]
        w = World(options, make(options), requests, rng.choice((0, 0, 1, 4)))
        while not out.fault:
            actions = w.serving.next_actions()
            sums.update(repr(actions).encode())
            out.fault = w.obey(actions)
            may = w.may()
            if out.fault or not may:
                break
            event = rng.choice(may)
            if w.troubles and rng.random() < 0.1:
                w.troubles, event = w.troubles - 1, w.trouble(rng)
            sums.update(repr((event, w.tell(event, rng), w.serving.idle)).encode())
            out.events += 1
            if out.events == MOST:
                out.fault = f"not the end after {MOST} events: {sorted(w.live)}"
        if not out.fault and not w.serving.idle:
            out.fault = f"nothing can happen, and this is not the end: {sorted(w.live)}"
    except Exception as error:
        out.fault = f"{type(error).__name__}: {error}"
    out.digest = sums.hexdigest()
    return out
