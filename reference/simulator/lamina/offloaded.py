"""Experts offloaded and attention elsewhere, in virtual time: fixed batches in turn against the
scheduler's own groups (LAMINA-20).

Both have one compute device, the same slots for experts, the same channel, the same routes and the
same memory pool. What differs is who goes next:

    rotation    two fixed batches take turns on the compute device; a turn waits, with it, until
                every expert that any of its rows chose is there
    scheduler   the shipped scheduler: whoever has its experts goes on, loads run meanwhile, and the
                compute device is free while a group's attention is at the memory pool
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from reference.control import Scheduler
from reference.simulator.costs import CostModel
from reference.simulator.lamina.pipeline import play
from reference.simulator.loop import VirtualLoop
from reference.simulator.routes import RoutedExecutor, Routes, random_routes
from reference.vocab.actions import Compute
from reference.vocab.events import Arrived, Event, Routed
from reference.vocab.options import ControlOptions


@dataclass(frozen=True)
class Setting:
    """A mixture, a load and a machine. Seconds; `attention_s` a row at the memory pool."""

    requests: int = 16
    tokens: int = 12
    layers: int = 6
    experts: int = 32
    top_k: int = 4
    slots: int = 96
    expert_bytes: int = 1_000_000
    skew: float = 0.8
    costs: CostModel = field(default_factory=lambda: CostModel(bytes_per_s=8e9))
    attention_s: float = 1e-5
    network_s: float = 5e-5
    seed: int = 0


@dataclass(frozen=True)
class Compared:
    """Seconds that the same tokens took, and the experts that were read."""

    rotation_s: float
    rotation_loads: int
    scheduler_s: float
    scheduler_loads: int
    tokens: int

    @property
    def gain(self) -> float:
        """How many times faster the scheduler's groups were."""
        return self.rotation_s / self.scheduler_s


class PooledRoutes(RoutedExecutor):
    """A step ends for the compute device when its keys and values are sent; its routers speak
    when the memory pool, which attends to one group after another, has answered."""

    def pool(
        self, at: Callable[[float, Callable[[], Iterable[Event]]], None], row_s: float, net_s: float
    ) -> None:
        """The memory pool: `at` lets something happen later."""
        self._at, self._row_s, self._net_s, self._free = at, row_s, net_s, 0.0

    def run(self, action: Compute) -> list[Event]:
        """Computed now; what the routers say after attention. The head needs none."""
        computed, *rest = super().run(action)
        routed = [e for e in rest if isinstance(e, Routed)]
        if routed:
            rows = sum(len(e.experts) for e in routed)
            self._free = max(self._free, self.now()) + rows * self._row_s
            self._at(self._free + self._net_s, lambda: routed)
        return [computed, *(e for e in rest if not isinstance(e, Routed))]


def compare(setting: Setting) -> Compared:
    """The same requests, both ways."""
    s = setting
    routes = random_routes(s.experts, s.top_k, s.seed, s.skew)
    seconds, loads = _rotation(s, routes)
    loop = _scheduler(s, routes)
    return Compared(
        seconds, loads, loop.totals.seconds, loop.totals.loads, s.requests * (s.tokens + 1)
    )


def _rotation(s: Setting, routes: Routes) -> tuple[float, int]:
    """Two batches, one compute device; least recently used goes first, each layer with an even
    share of the slots (over all slots together the turns would flush each other)."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(s.layers)]
    half = s.requests // 2
    batches = [range(half), range(half, s.requests)]
    loads = 0

    def slice_s(batch: int, turn: int) -> float:
        """Turn 0 embeds and opens layer 0; turn k runs the experts of layer k - 1."""
        nonlocal loads
        token, layer = divmod(turn - 1, s.layers)
        rows = len(batches[batch])
        if turn == 0:
            return s.costs.step_s + s.costs.row_s * rows
        wanted = sorted({e for r in batches[batch] for e in routes(r, token, layer)})
        cache = caches[layer]
        missing = [e for e in wanted if e not in cache]
        loads += len(missing)
        for e in wanted:
            cache[e] = None
            cache.move_to_end(e)
        while len(cache) > s.slots // s.layers:
            cache.popitem(last=False)
        wait = s.costs.transfer(s.expert_bytes) * len(missing)
        wait += s.costs.latency_s if missing else 0.0
        return wait + s.costs.step_s + s.costs.row_s * rows + s.costs.expert_s * len(wanted)

    turns = 1 + s.layers * (s.tokens + 1)
    ran = play(
        2, turns, slice_s, lambda batch, turn: s.attention_s * len(batches[batch]), s.network_s
    )
    return ran.seconds, loads


def _scheduler(s: Setting, routes: Routes) -> VirtualLoop:
    """The shipped scheduler over the same machine."""
    layers = tuple(range(s.layers))
    options = ControlOptions(
        layers=layers, experts=s.experts, top_k=s.top_k, slots=s.slots, chunk=1,
        max_running=s.requests, max_rows=s.requests, kv_tokens=s.requests * 64, kv_block=64,
    )  # fmt: skip
    loop: VirtualLoop
    executor = PooledRoutes(
        routes, layers, 1, s.slots, lambda r: (1, s.tokens + 1), lambda: loop.now
    )
    loop = VirtualLoop(Scheduler(options), executor, s.expert_bytes, s.costs)
    executor.pool(loop.at, s.attention_s, s.network_s)
    for r in range(s.requests):
        loop.at(0.0, lambda r=r: [Arrived(r, 1, s.tokens + 1)])
    loop.run()
    assert all(p.reason == "length" for p in executor.progress.values())
    return loop
