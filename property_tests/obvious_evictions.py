"""Each eviction policy once more, as plain lists and counts: which READY slot goes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Rank = tuple[float, ...]


class Plain:
    """`per-layer` and `global` (CACHE-5). `line`: (slot, code) of all READY slots, the least
    recently used first; `slots_of`: how many slots each layer has, those being written too."""

    def __init__(self, name: str, slots: int, layers: int, experts: int) -> None:
        self.name, self.layers, self.experts = name, layers, experts
        self.share = max(1, slots // layers)
        self.line: list[tuple[int, int]] = []
        self.slots_of = Counter(dict.fromkeys(range(layers), 0))

    def layer(self, code: int) -> int:
        return code // self.experts

    def place(self, slot: int) -> int:
        return [s for s, _ in self.line].index(slot)

    def begin(self, code: int) -> None:
        self.slots_of[self.layer(code)] += 1

    def gone(self, code: int) -> None:
        self.slots_of[self.layer(code)] -= 1

    def arrive(self, slot: int, code: int) -> None:
        self.line.append((slot, code))

    def drop(self, slot: int, code: int) -> None:
        self.line.remove((slot, code))

    def named(self, request: int, experts: Sequence[tuple[int, int, bool]]) -> None:
        pass

    def ended(self, request: int) -> None:
        pass

    def use(self, slot: int, code: int) -> None:
        self.line.remove((slot, code))
        self.line.append((slot, code))

    def demote(self, slot: int, code: int) -> None:
        self.line.remove((slot, code))
        self.line.insert(0, (slot, code))

    def entered(self, visits: int, running: int) -> None:
        pass

    def look(self, stages: list[int]) -> None:
        pass

    def within(self, layer: int, own: int) -> Rank:
        """The layer's turn: the newcomer's own, once it has its share; then who has most."""
        if self.name == "global":
            return ()
        first = layer == own and self.slots_of[own] >= self.share
        return (not first, -self.slots_of[layer], layer)

    def rank(self, slot: int, code: int, newcomer: int) -> Rank:
        """The least goes first."""
        return (*self.within(self.layer(code), self.layer(newcomer)), self.place(slot))


class Counted(Plain):
    """`lfu` and `lfru` (CACHE-10). The line is by count, and by age among equals."""

    limit = 16

    def __init__(self, name: str, slots: int, layers: int, experts: int) -> None:
        super().__init__(name, slots, layers, experts)
        self.count: Counter = Counter()
        self.grade: dict[int, int] = {}
        """A slot's count, or -1 where it goes first."""

    def _settle(self, slot: int, grade: int) -> None:
        self.grade[slot] = grade
        self.line.sort(key=lambda x: self.grade[x[0]])  # stable: the newest last among equals

    def arrive(self, slot: int, code: int) -> None:
        self.line.append((slot, code))
        self._settle(slot, self.count[code])

    def use(self, slot: int, code: int) -> None:
        self.line.remove((slot, code))
        self.count[code] += 1
        self.arrive(slot, code)
        if self.count[code] == self.limit:
            mine = range(self.layer(code) * self.experts, (self.layer(code) + 1) * self.experts)
            for c in mine:
                self.count[c] //= 2
            for s, c in self.line:
                if c in mine and self.grade[s] > 0:
                    self.grade[s] //= 2
            self.line.sort(key=lambda x: self.grade[x[0]])

    def demote(self, slot: int, code: int) -> None:
        super().demote(slot, code)
        self._settle(slot, -1)

    def rank(self, slot: int, code: int, newcomer: int) -> Rank:
        equal = code if self.name == "lfu" else self.place(slot)
        layer = self.within(self.layer(code), self.layer(newcomer))
        return (*layer, self.grade[slot], equal)


class Nearness(Counted):
    """`known-demand` (CACHE-11)."""

    stages: list[int]

    def look(self, stages: list[int]) -> None:
        self.stages = stages

    def rank(self, slot: int, code: int, newcomer: int) -> Rank:
        layer = self.layer(code)
        stages = getattr(self, "stages", [])
        near = min([(layer - s - 1) % self.layers for s in stages], default=0)
        return (-near, layer, self.grade[slot], self.place(slot))


class Passes(Plain):
    """`least-stale` (CACHE-12)."""

    def __init__(self, name: str, slots: int, layers: int, experts: int) -> None:
        super().__init__(name, slots, layers, experts)
        self.touched: set[int] = set()
        self.visits = 0

    def arrive(self, slot: int, code: int) -> None:
        super().arrive(slot, code)
        self.touched.add(slot)

    def drop(self, slot: int, code: int) -> None:
        super().drop(slot, code)
        self.touched.discard(slot)

    def use(self, slot: int, code: int) -> None:
        super().use(slot, code)
        self.touched.add(slot)

    def demote(self, slot: int, code: int) -> None:
        super().demote(slot, code)
        self.touched.discard(slot)

    def entered(self, visits: int, running: int) -> None:
        self.visits += visits
        if self.visits >= running:
            self.visits, self.touched = 0, set()

    def rank(self, slot: int, code: int, newcomer: int) -> Rank:
        back = (self.layer(newcomer) - self.layer(code)) % self.layers
        return (slot in self.touched, back, self.place(slot))


class Trading(Plain):
    """`adaptive` (CACHE-13)."""

    step = 16

    def __init__(self, name: str, slots: int, layers: int, experts: int) -> None:
        super().__init__(name, slots, layers, experts)
        self.reach = max(1, self.share // 8)
        self.shares = dict.fromkeys(range(layers), self.share)
        self.gain = dict.fromkeys(range(layers), 0)
        self.loss = dict.fromkeys(range(layers), 0)
        self.past: list[int] = []

    def _one_more(self, counts: dict[int, int], layer: int) -> None:
        counts[layer] += 1
        if counts[layer] == 2 * self.step:
            for both in (self.gain, self.loss):
                both.update({k: n // 2 for k, n in both.items()})

    def begin(self, code: int) -> None:
        super().begin(code)
        self.past = [c for c in self.past if c != code]

    def named(self, request: int, experts: Sequence[tuple[int, int, bool]]) -> None:
        for code, slot, first in experts:
            if first:
                self.first_named(code, slot)

    def first_named(self, code: int, slot: int) -> None:
        layer = self.layer(code)
        mine = [s for s, c in self.line if self.layer(c) == layer]
        if slot in mine[: self.reach]:
            self._one_more(self.loss, layer)
        if code not in self.past:
            return
        self._one_more(self.gain, layer)
        others = [i for i in range(self.layers) if i != layer and self.shares[i] > 1]
        if others:
            poor = min(others, key=lambda i: (self.loss[i], self.gain[i], i))
            if self.gain[layer] - self.loss[poor] >= self.step:
                self.gain[layer] -= self.step
                self.shares[layer] += 1
                self.shares[poor] -= 1

    def drop(self, slot: int, code: int) -> None:
        super().drop(slot, code)
        self.past.append(code)
        mine = [c for c in self.past if self.layer(c) == self.layer(code)]
        for c in mine[: -self.reach]:
            self.past.remove(c)


    def within(self, layer: int, own: int) -> Rank:
        first = layer == own and self.slots_of[own] >= self.shares[own]
        return (not first, self.shares[layer] - self.slots_of[layer], layer)


class Pooled(Counted):
    """`frequency` (CACHE-14): what was said by whom, and each count added up anew from it."""

    passes = 32

    def __init__(self, name: str, slots: int, layers: int, experts: int) -> None:
        super().__init__(name, slots, layers, experts)
        self.ever: Counter = Counter()
        self.by: dict[int, Counter] = {}
        self.latest: dict[tuple[int, int], tuple[int, ...]] = {}
        self.since = self.turns = 0

    def weigh(self, code: int) -> int:
        said = sum(by[code] for by in self.by.values())
        return self.ever[code] + said + 8 * sum(code in c for c in self.latest.values())

    def settle(self, codes: Sequence[int]) -> None:
        """They have another count; of READY ones the newest among their equals now."""
        for code in codes:
            self.count[code] = self.weigh(code)
            for slot, there in list(self.line):
                if there == code and self.grade[slot] >= 0:
                    self.use(slot, code)

    def named(self, request: int, experts: Sequence[tuple[int, int, bool]]) -> None:
        codes = tuple(code for code, _, _ in experts)
        key = request, self.layer(codes[0])
        before = self.latest.pop(key, ())
        self.settle(before)
        self.latest[key] = codes
        for code in codes:
            self.ever[code] += 1
            self.by.setdefault(request, Counter())[code] += 3
            self.count[code] = self.weigh(code)
            for slot, there in list(self.line):
                if there == code:
                    self.use(slot, code)

    def ended(self, request: int) -> None:
        said = set(+self.by.pop(request, Counter()))
        for key in [k for k in self.latest if k[0] == request]:
            said.update(self.latest.pop(key))
        self.settle(sorted(said))

    def entered(self, visits: int, running: int) -> None:
        self.since += visits
        if self.since >= running:
            self.since, self.turns = 0, self.turns + 1
            if self.turns % self.passes == 0:
                for counts in (self.ever, *self.by.values()):
                    for c in counts:
                        counts[c] //= 2
                for code in range(self.layers * self.experts):
                    self.count[code] = self.weigh(code)
                self.grade = {s: self.count[c] if self.grade[s] >= 0 else -1 for s, c in self.line}
                self.line.sort(key=lambda x: self.grade[x[0]])

    def use(self, slot: int, code: int) -> None:
        self.line.remove((slot, code))
        self.arrive(slot, code)

    def rank(self, slot: int, code: int, newcomer: int) -> Rank:
        own, grade = self.layer(code) == self.layer(newcomer), self.grade[slot]
        layer = self.layer(code) * self.experts
        total = sum(self.count[c] for c in range(layer, layer + self.experts))
        slots = self.slots_of[self.layer(code)]
        heavy = grade if grade <= 0 else grade * (2 if own else 3) / (total * slots)
        return (heavy, not own, self.layer(code), self.place(slot))


PLAIN: dict[str, type[Plain]] = {
    "per-layer": Plain, "global": Plain, "lfu": Counted, "lfru": Counted,
    "known-demand": Nearness, "least-stale": Passes, "adaptive": Trading,
    "frequency": Pooled,
}  # fmt: skip
