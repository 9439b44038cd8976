"""What to run next: which visits are ready, and which of them make one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference.control.fetch import Chooser
from reference.control.requests import RUNNING, WAITING, Request
from reference.vocab.actions import Action, Compute, Load
from reference.vocab.ids import Part, Visit

if TYPE_CHECKING:
    from reference.control.scheduler import Scheduler

Ready = tuple[Request, tuple[int, ...]]
"""A visit and the experts that it can run now; all that it still needs when it is whole."""


def group(s: Scheduler, actions: list[Action], choose: Chooser) -> None:
    """Start at most one step. Only called when compute is idle."""
    if s.blocking and (s.cache.loading() or any(isinstance(a, Load) for a in actions)):
        return
    ready = [(r, codes) for r in s.running.values() if (codes := runnable(s, r)) is not None]
    if not ready:
        return
    if s.lockstep:
        chosen = ready
    else:
        bulk = [x for x in ready if x[0].bulk]
        decode = [x for x in ready if not x[0].bulk]
        # SCHED-5: prompts and decoding visits run apart and take turns.
        turn = bool(bulk) and (not decode or s.steps_since_bulk >= s.options.bulk_every - 1)
        if turn:
            s.steps_since_bulk = 0
        elif bulk:
            s.steps_since_bulk += 1
        chosen = _same_layer(bulk if turn else decode, choose)
        if turn and s.decoding():
            chosen = _limit_experts(chosen, s.options.top_k)
    _start(s, actions, _limit_rows(s, chosen))


def runnable(s: Scheduler, r: Request) -> tuple[int, ...] | None:
    """The experts that the visit can run now, or None when it cannot run."""
    if r.status != WAITING or r.doomed is not None:
        return None
    if s.lockstep and r.stage != s.front:
        return None
    if not r.need:
        return () if s.eligible(r) else None
    present = s.cache.present
    if s.claims and not r.bulk:
        return r.need if r.claimed and all(present(c) for c in r.need) else None
    codes = tuple([c for c in r.need if present(c)])
    return codes or None


def _same_layer(ready: list[Ready], choose: Chooser) -> list[Ready]:
    """SCHED-4: the layer of the least advanced ready visit, and all who are ready there.

    Visits that would be whole go before those that could run only a part: a part run now is one
    more step, and nobody waits for it. Equally advanced layers are offered to `choose`.
    """
    rank = [(len(codes) < len(r.need), r.progress) for r, codes in ready]
    best = min(rank)
    layers = list(
        dict.fromkeys(r.stage for (r, _), k in zip(ready, rank, strict=True) if k == best)
    )
    stage = layers[choose(layers)] if len(layers) > 1 else layers[0]
    return [x for x in ready if x[0].stage == stage]


def _limit_experts(ready: list[Ready], most: int) -> list[Ready]:
    """At most `most` distinct experts, so that a prompt's step stays short beside decoding."""
    taken: set[int] = set()
    out = []
    for r, codes in ready:
        if r.need:
            keep = []
            for code in codes:
                if code in taken or len(taken) < most:
                    taken.add(code)
                    keep.append(code)
            if not keep:
                continue
            codes = tuple(keep)
        out.append((r, codes))
    return out


def _limit_rows(s: Scheduler, ready: list[Ready]) -> list[Ready]:
    """The least advanced first, up to `max_rows` token rows, at least one visit."""
    ready = sorted(ready, key=lambda x: (x[0].progress, x[0].number))
    out, rows = [], 0
    for x in ready:
        rows += x[0].rows
        if out and rows > s.options.max_rows:
            break
        out.append(x)
    return out


def _start(s: Scheduler, actions: list[Action], chosen: list[Ready]) -> None:
    parts, numbers = [], []
    slots: dict[int, int] = {}
    cache = s.cache
    promote = s.lockstep or not s.decoding()
    stage = chosen[0][0].stage
    per_layer = s.experts
    for r, codes in chosen:
        rest = tuple([c for c in r.need if c not in codes]) if len(codes) < len(r.need) else ()
        if codes:
            cache.want(codes, -1, not s.claims or r.bulk)
            for code in codes:
                if code not in slots:
                    slots[code] = cache.read(code, r.bulk, promote)
                elif not r.bulk:
                    cache.bulk.pop(slots[code], None)
        if r.claimed:
            cache.hold(codes, -1)
            r.claimed = False
        r.need, r.running, r.last, r.status = rest, codes, not rest, RUNNING
        visit = Visit(r.number, r.chunk, s.layer_of(stage))
        parts.append(Part(visit, tuple([c % per_layer for c in codes]), not rest))
        numbers.append(r.number)
        if codes and not rest:
            s.routed_order.remove(r.number)
    if stage < 0:
        cache.policy.entered(len(numbers), len(s.running))
    pairs = sorted((code % per_layer, slot) for code, slot in slots.items())
    step = s.next_step
    s.next_step += 1
    s.steps[step] = (tuple(numbers), tuple([slot for _, slot in pairs]))
    actions.append(Compute(step, s.layer_of(stage), tuple(parts), tuple(pairs)))


def advance_front(s: Scheduler) -> None:
    """The barrier (SCHED-4, lock-step): the front goes on, to the nearest stage, only when nobody
    is left at it: whoever computes, or waits for the executor's word, still stands there."""
    count = len(s.options.layers) + 1
    stages = {r.stage for r in s.running.values()}
    s.front = min(stages, key=lambda stage: (stage - s.front) % count, default=s.front)
