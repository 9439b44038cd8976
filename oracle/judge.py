"""Judging what control asks for: each action against the truth, each ask for what it left undone.

`obey` moves a `World` by the actions of one ask and returns the first fault as (property, text):
S1 to S7 and S9 to S11 at the action, L5, L7 and L3 (specs/properties.md) after the last. S8 shows
as S9 here, for the world does not ask on whose word control acted; the log checkers tell the two
apart.
"""

from __future__ import annotations

from oracle.world import (
    CANCELLED,
    CHUNK,
    ENDED,
    ERROR,
    LAST,
    LENGTH,
    LOADING,
    MADE,
    NEED,
    NEW,
    NUMBER,
    OWED,
    PART,
    PHASE,
    PROMPT,
    QUARANTINED,
    QUEUED,
    READY,
    RUNNING,
    STAGE,
    STOP,
    WAITING,
    WHY,
    World,
)
from reference.vocab.actions import Action, Admit, Compute, Finish, Load, Reject
from reference.vocab.ids import ENTRY

Fault = tuple[str, str]
REASONS = {"stop": STOP, "length": LENGTH, "cancelled": CANCELLED, "error": ERROR}


def obey(w: World, actions: list[Action], channels: int, lanes: int) -> Fault | None:
    """Obey the actions of one ask and judge them; the first fault is (property, text)."""
    at_barrier = w.scope.lockstep
    guesses = 0
    for action in actions:
        if at_barrier and isinstance(action, Load | Compute):
            at_barrier = _advance(w)
        if isinstance(action, Load):
            channels -= 1
            guesses += action.guess
            fault = _load(w, action) or (channels < 0 and ("S11", "more loads than asked"))
        elif isinstance(action, Compute):
            lanes -= 1
            fault = _compute(w, action) or (lanes < 0 and ("S11", "more steps than asked"))
        else:
            fault = _lifecycle(w, action)
        if fault:
            return fault
    if at_barrier:
        _advance(w)
    # What a guess took was free for what somebody has named.
    return _left_undone(w, channels + guesses, lanes)


def _advance(w: World) -> bool:
    """Lock-step: the front goes on, to the nearest stage, when nobody is left at it. False."""
    stages = []
    for r in w.live:
        if r[PHASE] != QUEUED:
            if r[PHASE] == OWED or r[STAGE] == w.front:
                return False
            stages.append(r[STAGE])
    if stages:
        w.front = min(stages, key=lambda stage: (stage - w.front) % (w.scope.last_stage + 2))
    return False


def _load(w: World, a: Load) -> Fault | None:
    scope, slot = w.scope, a.slot
    code = scope.ordinal[a.key[0]] * scope.options.experts + a.key[1]
    if not 0 <= slot < len(w.state):
        return "S3", f"{a}: no such slot"
    if a.ticket <= w.newest_ticket:
        return "S3", f"{a}: the newest ticket was {w.newest_ticket}"
    if w.state[slot] == LOADING:
        return "S6", f"{a}: the slot is being loaded"
    if w.state[slot] == QUARANTINED:
        return "S7", f"{a}: ticket {w.ticket[slot]} may still write there"
    if w.step is not None and slot in w.step[2]:
        return "S6", f"{a}: step {w.step[0]} reads the slot"
    if w.scope.blocking and w.step is not None:
        return "S11", f"{a}: step {w.step[0]} runs"
    if code in w.code:
        return "S5", f"{a}: slot {w.code.index(code)} has it"
    w.newest_ticket = w.ticket[slot] = a.ticket
    w.state[slot], w.code[slot] = LOADING, code
    return None


def _compute(w: World, a: Compute) -> Fault | None:
    scope = w.scope
    experts = scope.options.experts
    if w.step is not None or a.step <= w.newest_step:
        return "S4", f"{a}: while step {w.newest_step} was the newest"
    stage = -1 if a.layer == ENTRY else scope.ordinal.get(a.layer, -2)
    if stage == -2:
        return "S10", f"{a}: no such layer"
    if scope.lockstep and stage != w.front:
        return "S10", f"{a}: the barrier stands at stage {w.front}"
    if scope.blocking and LOADING in w.state:
        return "S11", f"{a}: a load is under way"
    held, slots = 0, []
    for expert, slot in a.slots:
        held |= 1 << expert
        slots.append(slot)
        if w.code[slot] != stage * experts + expert or w.state[slot] != READY:
            return "S9", f"{a}: slot {slot} holds {w.code[slot]}, state {w.state[slot]}"
    used = rows = 0
    members = []
    for visit, of_part, last in a.parts:
        r = w.find(visit.request)
        if r is None or r[PHASE] == QUEUED or r[PHASE] == ENDED or r[WHY] & CANCELLED:
            return "S2", f"{a}: request {visit.request} does not run"
        mask = 0
        for expert in of_part:
            mask |= 1 << expert
        if r[PHASE] != WAITING or visit.chunk != r[CHUNK] or stage != r[STAGE]:
            return "S10", f"{a}: request {visit.request} is elsewhere: {r}"
        idle = not mask and (r[NEED] or not last)
        if mask & ~r[NEED] or mask.bit_count() != len(of_part) or idle:
            return "S10", f"{a}: experts {of_part} of needed {r[NEED]:b}"
        used |= mask
        rows += scope.rows(r[CHUNK], r[PROMPT])
        r[NEED] &= ~mask
        r[PHASE], r[PART], r[LAST] = RUNNING, mask, int(last)
        if last and r[NEED]:
            return "S10", f"{a}: last={last}, left {r[NEED]:b}"
        members.append(r[NUMBER])
    if used != held:
        return "S4", f"{a}: holds {held:b}, uses {used:b}"
    if len(members) > 1 and rows > scope.options.max_rows:
        return "S11", f"{a}: {rows} rows"
    w.newest_step = a.step
    w.step = (a.step, tuple(members), tuple(slots))
    return None


def _lifecycle(w: World, a: Action) -> Fault | None:
    assert isinstance(a, (Admit, Finish, Reject))
    r = w.find(a.request)
    if r is None:
        return "S2" if a.request < w.arrived else "S1", f"{a}: no such unfinished request"
    if isinstance(a, Admit):
        if r[PHASE] != QUEUED or r[WHY] or w.draining:
            return "S2", f"{a}: {r}"
        if any(x[PHASE] == QUEUED and not x[WHY] and x[NUMBER] < r[NUMBER] for x in w.live):
            return "S2", f"{a}: not the first in the queue"
        r[PHASE] = WAITING
        running = [x for x in w.live if x[PHASE] != QUEUED]
        held = sum(w.scope.reserved(x[PROMPT], x[NEW]) for x in running)
        if held > w.scope.options.kv_tokens:
            return "S11", f"{a}: {held} KV tokens reserved"
        if len(running) > w.scope.options.max_running:
            return "S11", f"{a}: {len(running)} requests run"
        return None
    w.live.remove(r)
    if r[PHASE] == RUNNING:
        return "S2", f"{a}: its step still runs"
    if isinstance(a, Reject):
        never = w.scope.reserved(r[PROMPT], r[NEW]) > w.scope.options.kv_tokens
        return None if r[PHASE] == QUEUED and (w.draining or never) else ("S2", f"{a}: {r}")
    if a.reason == "drained":
        return None if r[PHASE] == QUEUED and w.draining else ("S2", f"{a}: {r}")
    if r[WHY] & REASONS.get(a.reason, 0):
        return None
    if a.reason == "error" and _lost(w, r):
        return None
    return "S2", f"{a}: without its cause: {r}"


def _lost(w: World, r: list[int]) -> bool:
    """An expert that it needs has failed more often than may be retried."""
    base = r[STAGE] * w.scope.options.experts
    for code, times in w.fails.items():
        if times > w.scope.options.retries and code >= base and r[NEED] >> code - base & 1:
            return True
    return False


def _left_undone(w: World, channels: int, lanes: int) -> Fault | None:
    """L5 and L7 for who is queued, then the rules (a) to (e) of L3 in specs/properties.md."""
    queued = [r for r in w.live if r[PHASE] == QUEUED]
    for r in queued:
        if w.scope.reserved(r[PROMPT], r[NEW]) > w.scope.options.kv_tokens:
            return "L5", f"can never fit and is not refused: {r}"
        if w.draining and not r[WHY]:
            return "L7", f"queued after Drain: {r}"
    for r in w.live:
        phase = r[PHASE]
        if phase == ENDED or (r[WHY] and (phase in (QUEUED, WAITING))):
            return "L3", f"(e) not finished: {r}"
    if lanes and channels and w.live and not w.moving:
        return "L3", f"(a) nothing is in flight while these wait: {w.live}"
    if lanes and w.step is None:
        for r in w.live:
            if r[PHASE] == WAITING and _runnable(w, r):
                return "L3", f"(b) no step was started, this can run: {r}"
    if channels:
        for r in w.live:
            if r[NEED] and (r[PHASE] == WAITING or r[PHASE] == RUNNING) and _loadable(w, r):
                return "L3", f"(c) a channel is idle, this lacks an expert: {r}"
    return _admissible(w) if queued else None


def _free_to_go(w: World, r: list[int]) -> bool:
    """Neither the lag bound nor a barrier can be what holds this request."""
    if w.scope.interleaved:
        return r[MADE] < w.scope.lag_bound
    if not w.scope.lockstep:
        return True
    running = [x for x in w.live if x[PHASE] != QUEUED]
    return len({x[STAGE] for x in running}) == 1 and not any(x[PHASE] == OWED for x in running)


def _room(w: World) -> bool:
    """All experts that anybody needs, reads or is being brought fit together."""
    experts = w.scope.options.experts
    needs = [0] * (w.scope.last_stage + 1)
    for r in w.live:
        needs[r[STAGE]] |= r[NEED]
    kept = 0
    for slot, code in enumerate(w.code):
        state = w.state[slot]
        reads = w.step is not None and slot in w.step[2]
        if state == QUARANTINED:
            kept += 1
        elif state == LOADING or reads:
            kept += not needs[code // experts] >> code % experts & 1
    return kept + sum(n.bit_count() for n in needs) <= len(w.code)


def _here(w: World, r: list[int]) -> int:
    """The needed experts that are resident, as a mask."""
    base, experts, mask = r[STAGE] * w.scope.options.experts, w.scope.options.experts, 0
    for slot, code in enumerate(w.code):
        if 0 <= code - base < experts and w.state[slot] == READY:
            mask |= 1 << code - base
    return mask & r[NEED]


def _all_whole(w: World) -> bool:
    """Whoever waits for whom, somebody can go on: all wait, and all that they lack is there."""
    running = [r for r in w.live if r[PHASE] != QUEUED]
    return all(r[PHASE] == WAITING and _here(w, r) == r[NEED] for r in running)


def _runnable(w: World, r: list[int]) -> bool:
    scope = w.scope
    if not _free_to_go(w, r) or (scope.blocking and LOADING in w.state):
        return False
    if not r[NEED]:
        return scope.interleaved or _all_whole(w)
    here = _here(w, r)
    if scope.by_task or scope.rows(r[CHUNK], r[PROMPT]) > 1:
        return here != 0
    return here == r[NEED] and _room(w)


def _lacks(w: World, r: list[int]) -> int:
    """The needed experts that are neither resident nor loading, as a mask."""
    base, lacks = r[STAGE] * w.scope.options.experts, r[NEED]
    for code in w.code:
        if code >= base:
            lacks &= ~(1 << code - base)
    return lacks


def _loadable(w: World, r: list[int]) -> bool:
    scope = w.scope
    if not _lacks(w, r) or r[WHY] or not _free_to_go(w, r) or (scope.blocking and w.step):
        return False
    if scope.options.grouping == "balanced":  # the least advanced, whoever that is
        running = [x for x in w.live if x[PHASE] != QUEUED]
        return _room(w) and all(x[PHASE] in (WAITING, RUNNING) and _lacks(w, x) for x in running)
    if scope.rows(r[CHUNK], r[PROMPT]) > 1:
        for x in w.live:
            if x[PHASE] != QUEUED and scope.rows(x[CHUNK], x[PROMPT]) == 1:
                return False
    return _room(w)


def _admissible(w: World) -> Fault | None:
    """The first in the queue must not fit (ADMIT-2)."""
    scope = w.scope
    running = [r for r in w.live if r[PHASE] != QUEUED]
    if w.draining or len(running) >= scope.options.max_running:
        return None
    first = next(r for r in w.live if r[PHASE] == QUEUED)
    held = sum(scope.reserved(r[PROMPT], r[NEW]) for r in [*running, first])
    return ("L3", f"(d) not admitted: {first}") if held <= scope.options.kv_tokens else None
