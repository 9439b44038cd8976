"""A simple cost model: one channel, one compute unit, both in seconds (SIM-1)."""

from __future__ import annotations

from dataclasses import dataclass

from reference.vocab.actions import Compute


@dataclass(frozen=True)
class CostModel:
    """bytes_per_s, latency_s: the channel moves one transfer after another at this rate and tells
    of each `latency_s` after its last byte; `depth` transfers may be outstanding.
    step_s, row_s, expert_s: a step costs step_s + row_s a token row that goes on to the next router
    or the head + expert_s a distinct expert (its weights are read once for all rows of the step).
    """

    bytes_per_s: float = 1e9
    latency_s: float = 0.0
    depth: int = 2
    step_s: float = 1e-4
    row_s: float = 1e-5
    expert_s: float = 2e-5

    def step(self, action: Compute, rows: int) -> float:
        """Seconds that the step takes."""
        return self.step_s + self.row_s * rows + self.expert_s * len(action.slots)

    def transfer(self, nbytes: int) -> float:
        """Seconds that the channel is taken by a transfer."""
        return nbytes / self.bytes_per_s
