"""Which JAX devices are which pool, and what both are told about the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_impl.attention_pool.memory_programs import PoolOptions
from jax_impl.attention_pool.model import PooledModel
from jax_impl.attention_pool.pool import MemoryPool
from jax_impl.attention_pool.wire import Wire
from jax_impl.kv import kv_kinds
from jax_impl.stored import dtype_of
from reference.control.attention_partition import PARTITIONS, Partition
from reference.vocab.errors import BadInput, Unsupported


def pick(compute: int, memory: int) -> tuple[list[Any], list[Any]]:
    """Devices for so many replicas (and prefill workers) and memory devices, all different.

    One kind of device for both where there are enough of them, the last ones for memory; else the
    memory pool gets CPU devices. Raises BadInput saying how to have more.
    """
    here = jax.devices()
    if len(here) >= compute + memory:
        return here[:compute], here[len(here) - memory :]
    cpus = jax.devices("cpu")
    if here[0].platform != "cpu" and len(here) >= compute and len(cpus) >= memory:
        return here[:compute], cpus[:memory]
    raise BadInput(
        f"devices: {compute} for compute and {memory} for memory are needed, there are "
        f"{len(here)}; on the CPU set jax_num_cpu_devices to {compute + memory} before jax starts"
    )


def sinks_of(ckpt: Any) -> list[np.ndarray | None]:
    """Each layer's attention sinks, which belong to the operator: float32 [N], or None."""
    out: list[np.ndarray | None] = []
    for i, spec in enumerate(ckpt.config.layers):
        if not spec.attention.sinks:
            out.append(None)
            continue
        ref = ckpt.tensor(f"layers.{i}.sinks")
        kind = dtype_of(ref.dtype, f"layers.{i}.sinks")
        out.append(ckpt.read(ref).view(kind).reshape(ref.shape).astype(np.float32))
    return out


def memory_pool(
    ckpt: Any, devices: Sequence[Any], wire: Wire, partition: Partition, overlap: bool,
    timed: bool, sizes: dict[str, Any], pull_bytes: int = 0,
) -> MemoryPool:  # fmt: skip
    """A pool for a model of these sizes (as JaxModel takes them), `kv_blocks` on each device."""
    kinds = kv_kinds(
        ckpt.config, kv_block=sizes["kv_block"], kv_blocks=sizes["kv_blocks"],
        max_len=sizes["max_len"], tile=sizes["tile"], texts=sizes["texts"],
    )  # fmt: skip
    options = PoolOptions(
        kinds, sizes["kv_block"], sizes["tile"], sizes["compute"], sizes["kv_dtype"],
        overlap=overlap, timed=timed, pull_bytes=pull_bytes,
    )  # fmt: skip
    return MemoryPool.of(devices, ckpt.config, options, sinks_of(ckpt), wire, partition)


@dataclass
class Offloaded:
    """For `JaxEngine.open(path, model=Offloaded(...))`: the engine's scheduler runs one compute
    device, `memory` devices hold all KV (LAMINA-21), with heads or whole requests shared out.

    Requests are admitted by their total. For whole requests a device therefore gets
    (K + (b - 1) m) / b blocks, K all that the engine was told to hold and m those of the longest
    text: where not more than K are promised, the device with most room then has m free (LAMINA-4).
    After opening, `wire` counts what was sent and `pool` what is held where.
    """

    memory: int = 1
    overlap: bool = True
    timed: bool = False
    wire: Wire | None = None
    partition: Partition = "head"

    def __call__(self, ckpt: Any, **sizes: Any) -> PooledModel:
        if self.partition not in PARTITIONS:
            raise Unsupported("partition", repr(self.partition), ", ".join(PARTITIONS))
        sizes["wide"] = 0  # only a saving of calls: the bits are the small tile's
        sizes["texts"] = sizes.get("texts") or sizes["kv_blocks"]
        wire = self.wire = self.wire or Wire()
        compute, memory = pick(1, self.memory)
        mine = dict(sizes)
        if self.partition == "request":
            longest = -(-sizes["max_len"] // sizes["kv_block"])
            mine["kv_blocks"] += (self.memory - 1) * longest
            mine["kv_blocks"] = -(-mine["kv_blocks"] // self.memory)
        pool = memory_pool(ckpt, memory, wire, self.partition, self.overlap, self.timed, mine)
        self.pool = pool
        return PooledModel(ckpt, device=compute[0], pool=pool, wire=wire, **sizes)
