"""An executor without a model: only the routing is real (recorded or made up)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from reference.vocab.actions import Compute, Finish, Load, Reject
from reference.vocab.events import Computed, Event, Routed, Sampled
from reference.vocab.ids import ExpertKey, Visit

Routes = Callable[[int, int, int], tuple[int, ...]]
"""(request, position, layer) -> the token's experts in rank order."""


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


@dataclass
class Progress:
    """What a request has done, in virtual seconds."""

    arrived: float
    token_s: list[float] = field(default_factory=list)
    ended: float | None = None
    reason: str = ""


class RoutedExecutor:
    """`shape(request)` gives (prompt_len, max_new_tokens); `layers` those with experts."""

    def __init__(
        self,
        routes: Routes,
        layers: tuple[int, ...],
        chunk: int,
        slots: int,
        shape: Callable[[int], tuple[int, int]],
        now: Callable[[], float],
    ) -> None:
        self.routes = routes
        self.layers = layers
        self.chunk = chunk
        self.slots: list[ExpertKey | None] = [None] * slots
        self.shape = shape
        self.now = now
        self.progress: dict[int, Progress] = {}
        self.visits: dict[int, int] = {}

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

    def rows(self, action: Compute) -> int:
        """Token rows that go on with the step: those of its last parts."""
        spans = [self._span(p.visit) for p in action.parts if p.last]
        return sum(end - start for start, end in spans)

    def run(self, action: Compute) -> list[Event]:
        """Every expert must lie where the action says; then the next routers speak."""
        for expert, slot in action.slots:
            assert self.slots[slot] == (action.layer, expert), (action, slot, self.slots[slot])
        out: list[Event] = [Computed(action.step)]
        for part in action.parts:
            if part.last:
                out += self._next(part.visit)
        return out

    def _next(self, visit: Visit) -> list[Event]:
        self.visits[visit.request] = self.visits.get(visit.request, 0) + 1
        start, end = self._span(visit)
        later = [layer for layer in self.layers if layer > visit.layer]
        if later:
            experts = tuple(self.routes(visit.request, p, later[0]) for p in range(start, end))
            return [Routed(visit._replace(layer=later[0]), experts)]
        prompt, new = self.shape(visit.request)
        if end < prompt:
            return []
        if new == 0:
            return [Sampled(visit.request, None, True)]
        self.progress.setdefault(visit.request, Progress(0.0)).token_s.append(self.now())
        return [Sampled(visit.request, 0, False)]

    def ended(self, action: Finish | Reject) -> None:
        """Note when and why."""
        p = self.progress.setdefault(action.request, Progress(0.0))
        p.ended, p.reason = self.now(), action.reason
