"""Guesses: what is read before a router has named it, while nothing named wants the channel.

An executor says what it expects of a visit ahead (`Predicted`); `Guesses` keeps that until the
visit is Routed, and `prefetch` reads the likeliest of what is absent. It is all that the predictive
schedulers add to the control plane; with the option `prefetch` at 0 none of it does anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference.control.cache import LOADING
from reference.control.requests import Request
from reference.vocab.actions import Action, Load
from reference.vocab.errors import IllegalEvent
from reference.vocab.events import Predicted
from reference.vocab.ids import ExpertKey

if TYPE_CHECKING:
    from reference.control.scheduler import Scheduler

SCALE = 1000
"""Scores are kept as integers, in thousandths: 1.0, a use that is certain, weighs this much."""
HEAVIEST = 1000 * SCALE

Place = tuple[int, int]
"""(chunk, stage) of a visit: visits of a request come in this order."""
Weights = tuple[tuple[int, int], ...]
"""(expert code, weight) pairs, the likeliest first."""


class Guesses:
    """What is expected of visits that no router has spoken for yet: request -> place -> weights."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: dict[int, dict[Place, Weights]] = {}

    def copy(self) -> Guesses:
        """An independent copy."""
        new = Guesses()
        if self.of:
            new.of = {n: places.copy() for n, places in self.of.items()}
        return new

    def key(self, running: dict[int, Request]) -> tuple:
        """Canonical: requests in order of arrival, unnumbered; places ascending."""
        if not self.of:
            return ()
        return tuple([tuple(sorted(self.of.get(n, {}).items())) for n in running])

    def drop(self, number: int) -> None:
        """The request has ended."""
        self.of.pop(number, None)

    def passed(self, number: int, place: Place) -> None:
        """PREFETCH-6: the router has spoken at `place`; what was said of it and before is void."""
        if places := self.of.get(number):
            left = {p: w for p, w in places.items() if p > place}
            if left:
                self.of[number] = left
            else:
                del self.of[number]

    def lost(self, code: int) -> None:
        """PREFETCH-5: the expert's load has failed: nobody guesses it again on what was said."""
        for number, places in list(self.of.items()):
            kept = {
                p: rest
                for p, w in places.items()
                if (rest := tuple([x for x in w if x[0] != code]))
            }
            if kept:
                self.of[number] = kept
            else:
                del self.of[number]


def predicted(s: Scheduler, e: Predicted) -> None:
    """PREFETCH-1: keep the first `prefetch` experts that are expected of a visit ahead."""
    number, chunk, layer = e.visit
    if layer not in s.options.layers:
        raise IllegalEvent(f"{e.visit}: no layer with experts")
    experts = [expert for expert, _ in e.scores]
    if len(set(experts)) < len(experts) or any(not 0 <= x < s.options.experts for x in experts):
        raise IllegalEvent(
            f"{e.visit}: {experts} are not distinct experts below {s.options.experts}"
        )
    r = s.running.get(number)
    if r is None and number > s.last_number:
        raise IllegalEvent(f"{e.visit}: no such request")
    place = chunk, s.options.layers.index(layer)
    if not s.options.prefetch or r is None or place <= (r.chunk, r.stage):
        return  # off, or the request has ended or is past that visit (CANCEL-2, PREFETCH-6)
    size = s.options.chunk
    if not s.lockstep and min(size, r.prompt_len - chunk * size) > 1:
        return  # PREFETCH-1: interleaved, nothing is guessed for prompts
    base = place[1] * s.experts
    weights = tuple([
        (base + expert, weight)
        for expert, score in e.scores[: s.options.prefetch]
        if (weight := _weight(score))
    ])  # fmt: skip
    places = s.guesses.of.setdefault(number, {})
    places.pop(place, None)
    if weights:
        places[place] = weights
    elif not places:
        del s.guesses.of[number]


def _weight(score: float) -> int:
    """A score in thousandths; what is not above zero, or no number, is no guess."""
    return min(round(min(score, HEAVIEST) * SCALE), HEAVIEST) if score > 0 else 0


def prefetch(s: Scheduler, actions: list[Action], channels: int) -> None:
    """PREFETCH-3: start what is expected most. Called when nothing named wants the channel."""
    most = s.options.prefetch_loads
    if most:
        channels = min(channels, most - _unnamed(s))
    if channels <= 0:
        return
    weights = expected(s)
    for code in weights:
        if channels <= 0:
            return
        if not s.absent(code):
            continue
        slot = _slot(s, code, weights)
        if slot is None:
            return  # nor is there one for what is expected less
        ticket = s.cache.begin(slot, code, False, False)
        actions.append(Load(ticket, ExpertKey(*s.key_of(code)), slot, guess=True))
        channels -= 1


def _slot(s: Scheduler, code: int, weights: dict[int, int]) -> int | None:
    """PREFETCH-4: in the place of what nobody expects, else of what is expected less. While a slot
    is looked for, the others count as named."""
    here = [c for c in weights if c in s.cache.where]
    as_good = [c for c in here if weights[c] >= weights[code]]
    for spared in (tuple(here), tuple(as_good)):
        s.cache.want(spared, 1, False)
        slot = s.cache.victim(code, True)
        s.cache.want(spared, -1, False)
        if slot is not None:
            return slot
    return None


def _unnamed(s: Scheduler) -> int:
    """Loads in flight for experts that no waiting visit has named."""
    c = s.cache
    return sum(1 for i in c.flying.values() if c.state[i] == LOADING and c.code[i] not in c.wanted)


def expected(s: Scheduler) -> dict[int, int]:
    """Expert codes with the sum of what is expected of them, in the order in which they are to be
    guessed: the heaviest first, then the one due soonest, then the lowest (PREFETCH-3).

    In lock-step, what a visit beyond the barrier has named is certain, and stands in the place of
    what was expected of it.
    """
    weights: dict[int, int] = {}
    due: dict[int, int] = {}
    stages = len(s.options.layers) + 1

    def add(code: int, weight: int, when: int) -> None:
        weights[code] = weights.get(code, 0) + weight
        due[code] = min(due.get(code, when), when)

    for r in s.running.values():
        if r.doomed is not None:
            continue
        for (chunk, stage), pairs in s.guesses.of.get(r.number, {}).items():
            ahead = stage - r.stage + (chunk - r.chunk) * stages
            when = _from_front(s, stage) if s.lockstep else r.progress + ahead
            for code, weight in pairs:
                add(code, weight, when)
        if s.lockstep and r.stage != s.front:
            for code in r.need:
                add(code, SCALE, _from_front(s, r.stage))
    order = sorted(weights, key=lambda c: (-weights[c], due[c], c))
    return {c: weights[c] for c in order}


def _from_front(s: Scheduler, stage: int) -> int:
    """Stages until the barrier comes there (a whole round, where it stands)."""
    stages = len(s.options.layers) + 1
    return (stage - s.front) % stages or stages
