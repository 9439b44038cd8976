"""What an engine can be told, and the sizes that follow from it for one checkpoint."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax_impl.kv import KV_DTYPES, KvDtype, kv_bytes, kv_kinds
from jax_impl.model import Compute, JaxModel
from jax_impl.readers import Reader
from jax_impl.spans import Io
from reference.files.budget import (
    Sizes,
    expert_budget,
    host_tier,
    parse_size,
    round_up,
    slot_size,
    slots_for,
)
from reference.files.checkpoint import Checkpoint
from reference.files.residency import warm_order
from reference.files.safetensors_header import TensorRef
from reference.vocab.config import ModelConfig
from reference.vocab.errors import BadInput, Unsupported
from reference.vocab.ids import ExpertKey
from reference.vocab.options import LEAST, ControlOptions, check_counts, check_prefetch

MAX_LEN_ASSUMED = 4096
"""Tokens of a request for which KV space is planned, where the caller does not say."""

MAX_THREADS = 256
"""Reads at a time: more than any device's queue is deep."""


def silent(text: str) -> None:
    """Progress that nobody wants to see."""


@dataclass(frozen=True)
class EngineOptions:
    """Every option of `Engine.open`, with its default.

    memory        bytes for routed experts: a size, "40%" of them all, "auto", or an int
    host_memory   bytes of a host tier between disk and device (TIER-1): None for none, a size,
                  "60%" of all experts, or an int. `memory` is then for the device alone
    scheduler     which ready visits run together (reference.vocab.options.SCHEDULERS)
    cache         which expert goes when a slot is needed (reference.vocab.options.EVICTIONS)
    prefetch      none | next-gate | activation | layer | token    readiness  visit | expert
    prefetch_experts   how many experts of each visit are guessed (0: as many as a token uses);
                  prefetch_loads  guesses in flight (0: no bound but threads)
    fetch_order   least-progress | first-come | fewest-missing     compute  f32 | bf16
    chunk         prompt tokens a visit
    max_running   requests running at a time;  max_rows  token rows a step
    kv_memory     most bytes for K and V together, where kv_tokens does not say
    kv_tokens     KV capacity in tokens over all running requests; 0 plans for max_running
                  requests of the model's length, at most 4096 tokens each, within kv_memory
    kv_block, kv_dtype   tokens a KV block; what K and V are rounded to
    tile          rows a device call; wide  rows of a larger one for prompts, used only where a
                  probe at the start finds equal bits (0: none; None: 32 for models of 256 MiB
                  and more, where it is worth its compilation)
    threads       loads at a time          io       auto | direct | buffered
    warm          (layer, expert) pairs to read before the first request, the hottest first; the
                  least hot of those that fit are read first, so that they are the first to go
    deadline_s    when a load is overdue   retries  further attempts after a failed load
    bulk_slots, bulk_every, max_lag        as in ControlOptions; they bound what a long prompt
                  takes from those who decode (ENGINE-11)
    ignore_eos    go on to max_new_tokens whatever is sampled
    check         checksum of every expert at load, verified at every use
    log           file for the event log; keep_log also keeps it in memory (`engine.records`)
    progress      called with one line at a time while the engine is opened
    warn          called with one line on what the run goes on without: the event log (LOG-5),
                  guesses (PREDICT-10); None prints it to standard error
    compile_cache directory for compiled code, "auto" for the user's cache, None for none
    reader        where bytes come from (tests, throttling); rate: its bytes/s, if it has one
    model         what makes the model; JaxModel, or one whose attention is elsewhere
    """

    memory: str | int = "auto"
    host_memory: str | int | None = None
    scheduler: str = "interleaved"
    cache: str = "per-layer"
    prefetch: str = "none"
    prefetch_experts: int = 0
    prefetch_loads: int = 1
    readiness: str = "visit"
    fetch_order: str = "least-progress"
    compute: Compute = "f32"
    chunk: int = 64
    max_running: int = 32
    max_rows: int = 64
    kv_memory: str | int = "1GiB"
    kv_tokens: int = 0
    kv_block: int = 64
    kv_dtype: KvDtype = "f32"
    tile: int = 8
    wide: int | None = None
    threads: int = 4
    io: Io = "auto"
    deadline_s: float = 60.0
    retries: int = 2
    warm: Sequence[tuple[int, int]] = ()
    bulk_slots: int = 0
    bulk_every: int = 2
    max_lag: int = 0
    ignore_eos: bool = False
    check: bool = False
    log: str | Path | None = None
    keep_log: bool = False
    progress: Callable[[str], None] = silent
    warn: Callable[[str], None] | None = None
    compile_cache: str | Path | None = "auto"
    reader: Reader | None = None
    rate: float | None = None
    model: Callable[..., JaxModel] = JaxModel

    def __post_init__(self) -> None:
        check_prefetch(self.prefetch, self.prefetch_experts, self.scheduler)
        for name, allowed in (
            ("io", ("auto", "direct", "buffered")),
            ("compute", ("f32", "bf16")),
            ("kv_dtype", tuple(KV_DTYPES)),
        ):
            if getattr(self, name) not in allowed:
                raise Unsupported(name, repr(getattr(self, name)), ", ".join(allowed))
        check_counts(vars(self), LEAST | {"tile": 1, "threads": 1})
        if self.wide is not None:
            check_counts(vars(self), {"wide": 0})
        if self.threads > MAX_THREADS:
            raise BadInput(f"threads: {self.threads}; at most {MAX_THREADS} expected")
        if not 0 < self.deadline_s < math.inf:
            raise BadInput(f"deadline_s: {self.deadline_s}; a positive number expected")

    @classmethod
    def of(cls, **given: Any) -> EngineOptions:
        """Options by name. Raises BadInput for a name that there is not."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise BadInput(f"no option {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        return cls(**given)


WIDE, WIDE_FROM = 32, 256 << 20


def wide_rows(ckpt: Checkpoint, options: EngineOptions) -> int:
    """Rows of the larger tile that a run asks for, 0 for none."""
    if options.wide is not None:
        return options.wide
    large = ckpt.non_expert_bytes + ckpt.experts_bytes >= WIDE_FROM
    return WIDE if large and WIDE % options.tile == 0 else 0


def expert_keys(ckpt: Checkpoint) -> list[ExpertKey]:
    """Every routed expert of the model."""
    config = ckpt.config
    return [ExpertKey(layer, e) for layer in config.moe_layers for e in range(config.experts)]


def plan_sizes(ckpt: Checkpoint, options: EngineOptions) -> tuple[Sizes, int]:
    """(what a run of this checkpoint takes, its KV capacity in tokens); headers only.

    `resident`, `kv` and `rows` are estimates for "auto"; the model's own figures replace them.
    Raises BudgetTooSmall naming the least budget (ENGINE-3), BadInput for a bad size.
    """
    config = ckpt.config
    keys = expert_keys(ckpt)
    slot = slot_size(ckpt.expert(*key) for key in keys)
    kv_tokens = options.kv_tokens // options.kv_block * options.kv_block
    if options.kv_tokens and not kv_tokens:
        raise BadInput(f"kv_tokens: {options.kv_tokens}; at least one block of {options.kv_block}")
    tile = max(options.tile, wide_rows(ckpt, options))
    kv_tokens = kv_tokens or fitting_kv(config, options, tile)
    kv = pool_bytes(config, options, kv_tokens, tile)
    rows = bank_rows(options) * config.hidden * 4 * (2 + config.top_k)
    held = sum(_held_bytes(ckpt.tensor(role)) for role in ckpt.roles)
    host, entries = host_tier(options.host_memory, len(keys), slot)
    budget = expert_budget(options.memory, len(keys), slot, held + kv + rows + entries * slot)
    slots = slots_for(budget, len(keys), slot, config.top_k)
    sizes = Sizes(
        budget, slots, slot, ckpt.expert_bytes(), len(keys), held, kv, rows, 0, host, entries
    )
    return sizes, kv_tokens


def _held_bytes(ref: TensorRef) -> int:
    """Bytes of a resident tensor on the device: float16 and all vectors are widened."""
    widened = ref.dtype == "F16" or (ref.dtype == "BF16" and len(ref.shape) == 1)
    return ref.nbytes * (2 if widened else 1)


def pool_bytes(config: ModelConfig, options: EngineOptions, kv_tokens: int, tile: int) -> int:
    """Bytes of all KV pools that hold kv_tokens tokens (whole blocks) of running requests; `tile`
    is the most rows of a device call."""
    kinds = kv_kinds(
        config,
        kv_block=options.kv_block,
        kv_blocks=kv_tokens // options.kv_block,
        max_len=min(config.max_position, kv_tokens),
        tile=tile,
        texts=options.max_running,
    )
    return kv_bytes(config, kinds, options.kv_block, options.kv_dtype)


def fitting_kv(config: ModelConfig, options: EngineOptions, tile: int) -> int:
    """KV capacity in tokens (whole blocks): what max_running requests of the model's length need,
    bounded by kv_memory but never below one block."""
    limit, size = parse_size(options.kv_memory), options.kv_block
    longest = min(config.max_position, MAX_LEN_ASSUMED)
    blocks = range(1, options.max_running * -(-longest // size) + 1)
    over = bisect_right(blocks, limit, key=lambda n: pool_bytes(config, options, n * size, tile))
    return max(1, over) * size


def bank_rows(options: EngineOptions) -> int:
    """Token rows that can be in flight: one chunk of every running request. Rounded up, so that
    options that differ a little share their executables."""
    return round_up(options.max_running * options.chunk, 64)


def control_options(
    ckpt: Checkpoint, options: EngineOptions, sizes: Sizes, kv_tokens: int
) -> ControlOptions:
    """The scheduler's share of the options."""
    config = ckpt.config
    return ControlOptions(
        layers=config.moe_layers,
        experts=config.experts,
        top_k=config.top_k,
        slots=sizes.slots,
        chunk=options.chunk,
        grouping=options.scheduler,  # type: ignore[arg-type]
        readiness=options.readiness,  # type: ignore[arg-type]
        fetch_order=options.fetch_order,  # type: ignore[arg-type]
        eviction=options.cache,  # type: ignore[arg-type]
        bulk_slots=options.bulk_slots,
        bulk_every=options.bulk_every,
        max_lag=options.max_lag,
        max_running=options.max_running,
        max_rows=max(options.max_rows, options.chunk),
        kv_tokens=kv_tokens,
        kv_block=options.kv_block,
        retries=options.retries,
        prefetch=0 if options.prefetch == "none" else options.prefetch_experts or config.top_k,
        prefetch_loads=options.prefetch_loads,
        warm=warm_order(options.warm, sizes.slots),
    )
