"""Under which settings `covey verify` runs a model: a plan that covers, and a way to name one.

A setting is what may not matter: the budget, the scheduler, readiness, eviction, what is guessed
ahead, the chunks of a prompt, and the company in which requests come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from reference.vocab.errors import BadInput
from reference.vocab.options import (
    EVICTIONS,
    PREFETCHERS,
    READINESS,
    SCHEDULERS,
    Eviction,
    Grouping,
    Readiness,
)

COMPANIES: dict[str, str] = {
    "alone": "one request at a time",
    "together": "all at once, in order",
    "reversed": "all at once, the last first",
    "staggered": "each when the one before has its first token",
    "halves": "every other one, then the rest",
    "cancelled": "among others that are cancelled at their second token",
    "rescored": "prompt and generated tokens together, as given texts",
}
CHUNKS = (16, 5, 64)
"""Prompt tokens a visit: the first is that of the requests alone."""


@dataclass(frozen=True)
class Setting:
    """`memory` in bytes; the other fields as the flags of `covey run`, and a key of COMPANIES."""

    memory: int
    scheduler: Grouping = "interleaved"
    readiness: Readiness = "visit"
    cache: Eviction = "per-layer"
    prefetch: str = "none"
    chunk: int = CHUNKS[0]
    company: str = "alone"

    def options(self) -> dict[str, Any]:
        """The engine's share; settings of equal options can use one engine."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        del given["company"]
        return given

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


def parse(text: str) -> Setting:
    """A setting from what `str` gives; fields left out keep their defaults, memory must be there.

    Raises BadInput naming the field.
    """
    given: dict[str, Any] = {}
    allowed = {"scheduler": get_args(Grouping), "readiness": get_args(Readiness),
               "cache": get_args(Eviction), "prefetch": PREFETCHERS, "company": tuple(COMPANIES)}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if not equals or name in given or name not in {f.name for f in fields(Setting)}:
            raise BadInput(f"--only: {item!r} is not one of the fields of a setting")
        if name in allowed:
            if value not in allowed[name]:
                raise BadInput(f"--only: {name} is {value!r}; {', '.join(allowed[name])} expected")
            given[name] = value
        else:
            if not value.isascii() or not value.isdigit() or not int(value):
                raise BadInput(f"--only: {name} is {value!r}; a positive number expected")
            given[name] = int(value)
    if "memory" not in given:
        raise BadInput("--only: memory is missing (bytes)")
    return Setting(**given)


def budgets(slots: int, top_k: int, slot: int) -> list[int]:
    """Bytes from the least budget that runs up to `slots` slots; one value for a dense model."""
    if not slots:
        return [1]
    more = slots - top_k
    counts = {top_k, top_k + min(1, more), top_k + more // 4, top_k + more // 2, slots}
    return [n * slot for n in sorted(counts)]


def plan(memories: Sequence[int], rounds: int) -> list[Setting]:
    """`rounds` times an engine for each scheduler with each readiness, in two companies each.

    Every scheduler meets the least budget in each round; the other budgets, the evictions,
    predictors (none where nothing is read ahead), chunks and companies come in turn, paired
    differently in the next round.
    """
    companies = itertools.cycle([c for c in COMPANIES if c not in ("alone", "rescored")])
    chunks = itertools.cycle(CHUNKS)
    caches = itertools.cycle(EVICTIONS)
    predictors = itertools.cycle(PREFETCHERS)
    others = itertools.cycle(memories[1:] or memories)
    settings = []
    for turn in range(rounds):
        for scheduler, readiness in itertools.product(SCHEDULERS, READINESS):
            least = (readiness == "visit") == (turn % 2 == 0)
            ahead = "none" if scheduler == "lockstep-blocking" else next(predictors)
            one = Setting(memories[0] if least else next(others), scheduler, readiness,
                          next(caches), ahead, next(chunks), next(companies))
            settings += [one, replace(one, company=next(companies))]
        next(caches)
        next(chunks)
    return settings
