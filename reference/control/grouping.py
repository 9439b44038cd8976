"""What to run next: which visits are ready, and which of them make one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference.control.fetch import Chooser
from reference.control.requests import AWAITING, RUNNING, WAITING, Request
from reference.vocab.actions import Action, Compute
from reference.vocab.ids import Part, Visit

if TYPE_CHECKING:
    from reference.control.scheduler import Scheduler

Ready = tuple[Request, tuple[int, ...], bool]
"""A visit, the experts that it can run now, and whether it then goes on to the next router."""


def group(s: Scheduler, actions: list[Action], choose: Chooser) -> None:
    """Start at most one step. Only called when compute is idle."""
    if s.blocking and s.cache.loading():
        return
    if s.options.grouping == "balanced":
        chosen = _balanced(s)
    elif s.lockstep:
        here = [r for r in s.running.values() if r.stage == s.front and r.status != AWAITING]
        chosen = _together(s, here)
    else:
        ready = [
            (r, codes, len(codes) == len(r.need))
            for r in s.running.values()
            if (codes := runnable(s, r)) is not None
        ]
        bulk = [x for x in ready if x[0].bulk]
        decode = [x for x in ready if not x[0].bulk]
        # SCHED-5: prompts and decoding visits run apart and take turns.
        turn = bool(bulk) and (not decode or s.steps_since_bulk >= s.options.bulk_every - 1)
        if turn:
            s.steps_since_bulk = 0
        elif bulk:
            s.steps_since_bulk += 1
        mine = bulk if turn else decode
        if not mine:
            return
        rule = _defrag if s.options.grouping == "micro-queues" else _same_layer
        chosen = rule(s, mine, choose)
        if turn and s.decoding():
            chosen = _limit_experts(chosen, s.options.top_k)
    if chosen:
        _start(s, actions, _limit_rows(s, chosen))


def runnable(s: Scheduler, r: Request) -> tuple[int, ...] | None:
    """Interleaved: the experts that the visit can run now, or None when it cannot run."""
    if r.status != WAITING or not s.eligible(r):
        return None
    if not r.need:
        return ()
    present = s.cache.present
    if s.claims and not r.bulk:
        return r.need if r.claimed and all(present(c) for c in r.need) else None
    codes = tuple([c for c in r.need if present(c)])
    return codes or None


def _together(s: Scheduler, visits: list[Request]) -> list[Ready]:
    """SCHED-12: of visits that go on together, what can run: the last parts of all, when all that
    they lack is there; until then whatever experts are."""
    present = s.cache.present
    ready, complete = [], True
    for r in visits:
        codes = tuple([c for c in r.need if present(c)])
        # Who does not wait has a router that has yet to speak.
        complete = complete and r.status == WAITING and len(codes) == len(r.need)
        ready.append((r, codes, True))
    if complete:
        return ready
    return [(r, codes, False) for r, codes, _ in ready if codes]


def _balanced(s: Scheduler) -> list[Ready]:
    """SCHED-13: the least advanced that can run, with all who can at its layer.

    Requests of equal progress go on together. Where reading is the limit and the channel has
    nothing left to start, those that are whole go on alone, to name what they need next.
    """
    level: dict[int, list[Request]] = {}
    for r in s.running.values():
        level.setdefault(r.progress, []).append(r)
    dry = s.apart and not any(s.absent(c) for r in s.running.values() for c in r.need)
    chosen: list[Ready] = []
    for progress in sorted(level):
        able = _each(s, level[progress]) if dry else _together(s, level[progress])
        if progress - s.floor >= s.window:
            able = [(r, codes, False) for r, codes, _ in able if codes]
        if able and (not chosen or able[0][0].stage == chosen[0][0].stage):
            chosen += able
    return chosen


def _each(s: Scheduler, visits: list[Request]) -> list[Ready]:
    """What each visit can run now, by itself."""
    present = s.cache.present
    out = []
    for r in visits:
        if r.status == WAITING:
            codes = tuple([c for c in r.need if present(c)])
            if codes or not r.need:
                out.append((r, codes, len(codes) == len(r.need)))
    return out


def _same_layer(s: Scheduler, ready: list[Ready], choose: Chooser) -> list[Ready]:
    """SCHED-4: the layer of the least advanced ready visit, and all who are ready there.

    Visits that would be whole go before those that could run only a part: a part run now is one
    more step, and nobody waits for it. Equally advanced layers are offered to `choose`.
    """
    rank = [(not last, r.progress) for r, _, last in ready]
    best = min(rank)
    layers = list(
        dict.fromkeys(x[0].stage for x, k in zip(ready, rank, strict=True) if k == best)
    )
    stage = layers[choose(layers)] if len(layers) > 1 else layers[0]
    return [x for x in ready if x[0].stage == stage]


def _defrag(s: Scheduler, ready: list[Ready], choose: Chooser) -> list[Ready]:
    """SCHED-14: the layer with most visits to run, counting those that will meet them at one of the
    next layers the less the further that is (AMoE's defrag score, arXiv 2505.08944, by layer)."""
    count = len(s.options.layers) + 1
    there = [0] * count
    for r in s.running.values():
        there[r.stage + 1] += 1
    score: dict[int, float] = {}
    for r, _, _ in ready:
        score[r.stage] = score.get(r.stage, 0) + 1
    for stage in score:
        for j in range(1, min(4, count - 1) + 1):
            score[stage] += 0.8**j * there[(stage + 1 + j) % count] / s.experts
    best = max(score.values())
    stages = [stage for stage in score if score[stage] == best]
    stage = stages[choose(stages)] if len(stages) > 1 else stages[0]
    return [x for x in ready if x[0].stage == stage]


def _limit_experts(ready: list[Ready], most: int) -> list[Ready]:
    """At most `most` distinct experts, so that a prompt's step stays short beside decoding."""
    taken: set[int] = set()
    out = []
    for r, codes, last in ready:
        if r.need:
            keep = []
            for code in codes:
                if code in taken or len(taken) < most:
                    taken.add(code)
                    keep.append(code)
            if not keep:
                continue
            last = last and len(keep) == len(codes)
            codes = tuple(keep)
        out.append((r, codes, last))
    return out


def _limit_rows(s: Scheduler, ready: list[Ready]) -> list[Ready]:
    """The least advanced first, up to `max_rows` token rows: one visit has no more than that."""
    ready = sorted(ready, key=lambda x: (x[0].progress, x[0].number))
    out, rows = [], 0
    for x in ready:
        rows += x[0].rows
        if rows > s.options.max_rows:
            break
        out.append(x)
    return out


def _start(s: Scheduler, actions: list[Action], chosen: list[Ready]) -> None:
    parts, numbers = [], []
    slots: dict[int, int] = {}
    cache = s.cache
    promote = s.alike or not s.decoding()
    stage = chosen[0][0].stage
    per_layer = s.experts
    for r, codes, last in chosen:
        rest = tuple([c for c in r.need if c not in codes]) if len(codes) < len(r.need) else ()
        if codes:
            cache.want(codes, -1, not s.claims or r.bulk)
            for code in codes:
                if code not in slots:
                    slots[code] = cache.read(code, r.bulk, promote)
        if r.claimed:
            cache.hold(codes, -1)
            r.claimed = False
        r.need, r.running, r.last, r.status = rest, codes, last, RUNNING
        visit = Visit(r.number, r.chunk, s.layer_of(stage))
        parts.append(Part(visit, tuple([c % per_layer for c in codes]), last))
        numbers.append(r.number)
        if last and r.stage >= 0:
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
