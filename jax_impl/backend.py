"""Which accelerator this is, and what it does: probed once, not looked up by name (JAX-11).

Nothing else in this package asks for a platform. What a backend says about itself is not trusted
where a pointer can tell.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

_SIZE = 1 << 16
_ALIGNMENTS = (4096, 256, 128, 64, 32, 16)
_METAL = ("metal", "mtl", "mps")


@dataclass(frozen=True)
class Backend:
    """The device that the engine uses, and its habits.

    platform       as JAX names it (cpu, gpu, ...)
    device         the device in words
    jax, jaxlib    versions; bits are claimed for one pair only
    donation       a donated array's memory is used again in place
    zero_copy      least alignment in bytes from which `device_put` reads NumPy memory where it
                   lies, or 0 where it always copies
    memory_kinds   kinds of memory the device can address
    pinned         pinned_host is one of them, and going from there to the device is a real copy
    pinned_in_place  a pinned_host array of aligned NumPy memory is that memory
    dma_map        host memory can be registered, so that the device reads it by itself
    note           what nobody has tried on this device, or ""
    """

    platform: str
    device: str
    jax: str
    jaxlib: str
    donation: bool
    zero_copy: int
    memory_kinds: tuple[str, ...]
    pinned: bool = False
    pinned_in_place: bool = False
    dma_map: bool = False
    note: str = ""

    def record(self) -> dict[str, Any]:
        """As plain data, for the head of a log."""
        return asdict(self)


def _pointer(a: jax.Array) -> int:
    """Where the array lies; -1 where the backend does not tell."""
    try:
        return a.unsafe_buffer_pointer()
    except Exception:  # any refusal of an optional call means the same: it cannot be known
        return -1


def aligned(size: int, alignment: int) -> np.ndarray:
    """`size` bytes at an address that is a multiple of `alignment`, but not of twice that."""
    raw = np.empty(size + 4 * alignment, np.uint8)
    start = -raw.ctypes.data % (2 * alignment) + alignment
    return raw[start : start + size]


def _reads_in_place(alignment: int) -> bool:
    host = aligned(_SIZE, alignment)
    host[:] = 1
    there = jax.block_until_ready(jax.device_put(host))
    return _pointer(there) == host.ctypes.data


def _donates() -> bool:
    before = jnp.zeros(_SIZE, jnp.float32)
    place = _pointer(jax.block_until_ready(before))
    after = jax.jit(lambda a: a.at[0].set(1.0), donate_argnums=0)(before)
    return place != -1 and _pointer(jax.block_until_ready(after)) == place


@cache
def memory(kind: str) -> SingleDeviceSharding:
    """The default device's memory of a kind: device, pinned_host."""
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def register(region: mmap.mmap) -> Callable[[], None]:
    """Let the device read host memory by itself; call the result when it shall no more.

    Raises whatever the backend does where it cannot.
    """
    client = jax.devices()[0].client
    address = np.frombuffer(region, np.uint8).ctypes.data
    client.dma_map(address, len(region))
    return lambda: client.dma_unmap(address)


def _registers() -> bool:
    try:
        region = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        register(region)()
        return True
    except Exception:  # not on this backend, or not in this version of it
        return False


def _pins() -> tuple[bool, bool]:
    """(pinned_host arrays are copied to the device, they may be NumPy memory itself)."""
    host = aligned(_SIZE, 4096)
    host[:] = 1
    try:
        pinned = jax.block_until_ready(jax.device_put(host, memory("pinned_host")))
        there = jax.block_until_ready(jax.device_put(pinned, memory("device")))
        copied = there.sharding.memory_kind == "device" and _pointer(there) != _pointer(pinned)
        copied = copied and bool((np.asarray(there) == 1).all())
    except Exception:  # no such kind of memory, or no way from it
        return False, False
    return copied, _pointer(pinned) == host.ctypes.data


@cache
def backend() -> Backend:
    """Probe the default device. Takes some 50 ms, the first time.

    Raises RuntimeError (JAX's own) when JAX finds no device.
    """
    device = jax.devices()[0]
    zero_copy = 0
    for alignment in _ALIGNMENTS:
        if not _reads_in_place(alignment):
            break
        zero_copy = alignment
    try:
        kinds = tuple(sorted(m.kind for m in device.addressable_memories()))
    except Exception:  # older plugins do not know the call
        kinds = ()
    pinned, in_place = _pins() if "pinned_host" in kinds else (False, False)
    return Backend(
        platform=device.platform,
        device=device.device_kind,
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        donation=_donates(),
        zero_copy=zero_copy,
        memory_kinds=kinds,
        pinned=pinned,
        pinned_in_place=in_place,
        dma_map=_registers(),
        note="not run on Metal" if device.platform in _METAL else "",
    )
