"""Host memory for experts: a fixed pool of slots, read by kernels without a copy.

One anonymous mapping holds all slots (ENGINE-4). An expert's tensors lie one after another, each
on a 64-byte boundary, because the CPU backend takes an aligned numpy view as it is: the jax array
*is* the slot's memory. That is why a slot may be refilled only when everything that read it is
done, and why every load makes new arrays (a generation) instead of changing old ones.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from jax_impl.stored import STORED
from reference.files.budget import ALIGN, PAGE, round_up
from reference.files.safetensors_header import TensorRef
from reference.vocab.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in a slot: byte offset and length, and how to look at it."""

    offset: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]


def layout(refs: Sequence[TensorRef]) -> tuple[Place, ...]:
    """Places for an expert's tensors, in their order, each on a 64-byte boundary (XFER-1).

    Raises Unsupported for a stored type that no slot can hold as it is.
    """
    places: list[Place] = []
    offset = 0
    for ref in refs:
        dtype = STORED.get(ref.dtype)
        if dtype is None:
            raise Unsupported(str(ref.file), f"expert type {ref.dtype}", ", ".join(STORED))
        places.append(Place(offset, ref.nbytes, dtype, tuple(ref.shape)))
        offset = round_up(offset + ref.nbytes, ALIGN)
    return tuple(places)


def private_memory(nbytes: int) -> mmap.mmap:
    """Zeroed, page-aligned memory of this process alone.

    Private, because Python's default is shared memory, which is not counted as anonymous and which
    the kernel does not back with huge pages.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


Put = Callable[[Sequence[np.ndarray]], list[jax.Array]]


def quick_put() -> Put:
    """What `jax.device_put` of a list of arrays ends in, without the several layers before it: they
    cost a fifth of what reading an expert from a disk costs the processor. It is no public part of
    jax, so it is tried once, and where it is not there or does not alias, `jax.device_put` is
    used: which of the two makes no difference but time."""
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    try:
        from jax._src.core import ShapedArray
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        shaped = cache(ShapedArray)

        def put(views: Sequence[np.ndarray]) -> list[jax.Array]:
            return [
                xla_client.batched_device_put(
                    shaped(v.shape, v.dtype), sharding, [v], [device], False)
                for v in views
            ]  # fmt: skip

        view = np.frombuffer(private_memory(PAGE), np.uint16)
        view[:] = np.arange(len(view))
        [array] = put([view])
        if array.unsafe_buffer_pointer() == view.ctypes.data and (array == view).all():
            return put
    except Exception:
        pass  # another jax
    return jax.device_put


class SlotPool:
    """`count` slots of `slot_bytes` bytes each, numbered from 0.

    The memory is touched once here, so that resident memory does not grow afterwards, and it is
    never given back while a write or a read may be outstanding: the arrays keep it alive.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self.nbytes = count * slot_bytes
        self.region = region = private_memory(max(PAGE, self.nbytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                region.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: only slower
        self._bytes = np.frombuffer(region, dtype=np.uint8)
        self._bytes[::PAGE] = 0
        self._address = self._bytes.ctypes.data
        self.zero_copy = self._probe()
        self._put = quick_put() if self.zero_copy else jax.device_put

    def _probe(self) -> bool:
        """Does the backend read an aligned view in place?"""
        view = self._bytes[:PAGE]
        return jax.device_put(view).unsafe_buffer_pointer() == view.ctypes.data

    def view(self, slot: int) -> np.ndarray:
        """The slot's bytes, uint8 [slot_bytes], writable."""
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot} of {self.count}")
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def handle(self, slot: int, places: Sequence[Place]) -> tuple[jax.Array, ...]:
        """Arrays over the slot's present content, one a place, ready to be read.

        Zero-copy on the CPU backend (checked by pointer, XFER-2); elsewhere a copy that is
        finished when this returns, so that the slot's memory and the arrays agree for good.
        """
        data = self.view(slot)
        views = [
            data[p.offset : p.offset + p.nbytes].view(p.dtype).reshape(p.shape) for p in places
        ]
        arrays = self._put(views)
        if not self.zero_copy:
            jax.block_until_ready(arrays)
        else:  # nothing is copied, so there is nothing to wait for
            start = self._address + slot * self.slot_bytes
            for array, p in zip(arrays, places, strict=True):
                assert not p.nbytes or array.unsafe_buffer_pointer() == start + p.offset
        return tuple(arrays)

    def checksum(self, slot: int, places: Sequence[Place]) -> int:
        """CRC-32 of the tensors' bytes in the slot (padding left out)."""
        data = self.view(slot)
        crc = 0
        for p in places:
            crc = zlib.crc32(data[p.offset : p.offset + p.nbytes].data, crc)
        return crc
