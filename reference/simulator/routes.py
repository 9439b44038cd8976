"""An executor without a model: only the routing is real (recorded or made up)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from reference.files.routing_trace import RoutingTrace
from reference.simulator.costs import Work
from reference.vocab.actions import Compute, Finish, Load, Reject
from reference.vocab.events import Computed, Event, Routed, Sampled
from reference.vocab.ids import ENTRY, ExpertKey, Part, Visit

Routes = Callable[[int, int, int], tuple[int, ...]]
"""(request, position, layer) -> the token's experts in rank order."""
Shape = Callable[[int], tuple[int, int]]
"""request -> (prompt_len, max_new_tokens)."""


class RouteSource(Protocol):
    """A synthetic router, or recorded traces."""

    def request(self, request: int, tokens: int) -> np.ndarray:
        """uint16 [tokens, layers, K], experts in rank order; of more tokens they begin the same."""
        ...


def random_routes(experts: int, top_k: int, seed: int, skew: float = 0.0) -> Routes:
    """Routes that depend on (seed, request, position, layer) alone, so that every scheduler sees
    the same. With `skew`, expert e of a layer is drawn with weight 1 / (rank of e) ** skew, where
    each layer has its own ranking."""
    weights = [1.0 / (i + 1) ** skew for i in range(experts)]

    def routes(request: int, position: int, layer: int) -> tuple[int, ...]:
        ranking = list(range(experts))
        random.Random(f"{seed}/{layer}").shuffle(ranking)
        draw = random.Random(f"{seed}/{request}/{position}/{layer}")
        left, chosen = list(range(experts)), []
        for _ in range(top_k):
            i = draw.choices(left, [weights[j] for j in left])[0]
            left.remove(i)
            chosen.append(ranking[i])
        return tuple(chosen)

    return routes


class RecordedRoutes:
    """A RouteSource of a recorded trace: request n follows the (n mod requests)-th recorded one,
    from its beginning and, when that ends, from there again. Where there are more requests than
    recorded ones, each further round begins `shift` tokens later, so that two that follow the same
    do not go hand in hand."""

    def __init__(self, trace: RoutingTrace, shift: int = 37) -> None:
        self.trace = trace
        self.shift = shift

    def request(self, request: int, tokens: int) -> np.ndarray:
        """uint16 [tokens, layers, K]."""
        again, which = divmod(request, len(self.trace.requests))
        topk = self.trace.requests[which].topk
        return topk[(np.arange(tokens) + again * self.shift) % len(topk)]


AHEAD = 256
"""Tokens of a request whose routes are made at once."""


class RoutesOf:
    """A RouteSource as `Routes`: each request's are made as far as it has come, `AHEAD` tokens at
    first and then twice as many, and dropped by `forget`. `keep` holds them for a next run over the
    same."""

    def __init__(
        self, source: RouteSource, layers: tuple[int, ...], shape: Shape, keep: bool = False
    ) -> None:
        self.source = source
        self.shape = shape
        self.keep = keep
        self.place = {layer: i for i, layer in enumerate(layers)}
        self.made: dict[int, list[list[tuple[int, ...]]]] = {}

    def __call__(self, request: int, position: int, layer: int) -> tuple[int, ...]:
        rows = self.made.get(request)
        if rows is None:
            rows = self.made[request] = []
        if position >= len(rows):
            tokens = min(sum(self.shape(request)), max(AHEAD, 2 * len(rows), position + 1))
            topk = self.source.request(request, tokens)[len(rows) :]
            rows += [[tuple(x) for x in token] for token in topk.tolist()]
        return rows[position][self.place[layer]]

    def forget(self, request: int) -> None:
        """The request has ended."""
        if not self.keep:
            self.made.pop(request, None)


@dataclass
class Progress:
    """What a request has done, in virtual seconds."""

    arrived: float
    token_s: list[float] = field(default_factory=list)
    ended: float | None = None
    reason: str = ""
    refused: bool = False


class RoutedExecutor:
    """`shape(request)` gives (prompt_len, max_new_tokens); `layers` those with experts. `on_end` is
    told of every request that has ended."""

    def __init__(
        self,
        routes: Routes,
        layers: tuple[int, ...],
        chunk: int,
        slots: int,
        shape: Shape,
        now: Callable[[], float],
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        self.routes = routes
        self.layers = layers
        self.chunk = chunk
        self.slots: list[ExpertKey | None] = [None] * slots
        self.shape = shape
        self.now = now
        self.on_end = on_end
        self.progress: dict[int, Progress] = {}
        self.generated = 0
        self.visits: dict[int, int] = {}
        self.named: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._next_layer = dict(zip((ENTRY, *layers), (*layers, None), strict=True))

    def clear(self, slot: int) -> None:
        """The slot's content is gone."""
        self.slots[slot] = None

    def fill(self, action: Load) -> None:
        """The slot holds the expert."""
        self.slots[action.slot] = action.key

    def _span(self, visit: Visit) -> tuple[int, int]:
        prompt = self.shape(visit.request)[0]
        chunks = -(-prompt // self.chunk)
        if visit.chunk < chunks:
            return visit.chunk * self.chunk, min((visit.chunk + 1) * self.chunk, prompt)
        return prompt + visit.chunk - chunks, prompt + visit.chunk - chunks + 1

    def truth(self, visit: Visit) -> tuple[tuple[int, ...], ...]:
        """The experts that a visit to come will name, a tuple a token: for oracles."""
        request, _, layer = visit
        return tuple([self.routes(request, p, layer) for p in range(*self._span(visit))])

    def work(self, action: Compute) -> Work:
        """What the step computes: rows of its last parts, products of all."""
        spans = [self._span(p.visit) for p in action.parts if p.last]
        return Work(spans, sum([self._pairs(p) for p in action.parts]))

    def _pairs(self, part: Part) -> int:
        named = self.named.get(part.visit.request, ())
        if len(named) <= 1:
            return len(part.experts)
        experts = set(part.experts)
        return sum(1 for token in named for e in token if e in experts)

    def run(self, action: Compute) -> list[Event]:
        """Every expert must lie where the action says; then the next routers speak."""
        layer, slots = action.layer, self.slots
        for expert, slot in action.slots:
            assert slots[slot] == (layer, expert), (action, slot, slots[slot])
        out: list[Event] = [Computed(action.step)]
        for part in action.parts:
            if part.last:
                out += self._next(part.visit)
        return out

    def _next(self, visit: Visit) -> list[Event]:
        request = visit.request
        self.visits[request] = self.visits.get(request, 0) + 1
        start, end = self._span(visit)
        layer = self._next_layer[visit.layer]
        if layer is not None:
            routes = self.routes
            experts = tuple([routes(request, p, layer) for p in range(start, end)])
            self.named[request] = experts
            return [Routed(Visit(request, visit.chunk, layer), experts)]
        self.named.pop(request, None)
        prompt, new = self.shape(request)
        if end < prompt:
            return []
        if new == 0:
            return [Sampled(request, None, True)]
        self.generated += 1
        self.progress.setdefault(request, Progress(0.0)).token_s.append(self.now())
        return [Sampled(request, 0, False)]

    def ended(self, action: Finish | Reject) -> None:
        """Note when and why."""
        p = self.progress.setdefault(action.request, Progress(0.0))
        p.ended, p.reason, p.refused = self.now(), action.reason, isinstance(action, Reject)
        self.named.pop(action.request, None)
        if isinstance(self.routes, RoutesOf):
            self.routes.forget(action.request)
        if self.on_end is not None:
            self.on_end(action.request)
