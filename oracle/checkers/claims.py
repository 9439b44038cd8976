"""What a head's own options leave unjudged: a scheduler of another kind promises less (LOG-8)."""

from __future__ import annotations

from collections.abc import Mapping

from oracle.checkers.records import Head

WHOLE: Mapping[str, tuple[str, ...]] = {
    "L1": ("grouping",),
    "L3": ("grouping", "readiness", "max_lag", "max_running", "kv_tokens", "retries"),
    "L4": ("grouping", "max_lag"),
    "L5": ("kv_tokens",),
}
"""The options without which a property says nothing. L3 and L4 are what our groupings
promise; L1 is not asked of a scheduler that may have a clock."""

PARTS: tuple[tuple[str, str, str], ...] = (
    ("S2", "order of admission", "grouping"),
    ("S2", "why it rejects", "kv_tokens"),
    ("S2, S15", "failures that end a request", "retries"),
    ("S11", "KV tokens held", "kv_tokens"),
    ("S11", "requests that run", "max_running"),
    ("S11", "rows of a step", "max_rows"),
    ("S14", "KV tokens of Admit", "kv_block"),
)
"""(property, what of it is not judged, without which option); the rest of it is judged."""


def unjudged(head: Head) -> dict[str, tuple[str, ...]]:
    """The properties that are not judged, each with the options that it lacks."""
    lacking = {name: tuple(o for o in needs if o in head.absent) for name, needs in WHOLE.items()}
    return {name: options for name, options in lacking.items() if options}


def unjudged_parts(head: Head) -> list[str]:
    """The same for parts of properties, as text."""
    return [f"{name} {what} ({option})" for name, what, option in PARTS if option in head.absent]
