"""One small world for every shipped policy, worlds for any legal one, and worlds of guesses."""

from __future__ import annotations

from itertools import cycle, product

from oracle.scope import Scope, scope
from reference.vocab.options import EVICTIONS, FETCH_ORDERS, READINESS, SCHEDULERS


def _policies() -> list[Scope]:
    """Every grouping with every fetch order and readiness that means something there; and every
    eviction under each grouping."""
    out = []
    every = dict.fromkeys((g, o, EVICTIONS[0], r) for g in SCHEDULERS for o, r in _served(g))
    every |= dict.fromkeys((g, *s) for g in SCHEDULERS for s in _evicting(g))
    for grouping, order, eviction, ready in every:
        base = eviction == EVICTIONS[0] or (grouping, ready) == ("interleaved", "visit")
        by_task = (grouping, ready) not in (("interleaved", "visit"), ("lockstep", "visit"))
        name = f"policy-{grouping}-{order}-{eviction}-{ready}"
        out.append(
            scope(
                name, "a shipped policy, every property",
                (2, 3, 2, 3), ((1, 2 if base else 1), (1, 1)), grouping=grouping,
                fetch_order=order, eviction=eviction, readiness=ready, load_faults=1,
                cancels=int(not by_task and eviction in ("per-layer", "global", "least-stale")),
                initial=1,
            )
        )  # fmt: skip
    return out


def _served(grouping: str) -> list[tuple[str, str]]:
    """(fetch order, readiness): where requests wait for one another, reads have one order, and only
    `interleaved` has visits that wait whole."""
    if grouping == "interleaved":
        return list(product(FETCH_ORDERS, READINESS))
    if grouping == "micro-queues":
        return [(order, READINESS[0]) for order in FETCH_ORDERS]
    return [(FETCH_ORDERS[0], READINESS[0])]


def _evicting(grouping: str) -> list[tuple[str, str, str]]:
    """(fetch order, eviction, readiness)."""
    ready = READINESS if grouping == "interleaved" else READINESS[:1]
    return [(FETCH_ORDERS[0], eviction, r) for eviction in EVICTIONS for r in ready]


_ANY = (
    scope(
        "any-k1", "two layers in one slot, a failed load whose write lands late, a cancel",
        (2, 2, 1, 1), ((1, 1), (1, 1)), load_faults=1, undrained=True, cancels=1,
        any_policy=True,
    ),
    scope(
        "any-k1-c2", "two channels, a failed load, a failed step, a cancel",
        (1, 2, 1, 2), ((1, 1), (1, 1)), channels=2, load_faults=1, undrained=True, cancels=1,
        step_faults=1, any_policy=True,
    ),
    scope(
        "any-k2", "parts of visits in any split, no slot to spare, a failed load",
        (1, 3, 2, 2), ((1, 1), (1, 1)), load_faults=1, undrained=True, any_policy=True,
    ),
    scope(
        "any-k2-s3", "arrivals, a cancel and a drain anywhere",
        (1, 3, 2, 3), ((1, 1), (1, 1)), cancels=1, drains=1, initial=1, any_policy=True,
    ),
    scope(
        "any-bulk", "a prompt of two chunks and a cancel",
        (1, 3, 1, 2), ((3, 1), (1, 1)), cancels=1, any_policy=True,
    ),
    scope(
        "any-split", "results told one by one, stops, a cancel",
        (1, 2, 1, 2), ((1, 2), (1, 1)), split=True, cancels=1, stops=True, any_policy=True,
    ),
    scope(
        "any-three", "three requests, two layers, two slots, a failed load and a cancel",
        (2, 2, 1, 2), ((1, 1), (1, 1), (1, 1)), load_faults=1, undrained=True, cancels=1,
        any_policy=True,
    ),
)  # fmt: skip

_NAMED = (
    scope(
        "warm-k1", "experts read before anybody asks: one fails, a drain, requests at any time",
        (2, 2, 1, 3), ((1, 2), (1, 1)), warm=((1, 1), (0, 1), (0, 0)), initial=0, load_faults=1,
        undrained=True, drains=1,
    ),
    # What routers may be expected to say, told in every order, right and wrong.
    scope(
        "guess-k1", "two layers in two slots, one expert expected at a time, two channels",
        (2, 2, 1, 2), ((1, 2), (1, 1)), prefetch=1, predictions=2, initial=1, channels=2,
        prefetch_loads=0,
    ),
    scope(
        "guess-k2-s3", "guesses beside claims; a load fails and its write may land late",
        (1, 3, 2, 3), ((1, 2), (1, 1)), prefetch=2, predictions=1, load_faults=1,
        undrained=True,
    ),
    scope(
        "guess-k2-c2", "guesses over two channels, one of them in flight at most",
        (2, 3, 2, 4), ((1, 2),), prefetch=1, predictions=2, load_faults=1, channels=2,
        prefetch_loads=1, cancels=1,
    ),
    scope(
        "guess-expert-k2", "guesses beside tasks; a cancel and a drain",
        (1, 3, 2, 2), ((1, 2), (1, 1)), prefetch=1, predictions=1, readiness="expert",
        cancels=1, drains=1, initial=1,
    ),
    scope(
        "guess-lockstep-k2", "reading ahead of the barrier, with a cancel",
        (2, 3, 2, 4), ((1, 2), (1, 1)), prefetch=1, predictions=1, grouping="lockstep",
        cancels=1,
    ),
    scope(
        "guess-balanced-k2", "guesses where requests of equal progress go together",
        (1, 3, 2, 3), ((1, 2), (1, 1)), prefetch=1, predictions=1, grouping="balanced",
        cancels=1,
    ),
    # The other groupings: prompts in waves, and what may go wrong.
    scope(
        "balanced-bulk-k2", "a prompt in waves beside a decoding request, both of one class",
        (1, 4, 2, 3), ((3, 1), (1, 2)), grouping="balanced", cancels=1, load_faults=1,
    ),
    scope(
        "balanced-faults-k1", "three requests, a failed step, results told one by one",
        (2, 2, 1, 2), ((1, 1), (1, 1), (1, 1)), grouping="balanced", step_faults=1, split=True,
        initial=2,
    ),
    scope(
        "micro-bulk-k2", "a prompt in waves beside a decoding request, tasks by queue",
        (1, 4, 2, 2), ((3, 1), (1, 2)), grouping="micro-queues", cancels=1,
    ),
    scope(
        "micro-three-k1", "three requests over three layers, a cancel",
        (3, 2, 1, 2), ((1, 2), (1, 1), (1, 1)), grouping="micro-queues", cancels=1, initial=1,
    ),
)  # fmt: skip

_SMALL = tuple(
    scope(
        f"small-{eviction}-k1", "little worlds of every eviction, for whoever is in a hurry",
        (2, 2, 1, 2), ((1, 2), (1, 1)), eviction=eviction, grouping=grouping,
    )
    for eviction, grouping in zip(EVICTIONS, cycle(SCHEDULERS))
) + (
    scope(
        "small-guess-k1", "one request, one expert expected at a time",
        (2, 2, 1, 2), ((1, 2),), prefetch=1, predictions=2,
    ),
    scope(
        "small-guess-lockstep-k1", "the same before a barrier",
        (2, 2, 1, 3), ((1, 1), (1, 1)), prefetch=1, predictions=1, grouping="lockstep",
    ),
    scope(
        "small-warm-k1", "warm experts, some more than there are slots",
        (1, 3, 1, 2), ((1, 1), (1, 1)), warm=((0, 2), (0, 0), (0, 1)), initial=0, cancels=1,
    ),
)  # fmt: skip

POLICIES: tuple[Scope, ...] = (*_policies(), *_ANY, *_NAMED, *_SMALL)
