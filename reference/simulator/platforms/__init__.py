"""Machines as data: the TOML files beside this one, each figure with its source (SIM-6).

[channel]   where experts come from: bytes_per_s of large reads at full queue, latency_s of one
            read, depth and block_bytes of the reads that the device serves at once
[memory]    of the compute unit: bytes_per_s, capacity_bytes, share that kernels reach
[compute]   flops_per_s of dense bf16 products, share that kernels reach
[overhead]  seconds of the engine and of launching, a step, a layer, a row, a distinct expert
[host]      of a discrete GPU: bytes_per_s and flops_per_s of the processor beside it
[sources]   one line for each figure, beginning with nominal (a data sheet), measured (and by
            whom) or assumed (and why)
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from reference.files.strict_json import show
from reference.vocab.errors import BadInput

KINDS = ("nominal", "measured", "assumed")
LIMITS: dict[str, tuple[float, float]] = {
    "bytes_per_s": (1.0, 1e18), "flops_per_s": (1.0, 1e24), "capacity_bytes": (1.0, 1e18),
    "share": (1e-6, 1.0), "depth": (1, 1 << 16), "block_bytes": (1, 1 << 40),
}  # fmt: skip
"""What a figure of a machine can be; seconds: 0 to 1000."""
WHOLE = ("depth", "block_bytes")


@dataclass(frozen=True)
class Channel:
    """Where experts come from."""

    bytes_per_s: float
    latency_s: float
    depth: int
    block_bytes: int

    def alone(self, nbytes: int, block_bytes: int, queue: int) -> float:
        """Seconds of one transfer of `nbytes` alone on the channel, as requests of at most
        `block_bytes`, `queue` of them at a time (0: as many as the device takes) (SIM-8).

        By Little's law requests pass at the rate of what is in flight over one request's time.
        """
        block = min(block_bytes, self.block_bytes, nbytes)
        at_once = min(queue or self.depth, self.depth, -(-nbytes // block))
        one = self.latency_s + block / self.bytes_per_s
        rate = min(self.bytes_per_s, at_once * block / one)
        return one + (nbytes - block) / rate


@dataclass(frozen=True)
class Memory:
    """Of the compute unit. `share`: what kernels reach of the nominal rate."""

    bytes_per_s: float
    capacity_bytes: float
    share: float


@dataclass(frozen=True)
class Arithmetic:
    """Dense products in bf16 (or the nearest type that the machine has)."""

    flops_per_s: float
    share: float


@dataclass(frozen=True)
class Overhead:
    """Seconds that nothing hides, a step, a layer passed, a token row, a distinct expert."""

    step_s: float
    layer_s: float
    row_s: float
    expert_s: float


@dataclass(frozen=True)
class Host:
    """The processor beside a discrete GPU, whose memory holds the experts."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Platform:
    """A machine. `sources[figure]` says where each figure comes from."""

    name: str
    title: str
    channel: Channel
    memory: Memory
    compute: Arithmetic
    overhead: Overhead
    host: Host | None = None
    sources: dict[str, str] = field(default_factory=dict)


_PARTS: dict[str, type] = {
    "channel": Channel, "memory": Memory, "compute": Arithmetic, "overhead": Overhead, "host": Host,
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The platforms that there are files of."""
    found = files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in found if f.name.endswith(".toml")))


@cache
def load(name: str) -> Platform:
    """The platform of a name. Raises BadInput for an unknown one."""
    if name not in names():
        raise BadInput(f"platform: unknown {name!r}; there are: {', '.join(names())}")
    text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse(name, text)


def parse(name: str, text: str) -> Platform:
    """A platform of TOML text. Raises BadInput naming the field: a figure that is missing, no
    number within its limits, unknown, or without a source."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"platform {name}: {error}") from None
    title, sources = raw.pop("title", None), raw.pop("sources", None)
    if not isinstance(title, str):
        raise BadInput(f"platform {name}: title: {title!r}; a text expected")
    if not isinstance(sources, dict):
        raise BadInput(f"platform {name}: sources: a table expected, one line a figure")
    if unknown := sorted(set(raw) - set(_PARTS)):
        raise BadInput(f"platform {name}: unknown {', '.join(unknown)}; there are: "
                       f"{', '.join(_PARTS)}")  # fmt: skip
    parts: dict[str, Any] = {}
    told = set()
    for part, kind in _PARTS.items():
        if part == "host" and part not in raw:
            continue
        parts[part] = _part(name, part, kind, raw.get(part), sources)
        told |= {f"{part}.{f.name}" for f in fields(kind)}
    if extra := sorted(set(sources) - told):
        raise BadInput(f"platform {name}: sources: {', '.join(extra)} names no figure")
    return Platform(name, title, **parts, sources=sources)


def _part(name: str, part: str, kind: type, table: Any, sources: dict[str, Any]) -> Any:
    wanted = {f.name for f in fields(kind)}
    given = set(table) if isinstance(table, dict) else set()
    if given != wanted:
        raise BadInput(f"platform {name}: {part}: {', '.join(sorted(given)) or 'nothing'}; "
                       f"expected {', '.join(sorted(wanted))}")  # fmt: skip
    for key, value in table.items():
        least, most = LIMITS.get(key, (0.0, 1e3))
        number = type(value) is int or (type(value) is float and key not in WHOLE)
        if not number or not least <= value <= most:  # NaN is not
            what = "a whole number" if key in WHOLE else "a number"
            raise BadInput(f"platform {name}: {part}.{key}: {show(repr(value), 40)}; {what} from "
                           f"{least:g} to {most:g} expected")  # fmt: skip
        source = sources.get(f"{part}.{key}")
        if not isinstance(source, str) or source.split(":")[0] not in KINDS:
            raise BadInput(f"platform {name}: sources: {part}.{key}: {source!r}; a line that "
                           f"begins with {', '.join(KINDS)} expected")  # fmt: skip
    return kind(**table)
