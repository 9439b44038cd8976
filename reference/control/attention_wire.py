"""What goes over the wire between the pools, in which order, and how many bytes (LAMINA-1, 2, 5).

A *tile* is what one call computes: the rows of one or more requests at one layer. For every tile
and layer the compute pool sends its queries, then its new keys and values; the memory pool stores
these, and sends what it attended back. `Protocol` is the automaton of that conversation, fed by
the same events that an event log holds; `WireBytes` is the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from reference.vocab.config import AttentionSpec
from reference.vocab.errors import IllegalEvent

Kind = Literal["q", "kv", "a", "context", "pull"]
KINDS: tuple[Kind, ...] = ("q", "kv", "a", "context", "pull")
TURN: tuple[Kind, ...] = ("q", "kv", "a")
"""What passes between a tile and one memory device at one layer, in this order."""
WIDTHS = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One message. Recorded by its sender, when it sends.

    kind    q, kv: compute pool -> memory device; a: back; context: replica -> replica;
            pull: prefill worker -> memory device
    tile    the call it belongs to, counted from 0 (pull: the request)
    layer   model layer
    device  memory device, or for a context the replica that gets it
    rows    token rows;  bytes  of the payload: positions and block tables are not counted
    """

    kind: Kind
    tile: int
    layer: int
    device: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class LayerBytes:
    """Payload of one token at one layer, over all memory devices."""

    q: int
    kv: int
    a: int
    context: int

    @property
    def attention(self) -> int:
        """To the memory pool and back."""
        return self.q + self.kv + self.a


class WireBytes:
    """LAMINA-5: bytes a token and layer = e_q H d_qk + (bytes cached) + e_a H d_v.

    hidden    width of the residual stream, which a context carries in `e_context` bytes each
    kv_dtype  what K and V are kept, and sent, in; q, a and context are float32 unless told
    """

    def __init__(
        self,
        layers: Iterable[AttentionSpec],
        hidden: int,
        kv_dtype: str = "f32",
        e_q: int = 4,
        e_a: int = 4,
        e_context: int = 4,
    ) -> None:
        self.layers: list[LayerBytes] = []
        for a in layers:
            # MLA in its absorbed form: what is cached is one head, of which a value is a part.
            value = a.cache_value_dim or a.kv_rank
            self.layers.append(
                LayerBytes(
                    e_q * a.heads * a.cache_key_dim,
                    WIDTHS[kv_dtype] * a.cache_heads * (a.cache_key_dim + a.cache_value_dim),
                    e_a * a.heads * value,
                    e_context * hidden,
                )
            )

    def attention(self, rows: int) -> int:
        """Bytes of one turn through all layers for so many token rows."""
        return rows * sum(layer.attention for layer in self.layers)

    def to_memory(self, rows: int) -> int:
        """The part that goes to the memory pool."""
        return rows * sum(layer.q + layer.kv for layer in self.layers)

    def context(self, rows: int, batches: int) -> int:
        """LAMINA-10: what the rotation moves between replicas in one turn through all layers:
        with more than one replica each of the turns but the token's first ends elsewhere."""
        if batches <= 2:
            return 0
        return rows * sum(layer.context for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Opened:
    """A tile sets out: it will attend at layers [first, end) on these memory devices."""

    tile: int
    devices: tuple[int, ...]
    first: int
    end: int


WireEvent = Opened | Sent


def plain_of(event: WireEvent) -> list[Any]:
    """As a field `wire` of an event log holds it: a list of these beside a Computed."""
    if isinstance(event, Opened):
        return ["open", event.tile, list(event.devices), event.first, event.end]
    return [event.kind, event.tile, event.layer, event.device, event.rows, event.bytes]


def event_of(plain: list[Any]) -> WireEvent:
    """Back from `plain_of`. Raises ValueError for anything else."""
    try:
        if plain[0] == "open":
            _, tile, devices, first, end = plain
            return Opened(int(tile), tuple(map(int, devices)), int(first), int(end))
        kind, *numbers = plain
        return Sent(kind, *map(int, numbers))
    except (TypeError, IndexError, KeyError, ValueError):
        raise ValueError(f"no message of the wire: {plain}") from None


class Protocol:
    """LAMINA-1, LAMINA-2: raises IllegalEvent at the first message that breaks the order.

    A tile is opened once and goes layer by layer; at a layer each of its devices gets q, then kv,
    then answers a; the next layer begins when all have answered. Contexts and pulls stand outside
    that conversation.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[Opened, int, dict[int, int]]] = {}
        self._last = -1
        self.finished = 0

    def take(self, event: WireEvent) -> None:
        """One event in the order in which things were sent."""
        if isinstance(event, Opened):
            if event.tile <= self._last or not event.devices or not 0 <= event.first < event.end:
                raise IllegalEvent(f"{event}: a new tile, devices and layers expected")
            self._last = event.tile
            self._open[event.tile] = event, event.first, dict.fromkeys(event.devices, 0)
        else:
            self._sent(event)

    def _sent(self, m: Sent) -> None:
        if m.kind not in KINDS or m.bytes < 0 or m.rows < 1:
            raise IllegalEvent(f"{m} is no message of the protocol")
        if m.kind not in TURN:
            return
        if m.tile not in self._open:
            raise IllegalEvent(f"{m}: tile {m.tile} is not under way")
        tile, layer, said = self._open[m.tile]
        if m.layer != layer or m.device not in said:
            raise IllegalEvent(f"{m}: {tile} is at layer {layer}")
        if m.kind != (*TURN, "nothing more")[said[m.device]]:
            raise IllegalEvent(f"{m}: {(*TURN, 'nothing more')[said[m.device]]} comes next")
        said[m.device] += 1
        if any(n < len(TURN) for n in said.values()):
            return
        if layer + 1 == tile.end:
            del self._open[m.tile]
            self.finished += 1
        else:
            self._open[m.tile] = tile, layer + 1, dict.fromkeys(tile.devices, 0)

    @property
    def quiet(self) -> bool:
        """No tile is under way."""
        return not self._open
