"""What is known of a load: while it is in flight, when it has ended, and of all together."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jax_impl.host_stage import Lease
from reference.vocab.ids import ExpertKey


@dataclass(frozen=True, slots=True)
class Transferred:
    """The end of one load, or the news that it is overdue.

    error    None when the slot holds the expert, else one line
    drained  False: overdue, the slot may still be written; another Transferred will follow
    handle   the expert's arrays (empty after an error)
    sum      CRC-32 of the tensors in the slot, when asked for
    source   "disk", or "host" when nothing had to be read
    """

    ticket: int
    key: ExpertKey
    slot: int
    nbytes: int
    seconds: float
    error: str | None = None
    drained: bool = True
    handle: tuple[jax.Array, ...] = ()
    sum: int | None = None
    source: str = "disk"

    @property
    def disk_bytes(self) -> int:
        """Bytes of the expert that were read for it."""
        return self.nbytes if self.source == "disk" else 0


@dataclass(slots=True)
class Job:
    """A load in flight. `started`: seconds of the clock; `lease`: its use of the host tier."""

    ticket: int
    key: ExpertKey
    slot: int
    started: float
    overdue: bool = False
    lease: Lease | None = None


@dataclass(slots=True)
class ChannelStats:
    """What the channel did so far. busy_s: time with at least one load in flight."""

    loads: int = 0
    failed: int = 0
    overdue: int = 0
    bytes: int = 0
    busy_s: float = 0.0
