"""Which accelerator this is, and what it does: probed once, not looked up by name (JAX-11).

Nothing else in this package asks for a platform. What a backend says about itself is not trusted
where a pointer can tell.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIZE = 1 << 16
_ALIGNMENTS = (4096, 256, 128, 64, 32, 16)


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
    """

    platform: str
    device: str
    jax: str
    jaxlib: str
    donation: bool
    zero_copy: int
    memory_kinds: tuple[str, ...]

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
    return Backend(
        platform=device.platform,
        device=device.device_kind,
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        donation=_donates(),
        zero_copy=zero_copy,
        memory_kinds=kinds,
    )
