"""What is sent between the pools: counted, and recorded as events of the protocol (LAMINA-5).

A payload is a NumPy array of exactly the live rows; padding is put on by the receiver. In one
process "sending" hands the array over; a process boundary would go here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from reference.control.attention_wire import TURN, Kind, Opened, Protocol, Sent, WireEvent


class Wire:
    """Bytes by kind, and of attention by memory device. With `keep` every message is kept, in the
    order of sending, until `taken`; `protocol` judges each as it is sent (LAMINA-1).

    Called from the dispatch threads of both pools.
    """

    def __init__(self, keep: bool = False, protocol: Protocol | None = None) -> None:
        self._keep, self._protocol = keep, protocol
        self._kept: list[WireEvent] = []
        self.by_kind: Counter[str] = Counter()
        self.by_device: Counter[int] = Counter()
        self.rows: Counter[str] = Counter()
        self._tiles = 0
        self._lock = threading.Lock()

    def open(self, devices: Sequence[int], first: int, end: int) -> int:
        """A new tile that attends at layers [first, end) on these memory devices: its number."""
        with self._lock:
            tile, self._tiles = self._tiles, self._tiles + 1
            self._note(Opened(tile, tuple(devices), first, end))
            return tile

    def send(
        self, kind: Kind, tile: int, layer: int, device: int, *payload: np.ndarray | None
    ) -> None:
        """Account for a message; its payloads have one entry a row."""
        arrays = [p for p in payload if p is not None]
        size, rows = sum(a.nbytes for a in arrays), len(arrays[0])
        with self._lock:
            self.by_kind[kind] += size
            self.rows[kind] += rows
            if kind in TURN:
                self.by_device[device] += size
            self._note(Sent(kind, tile, layer, device, rows, size))

    def _note(self, event: WireEvent) -> None:
        if self._protocol is not None:
            self._protocol.take(event)
        if self._keep:
            self._kept.append(event)

    def taken(self) -> list[WireEvent]:
        """What was kept, and forget it."""
        with self._lock:
            kept, self._kept = self._kept, []
            return kept

    @property
    def attention(self) -> int:
        """Bytes to the memory pool and back."""
        return sum(self.by_kind[k] for k in TURN)
