"""Costs of this host: what the probe's arithmetic finds in a log whose costs are known."""

from __future__ import annotations

from typing import Any

import pytest

from perf.calibrate import (
    HostCosts,
    calmest,
    delay_s,
    features_of,
    fit,
    latency_of,
    slowed_by,
    steps_of,
)
from reference.files.log_records import record_of
from reference.simulator.arrivals import Arrival
from reference.simulator.models import ModelShape
from reference.simulator.run import control, simulate
from reference.simulator.synthetic import SyntheticRouter, uniform_shares
from reference.vocab.actions import Action
from reference.vocab.events import Event
from reference.vocab.ids import ENTRY

MODEL = ModelShape("m", "m", (), (0, 1, 2, 3), 8, 2, 1, {"own": 1000}, 1)
KNOWN = HostCosts(
    entry_s=1e-3, router_s=2e-3, head_s=3e-3, expert_s=1e-4, part_s=5e-5, tile_s=7e-4,
    bytes_per_s=1e6, latency_s=4e-4, last_layer=3, slowed=1.5,
)  # fmt: skip


class Records:
    """A log in memory, by a virtual clock."""

    def __init__(self, options: Any) -> None:
        head = {"options": {"layers": list(options.layers), "top_k": options.top_k}}
        self.records: list[dict[str, Any]] = [head]
        self.now = lambda: 0.0

    def event(self, event: Event, **extra: Any) -> None:
        self.records.append({"t": self.now(), **record_of(event), **extra})

    def ask(self, idle_channels: int, idle_compute: int) -> None:
        self.records.append({"t": self.now(), "ask": [idle_channels, idle_compute]})

    def action(self, action: Action, **extra: Any) -> None:
        self.records.append({"t": self.now(), **record_of(action), **extra})


def run(
    share: float, requests: int, prompt: int, monkeypatch: pytest.MonkeyPatch, **policies: Any
) -> list[dict[str, Any]]:
    """The records of a virtual run with the known costs."""
    from reference.simulator import run as module

    options = control(MODEL, share, 16, chunk=16, **policies)
    log = Records(options)
    made = module.VirtualLoop

    def loop(*args: Any, **given: Any) -> Any:
        it = made(*args, **given)
        log.now = lambda: it.now
        return it

    monkeypatch.setattr(module, "VirtualLoop", loop)
    routes = SyntheticRouter(uniform_shares(4), 8, 2)
    simulate(None, MODEL, routes, options, arrivals=[Arrival(0.0, prompt, 6)] * requests,
             tokens=10**9, warm_up=0, warm=share == 1, costs=KNOWN, log=log)  # fmt: skip
    return log.records


@pytest.mark.rule("SIM-13")
def test_the_probe_finds_the_costs_that_made_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = []
    for requests in (1, 2, 4, 12):
        alone += steps_of(run(1.0, requests, 9, monkeypatch), 16, 9)
    assert not any(s.loading for s in alone)
    values = fit([(s.features, s.next_s) for s in alone])
    known = [KNOWN.entry_s, KNOWN.router_s, KNOWN.head_s, KNOWN.expert_s, KNOWN.part_s,
             KNOWN.tile_s]  # fmt: skip
    assert values == pytest.approx(known, rel=0.05)
    loaded = steps_of(run(0.5, 3, 9, monkeypatch), 16, 9)
    assert slowed_by(loaded, alone) == pytest.approx(KNOWN.slowed, rel=0.02)
    assert slowed_by([], alone) == 1.0
    blocking = run(0.5, 1, 9, monkeypatch, grouping="lockstep-blocking")
    assert latency_of(blocking, 1000 / KNOWN.bytes_per_s) == pytest.approx(KNOWN.latency_s)
    assert latency_of([{}], 1.0) == 0.0


def test_features_and_fits_by_hand() -> None:
    assert features_of(ENTRY, 3, 0, 0, 2, 20) == (1, 0, 0, 0, 2, 2)
    assert features_of(1, 3, 5, 60, 2, 8) == (0, 1, 0, 8, 2, 0)
    assert features_of(3, 3, 5, 20, 1, 1) == (0, 0, 1, 5, 1, 0)
    # One outlier among twenty is no matter; a cost that would be negative is none.
    rows = [((1.0, 0.0), 1.0 + n % 2 * 2) for n in range(20)] + [((1.0, 0.0), 90.0)]
    assert fit([*rows, ((1.0, 1.0), 1.5)])[1] == 0.0
    assert fit([*rows, ((1.0, 1.0), 5.0)]) == pytest.approx([2.0, 3.0])


def test_the_calmest_half() -> None:
    assert calmest([(0.5, "b"), (0.1, "a"), (0.9, "c")]) == ["a", "b"]
    assert calmest([(0.5, "b")]) == ["b"]
    assert delay_s() >= 0.0
