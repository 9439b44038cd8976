"""The host tier's memory, and the way from there to the device (TIER-1..8).

`HostTier` (reference.control) says which entry holds which expert; this file holds the bytes and
makes the device's arrays from them. Three ways, chosen from what the backend was seen to do:

    dma       the entries' memory is registered with the device, which reads it by itself
    pinned    each entry is an array of the memory kind pinned_host; where the backend reads aligned
              NumPy memory in place (CPU) that array is the entry's own memory
    pageable  plain memory; the backend stages the copy as it likes

In every way a device slot is a set of arrays of its own, made anew by each load and let go before
the next load of that slot begins: so slots and transfers stay within the device budget, and no lock
or donation is needed. `begin` and `heard` belong to the engine thread; a load's own
`buffer`, `keep` and `arrive` may be called from its fetch thread, since its entry is pinned.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.backend import Backend, backend, memory, register
from jax_impl.options import EngineOptions
from jax_impl.slots import Place, SlotPool, private_memory
from reference.control.host_tier import HostTier
from reference.files.budget import Sizes
from reference.vocab.ids import ExpertKey

Way = Literal["dma", "pinned", "pageable"]
Arrays = tuple[jax.Array, ...]


def way_of(found: Backend) -> Way:
    """The shortest way to the device that the backend was seen to have."""
    if found.dma_map:
        return "dma"
    return "pinned" if found.pinned else "pageable"


@dataclass(slots=True)
class Lease:
    """A load's use of an entry. `arrays`: the copy to the device, where it was dispatched at once;
    `fault`: why that failed."""

    entry: int
    hit: bool
    arrays: Arrays = ()
    fault: Exception | None = None

    def record(self, nbytes: int) -> dict[str, Any]:
        """What the log says of it (TIER-7)."""
        source, read = ("host", 0) if self.hit else ("disk", nbytes)
        return {"from": source, "entry": self.entry, "disk_bytes": read}


class HostStage:
    """The entries of `tier`, and the loads that go through them.

    pool   memory of the entries; the CPU backend's pinned arrays are made over it
    way    one of the three above; None chooses
    """

    def __init__(
        self, entries: int, slot_bytes: int, tier: HostTier, way: Way | None = None
    ) -> None:
        self.tier = tier
        self.way = way or way_of(backend())
        self._own = self.way == "pinned" and not backend().pinned_in_place
        self.pool = SlotPool(0 if self._own else entries, slot_bytes)
        self._pinned: list[Arrays] = [()] * entries
        self._sums: list[int | None] = [None] * entries
        self._slots: dict[int, ExpertKey] = {}
        self._release = register(self.pool.region) if self.way == "dma" else None

    @property
    def staging_bytes(self) -> int:
        """Memory that each fetch thread needs for itself: a slot where entries are arrays."""
        return self.pool.slot_bytes if self._own else 0

    # -- the engine thread

    def begin(self, ticket: int, key: ExpertKey, slot: int, places: Sequence[Place]) -> Lease:
        """An entry for a load into device slot `slot`, whose old arrays have been let go.

        A hit's copy is dispatched here and now: on a device whose new buffers wait for the compute
        that was queued before them, that is before the step which it should hide behind (TIER-8).
        """
        old = self._slots.pop(slot, None)
        if old is not None:
            self.tier.use(old)
        entry, hit = self.tier.begin(ticket, key)
        lease = Lease(entry, hit)
        if not hit:
            self._pinned[entry], self._sums[entry] = (), None
            return lease
        try:
            lease.arrays = self._copy(entry, places)
        except Exception as error:  # no memory there, say: the load fails, the engine lives
            lease.fault = error
        return lease

    def heard(self, ticket: int, key: ExpertKey, slot: int, ok: bool, drained: bool) -> None:
        """A load has ended, or is overdue: told in the order in which control hears of it."""
        if not drained:
            self.tier.overdue(ticket)
            return
        if ok:
            self._slots[slot] = key
        entry = self.tier.loads[ticket].number
        self.tier.end(ticket, ok)
        if self.tier.keys[entry] is None:
            self._pinned[entry], self._sums[entry] = (), None

    # -- a load's own thread

    def buffer(self, entry: int, own: np.ndarray | None) -> np.ndarray:
        """Where to read the file into: the entry, or the thread's `own` memory. uint8, a slot."""
        if not self._own:
            return self.pool.view(entry)
        assert own is not None
        return own

    def keep(
        self, entry: int, view: np.ndarray, places: Sequence[Place], check: bool
    ) -> Arrays:
        """The file's bytes are in `view`: keep them in the entry and begin to copy them on."""
        if check:
            self._sums[entry] = crc(view[p.offset : p.offset + p.nbytes] for p in places)
        if self.way == "pinned":
            put = jax.device_put(views(view, places), memory("pinned_host"))
            self._pinned[entry] = tuple(jax.block_until_ready(put))
        return self._copy(entry, places)

    def arrive(self, entry: int, arrays: Arrays, check: bool) -> tuple[Arrays, int | None]:
        """Wait until the expert is on the device. With `check`, its checksum there is that of the
        bytes that came from the disk (TIER-6), else ValueError."""
        arrays = tuple(jax.block_until_ready(arrays))
        if check and (found := device_sum(arrays)) != self._sums[entry]:
            raise ValueError(f"entry {entry} of host memory changed since it was read: {found}")
        return arrays, self._sums[entry] if check else None

    def _copy(self, entry: int, places: Sequence[Place]) -> Arrays:
        """Dispatch the copy to the device; never an alias of the entry (TIER-4)."""
        if self.way == "pinned":
            return tuple(jax.device_put(list(self._pinned[entry]), memory("device")))
        there = views(self.pool.view(entry), places)
        if backend().zero_copy:
            return tuple(jnp.array(v) for v in there)
        return tuple(jax.device_put(there, memory("device")))

    def close(self) -> None:
        """Give back what was registered. Only when no load is in flight."""
        self._pinned = [()] * len(self._pinned)
        if self._release is not None:
            self._release()
            self._release = None


def host_stage(
    sizes: Sizes, told: EngineOptions, layers: int
) -> tuple[Sizes, HostStage | None]:
    """The host tier that was asked for, and the sizes with it (TIER-1).

    Where the device cannot read host memory in place and nothing was asked for: an entry for each
    load at a time. Loads need a way, and slots on both sides would take the budget twice.
    """
    if not sizes.host_slots and not backend().zero_copy and sizes.experts:
        entries = min(told.threads, sizes.experts)
        sizes = replace(sizes, host=entries * sizes.slot, host_slots=entries)
    if not sizes.host_slots:
        return sizes, None
    tier = HostTier(sizes.host_slots, layers, told.cache)  # type: ignore[arg-type]
    return sizes, HostStage(sizes.host_slots, sizes.slot, tier)


def staging(nbytes: int) -> np.ndarray:
    """A fetch thread's own memory for what it reads, uint8 [nbytes]."""
    return np.frombuffer(private_memory(nbytes), np.uint8)


def views(data: np.ndarray, places: Sequence[Place]) -> list[np.ndarray]:
    """The tensors in a slot's or an entry's bytes."""
    return [data[p.offset : p.offset + p.nbytes].view(p.dtype).reshape(p.shape) for p in places]


def crc(parts: Any) -> int:
    """CRC-32 of contiguous arrays' bytes, one after another."""
    total = 0
    for part in parts:
        total = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, total)
    return total


def device_sum(arrays: Arrays) -> int:
    """CRC-32 of arrays as they are on the device now.

    Read through a copy where the host cannot see them: JAX keeps what it has read of an array, and
    a kept value would hide a change. That copy, a tensor at a time, is beyond the device budget.
    """
    seen = arrays if backend().zero_copy else (a.copy() for a in arrays)
    return crc(np.asarray(a) for a in seen)
