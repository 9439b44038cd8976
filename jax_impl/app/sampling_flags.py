"""The flags that say how tokens are chosen, and whose word counts (FILE-14).

A request's own field beats the flag, the flag beats the model's generation_config.json, and that
beats the default (greedy, no filter, no penalty, seed 0).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference.files.generation import sampling_defaults
from reference.files.requests import MAX_LOGPROBS, MAX_SEED, MAX_TOKENS, POSITIVE, RANGES

MEANINGS = {
    "temperature": "0 is greedy",
    "top_p": "the likeliest tokens with this share of the mass",
    "top_k": "so many of the likeliest tokens; 0: all",
    "min_p": "tokens at least this likely, beside the likeliest",
    "repetition_penalty": "divides logits of tokens seen in prompt or answer; 1: none",
    "presence_penalty": "subtracted for tokens seen in the answer",
    "frequency_penalty": "the same, once for each time",
    "logprobs": "tell so many of the likeliest with each token (--json)",
    "seed": "of the draws",
}
INTEGERS = {"top_k": MAX_TOKENS, "logprobs": MAX_LOGPROBS, "seed": MAX_SEED}


def flag_of(name: str) -> str:
    """'top_p' -> '--top-p'."""
    return "--" + name.replace("_", "-")


def arguments(parser: argparse.ArgumentParser, *without: str) -> None:
    """Adds a flag for each option of a draw but those in `without`."""
    group = parser.add_argument_group(
        "choosing tokens",
        "for requests that do not say; without a flag, as the model's generation_config.json says",
    )
    for name, meaning in MEANINGS.items():
        if name not in without:
            group.add_argument(
                flag_of(name), type=_number(name), metavar="N" if name in INTEGERS else "X",
                help=meaning)


def _number(name: str) -> Callable[[str], float]:
    """argparse type: what a request file may have for this field."""

    def number(word: str) -> float:
        if name in INTEGERS:
            high = INTEGERS[name]
            if not word.isascii() or not word.isdigit() or int(word) > high:
                raise argparse.ArgumentTypeError(
                    f"invalid value {word!r}; an integer from 0 to {high} expected")
            return int(word)
        low, high = RANGES[name]
        try:
            value = float(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid number {word!r}") from None
        if not low <= value <= high or (name in POSITIVE and value == 0):
            above = "above 0, up to" if name in POSITIVE else f"from {low:g} to"
            raise argparse.ArgumentTypeError(f"{word}; a number {above} {high:g} expected")
        return value

    return number


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that flags say, as fields of a request."""
    said = {name: getattr(args, name, None) for name in MEANINGS}
    return {name: value for name, value in said.items() if value is not None}


def defaults(args: argparse.Namespace, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What flags and what the model say, for `Request.with_defaults` (FILE-14)."""
    return given(args), sampling_defaults(model)
