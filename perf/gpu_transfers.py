"""How fast bytes go from host memory to the device, by which way, and beside what.

The ways are those of `jax_impl.host_stage`, measured through it: what is timed here is what an
engine does when it finds an expert in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.backend import backend
from jax_impl.host_stage import HostStage, Way
from jax_impl.slots import Place
from reference.control.host_tier import HostTier
from reference.vocab.ids import ExpertKey

WAYS: tuple[Way, ...] = ("pageable", "pinned", "dma")
KEY = ExpertKey(0, 0)


class Shuttle:
    """One expert of `nbytes` bytes in host memory, to be sent to the device again and again."""

    def __init__(self, nbytes: int, way: Way) -> None:
        self.places = (Place(0, nbytes, np.dtype(np.uint8), (nbytes,)),)
        self.stage = HostStage(1, nbytes, HostTier(1), way)
        self.bytes = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        self.ticket = 1
        lease = self.stage.begin(1, KEY, 0, self.places)
        buffer = self.stage.buffer(lease.entry, np.empty(nbytes, np.uint8))
        buffer[:] = self.bytes
        arrays = self.stage.keep(lease.entry, buffer, self.places, False)
        self.equal = self.land(lease.entry, arrays).tobytes() == self.bytes.tobytes()

    def begin(self) -> tuple[int, tuple[jax.Array, ...]]:
        """Dispatch a copy, as the engine's thread does for a hit."""
        self.ticket += 1
        lease = self.stage.begin(self.ticket, KEY, 0, self.places)
        assert lease.hit and lease.fault is None, lease
        return lease.entry, lease.arrays

    def land(self, entry: int, arrays: tuple[jax.Array, ...]) -> np.ndarray:
        self.stage.arrive(entry, arrays, False)
        self.stage.heard(self.ticket, KEY, 0, True, True)
        return np.asarray(arrays[0])

    def send(self) -> float:
        """Seconds of one copy."""
        began = time.perf_counter()
        entry, arrays = self.begin()
        self.stage.arrive(entry, arrays, False)
        seconds = time.perf_counter() - began
        self.stage.heard(self.ticket, KEY, 0, True, True)
        return seconds

    def again(self) -> bool:
        """One more copy: are its bytes right?"""
        return self.land(*self.begin()).tobytes() == self.bytes.tobytes()


def usable(way: Way) -> bool:
    """Whether the backend was seen to have the way."""
    return {"dma": backend().dma_map, "pinned": backend().pinned, "pageable": True}[way]


def check_transfers(quick: bool, left: Callable[[], float]) -> dict[str, Any]:
    """Rates by way and size; `donated`: the cost of a stacked slot instead of arrays of its own."""
    sizes = [1 << 16, 1 << 20] if quick else [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        if not usable(way):
            rows.append({"way": way, "usable": False})
            continue
        for size in sizes:
            if rows and left() <= 0:
                break
            shuttle = Shuttle(size, way)
            times = [shuttle.send() for _ in range(5 if quick else 12)][2:]
            rows.append({
                "way": way, "usable": True, "bytes": size, "best_s": min(times),
                "median_s": float(np.median(times)), "gb_per_s": size / min(times) / 1e9,
                "equal": shuttle.equal and shuttle.again(),
            })  # fmt: skip
            shuttle.stage.close()
    donated = [donated_update(size) for size in sizes[:4]]
    good = all(row.get("equal", True) for row in rows) and all(d["equal"] for d in donated)
    return {"rows": rows, "donated": donated, "ok": good}


def donated_update(nbytes: int, slots: int = 4) -> dict[str, Any]:
    """A stacked slot buffer, of which one slot is overwritten in place by an array on the device:
    what donation would add to each load."""
    put = jax.jit(
        lambda held, new, at: jax.lax.dynamic_update_slice(held, new[None], (at, 0)),
        donate_argnums=0,
    )
    held = jnp.zeros((slots, nbytes), jnp.uint8)
    new = jnp.full(nbytes, 7, jnp.uint8)
    times, kept = [], True
    for i in range(6):
        jax.block_until_ready((held, new))
        place, old = _pointer(held), held
        began = time.perf_counter()
        held = jax.block_until_ready(put(held, new, i % slots))
        times.append(time.perf_counter() - began)
        kept = kept and old.is_deleted() and _pointer(held) == place
    equal = bool((held[0] == 7).all()) and bool((held[1] == 7).all())
    return {"bytes": nbytes, "best_s": min(times[1:]), "in_place": kept, "equal": equal}


def _pointer(a: jax.Array) -> int:
    try:
        return a.unsafe_buffer_pointer()
    except Exception:  # not every backend tells
        return -1


def check_overlap(quick: bool, left: Callable[[], float]) -> dict[str, Any]:
    """A copy beside a computation of about its length: dispatched before it, and after it.

    hidden   share of the shorter one that took no time of its own: 1 at best, 0 at worst
    """
    size, side = (1 << 20, 128) if quick else (64 << 20, 2048)
    a = jnp.ones((side, side), jnp.float32) / side

    @jax.jit
    def work(a: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda _, x: x @ a, a)

    def computing(n: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(work(a, jnp.int32(n)))
        return time.perf_counter() - began

    rows = []
    for way in WAYS:
        if not usable(way) or (rows and left() <= 0):
            continue
        shuttle = Shuttle(size, way)
        copy_s = min(shuttle.send() for _ in range(4))
        computing(1)
        each = min(computing(20) for _ in range(3)) / 20
        n = max(1, round(copy_s / each))
        compute_s = min(computing(n) for _ in range(3))
        row: dict[str, Any] = {
            "way": way, "bytes": size, "copy_s": copy_s, "compute_s": compute_s, "steps": n,
        }  # fmt: skip
        for order in ("before", "after"):
            best = float("inf")
            for _ in range(4):
                began = time.perf_counter()
                running = work(a, jnp.int32(n)) if order == "after" else None
                entry, arrays = shuttle.begin()
                running = work(a, jnp.int32(n)) if running is None else running
                shuttle.stage.arrive(entry, arrays, False)
                jax.block_until_ready(running)
                best = min(best, time.perf_counter() - began)
                shuttle.stage.heard(shuttle.ticket, KEY, 0, True, True)
            row[f"both_{order}_s"] = best
            row[f"hidden_{order}"] = (copy_s + compute_s - best) / min(copy_s, compute_s)
        rows.append(row)
        shuttle.stage.close()
    return {"rows": rows, "ok": bool(rows)}
