"""The memory pool as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from jax_impl.attention_pool.memory import Busy, MemoryDevice
from jax_impl.attention_pool.memory_programs import PoolOptions
from jax_impl.attention_pool.messages import Answer, Pulled
from jax_impl.attention_pool.puller import Pulls
from jax_impl.attention_pool.wire import Wire
from jax_impl.compute import Broken
from jax_impl.kv import KvKind
from jax_impl.programs import Progress
from reference.control.attention_partition import check_head_shares
from reference.vocab.config import ModelConfig


@dataclass
class MemoryPool:
    """All memory devices. `partition` head: each layer's heads are shared out over them."""

    devices: list[MemoryDevice] = field(default_factory=list)
    shares: int = 1
    overlap: bool = True

    @classmethod
    def of(
        cls,
        devices: Sequence[Any],
        config: ModelConfig,
        options: PoolOptions,
        sinks: Sequence[np.ndarray | None],
        wire: Wire,
        partition: str = "head",
    ) -> MemoryPool:
        """Raises BadInput when heads cannot be shared out over so many devices (LAMINA-3)."""
        shares = len(devices) if partition == "head" else 1
        check_head_shares(shares, [s.attention.cache_heads for s in config.layers])
        mine = replace(options, shares=shares)
        return cls(
            [MemoryDevice(i, d, config, mine, sinks, wire) for i, d in enumerate(devices)],
            shares,
            options.overlap,
        )

    @property
    def kinds(self) -> tuple[KvKind, ...]:
        """The kinds of KV, with the blocks of one device."""
        return self.devices[0].options.kinds

    @property
    def kv_bytes(self) -> int:
        return sum(d.kv_bytes for d in self.devices)

    def compile(self, progress: Progress = lambda text: None) -> None:
        for device in self.devices:
            device.compile(progress)

    def begin(self, answer: Callable[[Answer | Pulled | Broken], None]) -> None:
        for device in self.devices:
            device.begin(answer)

    def end(self, timeout_s: float = 5.0) -> bool:
        ended = [device.end(timeout_s) for device in self.devices]
        return all(ended)

    @property
    def told(self) -> Pulls:
        """Pulls of all devices together."""
        each = [astuple(d.told) for d in self.devices]
        return Pulls(*(sum(column) for column in zip(*each, strict=True)))

    @property
    def busy(self) -> Busy:
        """All devices together."""
        each = [d.busy for d in self.devices]
        return Busy(
            sum(b.attend_s for b in each), sum(b.hidden_s for b in each),
            sum(b.asks for b in each), sum(b.early for b in each),
        )  # fmt: skip
