"""The named small worlds that are explored whole, and what each is there to show."""

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
    undrained     a failed transfer may be reported while its write can still land
    stops         a token may end the text early
    split         Computed and its results are told one by one, with asks between
    batch         several events may happen before the next ask
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
    undrained: bool = False
    stops: bool = False
    split: bool = False
    batch: bool = False
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
        return self.options.grouping == "interleaved"

    @cached_property
    def blocking(self) -> bool:
        """Fetching and computing exclude one another."""
        return self.options.grouping == "lockstep-blocking"

    @cached_property
    def by_task(self) -> bool:
        """A visit may run in parts, whatever its chunk."""
        return not self.interleaved or self.options.readiness == "expert"

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


def _scope(name: str, why: str, shape: tuple[int, int, int, int], requests, **rest) -> Scope:
    """shape: (layers, experts, top_k, slots). Options of control and of the scope in `rest`."""
    layers, experts, top_k, slots = shape
    fields = {k: rest.pop(k) for k in list(rest) if k in Scope.__dataclass_fields__}
    options = ControlOptions(
        layers=tuple(range(layers)), experts=experts, top_k=top_k, slots=slots,
        **{"chunk": 2, "max_rows": 4, "kv_block": 1, "kv_tokens": 64, **rest},
    )  # fmt: skip
    return Scope(name, why, options, tuple(requests), **fields)


_PAIR = [(1, 1), (1, 1)]
_TWO = [(1, 2), (1, 1)]

SCOPES: dict[str, Scope] = {
    s.name: s
    for s in (
        # k = 1
        _scope(
            "thrash-k1", "one slot for two requests: a load must be used before it goes",
            (2, 2, 1, 1), [(1, 2), (1, 2)],
        ),
        _scope(
            "faults-k1", "3 requests x 2 layers x 2 tokens x 3 experts x 2 slots; a load fails, "
            "one gives up", (2, 3, 1, 2), [(1, 2), (1, 2), (1, 2)],
            load_faults=1, undrained=True, cancels=1, suite="long",
        ),
        # k = 2: k, k + 1 and k + 2 slots
        _scope("visit-k2-s2", "claims with no slot to spare", (2, 3, 2, 2), _TWO),
        _scope("visit-k2-s3", "claims with one slot to spare", (2, 3, 2, 3), _TWO),
        _scope("visit-k2-s4", "claims with two slots to spare", (2, 4, 2, 4), _TWO),
        _scope("expert-k2-s2", "tasks", (2, 3, 2, 2), _TWO, readiness="expert"),
        _scope("expert-k2-s3", "tasks", (2, 3, 2, 3), _TWO, readiness="expert"),
        _scope("lockstep-k2-s3", "tasks", (2, 3, 2, 3), _TWO, grouping="lockstep"),
        _scope("blocking-k2-s2", "tasks", (2, 3, 2, 2), _TWO, grouping="lockstep-blocking"),
        _scope(
            "bulk-k2-s3", "a prompt that needs more experts than there are slots, beside decoding",
            (2, 4, 2, 3), [(3, 1), (1, 2)],
        ),
        _scope(
            "three-k2-s4", "three visits contend: claims wait for claims",
            (1, 4, 2, 4), [(1, 2), (1, 2), (1, 1)], suite="long",
        ),
        _scope(
            "arrivals-k1", "requests come while others run", (2, 2, 1, 2), [(1, 2), (1, 1), (1, 1)],
            initial=1,
        ),
        _scope(
            "kv-k1", "room for one of three at a time, one can never fit",
            (1, 2, 1, 1), [(1, 1), (2, 1), (1, 2), (9, 9)], kv_tokens=4, max_running=2,
        ),
        _scope(
            "lost-k1", "an expert that cannot be read",
            (1, 2, 1, 1), [(1, 1), (1, 1)], retries=1, load_faults=3, undrained=True,
        ),
        _scope(
            "failed-k2", "steps fail, for all of their requests or for one",
            (1, 3, 2, 3), [(1, 1), (1, 2)], step_faults=2, stops=True,
        ),
        _scope(
            "cancel-k2", "cancels and a failed load while claims wait",
            (2, 3, 2, 3), [(1, 1), (1, 1)], load_faults=1, cancels=1, batch=True,
        ),
        _scope(
            "drain-k1", "drain and cancel at every point, also while results are owed",
            (2, 2, 1, 1), [(1, 1), (1, 1), (1, 1)], initial=1, max_running=2, drains=1, cancels=1,
            split=True,
        ),
    )
}  # fmt: skip
