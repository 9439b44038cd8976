"""A step: what the scheduler asked to compute, made ready for the model, run, and told.

`prepare` belongs to the engine thread, which owns rows, KV blocks and slots; `execute` belongs to
the compute thread, which owns the model. Only plain data passes between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_impl.holdings import Holdings, Resident, Running
from jax_impl.model import ExpertTask, JaxModel, StageOut, Table
from jax_impl.transfer import Transfers
from reference.handle import sum_of
from reference.prediction.base import Scores
from reference.prediction.next_gate import votes
from reference.sampling import choose
from reference.vocab.actions import Compute
from reference.vocab.errors import CoveyError, one_line
from reference.vocab.events import Routed, Sampled
from reference.vocab.ids import ENTRY, ExpertKey, Visit
from reference.vocab.sampling import Choice


@dataclass(frozen=True, slots=True)
class Member:
    """One part that ends its visit with this step: rows [first, first + n) of the model's call."""

    running: Running
    visit: Visit
    first: int
    n: int
    start: int
    final: bool
    """The chunk ends the text so far: its last row is sampled."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `execute` needs, in the form in which the model takes it."""

    step: int
    layer: int
    members: tuple[Member, ...]
    tasks: tuple[ExpertTask, ...]
    rows: list[int]
    tokens: list[int]
    positions: list[int]
    tables: list[Table]
    want: list[bool]
    visits: int


@dataclass(slots=True)
class Outcome:
    """What a step led to. `error` with no `failed` means that the whole step failed."""

    step: int
    error: str = ""
    failed: tuple[int, ...] = ()
    events: list[Routed | Sampled] = field(default_factory=list)
    routed: dict[int, np.ndarray] = field(default_factory=dict)
    chosen: dict[int, Choice] = field(default_factory=dict)
    gates: dict[int, Scores] = field(default_factory=dict)
    """What a later router said to a request's rows when it was asked early (PREDICT-4)."""
    sums: dict[int, int] = field(default_factory=dict)
    ended: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)


class WrongExpert(AssertionError):
    """A step was to read a slot that holds something else (S9)."""


def tasks_of(action: Compute, holdings: Holdings) -> tuple[ExpertTask, ...]:
    """For each expert of the step the rows that chose it, and as which of their K choices.

    Raises WrongExpert when a slot does not hold the expert that it is listed for.
    """
    held: dict[int, Resident] = {}
    wanted: dict[int, tuple[list[int], list[int]]] = {}
    for expert, slot in action.slots:
        there = holdings.residents.get(slot)
        if there is None or there.key != (action.layer, expert):
            raise WrongExpert(f"step {action.step}: slot {slot} is not expert {expert}: {there}")
        held[expert], wanted[expert] = there, ([], [])
    for visit, experts, _ in action.parts:
        if not experts:
            continue
        running, asked = holdings.running[visit.request], frozenset(experts)
        assert running.topk is not None
        for row, chosen in zip(running.rows, running.topk.tolist(), strict=True):
            for rank, expert in enumerate(chosen):
                if expert in asked:
                    rows, ranks = wanted[expert]
                    rows.append(row)
                    ranks.append(rank)
    return tuple(ExpertTask(held[expert].handle, *wanted[expert]) for expert in held)


def prepare(action: Compute, holdings: Holdings, chunk: int) -> Plan:
    """Turn the action into calls. At ENTRY the chunk's rows are taken from the bank."""
    members: list[Member] = []
    rows: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    tables: list[Table] = []
    want: list[bool] = []
    for visit, _, last in action.parts:
        running = holdings.running[visit.request]
        start, end = running.span(visit.chunk, chunk)
        if action.layer == ENTRY:
            holdings.take_rows(running, end - start)
        if not last:
            continue
        final = end == len(running.tokens)
        members.append(Member(running, visit, len(rows), end - start, start, final))
        rows += running.rows
        tokens += running.tokens[start:end]
        positions += range(start, end)
        tables += [running.table] * (end - start)
        want += [running.handle.want_logits] * (end - start)
        want[-1] = want[-1] or (final and running.handle.request.max_new_tokens != 0)
    tasks = tasks_of(action, holdings)
    return Plan(
        action.step, action.layer, tuple(members), tasks, rows, tokens, positions, tables, want,
        len(action.parts),
    )  # fmt: skip


def checked(
    action: Compute, held: Holdings, transfers: Transfers
) -> tuple[str, list[int]]:
    """Do the slots still hold what was read into them? (why not or "", checksums) (S9, XFER-10)"""
    wrong, sums = "", []
    for expert, slot in action.slots:
        key = ExpertKey(action.layer, expert)
        resident = held.residents[slot]
        sums.append(transfers.checksum(slot, key, resident.handle))
        if sums[-1] != resident.sum:
            wrong = f"expert {expert} of layer {action.layer}: its bytes in memory changed"
    return wrong, sums


def execute(plan: Plan, model: JaxModel, eos: frozenset[int], sums: bool = False) -> Outcome:
    """Run the step. When this returns, nothing reads its slots any more (SCHED-9).

    A failure of one request (a NaN in its router or in its logits) is told as its own; any other
    exception fails the step.
    """
    outcome = Outcome(plan.step)
    try:
        if plan.layer == ENTRY:
            out = model.enter(plan.rows, plan.tokens, plan.positions, plan.tables, plan.want).get()
        else:
            model.experts(plan.layer, plan.tasks)
            if not plan.members:
                model.wait()
                return outcome
            out = model.advance(plan.layer, plan.rows, plan.positions, plan.tables, plan.want).get()
        for member in plan.members:
            _tell(member, out, outcome, eos, sums)
    except Exception as error:
        return Outcome(plan.step, one_line(error))
    return outcome


def _tell(
    member: Member, out: StageOut, outcome: Outcome, eos: frozenset[int], sums: bool
) -> None:
    """The event that a part's end gives rise to, if any (see reference.vocab.events)."""
    number = member.visit.request
    span = slice(member.first, member.first + member.n)
    try:
        if out.layer is not None:
            if out.bad[span].any():
                raise CoveyError(f"NaN in the router's scores at layer {out.layer}")
            topk = out.topk[span]
            outcome.routed[number] = topk
            if out.ahead is not None:
                layer, ranked = out.ahead[0], out.ahead[1][span]
                good = ranked[(ranked >= 0).all(axis=1)]
                outcome.gates[number] = {layer: votes(good, ranked.shape[1])} if len(good) else {}
            visit = Visit(number, member.visit.chunk, out.layer)
            outcome.events.append(Routed(visit, tuple(map(tuple, topk.tolist()))))
            return
        handle = member.running.handle
        if handle.want_logits:
            for i in range(member.n):
                handle.put_logits(member.start + i, out.logits[member.first + i])
        if not member.final:
            return
        request, last = handle.request, member.first + member.n - 1
        if sums and (handle.want_logits or request.max_new_tokens != 0):
            outcome.sums[number] = sum_of(out.logits[last])
        if request.max_new_tokens == 0:
            outcome.events.append(Sampled(number, None, True))
            return
        # Nobody appends to the text while its step is in flight, so it can be read here.
        choice = choose(
            out.logits[last], handle.sampling, member.running.tokens, len(request.prompt)
        )
        outcome.chosen[number] = choice
        stop = handle.stops(choice.token) or choice.token in eos  # ENGINE-13
        outcome.events.append(Sampled(number, choice.token, stop))
    except Exception as error:
        # One request's trouble, also an error in a callback of the caller's: the rest goes on.
        outcome.failed += (number,)
        outcome.error = outcome.error or one_line(error)
