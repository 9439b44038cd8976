"""Who of the memory pool keeps what: shares of heads, or whole requests (LAMINA-3, LAMINA-4).

Both are pure bookkeeping in KV blocks. `place` says where a request goes, or None while there is
no room for all of prompt and answer; `fits` says whether there could ever be room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from reference.vocab.errors import BadInput

Partition = Literal["head", "request"]
PARTITIONS: tuple[Partition, ...] = ("head", "request")


def legal_head_shares(kv_heads: Sequence[int]) -> tuple[int, ...]:
    """LAMINA-3: the numbers of memory devices over which heads can be shared out: those that
    divide the KV heads of every layer. `kv_heads` has one entry a layer."""
    least = min(kv_heads)
    return tuple(b for b in range(1, least + 1) if all(g % b == 0 for g in kv_heads))


def check_head_shares(devices: int, kv_heads: Sequence[int]) -> None:
    """Raises BadInput naming the legal numbers when `devices` is none of them."""
    legal = legal_head_shares(kv_heads)
    if devices not in legal:
        told = ", ".join(map(str, sorted(set(kv_heads))))
        raise BadInput(
            f"memory devices: {devices}; heads are shared out over a number that divides the "
            f"{told} KV heads: {', '.join(map(str, legal))}"
        )


def head_share(device: int, devices: int, heads: int) -> range:
    """The heads of one layer that `device` keeps; `heads` KV heads or query heads."""
    each = heads // devices
    return range(device * each, (device + 1) * each)


class HeadPool:
    """Every device keeps its share of the heads of every request: all are equally full.

    devices  memory devices;  blocks  KV blocks of each (a block: `kv_block` tokens, a share of
    the heads). Errors: BadInput for an illegal number of devices.
    """

    kind: Partition = "head"

    def __init__(self, devices: int, blocks: int, kv_heads: Sequence[int]) -> None:
        check_head_shares(devices, kv_heads)
        self.devices, self.blocks = devices, blocks
        self.free = blocks
        self._held: dict[int, int] = {}

    def fits(self, blocks: int) -> bool:
        """A request of so many blocks fits into the empty pool."""
        return blocks <= self.blocks

    def place(self, request: int, blocks: int) -> tuple[int, ...] | None:
        """Reserve; the devices that hold the request (all of them), or None: not now."""
        if blocks > self.free:
            return None
        self.free -= blocks
        self._held[request] = blocks
        return tuple(range(self.devices))

    def drop(self, request: int) -> None:
        """The request has ended."""
        self.free += self._held.pop(request)

    def held(self) -> list[int]:
        """Blocks reserved on each device."""
        return [self.blocks - self.free] * self.devices

    def lost(self, device: int) -> tuple[int, ...]:
        """Requests that lose KV when `device` is lost: every one of them loses a share."""
        return tuple(self._held)


class RequestPool:
    """A request lies whole on one device: the one with most room, lowest number first."""

    kind: Partition = "request"

    def __init__(self, devices: int, blocks: int) -> None:
        if devices < 1:
            raise BadInput(f"memory devices: {devices}; at least 1 expected")
        self.devices, self.blocks = devices, blocks
        self._free = [blocks] * devices
        self._held: dict[int, tuple[int, int]] = {}

    def fits(self, blocks: int) -> bool:
        """A request of so many blocks fits onto an empty device."""
        return blocks <= self.blocks

    def place(self, request: int, blocks: int) -> tuple[int, ...] | None:
        """Reserve on one device, or None: not now."""
        device = max(range(self.devices), key=lambda d: (self._free[d], -d))
        if blocks > self._free[device]:
            return None
        self._free[device] -= blocks
        self._held[request] = (device, blocks)
        return (device,)

    def drop(self, request: int) -> None:
        """The request has ended."""
        device, blocks = self._held.pop(request)
        self._free[device] += blocks

    def held(self) -> list[int]:
        """Blocks reserved on each device."""
        return [self.blocks - f for f in self._free]

    def lost(self, device: int) -> tuple[int, ...]:
        """Requests that lose KV when `device` is lost: its own."""
        return tuple(r for r, (d, _) in self._held.items() if d == device)


Pool = HeadPool | RequestPool


def imbalance(held: Sequence[float]) -> float:
    """Fullest over mean: 1.0 is exact balance; 1.0 for an empty pool."""
    total = sum(held)
    return max(held) * len(held) / total if total else 1.0


def longest_first(lengths: Sequence[int], devices: int) -> list[int]:
    """Total length on each device when requests are placed greedily, longest first."""
    totals = [0] * devices
    for length in sorted(lengths, reverse=True):
        totals[totals.index(min(totals))] += length
    return totals
