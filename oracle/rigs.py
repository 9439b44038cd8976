"""Runs of the two executors under the real scheduler, for faults in what executes.

`loop` is the virtual-time loop over slots that hold only names; `transfer` the real fetch threads
over a real file and real slots. Both log a checksum of each slot when a load completes and when
a step that reads it ends, so that a wrong write is seen by S9. Both give the records of the log;
an exception of the code under test is told in the end record.
"""

from __future__ import annotations

import queue
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from reference.control import Scheduler
from reference.files.log_records import record_of
from reference.simulator.costs import CostModel
from reference.simulator.routes import RoutedExecutor, random_routes
from reference.vocab.actions import Action, Compute, Load
from reference.vocab.events import Arrived, Computed, Event, Loaded, LoadFailed
from reference.vocab.ids import ExpertKey
from reference.vocab.options import ControlOptions

OPTIONS = ControlOptions(
    layers=(0, 1), experts=6, top_k=2, slots=5, chunk=2, max_rows=8, kv_block=4, kv_tokens=128,
    readiness="expert",
)  # fmt: skip
REQUESTS = ((3, 3), (1, 4), (5, 0), (1, 2), (2, 3))
EXPERT_BYTES = 4096
TURNS = 10_000


class Records:
    """A log in memory; `sum_of` is what a slot's checksum is now."""

    def __init__(self, slots: RoutedExecutor, options: ControlOptions = OPTIONS) -> None:
        self.slots = slots
        self.records: list[dict[str, Any]] = [
            {
                "log": 1,
                "options": asdict(options),
                "model": {},
                "engine": "simulator",
                "versions": {},
                "expert_bytes": EXPERT_BYTES,
                "slot_bytes": EXPERT_BYTES,
                "budget_bytes": EXPERT_BYTES * options.slots,
            }
        ]
        self.where: dict[int, Load] = {}

    def sum_of(self, key: ExpertKey, slot: int) -> int:
        """Checksum of the slot's bytes; `key` says whose bytes should be there."""
        return zlib.crc32(repr(self.slots.slots[slot]).encode())

    def event(self, event: Event, **extra: Any) -> None:
        if isinstance(event, Loaded) and event.ticket in self.where:
            load = self.where[event.ticket]
            extra["sum"] = self.sum_of(load.key, load.slot)
        self.add(record_of(event), extra)

    def ask(self, idle_channels: int, idle_compute: int) -> None:
        self.add({"ask": [idle_channels, idle_compute]}, {})

    def action(self, action: Action, **extra: Any) -> None:
        if isinstance(action, Load):
            self.where[action.ticket] = action
        self.add(record_of(action), extra)

    def add(self, record: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        full = {"t": float(len(self.records)), **record, **extra}
        self.records.append(full)
        return full

    def read(self, action: Compute, record: dict[str, Any]) -> None:
        """The step ends: what did it read?"""
        pairs = action.slots
        record["sum"] = [self.sum_of(ExpertKey(action.layer, e), slot) for e, slot in pairs]

    def whole(self, trouble: str = "") -> list[dict[str, Any]]:
        self.add({"end": {"trouble": trouble} if trouble else {}}, {})
        return self.records


class _Named(RoutedExecutor):
    """Slots that hold names, and reads of which the third fails."""

    fills = 0

    def fill(self, action: Load) -> None:
        self.fills += 1
        if self.fills == 3:
            raise OSError("a failed read")
        super().fill(action)

    def run(self, action: Compute) -> list[Event]:
        # What lies in the slots is judged by the log, not here.
        out: list[Event] = [Computed(action.step)]
        for part in action.parts:
            if part.last:
                out += self._next(part.visit)
        return out


def _executor(kind: type[RoutedExecutor], now: Any) -> Any:
    routes = random_routes(OPTIONS.experts, OPTIONS.top_k, seed=5)
    return kind(routes, OPTIONS.layers, OPTIONS.chunk, OPTIONS.slots, REQUESTS.__getitem__, now)


def _arrivals() -> Iterator[Arrived]:
    for number, (prompt, new) in enumerate(REQUESTS):
        yield Arrived(number, prompt, new)


def loop(module: ModuleType) -> list[dict[str, Any]]:
    """A run of `reference.simulator.loop` (or a copy): a read fails, another one is late."""
    executor = _executor(_Named, lambda: 0.0)
    log = Records(executor)
    costs = CostModel(bytes_per_s=4e7, depth=2, step_s=3e-4)
    faults = {5: module.Fault("late", late_s=3e-4)}
    virtual = module.VirtualLoop(Scheduler(OPTIONS), executor, EXPERT_BYTES, costs, log, faults)

    def action(action: Action, **extra: Any) -> None:
        Records.action(log, action, **extra)
        if isinstance(action, Compute):
            # The kernel reads its slots for as long as the step costs, whatever the loop says.
            record, end = log.records[-1], virtual.now + costs.step(action, executor.work(action))
            virtual.at(end, lambda: log.read(action, record) or ())

    log.action = action  # type: ignore[method-assign]
    for event in _arrivals():
        virtual.at(event.request * 2e-4, lambda e=event: [e])
    try:
        for _ in range(TURNS):
            if not virtual.tick():
                break
    except Exception as error:  # a fault may break anything; the log up to here is judged
        return log.whole(f"{type(error).__name__}: {error}")
    return log.whole()


def transfer(module: ModuleType) -> list[dict[str, Any]]:
    """A run over `jax_impl.transfer` (or a copy): one of its reads fails."""
    with tempfile.TemporaryDirectory() as folder:
        return _Threads(module, Path(folder)).run()


class _Bytes(Records):
    """Checksums of real slots."""

    def __init__(self, slots: RoutedExecutor, pool: Any, transfers: Any) -> None:
        super().__init__(slots)
        self.pool, self.transfers = pool, transfers

    def sum_of(self, key: ExpertKey, slot: int) -> int:
        return self.pool.checksum(slot, self.transfers.places(key))


class _Threads:
    """Scheduler, fetch threads, and a loop that waits for both."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        from jax_impl.fault_readers import FaultyReader
        from jax_impl.slots import SlotPool
        from reference.files.safetensors_header import TensorRef

        keys = [ExpertKey(layer, e) for layer in OPTIONS.layers for e in range(OPTIONS.experts)]
        file = folder / "experts.bin"
        file.write_bytes(b"".join(bytes([i + 1]) * EXPERT_BYTES for i in range(len(keys))))
        refs = {
            key: (TensorRef(file, i * EXPERT_BYTES, EXPERT_BYTES, "U8", (EXPERT_BYTES,)),)
            for i, key in enumerate(keys)
        }
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pool = SlotPool(OPTIONS.slots, EXPERT_BYTES)
        self.transfers = module.Transfers(
            self.pool, refs.__getitem__, refs, self.inbox.put, threads=1, io="buffered",
            reader=FaultyReader("eio", nth=6, times=1),
        )  # fmt: skip
        self.executor = _executor(_Named, lambda: 0.0)
        self.log = _Bytes(self.executor, self.pool, self.transfers)
        self.scheduler = Scheduler(OPTIONS)
        self.step: tuple[Compute, dict[str, Any]] | None = None

    def run(self) -> list[dict[str, Any]]:
        try:
            for event in _arrivals():
                self._tell(event)
            self._obey()
            for _ in range(TURNS):
                if self.scheduler.idle or not self._wait():
                    break
                self._obey()
        except Exception as error:  # a fault may break anything; the log up to here is judged
            return self.log.whole(f"{type(error).__name__}: {error}")
        finally:
            self.transfers.close()
        return self.log.whole()

    def _tell(self, event: Event) -> None:
        self.log.event(event)
        self.scheduler.handle(event)

    def _wait(self) -> bool:
        """A load ends if one is in flight; then the step does. False when nothing comes."""
        step, self.step = self.step, None
        try:
            done = self.inbox.get(timeout=0.02 if step else 0.5)
        except queue.Empty:
            if not step:
                return False
        else:
            ok = done.error is None
            self._tell(Loaded(done.ticket) if ok else LoadFailed(done.ticket, done.error))
        if step:
            self.log.read(*step)
            for event in self.executor.run(step[0]):
                self._tell(event)
        return True

    def _obey(self) -> None:
        lanes = self.transfers.idle, int(self.step is None)
        self.log.ask(*lanes)
        for action in self.scheduler.next_actions(*lanes):
            self.log.action(action)
            if isinstance(action, Load):
                self.transfers.start(action.ticket, action.key, action.slot)
            elif isinstance(action, Compute):
                self.step = action, self.log.records[-1]
