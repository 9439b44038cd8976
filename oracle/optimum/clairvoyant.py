"""OPT-1: the least makespan for given routes, over every schedule, found by A*.

Any expert that is needed later may be read at any time (`named_only`: only what a router has
named), into any slot that no step reads; any requests at one layer may go together, each with any
of its experts that are there, and goes on with the step that runs the rest of them, or with a later
one. Something may be left undone while anything moves.

A state is what the future depends on, as it is right after an event; time is what it cost to get
there. Nothing has to begin between events: what does could begin at the one before. What is left
out is never better:

- an expert given up between its load and its first use: the load could be left out;
- an idle channel while a slot is free and something is missing that may be read: whatever is read
  next could be read now (not with `named_only`: it may not be known yet);
- keeping an expert that nobody needs any more: its slot counts as free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import cache

from oracle.optimum.small import Route, Small, bits, subsets

Left = tuple[tuple[int, int], ...]
"""For each request its visit and, as a mask, which of its experts have not run."""
State = tuple[Left, int, int, int, int, int, int, int]
"""(left, as it will be when the step ends; mask of requests in the step; time left of it; what it
reads; resident; loaded and not used; what is being loaded, as a mask; time left of that)."""


class Search:
    """`makespan` is the optimum; `expanded` says how much was looked at."""

    def __init__(self, world: Small, routes: Sequence[Route], named_only: bool = False) -> None:
        self.world, self.named_only = world, named_only
        self.expanded = 0
        self.routes = [(*route, 0) for route in routes]  # nothing at the end
        self.later = [self._later(route) for route in self.routes]
        self.rest = cache(self._rest)
        self.future = cache(self._future)

    @staticmethod
    def _later(route: Route) -> list[int]:
        """For each visit, and for the end, all that is needed from there on."""
        out = [0]
        for need in reversed(route):
            out.append(out[-1] | need)
        return out[::-1]

    @property
    def makespan(self) -> int:
        """Time until the last request has ended."""
        start: State = (tuple((0, 0) for _ in self.routes), 0, 0, 0, 0, 0, 0, 0)
        best: dict[State, int] = {start: 0}
        queue: list[tuple[int, int, int, State]] = [(self.bound(start), 0, 0, start)]
        count = 0
        while queue:
            _, negative, _, state = heapq.heappop(queue)
            spent = -negative
            if best[state] < spent:
                continue
            if all(visit == self.world.visits for visit, _ in state[0]) and not state[1]:
                return spent
            self.expanded += 1
            for passed, new in self.following(state):
                cost = spent + passed
                if cost < best.get(new, 1 << 60):
                    best[new] = cost
                    count += 1
                    # Of equals the one that is furthest, then the latest found.
                    heapq.heappush(queue, (cost + self.bound(new), -cost, -count, new))
        raise AssertionError("no schedule ends")

    # -- bounds for A* -------------------------------------------------------------------------

    def bound(self, state: State) -> int:
        """No schedule needs less from here on."""
        left, busy, step_left, _, resident, _, flying, load_left = state
        together, alone = self.rest(left)
        longest = max(
            [a + (step_left if busy >> r & 1 else 0) for r, a in enumerate(alone)], default=0
        )
        missing = (self.future(left) & ~resident & ~flying).bit_count()
        fetch = load_left + missing * self.world.load
        if fetch:
            fetch += self.world.duration(0, 1) if missing or flying & self.future(left) else 0
        return max(step_left + together, longest, fetch)

    def _rest(self, left: Left) -> tuple[int, tuple[int, ...]]:
        """(compute of all that is left, of each request's alone)."""
        w = self.world
        steps: dict[int, int] = {}
        reads: dict[int, int] = {}
        rows, alone = 0, []
        for r, (visit, need) in enumerate(left):
            mine_steps: dict[int, int] = {}
            mine_reads: dict[int, int] = {}
            time = 0
            for v in range(visit, w.visits):
                mask = need if v == visit else self.routes[r][v]
                mine_steps[w.stage(v)] = mine_steps.get(w.stage(v), 0) + 1
                for c in bits(mask):
                    mine_reads[c] = mine_reads.get(c, 0) + 1
                rows += 1
                time += w.duration(1, mask.bit_count())
            alone.append(time)
            for total, mine in ((steps, mine_steps), (reads, mine_reads)):
                for key, n in mine.items():
                    total[key] = max(total.get(key, 0), n)
        together = w.step * sum(steps.values()) + w.row * rows + w.expert * sum(reads.values())
        return together, tuple(alone)

    def _future(self, left: Left) -> int:
        """All that is still needed."""
        out = 0
        for r, (visit, need) in enumerate(left):
            out |= need | self.later[r][visit + 1]
        return out

    # -- what can follow -----------------------------------------------------------------------

    def following(self, state: State) -> Iterator[tuple[int, State]]:
        """(time, state) right after the next event, for every choice."""
        for loading in self._loads(state):
            for now in self._steps(loading):
                yield from self._event(now)

    def _loads(self, state: State) -> Iterator[State]:
        left, busy, step_left, read, resident, unused, flying, _ = state
        if flying:
            yield state
            return
        future = self.future(left)
        resident &= future | read
        known = future
        if self.named_only:
            known = 0
            for r, (_, need) in enumerate(left):
                known |= 0 if busy >> r & 1 and need == self.routes[r][left[r][0]] else need
        missing = known & ~resident
        free = self.world.slots - resident.bit_count()
        if not missing or not free or self.named_only:
            yield left, busy, step_left, read, resident, unused, 0, 0
        for code in bits(missing):
            new = 1 << code
            if free:
                yield left, busy, step_left, read, resident, unused, new, self.world.load
                continue
            for gone in bits(resident & ~read & ~unused):
                rest = resident & ~(1 << gone)
                yield left, busy, step_left, read, rest, unused, new, self.world.load

    def _steps(self, state: State) -> Iterator[State]:
        left, busy, _, _, resident, unused, flying, load_left = state
        if busy:
            yield state
            return
        if flying:
            yield state
        w = self.world
        for stage in {w.stage(v) for v, _ in left if v < w.visits}:
            here = [r for r, (v, _) in enumerate(left) if v < w.visits and w.stage(v) == stage]
            for parts in self._parts(left, here, resident):
                now, members, read, rows = list(left), 0, 0, 0
                for r, codes, last in parts:
                    visit, need = left[r]
                    members |= 1 << r
                    read |= codes
                    rows += last
                    now[r] = (visit, need & ~codes)
                    if last:
                        now[r] = (visit + 1, self.routes[r][visit + 1])
                time = w.duration(rows, read.bit_count())
                yield tuple(now), members, time, read, resident, unused & ~read, flying, load_left

    def _parts(
        self, left: Left, here: list[int], resident: int
    ) -> Iterator[list[tuple[int, int, bool]]]:
        """Every group of parts (request, experts, goes on) but the empty one."""
        if not here:
            return
        r, rest = here[0], here[1:]
        need = left[r][1]
        options = [(r, codes, False) for codes in subsets(need & resident)]
        if not need & ~resident:
            options.append((r, need, True))
        others = [[], *self._parts(left, rest, resident)]
        yield from others[1:]
        for option in options:
            for other in others:
                yield [option, *other]

    def _event(self, state: State) -> Iterator[tuple[int, State]]:
        """Let time pass until the step or the load ends (both, if at once)."""
        left, busy, step_left, read, resident, unused, flying, load_left = state
        if not busy and not flying:
            return  # nothing moves
        passed = min([t for t, on in ((step_left, busy), (load_left, flying)) if on])
        step_left, load_left = step_left - passed, load_left - passed
        if busy and not step_left:
            busy = read = 0
        elif not busy:
            step_left = 0
        if flying and not load_left:
            resident, unused, flying = resident | flying, unused | flying, 0
        elif not flying:
            load_left = 0
        resident &= self.future(left) | read
        yield passed, (left, busy, step_left, read, resident, unused & resident, flying, load_left)
