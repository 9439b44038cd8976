"""How a token is to be chosen from a row of logits, and what is told about the choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reference.vocab.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settled options of one request's draws (SAMPLE-2 to SAMPLE-9).

    temperature          0 is greedy
    top_k, top_p, min_p  what may be drawn: 0, 1 and 0 leave all
    repetition_penalty   divides or multiplies logits of tokens seen in prompt or answer; 1: none
    presence_penalty     subtracted from logits of tokens seen in the answer
    frequency_penalty    the same, once for each time
    logprobs             how many of the likeliest tokens are told with each one; None: nothing is
    seed                 of the draws

    Raises BadInput for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for good, said, right in (
            (0 <= self.temperature < math.inf, f"temperature {self.temperature}", "0 or more"),
            (self.top_k >= 0, f"top_k {self.top_k}", "0 or more"),
            (0 < self.top_p <= 1, f"top_p {self.top_p}", "above 0, up to 1"),
            (0 <= self.min_p <= 1, f"min_p {self.min_p}", "from 0 to 1"),
            (0 < self.repetition_penalty < math.inf,
             f"repetition_penalty {self.repetition_penalty}", "above 0"),
            (math.isfinite(self.presence_penalty),
             f"presence_penalty {self.presence_penalty}", "a finite number"),
            (math.isfinite(self.frequency_penalty),
             f"frequency_penalty {self.frequency_penalty}", "a finite number"),
            (self.logprobs is None or self.logprobs >= 0,
             f"logprobs {self.logprobs}", "0 or more, or none"),
        ):  # fmt: skip
            if not good:
                raise BadInput(f"sampling: {said}; right would be {right}")

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities in the model's own distribution (SAMPLE-10).

    chosen   that of the token that was taken
    top      (token, logarithm) of the likeliest, best first
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, with its logarithms where they were asked for."""

    token: int
    logprobs: Logprobs | None = None
