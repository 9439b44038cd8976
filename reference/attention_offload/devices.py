"""A memory device: it keeps keys and values, and attends over what it keeps.

The memory pool is one or more of these. A device knows no weights; it is told queries, keys and
values, each for a share of the heads, and answers with attended values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from reference.control.attention_partition import (
    HeadPool,
    Pool,
    RequestPool,
    head_share,
)
from reference.control.attention_wire import Kind, Sent, WireEvent
from reference.numerics.attention import LayerKV, attend_past, finish_with_own
from reference.numerics.formats import Array
from reference.vocab.config import AttentionSpec, ModelConfig

Record = Callable[[WireEvent], None]


@dataclass
class MemoryDevice:
    """KV of some heads of some requests, and nothing else (LAMINA-11)."""

    number: int
    cached: dict[tuple[int, int], LayerKV] = field(default_factory=dict)

    def past(self, request: int, layer: int, q: Array, position: int, spec: AttentionSpec) -> list:
        """Attend over the positions before `position`: needs the query only (LAMINA-2)."""
        return attend_past(q, self.cached[request, layer], position, spec.window, spec.scale)

    def own(
        self, request: int, layer: int, q: Array, k: Array, v: Array, position: int, parts: list,
        spec: AttentionSpec,
    ) -> Array:  # fmt: skip
        """Keep the new keys and values, and merge their position in: [N', Dv]."""
        kv = self.cached[request, layer]
        kv.write(position, k, v)
        return finish_with_own(parts, q, kv, position, spec.scale)


class MemoryPool:
    """The devices, who holds what, and the record of every message.

    kind   head: each device keeps its share of the heads of every request;
           request: each request lies on one device
    blocks KV blocks of each device. Errors: BadInput for an illegal partition (LAMINA-3).
    """

    def __init__(
        self,
        config: ModelConfig,
        devices: int = 1,
        kind: str = "head",
        blocks: int = 1 << 20,
        kv_block: int = 64,
        element_bytes: int = 4,
        record: Record = lambda event: None,
    ) -> None:
        self.config, self.kv_block, self.element_bytes = config, kv_block, element_bytes
        self.record = record
        self.devices = [MemoryDevice(i) for i in range(devices)]
        kv_heads = [s.attention.kv_heads for s in config.layers]
        self.holds: Pool = (
            HeadPool(devices, blocks, kv_heads) if kind == "head" else RequestPool(devices, blocks)
        )
        self.tiles = 0

    def admit(self, request: int, tokens: int, dtype: type) -> tuple[int, ...] | None:
        """Reserve room for so many tokens; the devices that hold them, or None."""
        owners = self.holds.place(request, -(-tokens // self.kv_block))
        for d in owners or ():
            for i, s in enumerate(self.config.layers):
                a = s.attention
                self.devices[d].cached[request, i] = LayerKV(
                    a.kv_heads // len(owners or ()), a.head_dim, a.v_head_dim, self.kv_block, dtype
                )
        return owners

    def drop(self, request: int) -> None:
        """The request has ended: its KV is gone."""
        self.holds.drop(request)
        for device in self.devices:
            for key in [k for k in device.cached if k[0] == request]:
                del device.cached[key]


Asked = list[tuple[MemoryDevice, Array, list]]
"""For each owner: the device, its share of q, and what it made of it so far."""


@dataclass
class RemoteState:
    """A request on the compute pool: who holds its KV, how long it is, its rows' tiles.

    prompt   as in a local state, which nothing here follows
    """

    pool: MemoryPool
    request: int
    owners: tuple[int, ...]
    length: int = 0
    prompt: int = 0
    tiles: dict[int, int] = field(default_factory=dict)

    @property
    def layers(self) -> list[RemoteKV]:
        """Where a local state has its list of LayerKV."""
        return [RemoteKV(self, i) for i in range(len(self.pool.config.layers))]


@dataclass
class RemoteKV:
    """One layer of one request, seen from the compute pool: a conversation, no data."""

    state: RemoteState
    layer: int

    @property
    def spec(self) -> AttentionSpec:
        """The layer's attention."""
        return self.state.pool.config.layers[self.layer].attention

    def ask(self, q: Array, position: int) -> Asked:
        """Send q [N, D], a share to each owner, which begins at once."""
        s, asked = self.state, []
        for i, d in enumerate(s.owners):
            share = head_share(i, len(s.owners), self.spec.heads)
            part = q[share.start : share.stop]
            self._say("q", position, d, part.nbytes)
            device = s.pool.devices[d]
            past = device.past(s.request, self.layer, part, position, self.spec)
            asked.append((device, part, past))
        return asked

    def tell(self, asked: Asked, k: Array, v: Array, position: int) -> Array:
        """Send k [G, D] and v [G, Dv]; the owners' answers together, [N, Dv]."""
        s, answers = self.state, []
        for i, (device, q, parts) in enumerate(asked):
            share = head_share(i, len(asked), self.spec.kv_heads)
            own = slice(share.start, share.stop)
            size = (k[own].size + v[own].size) * s.pool.element_bytes
            self._say("kv", position, device.number, size)
            a = device.own(s.request, self.layer, q, k[own], v[own], position, parts, self.spec)
            self._say("a", position, device.number, a.nbytes)
            answers.append(a)
        return np.concatenate(answers)

    def _say(self, kind: Kind, position: int, device: int, nbytes: int) -> None:
        """Record a message of one row."""
        s = self.state
        s.pool.record(Sent(kind, s.tiles[position], self.layer, device, 1, nbytes))
