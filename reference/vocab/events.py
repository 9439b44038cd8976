"""What an executor tells the control plane. Plain data: no times, no arrays (LOG-2).

After `Computed(step)` the executor reports, for every part of the step that was `last`, exactly
one of: `Routed` (the next router has spoken), `Sampled` (the LM head was reached by the chunk
that ends the text so far), or nothing (a prompt chunk that is not the final one ended).
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.vocab.ids import Visit


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request of `prompt_len` tokens that may generate up to `max_new_tokens` (0: score only)."""

    request: int
    prompt_len: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Routed:
    """The router before `visit` chose `experts`: one tuple of expert ids a token, in rank order."""

    visit: Visit
    experts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Predicted:
    """A guess of what `visit` will need: (expert, score) pairs, the likeliest first."""

    visit: Visit
    scores: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The transfer `ticket` has written its slot and will not touch it again.

    `ns`: nanoseconds by which it made the channel busier; 0 where nobody measured.
    """

    ticket: int
    ns: int = 0


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The transfer `ticket` failed. `drained` is False while its write may still land (CACHE-9)."""

    ticket: int
    error: str
    drained: bool = True


@dataclass(frozen=True, slots=True)
class Computed:
    """Step `step` is done: everything that read its slots is ready (SCHED-9).

    `ns`: nanoseconds that it took; 0 where nobody measured.
    """

    step: int
    ns: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request got its next token (or none, when it only scores); `stop` ends the request."""

    request: int
    token: int | None
    stop: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Step `step` failed; its slots are no longer read. Every request in it fails.

    `requests` narrows the blame: when it is not empty only these fail and the rest of the step
    counts as computed (a NaN router score concerns one request).
    """

    step: int
    error: str
    requests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller gave up on a request. Unknown or finished requests are ignored."""

    request: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, refuse what waits and what comes."""


Event = (
    Arrived
    | Routed
    | Predicted
    | Loaded
    | LoadFailed
    | Computed
    | Sampled
    | Failed
    | Cancelled
    | Drain
)
