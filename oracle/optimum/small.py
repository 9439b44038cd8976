"""A small world: a few requests, layers and experts, times that are whole numbers.

Every request has one token of prompt and `tokens` to generate, all arrive at once, and nothing is
resident. An expert's code is `layer * experts + expert`; sets of codes are bit masks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reference.control import Scheduler
from reference.prediction import simulated
from reference.prediction.listener import Listener, Predicting
from reference.simulator.costs import CostModel
from reference.simulator.loop import Totals, VirtualLoop
from reference.simulator.routes import RoutedExecutor
from reference.vocab.events import Arrived
from reference.vocab.options import ControlOptions

Route = tuple[int, ...]
"""A request's needs as masks, visit by visit: 0 at ENTRY, then a mask for each layer; again for
each token."""


@dataclass(frozen=True)
class Small:
    """load: time of a transfer; step, row, expert: a step takes step + row for each visit that it
    ends + expert for each distinct expert (SIM-1)."""

    requests: int
    layers: int
    experts: int
    top_k: int
    slots: int
    tokens: int
    load: int
    step: int
    row: int
    expert: int

    @property
    def visits(self) -> int:
        """Of one request."""
        return self.tokens * (self.layers + 1)

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """What a router may name: masks of `top_k` experts, for layer 0."""
        return tuple(
            sum(1 << e for e in chosen)
            for chosen in itertools.combinations(range(self.experts), self.top_k)
        )

    def stage(self, visit: int) -> int:
        """-1 at ENTRY, else the layer."""
        return visit % (self.layers + 1) - 1

    def route(self, picks: Sequence[int]) -> Route:
        """From a choice (by number) for every visit to a layer."""
        out, at = [], iter(picks)
        for visit in range(self.visits):
            layer = self.stage(visit)
            out.append(0 if layer < 0 else self.choices[next(at)] << layer * self.experts)
        return tuple(out)

    @property
    def picks(self) -> int:
        """Choices of a request: one for every visit to a layer."""
        return self.tokens * self.layers

    def all_routes(self) -> Iterator[tuple[Route, ...]]:
        """Every world of routes, each as likely as any other."""
        each = itertools.product(range(len(self.choices)), repeat=self.picks)
        return itertools.product(*[[self.route(p) for p in each]] * self.requests)

    @property
    def worlds(self) -> int:
        """How many those are."""
        return len(self.choices) ** (self.picks * self.requests)

    def sample(self, seed: int, n: int) -> list[tuple[Route, ...]]:
        """Some of them, drawn evenly; all of them, where there are no more than n."""
        if self.worlds <= n:
            return list(self.all_routes())
        rng = random.Random(f"{self} {seed}")
        return [
            tuple(
                self.route([rng.randrange(len(self.choices)) for _ in range(self.picks)])
                for _ in range(self.requests)
            )
            for _ in range(n)
        ]

    def duration(self, rows: int, distinct: int) -> int:
        """Of a step."""
        return self.step + self.row * rows + self.expert * distinct

    @property
    def costs(self) -> CostModel:
        """The same for the simulator; one transfer is outstanding at a time."""
        return CostModel(bytes_per_s=1.0, depth=1, step_s=self.step, row_s=self.row,
                         expert_s=self.expert)  # fmt: skip

    def options(self, **changes: Any) -> ControlOptions:
        """Control's options for this world."""
        return ControlOptions(
            layers=tuple(range(self.layers)), experts=self.experts, top_k=self.top_k,
            slots=self.slots, chunk=1, kv_block=1,
        ).with_(**changes)  # fmt: skip

    def experts_of(self, mask: int) -> tuple[int, ...]:
        """The experts of a need, ascending."""
        return tuple([c % self.experts for c in bits(mask)])

    def run(self, routes: Sequence[Route], scheduler: Scheduler, predict: str = "") -> Totals:
        """The shipped control plane in virtual time; `predict` names a simulated predictor."""

        def spoken(request: int, position: int, layer: int) -> tuple[int, ...]:
            # A predictor also asks about the token after the last, which nobody computes.
            visit = position * (self.layers + 1) + layer + 1
            return self.experts_of(routes[request][visit % self.visits])

        shape = (1, self.tokens)
        executor = RoutedExecutor(
            spoken, tuple(range(self.layers)), 1, self.slots, lambda r: shape, lambda: 0.0
        )
        said = simulated(predict, scheduler.options, executor.truth)
        told = Predicting(executor, Listener(said, scheduler.options)) if said else executor
        loop = VirtualLoop(scheduler, told, self.load, self.costs)
        loop.at(0.0, lambda: [Arrived(r, *shape) for r in range(self.requests)])
        totals = loop.run()
        assert scheduler.idle, "a request is left over"
        return totals


def bits(mask: int) -> Iterator[int]:
    """The codes of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def subsets(mask: int) -> Iterator[int]:
    """All parts of a mask but the empty one."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask
