"""Larger worlds, for sheer numbers of states."""

from __future__ import annotations

from oracle.scope import Scope, scope

_THREE = ((1, 2), (1, 2), (1, 2))

LARGE: tuple[Scope, ...] = (
    scope(
        "three-k1-s3", "faults-k1 with a slot more, and writes that land late",
        (2, 3, 1, 3), _THREE, load_faults=1, undrained=True, cancels=1,
    ),
    # For `--scopes long`, by hand.
    scope(
        "four-k1-s3", "4 requests x 2 layers x 2 tokens x 3 experts x 3 slots",
        (2, 3, 1, 3), (*_THREE, (1, 2)), suite="long",
    ),
    scope(
        "layers-k1", "three requests through three layers, a failed load and a cancel",
        (3, 2, 1, 2), _THREE, load_faults=1, cancels=1, suite="long",
    ),
    scope(
        "tasks-k2-s3", "three requests in expert mode, a failed load and a cancel",
        (2, 3, 2, 3), ((1, 2), (1, 2), (1, 1)), readiness="expert", load_faults=1, cancels=1,
        suite="long",
    ),
    scope(
        "claims-k2-c2", "three claims over two channels, a failed load and a cancel",
        (2, 4, 2, 4), ((1, 2), (1, 2), (1, 1)), channels=2, load_faults=1, undrained=True,
        cancels=1, suite="long",
    ),
    scope(
        "bulk-three-k2", "a prompt of two chunks beside two that decode, two layers",
        (2, 4, 2, 3), ((3, 2), (1, 2), (1, 1)), suite="long",
    ),
    scope(
        "barrier-three-k2", "three requests behind the barrier, two channels, a cancel",
        (2, 3, 2, 4), _THREE, grouping="lockstep", channels=2, initial=1, cancels=1,
        suite="long",
    ),
    scope(
        "blocking-three-k2", "three requests, fetching and computing apart, late writes",
        (2, 4, 2, 4), ((1, 2), (1, 2), (1, 1)), grouping="lockstep-blocking", load_faults=1,
        undrained=True, suite="long",
    ),
    scope(
        "four-k1-faults", "four-k1-s3 with a failed load and a cancel anywhere",
        (2, 3, 1, 3), (*_THREE, (1, 2)), load_faults=1, cancels=1, suite="long",
    ),
    scope(
        "deep-batch-k2", "two requests of five tokens through three layers: long ways",
        (3, 3, 2, 4), ((1, 5), (1, 5)), batch=True, initial=1, suite="long",
    ),
    scope(
        "deep-batch-k1", "the same through four layers with one expert a token, and a cancel",
        (4, 2, 1, 3), ((1, 5), (1, 5)), batch=True, initial=1, cancels=1, suite="long",
    ),
    scope(
        "bulk-batch-k2", "a prompt in waves that comes at any time, a cancel",
        (2, 4, 2, 3), ((3, 2), (1, 2)), batch=True, cancels=1, initial=1, suite="long",
    ),
    scope(
        "split-batch-k2", "results one by one and late, stops, a failed load and a cancel",
        (2, 4, 2, 4), ((1, 2), (1, 2)), batch=True, split=True, load_faults=1, cancels=1,
        stops=True, suite="long",
    ),
    scope(
        "claims-batch-k2", "as claims-k2-c2, and several events before an ask",
        (2, 4, 2, 4), ((1, 2), (1, 2), (1, 1)), channels=2, batch=True, load_faults=1,
        undrained=True, cancels=1, suite="long",
    ),
    scope(
        "tasks-batch-k2", "tasks over two channels, a failed load, several events before an ask",
        (2, 4, 2, 4), ((1, 2), (1, 2)), channels=2, batch=True, readiness="expert",
        load_faults=1, suite="long",
    ),
    scope(
        "deep-faults-k2", "deep-batch-k2 with a failed load and a cancel anywhere",
        (3, 3, 2, 4), ((1, 5), (1, 5)), batch=True, initial=1, load_faults=1, cancels=1,
        suite="long",
    ),
    scope(
        "deep-three-k2", "three requests through three layers, coming at any time",
        (3, 3, 2, 4), ((1, 3), (1, 3), (1, 2)), batch=True, initial=1, suite="long",
    ),
    scope(
        "deep-tasks-k2", "deep-batch-k2 by tasks",
        (3, 3, 2, 3), ((1, 4), (1, 4)), batch=True, initial=1, readiness="expert",
        suite="long",
    ),
)  # fmt: skip
