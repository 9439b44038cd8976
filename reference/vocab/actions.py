"""What the control plane asks of an executor, in the order in which it is to be obeyed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reference.vocab.ids import ExpertKey, Part

Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Admit:
    """The request starts: its KV space (prompt + max_new_tokens) is reserved (ADMIT-2)."""

    request: int


@dataclass(frozen=True, slots=True)
class Load:
    """Read expert `key` into `slot`; whatever the slot held is gone. `guess` marks a prefetch."""

    ticket: int
    key: ExpertKey
    slot: int
    guess: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the parts as one group. All their experts are resident in the slots of this moment.

    `layer` is that of every part's visit. `slots` pairs each expert used with the slot to read,
    ascending by expert.
    """

    step: int
    layer: int
    parts: tuple[Part, ...]
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The terminal action of an admitted or queued request; its KV space is free again."""

    request: int
    reason: Reason
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """The terminal action of a request that was never accepted."""

    request: int
    reason: str


Action = Admit | Load | Compute | Finish | Reject
