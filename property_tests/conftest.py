"""What every test file shares: Hypothesis draws the same examples on every run, and every run of
the readable engine is judged when it closes (those of the JAX engine: engines.py).

`--hypothesis-profile=search` draws new ones, for looking further (`make search`, every night): what
it finds it prints as an example to be added here, and remembers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "search",
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def readable_engines_are_judged() -> Iterator[None]:
    """Each keeps its log, which passes the checkers, also beside all earlier ones; those that a
    seeded fault is in are judged by whoever put it there."""
    from property_tests.witness import violations
    from reference.engine import ReferenceEngine

    begin, close = ReferenceEngine.__init__, ReferenceEngine.close

    def beginning(self: ReferenceEngine, path: Any, **options: Any) -> None:
        begin(self, path, **({"keep_log": True} | options))

    def closing(self: ReferenceEngine) -> None:
        faulty = type(self.executor).__module__.startswith("covey_mutant_")
        judged = not (self._closed or faulty)
        close(self)
        if judged and len(self.records) > 1:
            found = violations(self.records, complete=self.failure is None)
            assert not found, "\n".join(map(str, found[:5]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceEngine, "__init__", beginning)
        patch.setattr(ReferenceEngine, "close", closing)
        yield
