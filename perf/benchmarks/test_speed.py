"""Speeds of the parts, each alone, by pytest-benchmark:

    python -m pytest perf/benchmarks --benchmark-enable --benchmark-autosave \\
        --benchmark-storage=file://perf/results/benchmarks

`extra_info` of a saved result has the rate that a time stands for. Without --benchmark-enable each
runs once, which shows that it works and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_impl.app import builtin
from jax_impl.app.bench import random_requests
from jax_impl.engine import JaxEngine
from oracle.tiny import tiny_config, write_checkpoint
from perf.pack import Side
from reference.control import Scheduler
from reference.simulator import models, platforms
from reference.simulator.run import control, routes_for, simulate, warm_slots
from reference.vocab.actions import Action
from reference.vocab.events import Event
from reference.vocab.options import SCHEDULERS

REQUESTS, TOKENS = 8, 24


class Told:
    """A log of what the scheduler heard and was asked, in order."""

    def __init__(self) -> None:
        self.moments: list[Event | tuple[int, int]] = []

    def event(self, event: Event, **extra: Any) -> None:
        self.moments.append(event)

    def ask(self, idle_channels: int, idle_compute: int) -> None:
        self.moments.append((idle_channels, idle_compute))

    def action(self, action: Action, **extra: Any) -> None:
        pass


def rate(benchmark: Any, name: str, count: float) -> None:
    """Keeps count / (median time) with the result, where there was a measurement."""
    if benchmark.stats is not None:
        benchmark.extra_info[name] = count / benchmark.stats.stats.median


def virtual(scheduler: str, log: Told | None) -> tuple[Any, Any]:
    """(options, result) of a run in virtual time: OLMoE on a laptop, half of the experts there."""
    model = models.load("olmoe-1b-7b")
    options = control(model, 0.5, requests=REQUESTS, grouping=scheduler)
    options = options.with_(warm=warm_slots(options))
    found = simulate(platforms.load("macbook-m4-max"), model, routes_for(model), options,
                     requests=REQUESTS, tokens=TOKENS, warm_up=8, log=log)
    return options, found


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_control(benchmark: Any, scheduler: str) -> None:
    """Moments a second: an event heard, or a question answered, by the scheduler alone."""
    told = Told()
    options, _ = virtual(scheduler, told)

    def replay(s: Scheduler) -> None:
        for moment in told.moments:
            if isinstance(moment, tuple):
                s.next_actions(*moment)
            else:
                s.handle(moment)

    benchmark.pedantic(replay, setup=lambda: ((Scheduler(options),), {}), rounds=7)
    rate(benchmark, "moments_per_s", len(told.moments))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_simulator(benchmark: Any, scheduler: str) -> None:
    """Events and actions a second of a whole run in virtual time."""
    found = benchmark.pedantic(lambda: virtual(scheduler, None)[1], rounds=3)
    rate(benchmark, "events_per_s", found.events + found.actions)


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_engine(benchmark: Any, memory: str) -> None:
    """Tokens a second of the built-in model: what the engine itself costs, for its experts are
    tiny."""
    with JaxEngine.open(builtin.folder(), memory=memory, ignore_eos=True, chunk=16, max_running=8,
                        kv_tokens=8 * 64) as engine:
        asked = random_requests(engine.config.vocab, REQUESTS, 8, TOKENS)

        def all_of_them() -> int:
            return sum(len(h.result().tokens) for h in engine.submit_all(asked))

        all_of_them()
        count = benchmark.pedantic(all_of_them, rounds=5)
        assert count == REQUESTS * TOKENS
    rate(benchmark, "tokens_per_s", count)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 experts of 1.5 MiB."""
    config = tiny_config("mixtral", hidden_size=512, intermediate_size=512, num_local_experts=24,
                         num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("reader") / "model"
    return write_checkpoint(folder, config, dtype="BF16", pattern=True)


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_reader(benchmark: Any, experts: Path, io: Any) -> None:
    """Bytes a second of the engine's loads into slots, four at a time; buffered: from memory."""
    from reference.vocab.errors import Unsupported

    try:
        side = Side(experts, io, 4)
    except Unsupported as error:
        pytest.skip(str(error))
    read: Callable[[], Any] = side.round
    read()
    found = benchmark.pedantic(read, rounds=7)
    side.close()
    rate(benchmark, "bytes_per_s", found[0]["bytes"])
