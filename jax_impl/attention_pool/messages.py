"""What is said between threads: to memory devices and back, and to the engine's loop."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from jax_impl.attention_pool.puller import PromptKV
from reference.handle import RequestHandle


@dataclass(frozen=True)
class Ask:
    """Queries of one tile at one layer for one device.

    q    [rows, G', M, D];  at  int32 [rows, 1 + W]: position, then KV block numbers
    alone  no row needs a position that another row of this tile brings
    sent   when it was sent, on the monotonic clock
    more   another tile of the same turn follows
    """

    tile: int
    layer: int
    q: np.ndarray
    at: np.ndarray
    alone: bool
    sent: float = 0.0
    more: bool = False


@dataclass(frozen=True)
class Tell:
    """The tile's own keys [rows, G', D] and values [rows, G', Dv] (None: they are in the keys).

    sent  when it was sent, on the monotonic clock
    """

    tile: int
    layer: int
    k: np.ndarray
    v: np.ndarray | None
    sent: float


@dataclass(frozen=True)
class Answer:
    """Attended values [rows, G', M, Dv], or what went wrong."""

    tile: int
    layer: int
    device: int
    y: np.ndarray | None
    error: BaseException | None = None


@dataclass(frozen=True)
class Void:
    """What this tile is about is begun again: nothing more of it comes."""

    tile: int


@dataclass(frozen=True)
class Offer:
    """A prefill worker has a layer's keys and values of a prompt; the device pulls its heads of it
    into `blocks`, which the request holds there. attempt: a loss makes it be offered again."""

    request: int
    layer: int
    kv: PromptKV
    blocks: tuple[int, ...]
    attempt: int


@dataclass(frozen=True)
class Drop:
    """Nothing more of the request's prompt is to be pulled."""

    request: int


@dataclass(frozen=True)
class Pulled:
    """A memory device has all of a prompt's keys and values that it keeps, or has failed; of the
    attempt with which they were offered (-1: no matter which)."""

    request: int
    device: int
    attempt: int
    error: BaseException | None = None


@dataclass(frozen=True)
class Submit:
    """Requests that arrive together."""

    handles: tuple[RequestHandle, ...]


@dataclass(frozen=True)
class Cancel:
    """The caller gave up."""

    request: int


@dataclass(frozen=True)
class Lost:
    """A replica ("replica"), a memory device ("memory") or a prefill worker ("prefill") is gone
    and replaced by an empty one."""

    kind: str
    number: int
    done: threading.Event


@dataclass(frozen=True)
class Stop:
    """End, at the latest at `by`."""

    by: float
