"""A trace served from a full queue: paged KV, prompts already prefilled, decoding only.

Requests are admitted in order, whole: the blocks for prompt and output are reserved (LAMINA-4).
Between two changes of the batch nothing happens but one token a request and step, so time goes in
stretches: each is timed at the lengths of its middle.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from reference.control.attention_partition import HeadPool, Pool, RequestPool, imbalance
from reference.vocab.errors import BadInput

StepTime = Callable[[int, float, float], float]
"""(requests, cached tokens, fullest device over mean) -> seconds of a step."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. Means are over steps."""

    requests: int
    refused: int
    tokens: int
    steps: int
    seconds: float
    imbalance: float

    @property
    def batch(self) -> float:
        """Mean requests a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def token_s(self) -> float:
        """Mean time between tokens."""
        return self.seconds / self.steps if self.steps else 0.0


def serve(
    requests: Sequence[tuple[int, int]],
    capacity: float,
    step_s: StepTime,
    *,
    devices: int = 1,
    partition: str = "head",
    block: int = 16,
    warm: float = 0.1,
) -> Outcome:
    """Serve (prompt, output) pairs from a full queue on `devices` memory devices of `capacity`
    tokens in all. The run ends when the queue is empty (the last requests are not waited for, and
    the first `warm` share of tokens is not counted: both would show a batch that is not full).

    Requests that generate nothing are left out; those that can never fit are refused.
    """
    if partition not in ("head", "request"):
        raise BadInput(f"partition: unsupported {partition!r}; supported: head, request")
    blocks = int(capacity / devices / block)
    shares = blocks * devices
    pool: Pool = HeadPool(1, shares, [1]) if partition == "head" else RequestPool(devices, blocks)
    total = sum(g for p, g in requests if g > 0)
    tokens = steps = refused = served = 0
    seconds = weighted = 0.0
    now = cached = done = 0
    ends: list[tuple[int, int, int]] = []
    waiting = [(p, g) for p, g in requests if g > 0]
    at = 0
    while at < len(waiting):
        while at < len(waiting):
            p, g = waiting[at]
            need = -(-(p + g) // block)
            if not pool.fits(need):
                refused += 1
            elif pool.place(at, need) is None:
                break
            else:
                heapq.heappush(ends, (now + g, at, p + g))
                cached += p
                served += 1
            at += 1
        if not ends or at == len(waiting):
            break
        n, stretch = len(ends), ends[0][0] - now
        if done >= warm * total:
            even = imbalance(pool.held()) if partition == "request" else 1.0
            each = step_s(n, cached + n * (stretch + 1) / 2, even)
            tokens += n * stretch
            steps += stretch
            seconds += each * stretch
            weighted += even * stretch
        done += n * stretch
        cached += n * stretch
        now += stretch
        while ends and ends[0][0] == now:
            _, request, length = heapq.heappop(ends)
            cached -= length
            pool.drop(request)
    return Outcome(served, refused, tokens, steps, seconds, weighted / steps if steps else 1.0)


def residents_imbalance(
    requests: Sequence[tuple[int, int]], batch: int, devices: int, rounds: int = 200, seed: int = 0
) -> float:
    """Mean of fullest over mean KV when residents are dealt out in turn: a resident is a request
    met with a chance in proportion to its output, at a random place of it."""
    rng = Random(seed)
    pairs = [r for r in requests if r[1] > 0]
    weights = [g for _, g in pairs]
    total = 0.0
    for _ in range(rounds):
        drawn = rng.choices(pairs, weights, k=batch)
        lengths = [p + rng.randrange(g) for p, g in drawn]
        total += imbalance([sum(lengths[i::devices]) for i in range(devices)])
    return total / rounds
