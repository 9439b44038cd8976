"""OPT-2: the least expected makespan of a policy that knows routes only as routers tell them.

Every router names each of its choices with equal chance, whatever was named before, and the policy
knows that. It is found by dynamic programming over all states and choices: those of clairvoyant.py,
but only what has been named may be read (`guess`: anything may). Between two ends of steps nothing
new is known, so an expert whose load began and that is given up within such a time was read for
nothing, and this is left out. Then states never come back, and the recursion ends.

Experts of a layer are alike but for what has happened to them, and so are requests: states that
differ only in such names are one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

from oracle.optimum.small import Small, bits, subsets

UNTOLD = -1
"""The need of a visit that a running step leads to."""

State = tuple[
    tuple[tuple[int, int, bool], ...],  # each request: visit, experts that have not run, in a step
    int,  # time left of the step
    int,  # what it reads
    int,  # resident
    int,  # of these, loads begun since the last step ended
    int,  # what is being loaded, as a mask
    int,  # time left of that
    bool,  # it has begun since the last step ended
]


class Causal:
    """`value` is the least expected makespan; `states` how many there are."""

    def __init__(self, world: Small, guess: bool = False) -> None:
        self.world, self.guess = world, guess
        self.known: dict[State, float] = {}
        self.layer_masks = [
            ((1 << world.experts) - 1) << layer * world.experts for layer in range(world.layers)
        ]

    @property
    def value(self) -> float:
        """From the start, where nothing is resident."""
        request = (0, 0, False)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
        return self._value(((request,) * self.world.requests, 0, 0, 0, 0, 0, 0, False))

    @property
    def states(self) -> int:
        """Different ones that were met."""
        return len(self.known)

    def _value(self, state: State) -> float:
        if all(visit == self.world.visits and not busy for visit, _, busy in state[0]):
            return 0.0
        state = self._canonical(state)
        found = self.known.get(state)
        if found is None:
            found = self.known[state] = min(
                [
                    self._expected(now)
                    for loading in self._loads(state)
                    for now in self._steps(loading)
                ],
                default=float("inf"),  # nothing moves: all slots hold what was guessed for nothing
            )
        return found

    # -- states that are alike -----------------------------------------------------------------

    def _canonical(self, state: State) -> State:
        requests, step_left, read, resident, new, flying, load_left, recent = state
        resident &= self._useful(requests) | read
        new &= resident
        requests = tuple(sorted(requests))
        masks = [read, resident, new, flying]
        masks += [need for _, need, _ in requests if need > 0]
        out = [0] * len(masks)
        experts = self.world.experts
        for first in range(0, experts * self.world.layers, experts):
            marks = sorted(
                [sum([(mask >> c & 1) << i for i, mask in enumerate(masks)])
                 for c in range(first, first + experts)]
            )  # fmt: skip
            for c, mark in enumerate(marks, first):
                for i in bits(mark):
                    out[i] |= 1 << c
        needs = iter(out[4:])
        requests = tuple(
            [(v, next(needs) if need > 0 else need, busy) for v, need, busy in requests]
        )
        return requests, step_left, out[0], out[1], out[2], out[3], load_left, recent

    def _useful(self, requests: tuple[tuple[int, int, bool], ...]) -> int:
        """What may still be needed: named and not run, or of a layer that somebody comes to."""
        out, w = 0, self.world
        for visit, need, _ in requests:
            out |= max(need, 0)
            first = visit if need == UNTOLD else visit + 1
            for v in range(first, min(w.visits, first + w.layers + 1)):
                if w.stage(v) >= 0:
                    out |= self.layer_masks[w.stage(v)]
        return out

    # -- choices ---------------------------------------------------------------------------------

    def _loads(self, state: State) -> Iterator[State]:
        requests, step_left, read, resident, new, flying, _, _ = state
        yield state
        if flying:
            return
        named = 0
        for _, need, _ in requests:
            named |= max(need, 0)
        wanted = (self._useful(requests) if self.guess else named) & ~resident
        free = self.world.slots - resident.bit_count()
        for code in self._kinds(wanted, state):
            gone = [0] if free else [1 << c for c in self._kinds(resident & ~read & ~new, state)]
            for out in gone:
                yield (requests, step_left, read, resident & ~out, new, 1 << code,
                       self.world.load, True)  # fmt: skip

    def _kinds(self, mask: int, state: State) -> Iterator[int]:
        """One expert of the mask of each kind: of those of a layer to which the same happened."""
        seen = set()
        for c in bits(mask):
            kind = (
                c // self.world.experts, state[2] >> c & 1, state[3] >> c & 1, state[4] >> c & 1,
                *[max(need, 0) >> c & 1 for _, need, _ in state[0]],
            )  # fmt: skip
            if kind not in seen:
                seen.add(kind)
                yield c

    def _steps(self, state: State) -> Iterator[State]:
        requests, step_left, _, resident, new, flying, load_left, recent = state
        if step_left:
            yield state
            return
        if flying:
            yield state
        w = self.world
        for stage in {w.stage(v) for v, _, _ in requests if v < w.visits}:
            here = [
                r for r, (v, _, _) in enumerate(requests) if v < w.visits and w.stage(v) == stage
            ]
            options = [self._parts(requests[r][1], resident) for r in here]
            for parts in itertools.product(*options):
                now, read, rows = list(requests), 0, 0
                for r, part in zip(here, parts, strict=True):
                    if part is not None:
                        codes, last = part
                        visit, need, _ = requests[r]
                        read |= codes
                        rows += last
                        now[r] = (visit + 1, UNTOLD, True) if last else (visit, need & ~codes, True)
                if any(busy for _, _, busy in now):
                    time = w.duration(rows, read.bit_count())
                    yield tuple(now), time, read, resident, new, flying, load_left, recent

    @staticmethod
    def _parts(need: int, resident: int) -> list[tuple[int, bool] | None]:
        """Nothing; some experts; all that are left, and on."""
        out: list[tuple[int, bool] | None] = [None]
        out += [(codes, False) for codes in subsets(need & resident)]
        if not need & ~resident:
            out.append((need, True))
        return out

    # -- chance ----------------------------------------------------------------------------------

    def _expected(self, state: State) -> float:
        """Time until the next event, and what is to be expected after it."""
        requests, step_left, read, resident, new, flying, load_left, recent = state
        if not step_left and not flying:
            return float("inf")  # nothing moves
        passed = min([t for t in (step_left, load_left) if t])
        if flying:
            load_left -= passed
            if not load_left:
                resident |= flying
                new |= flying if recent else 0
                flying, recent = 0, False
        if not step_left or step_left > passed:
            left = step_left - passed if step_left else 0
            return passed + self._value(
                (requests, left, read, resident, new, flying, load_left, recent)
            )
        # The step has ended: everything new is told, and no load is recent any more.
        total = 0.0
        outcomes = [self._told(visit, need) for visit, need, _ in requests]
        count = 1
        for options in outcomes:
            count *= len(options)
        for needs in itertools.product(*outcomes):
            told = tuple(
                [(visit, need, False) for (visit, _, _), need in zip(requests, needs, strict=True)]
            )
            total += self._value((told, 0, 0, resident, 0, flying, load_left, False))
        return passed + total / count

    def _told(self, visit: int, need: int) -> list[int]:
        w = self.world
        if need != UNTOLD:
            return [need]
        if visit == w.visits or w.stage(visit) < 0:
            return [0]
        return [mask << w.stage(visit) * w.experts for mask in w.choices]
