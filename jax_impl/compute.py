"""The compute thread: the one thread that calls the model, one step at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from jax_impl.model import JaxModel
from jax_impl.steps import Outcome, Plan, execute


@dataclass(frozen=True, slots=True)
class Broken:
    """The compute thread died of something that is no failure of a step."""

    error: BaseException


class Computer:
    """Runs plans in order and posts their outcomes, with the time at which each ended.

    A thread of its own and not the engine's, because a step's Python and its inline computations
    would otherwise keep completions of loads waiting (ENGINE-5).
    """

    def __init__(
        self,
        model: JaxModel,
        eos: frozenset[int],
        post: Callable[[Outcome | Broken], None],
        clock: Callable[[], float],
        sums: bool = False,
    ) -> None:
        """`sums`: outcomes have checksums of the logits that tokens were taken from."""
        self._sums = sums
        self._model, self._eos, self._post, self._clock = model, eos, post, clock
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="covey-compute", daemon=True)

    def begin(self) -> None:
        self.thread.start()

    def run(self, plan: Plan) -> None:
        """Do the step soon; its outcome is posted."""
        self._plans.put(plan)

    def end(self, timeout_s: float) -> bool:
        """Stop after what is queued. False when a step hangs."""
        self._plans.put(None)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _work(self) -> None:
        try:
            while (plan := self._plans.get()) is not None:
                outcome = execute(plan, self._model, self._eos, self._sums)
                outcome.ended, outcome.told = self._clock(), self._model.told()
                self._post(outcome)
                del plan, outcome  # they hold experts' arrays, and the next plan may be far off
        except BaseException as error:
            self._post(Broken(error))
