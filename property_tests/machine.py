"""What the rule-based machines share: they remember their steps, and can be set on a seeded fault.

`hunt` says after how many examples a machine found a fault, and the shortest failing trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SMALL = st.integers(0, 7)
"""An index; taken modulo what there is to choose from."""


class Traced(RuleBasedStateMachine):
    """`runs` holds the steps of every example; the last is the one that Hypothesis shows."""

    runs: ClassVar[list[list[str]]] = []
    broken: ClassVar[list[int]] = []
    """Numbers of the examples that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[str] = []
        self.runs.append(self.trace)

    def check(self, true: Any, what: str) -> None:
        if not true:
            self.broken.append(len(self.runs))
            raise AssertionError(f"{what}, after {self.trace}")


def machine_settings(examples: int, steps: int) -> settings:
    """For CI so many examples of so many steps; the random profile takes its own, longer."""
    if settings.default.derandomize:  # type: ignore[union-attr]
        return settings(max_examples=examples, stateful_step_count=steps)
    return settings(stateful_step_count=2 * steps)


@dataclass(frozen=True)
class Hunt:
    """How a seeded fault was found: after how many examples, and the shortest trace."""

    examples: int
    shortest: list[str]


def hunt(machine: type[Traced], examples: int, steps: int) -> Hunt | None:
    """Let the machine look for a fault, always in the same way; None when it finds none."""
    fresh = type(machine.__name__, (machine,), {"runs": [], "broken": []})
    how = settings(
        max_examples=examples, stateful_step_count=steps, derandomize=True, database=None,
        deadline=None, report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    try:
        run_state_machine_as_test(fresh, settings=how)
    except AssertionError:
        return Hunt(fresh.broken[0], fresh.runs[-1])
    return None
