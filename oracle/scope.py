"""What a small world is: options of control, requests, and what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from reference.vocab.options import ControlOptions

if TYPE_CHECKING:
    from oracle.world import Routes


@dataclass(frozen=True)
class Scope:
    """Options of control, requests, and what may go wrong.

    requests      (prompt_len, max_new_tokens) in order of arrival
    initial       how many have arrived before the first ask; the others come at any time
    channels      transfers at a time
    load_faults, step_faults, cancels, drains   how often each may happen, anywhere
    predictions   how often an executor tells what it expects of one of a request's next two visits
    undrained     a failed transfer may be reported while its write can still land
    stops         a token may end the text early
    split         Computed and its results are told one by one, with asks between
    batch         several events may happen before the next ask
    any_policy    not the shipped policy but any legal choice (oracle/any_policy.py); safety only
    suite         ci: explored in every test run; long: by `--scopes long`
    """

    name: str
    why: str
    options: ControlOptions
    requests: tuple[tuple[int, int], ...]
    initial: int = 99
    channels: int = 1
    load_faults: int = 0
    step_faults: int = 0
    cancels: int = 0
    drains: int = 0
    predictions: int = 0
    undrained: bool = False
    stops: bool = False
    split: bool = False
    batch: bool = False
    any_policy: bool = False
    suite: str = "ci"

    @cached_property
    def routes(self) -> Routes:
        """Unions of experts by rows of a chunk."""
        from oracle.world import Routes

        return Routes(self.options.experts, self.options.top_k)

    @cached_property
    def ordinal(self) -> dict[int, int]:
        """Model layer -> its place among the layers with experts."""
        return {layer: i for i, layer in enumerate(self.options.layers)}

    @cached_property
    def last_stage(self) -> int:
        """The stage whose visit ends at the LM head."""
        return len(self.options.layers) - 1

    @cached_property
    def interleaved(self) -> bool:
        """No barrier."""
        return self.options.grouping in ("interleaved", "micro-queues")

    @cached_property
    def lockstep(self) -> bool:
        """There is a barrier."""
        return self.options.grouping.startswith("lockstep")

    @property
    def blocking(self) -> bool:
        """Fetching and computing exclude one another."""
        return self.options.grouping == "lockstep-blocking"

    @cached_property
    def by_task(self) -> bool:
        """A visit may run in parts, whatever its chunk."""
        return (self.options.grouping, self.options.readiness) != ("interleaved", "visit")

    @cached_property
    def lag_bound(self) -> int:
        """max_lag, or four tokens' worth of visits."""
        return self.options.max_lag or 4 * (len(self.options.layers) + 1)

    def prompt_chunks(self, prompt_len: int) -> int:
        """Chunks of a prompt."""
        return -(-prompt_len // self.options.chunk)

    def rows(self, chunk: int, prompt_len: int) -> int:
        """Token rows of a chunk."""
        size = self.options.chunk
        return max(1, min(size, prompt_len - chunk * size))

    def reserved(self, prompt_len: int, max_new: int) -> int:
        """KV tokens of a running request, in whole blocks."""
        block = self.options.kv_block
        return -(-(prompt_len + max_new) // block) * block


def scope(name: str, why: str, shape: tuple[int, int, int, int], requests, **rest) -> Scope:
    """shape: (layers, experts, top_k, slots). Options of control and of the scope in `rest`."""
    layers, experts, top_k, slots = shape
    fields = {k: rest.pop(k) for k in list(rest) if k in Scope.__dataclass_fields__}
    options = ControlOptions(
        layers=tuple(range(layers)), experts=experts, top_k=top_k, slots=slots,
        **{"chunk": 2, "max_rows": 4, "kv_block": 1, "kv_tokens": 64, **rest},
    )  # fmt: skip
    return Scope(name, why, options, tuple(requests), **fields)
