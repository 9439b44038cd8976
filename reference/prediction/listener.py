"""Between an executor and control: what is expected is told behind what was heard (PREDICT-2)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import isfinite
from operator import index
from typing import Any

from reference.prediction.base import Predictor, Scores
from reference.vocab.actions import Compute, Finish, Reject
from reference.vocab.errors import BadInput, one_line
from reference.vocab.events import Event, Predicted, Routed, Sampled
from reference.vocab.ids import ENTRY, Visit
from reference.vocab.options import ControlOptions

Tokens = Callable[[Visit], Sequence[int]]
"""The token ids of a visit's chunk, () where the executor has none."""


def no_tokens(visit: Visit) -> Sequence[int]:
    """An executor without texts."""
    return ()


class Listener:
    """One predictor at work for one engine: events that control is told go through `heard`."""

    def __init__(
        self, predictor: Predictor, options: ControlOptions, tokens: Tokens = no_tokens
    ) -> None:
        self.predictor, self.tokens = predictor, tokens
        self._prompts = options.grouping.startswith("lockstep")

    def heard(self, event: Event, chunk: int, gates: Scores | None = None) -> list[Predicted]:
        """What is expected after a Routed or a Sampled of the chunk `chunk`; told to control next.

        `gates`: what later layers' routers said, where somebody asked them. Nothing is said of
        visits for which control would not guess (PREFETCH-1), but they are learned from.
        """
        if isinstance(event, Routed):
            tokens = self.tokens(event.visit)
            said = self.predictor.routed(event.visit, event.experts, tokens, gates)
            return said if self._prompts or len(event.experts) == 1 else []
        if isinstance(event, Sampled) and not event.stop:
            visit = Visit(event.request, chunk + 1, ENTRY)
            return self.predictor.opened(visit, self.tokens(visit))
        return []

    def ended(self, request: int) -> None:
        """The request has ended."""
        self.predictor.ended(request)


class CarefulListener(Listener):
    """For an engine, which no predictor may harm (PREDICT-10): the first one that raises, or says
    what control would not take, is told to `warn` in one line and asked nothing more.

    failed   that line; "" while all is well
    """

    def __init__(
        self, predictor: Predictor, options: ControlOptions, tokens: Tokens = no_tokens,
        warn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """`warn`: print to standard error if None."""
        super().__init__(predictor, options, tokens)
        self.failed = ""
        self._options, self._last = options, -1
        self._warn = warn or (lambda line: print(line, file=sys.stderr))

    def heard(self, event: Event, chunk: int, gates: Scores | None = None) -> list[Predicted]:
        """As Listener's, in plain integers and floats; nothing once the predictor has failed."""
        if self.failed:
            return []
        number = event.visit.request if isinstance(event, Routed) else getattr(event, "request", -1)
        self._last = max(self._last, number)
        try:
            return [self._plain(said) for said in super().heard(event, chunk, gates)]
        except Exception as error:
            self._give_up(error)
            return []

    def ended(self, request: int) -> None:
        """The request has ended."""
        if not self.failed:
            try:
                super().ended(request)
            except Exception as error:
                self._give_up(error)

    def _plain(self, said: Predicted) -> Predicted:
        """What is said, if it is of a request that was heard of, a layer with experts, some of its
        experts, each once and with a finite score."""
        visit = Visit(*map(index, said.visit))
        pairs = tuple([(index(expert), float(score)) for expert, score in said.scores])
        experts = {expert for expert, _ in pairs}
        if not (
            0 <= visit.request <= self._last and visit.chunk >= 0
            and visit.layer in self._options.layers
            and len(experts) == len(pairs) and all(0 <= e < self._options.experts for e in experts)
            and all(isfinite(score) for _, score in pairs)
        ):  # fmt: skip
            raise BadInput(
                f"expects {pairs[:8]} at {tuple(visit)}; distinct experts below "
                f"{self._options.experts} with finite scores, at a layer with experts of a request "
                "that it has heard of, are right"
            )
        return Predicted(visit, pairs)

    def _give_up(self, error: Exception) -> None:
        name = type(self.predictor).__name__
        self.failed = f"prefetch: {name}: {one_line(error)}; from here on nothing is guessed"
        self._warn(self.failed)


class Predicting:
    """An executor of the virtual loop (simulator/loop.py) that also tells what is expected.

    All but `run` and `ended` is the inner executor's. `inner.gates(visit)`, where there is one,
    gives what later routers say to the hidden state of that visit.
    """

    def __init__(self, inner: Any, listener: Listener) -> None:
        self.inner, self.listener = inner, listener
        self._gates = getattr(inner, "gates", None)

        self.clear, self.fill, self.work = inner.clear, inner.fill, inner.work

    def run(self, action: Compute) -> list[Event]:
        """As the inner executor, each Routed and Sampled followed by what it leads to expect."""
        chunk_of = {part.visit.request: part.visit.chunk for part in action.parts}
        out: list[Event] = []
        for event in self.inner.run(action):
            out.append(event)
            if isinstance(event, Routed):
                gates = self._gates(event.visit) if self._gates else None
                out += self.listener.heard(event, event.visit.chunk, gates)
            elif isinstance(event, Sampled):
                out += self.listener.heard(event, chunk_of[event.request])
        return out

    def ended(self, action: Finish | Reject) -> None:
        """The request's terminal action."""
        self.listener.ended(action.request)
        self.inner.ended(action)
