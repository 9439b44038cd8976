"""How fast a plan would run, as a band: what a short probe measures, and what has to be assumed.

The arithmetic is `band`; the probe only fills in `Speeds`. Reading is measured with the engine's
own transfers on the checkpoint's own experts, computing with the kernel that runs an expert.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from reference.vocab.config import ModelConfig, MoeSpec
from reference.vocab.errors import CoveyError, Unsupported

PROBE_S = 0.25
"""Seconds for each of the two measurements."""
TILE = 8
"""Token rows that one call of a kernel takes at the price of one."""
VISIT_S = 0.3e-3
"""Seconds that the engine itself takes for one step (measured on two cores of a server)."""
LOCALITY = 1.25
"""On published routing traces a cache of the share s finds about 1 - (1 - s) ** 1.25 of what is
asked for (0.5: 0.58, 0.75: 0.82, 0.875: 0.93); where routing has no favourites it is s."""


@dataclass(frozen=True)
class Speeds:
    """Bytes a second that are read; seconds for one expert on a tile of rows; and what was read
    for that, in bytes a second. None: not measured."""

    disk: float | None
    expert_s: float | None
    how: str = ""


@dataclass(frozen=True)
class Band:
    """Tokens a second over all requests, at least and at most; seconds a token of either side."""

    low: float
    high: float
    compute_s: tuple[float, float]
    fetch_s: tuple[float, float]

    @property
    def limit(self) -> str:
        """What bounds the upper end."""
        return "reading" if self.fetch_s[1] > self.compute_s[1] else "computing"


ASSUMED = (
    "least: no favourites among experts, nothing shared between requests, reading and computing in "
    "turn",
    f"most: hits as on published traces (1 - (1 - share) ** {LOCALITY}), requests share reads and "
    "tiles of rows, reading hidden behind computing or the other way round",
    f"{VISIT_S * 1e3:g} ms of the engine's own for each step; attention over short texts; prompts "
    "not counted",
)


def band(
    config: ModelConfig, expert: int, dense: int, share: float, speeds: Speeds, requests: int
) -> Band:
    """What `requests` at a time would make with the share `share` of the experts in memory.

    expert, dense: bytes of one expert, and of the other weights that every token goes through.
    Raises ValueError where a speed is not known.
    """
    if speeds.expert_s is None or (speeds.disk is None and config.moe_layers and share < 1):
        raise ValueError("a band needs both speeds")
    layers, k, experts = len(config.moe_layers), config.top_k, max(1, config.experts)
    weights = max(expert, 1) / speeds.expert_s
    steps = max(1, layers) + 1
    group = min(requests, TILE)
    distinct = experts * (1 - (1 - k / experts) ** requests) / requests if layers else 0.0
    alone = layers * k * speeds.expert_s + dense / weights + steps * VISIT_S
    together = layers * distinct * speeds.expert_s + (dense / weights + steps * VISIT_S) / group
    if not layers or share >= 1 or speeds.disk is None:
        fetch = (0.0, 0.0)
    else:
        each = layers * expert / speeds.disk
        fetch = (each * k * (1 - share), each * distinct * (1 - share) ** LOCALITY)
    return Band(1 / (alone + fetch[0]), 1 / max(together, fetch[1]), (alone, together), fetch)


def probe(ckpt: Any, compute: str, slots: int, disk: float | None) -> Speeds:
    """Measures for about half a second. `ckpt` is a Checkpoint, or a BareModel (nothing to read);
    `disk`, bytes/s, is taken as it is where it is given."""
    how = "as given" if disk else "not measured"
    if disk is None and ckpt.config.moe_layers and hasattr(ckpt, "read"):
        disk, how = read_rate(ckpt, slots)
    return Speeds(disk, expert_seconds(ckpt, compute), how)


def read_rate(ckpt: Any, slots: int, seconds: float = PROBE_S) -> tuple[float, str]:
    """(bytes/s with four loads at a time, how they were read), on experts drawn at random."""
    from jax_impl.options import expert_keys
    from jax_impl.slots import SlotPool
    from jax_impl.transfer import Transferred, Transfers
    from reference.files.budget import slot_size

    keys = expert_keys(ckpt)
    random.Random(0).shuffle(keys)
    keys = keys[:256]
    pool = SlotPool(max(1, min(4, slots)), slot_size(ckpt.expert(*key) for key in keys))
    done: SimpleQueue[Transferred] = SimpleQueue()
    transfers = Transfers(pool, lambda key: ckpt.expert(*key), keys, done.put, threads=pool.count)
    try:
        free, issued, nbytes = list(range(pool.count)), 0, 0
        began = time.monotonic()
        while (now := time.monotonic()) - began < seconds or len(free) < pool.count:
            while free and now - began < seconds:
                transfers.start(issued, keys[issued % len(keys)], free.pop())
                issued += 1
            try:
                end = done.get(timeout=10.0)
            except Empty:
                raise CoveyError("the probe's reads did not come back within 10 s") from None
            if end.error:
                raise CoveyError(end.error)
            free.append(end.slot)
            nbytes += end.nbytes
        return nbytes / (time.monotonic() - began), transfers.io
    finally:
        transfers.close()


def expert_seconds(ckpt: Any, compute: str, seconds: float = PROBE_S) -> float | None:
    """Seconds of the kernel for one expert on a tile of rows, the median of many calls on arrays of
    zeros of the expert's own shapes and types; a dense model's feed-forward stands for an expert.
    None where there is no such kernel."""
    import jax
    import jax.numpy as jnp

    from jax_impl.kernels.experts import FeedForward, gated
    from jax_impl.programs import ExpertForm
    from jax_impl.stored import dtype_of

    config: ModelConfig = ckpt.config
    layer = config.layers[config.moe_layers[0] if config.moe_layers else 0]
    try:
        if isinstance(layer.feed_forward, MoeSpec):
            refs = ckpt.expert(config.moe_layers[0], 0)
            roles = tuple(ckpt.expert_roles)
        else:
            roles = ("gate", "up", "down")
            refs = tuple(ckpt.tensor(f"layers.0.{role}") for role in roles)
        handle = tuple(jnp.zeros(r.shape, dtype_of(r.dtype, str(r.file))) for r in refs)
    except (Unsupported, KeyError):
        return None
    if isinstance(layer.feed_forward, MoeSpec):
        form = ExpertForm.of(layer.feed_forward, roles, handle)
        weights: Callable[[Any], FeedForward] = form.weights
    else:
        weights = lambda arrays: FeedForward(*arrays)  # noqa: E731
    spec = layer.feed_forward.activation
    run = jax.jit(lambda x, arrays: gated(compute, spec, x, weights(arrays)))
    x = jnp.zeros((TILE, config.hidden), jnp.float32)
    jax.block_until_ready(run(x, handle))
    took = []
    began = time.monotonic()
    while time.monotonic() - began < seconds or len(took) < 3:
        start = time.perf_counter()
        jax.block_until_ready(run(x, handle))
        took.append(time.perf_counter() - start)
    return sorted(took)[len(took) // 2]
