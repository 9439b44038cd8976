"""What a LaminaEngine can be told, and the sizes that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax_impl.attention_pool.expert_slots import check_slots
from jax_impl.kv import KV_DTYPES, KvDtype
from jax_impl.model import Compute
from jax_impl.options import silent
from reference.control.attention_partition import PARTITIONS, Partition
from reference.control.attention_rotation import ORDERS, Order
from reference.control.attention_serving import ServingOptions
from reference.files.checkpoint import Checkpoint
from reference.vocab.errors import BadInput, Unsupported

LEAST = {
    "batches": 1, "max_batch": 1, "chunk": 1, "memory_devices": 1, "kv_tokens": 1, "max_len": 0,
    "kv_block": 1, "tile": 1, "prefill": 0, "pull_bytes": 1, "expert_slots": 0,
}  # fmt: skip
"""The least that each number can be."""


@dataclass(frozen=True)
class LaminaOptions:
    """Every option of `LaminaEngine.open`.

    batches         in flight; one replica fewer (LAMINA-6)     order  rotation | queue
    max_batch       requests of a batch                         chunk  prompt tokens a token
    memory_devices  of the memory pool                          partition  head | request
    kv_tokens       tokens that each memory device holds (head: of its share of the heads)
    max_len         longest prompt + answer in tokens; 0: as much as a device holds
    kv_block, kv_dtype, tile, compute   as in JaxEngine
    prefill         workers that run prompts, on devices of their own; 0: the batches do (LAMINA-12)
    pull_bytes      most bytes of a prompt's KV that a memory device pulls at a time
    expert_slots    routed experts that each replica holds, the others being read when a turn needs
                    them; 0: all of them    rate  most bytes/s of such reads, all together
    overlap         attend over the past while keys and values are made (LAMINA-2)
    timed           wait for every piece of attention, to measure when it ended
    check           judge every message by the protocol as it is sent (LAMINA-1)
    log, keep_log   write the event log to a file; keep it in memory (LAMINA-27)
    ignore_eos, progress, compile_cache as in JaxEngine
    """

    batches: int = 1
    order: Order = "rotation"
    max_batch: int = 8
    chunk: int = 16
    memory_devices: int = 1
    partition: Partition = "head"
    kv_tokens: int = 4096
    max_len: int = 0
    kv_block: int = 64
    kv_dtype: KvDtype = "f32"
    tile: int = 8
    compute: Compute = "f32"
    prefill: int = 0
    pull_bytes: int = 1 << 16
    expert_slots: int = 0
    rate: float | None = None
    overlap: bool = True
    timed: bool = False
    check: bool = False
    log: str | Path | None = None
    keep_log: bool = False
    ignore_eos: bool = False
    progress: Callable[[str], None] = silent
    compile_cache: str | Path | None = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("order", ORDERS), ("partition", PARTITIONS), ("compute", ("f32", "bf16")),
            ("kv_dtype", tuple(KV_DTYPES)),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise Unsupported(name, repr(getattr(self, name)), ", ".join(allowed))
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise BadInput(f"{name}: {value!r}; a whole number, at least {least}, expected")
        if self.rate is not None and not (type(self.rate) in (int, float) and self.rate >= 1):
            raise BadInput(f"rate: {self.rate!r}; a number of bytes/s, at least 1, expected")
        if self.kv_tokens < self.kv_block:
            raise BadInput(f"kv_tokens: {self.kv_tokens}; at least one block of {self.kv_block}")

    @classmethod
    def of(cls, **given: Any) -> LaminaOptions:
        """Options by name. Raises BadInput for a name that there is not."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise BadInput(f"no option {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        return cls(**given)


def sizes_of(ckpt: Checkpoint, o: LaminaOptions) -> tuple[dict[str, Any], ServingOptions]:
    """(sizes as JaxModel takes them, options of control). Raises BadInput for too few
    `expert_slots`."""
    config = ckpt.config
    check_slots(config, o.expert_slots)
    blocks = o.kv_tokens // o.kv_block
    longest = min(config.max_position, o.max_len or blocks * o.kv_block)
    sizes = {
        "rows": o.batches * o.max_batch * o.chunk, "kv_blocks": blocks, "max_len": longest,
        "kv_block": o.kv_block, "texts": o.batches * o.max_batch, "tile": o.tile,
        "compute": o.compute, "kv_dtype": o.kv_dtype,
    }  # fmt: skip
    control = ServingOptions(
        layers=len(config.layers),
        kv_heads=tuple(s.attention.cache_heads for s in config.layers),
        batches=o.batches, order=o.order, max_batch=o.max_batch, chunk=o.chunk,
        devices=o.memory_devices, partition=o.partition,
        blocks=blocks, kv_block=o.kv_block, prefill=o.prefill,
    )  # fmt: skip
    return sizes, control
