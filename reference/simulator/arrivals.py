"""Requests as real traces have them: when they come, how long they are (SIM-11)."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """A request: seconds after the first, prompt tokens, tokens to generate."""

    at_s: float
    prompt_len: int
    new_tokens: int
