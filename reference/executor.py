"""Obeying the control plane with the NumPy model, one action after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference.handle import RequestHandle, sum_of
from reference.numerics.model import Hidden, Model, State
from reference.prediction.next_gate import votes
from reference.sampling import choose
from reference.simulator.costs import Work
from reference.vocab.actions import Compute, Finish, Load, Reject
from reference.vocab.errors import CoveyError
from reference.vocab.events import Arrived, Computed, Event, Failed, Routed, Sampled
from reference.vocab.ids import ENTRY, ExpertKey, Part, Visit


@dataclass
class Text:
    """A running request: its tokens so far, its KV, and the visit in work.

    outputs [T, K, H]: what the visit's experts have given so far, kept apart by rank until the
    last has run, so that the sum does not depend on the order in which they came (ROUTE-5).
    """

    handle: RequestHandle
    tokens: list[int]
    state: State
    hidden: Hidden | None = None
    outputs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))


class NumpyExecutor:
    """Slots that hold experts, requests that hold text. `chunk` as in ControlOptions."""

    def __init__(
        self,
        model: Model,
        slots: int,
        chunk: int,
        eos: frozenset[int],
        now: Callable[[], float],
    ) -> None:
        self.model = model
        self.slots: list[tuple[ExpertKey, tuple[Any, ...]] | None] = [None] * slots
        self.chunk = chunk
        self.eos = eos
        self.now = now
        self.texts: dict[int, Text] = {}
        self.handles: dict[int, RequestHandle] = {}
        self.heat: dict[tuple[int, int], int] = defaultdict(int)
        self.ask_gates = 0
        """How many experts of the next router `gates` tells; 0: it is not asked (PREDICT-4)."""
        self.sums: dict[int, int] | None = None
        """Checksums of the rows of logits that tokens were taken from, until the log has told them;
        None: nobody logs."""

    def submitted(self, handle: RequestHandle) -> None:
        """A request that will arrive."""
        self.handles[handle.number] = handle
        prompt = [int(t) for t in handle.request.prompt]
        self.texts[handle.number] = Text(handle, prompt, self.model.start(len(prompt)))

    # -- what the loop asks (reference.simulator.loop.Executor) --------------------------------

    def clear(self, slot: int) -> None:
        """Whatever reads the slot from now until `fill` is wrong, and fails."""
        self.slots[slot] = None

    def fill(self, action: Load) -> None:
        """Read the expert's tensors from the checkpoint; OSError when that fails."""
        try:
            self.slots[action.slot] = (action.key, self.model.read_expert(action.key))
        except CoveyError as error:
            raise OSError(str(error)) from error

    def work(self, action: Compute) -> Work:
        """What the step computes: rows of its last parts, products of all."""
        spans = [self._span(p.visit) for p in action.parts if p.last]
        pairs = 0
        for part in action.parts:
            hidden = self.texts[part.visit.request].hidden
            if part.experts and hidden is not None:
                pairs += int(np.isin(hidden.topk, part.experts).sum())
        return Work(spans, pairs)

    def run(self, action: Compute) -> list[Event]:
        """One step: each part's experts, and for each last part the way to the next router."""
        slot_of = dict(action.slots)
        failed: list[int] = []
        error = ""
        events: list[Event] = []
        for part in action.parts:
            try:
                events += self._part(part, slot_of)
            except CoveyError as e:
                failed.append(part.visit.request)
                error = error or str(e)
        end = Failed(action.step, error, tuple(failed)) if failed else Computed(action.step)
        return [end, *events]

    def told(self, event: Event) -> dict[str, Any]:
        """What the log says of an event beside what control hears."""
        if isinstance(event, Arrived):
            handle = self.handles[event.request]
            return {"id": handle.id, "asked": handle.asked}
        if isinstance(event, Sampled) and self.sums and event.request in self.sums:
            return {"sum": self.sums.pop(event.request)}
        return {}

    def tokens(self, visit: Visit) -> list[int]:
        """Token ids of the visit's chunk."""
        text = self.texts.get(visit.request)
        return text.tokens[slice(*self._span(visit))] if text else []

    def gates(self, visit: Visit) -> dict[int, list[tuple[int, float]]]:
        """What the next router would say to the visit that was Routed last: by layer."""
        hidden = self.texts[visit.request].hidden
        said = self.model.next_gate(hidden, self.ask_gates) if hidden and self.ask_gates else None
        return {said[0]: votes(said[1], self.ask_gates)} if said else {}

    def ended(self, action: Finish | Reject) -> None:
        """Forget the request and tell its handle."""
        self.texts.pop(action.request, None)
        handle = self.handles.pop(action.request)
        if isinstance(action, Reject):
            handle.end("rejected", action.reason)
        else:
            handle.end(action.reason, action.error)

    # -- one part ----------------------------------------------------------------------------

    def _span(self, visit: Visit) -> tuple[int, int]:
        """Positions [start, end) of the visit's chunk."""
        prompt = len(self.handles[visit.request].request.prompt)
        chunks = -(-prompt // self.chunk)
        if visit.chunk < chunks:
            return visit.chunk * self.chunk, min((visit.chunk + 1) * self.chunk, prompt)
        start = prompt + visit.chunk - chunks
        return start, start + 1

    def _part(self, part: Part, slot_of: dict[int, int]) -> list[Event]:
        text = self.texts[part.visit.request]
        start, end = self._span(part.visit)
        final = end == len(text.tokens)
        want = "all" if text.handle.want_logits else "last" if final else "none"
        if part.visit.layer == ENTRY:
            h = self.model.enter(text.state, text.tokens[start:end], start, want)
        else:
            assert text.hidden is not None and text.hidden.layer == part.visit.layer
            for expert in part.experts:
                self._expert(text, part.visit.layer, expert, slot_of[expert])
            if not part.last:
                return []
            h = self.model.advance(text.state, text.hidden, text.outputs, want)
        text.hidden = h
        if h.layer is not None:
            text.outputs = np.full((*h.topk.shape, h.x.shape[1]), np.nan, h.x.dtype)
            visit = Visit(part.visit.request, part.visit.chunk, h.layer)
            experts = tuple(map(tuple, h.topk.tolist()))
            for expert in {e for row in experts for e in row}:
                self.heat[h.layer, expert] += 1
            return [Routed(visit, experts)]
        return self._head(text, part.visit.request, start, h.logits, final)

    def _expert(self, text: Text, layer: int, expert: int, slot: int) -> None:
        held, h = self.slots[slot], text.hidden
        assert held is not None and held[0] == (layer, expert), (layer, expert, slot, held)
        assert h is not None
        tensors = self.model.widen(held[1])
        for row, rank in zip(*np.nonzero(h.topk == expert), strict=True):
            text.outputs[row, rank] = self.model.expert(layer, tensors, h.x[row])

    def _head(
        self, text: Text, number: int, start: int, logits: np.ndarray | None, final: bool
    ) -> list[Event]:
        """The LM head was reached: pass logits on, and sample if the text ends here."""
        if logits is not None and text.handle.want_logits:
            for i, row in enumerate(logits):
                text.handle.put_logits(start + i, row)
        if not final:
            return []
        if self.sums is not None and logits is not None:
            self.sums[number] = sum_of(logits[-1])
        request = text.handle.request
        if request.max_new_tokens == 0:
            return [Sampled(number, None, True)]
        assert logits is not None
        choice = choose(logits[-1], text.handle.sampling, text.tokens, len(request.prompt))
        stop = text.handle.stops(choice.token) or choice.token in self.eos  # ENGINE-13
        text.tokens.append(choice.token)
        text.handle.put_token(choice, self.now())
        return [Sampled(number, choice.token, stop)]
