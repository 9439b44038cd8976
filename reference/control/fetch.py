"""What to read next: claims, tasks, the prompts' share, and the fetch orders.

Decoding visits in visit mode *claim*: all their experts are held together or not at all, so that
nobody waits for slots while keeping some from others (CACHE-3). Every other visit is served task
by task: one expert, one slot, used as soon as it is there (SCHED-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reference.control.cache import LOADING
from reference.control.prefetch import prefetch
from reference.control.requests import Request
from reference.vocab.actions import Action, Load
from reference.vocab.ids import ExpertKey

if TYPE_CHECKING:
    from reference.control.scheduler import Scheduler

Chooser = Callable[[list], int]


def first(options: list) -> int:
    """The engines' choice among equally good ones; the explorer takes each."""
    return 0


def waiters(s: Scheduler, r: Request) -> int:
    """How many waiting visits the missing experts of `r` would help."""
    wanted = s.cache.wanted
    return sum(wanted[c] for c in r.need if s.absent(c))


def missing(s: Scheduler, r: Request) -> int:
    """How many experts of `r` no transfer is bringing yet."""
    return sum(1 for c in r.need if s.absent(c))


ORDERS: dict[str, Callable[[Scheduler, Request], tuple[int, ...]]] = {
    # FETCH-1: bounds the lag; equal progress goes to what helps most.
    "least-progress": lambda s, r: (r.progress, -waiters(s, r)),
    "first-come": lambda s, r: (s.routed_order.index(r.number),),
    # FETCH-7: who has been passed over too often goes first, whatever it lacks.
    "fewest-missing": lambda s, r: (
        (1, missing(s, r), r.progress)
        if r.passed < s.max_lag
        else (0, s.routed_order.index(r.number), 0)
    ),
}


def fetch(s: Scheduler, actions: list[Action], channels: int, choose: Chooser) -> None:
    """Issue up to `channels` loads and claim for visits that need none (FETCH-2, FETCH-5)."""
    s.cache.policy.look([r.stage for r in s.running.values()])
    if s.warming:
        if not s.running and not s.draining:
            return _warm(s, actions, channels)
        s.warming = []
    if s.blocking and s.steps:
        return
    blocked = False
    while channels > 0:
        found = None
        if not s.pending or _bulk_turn(s):
            found, blocked = _next_demand(s, choose)
        if found is not None:
            code, slot, bulk = found
        elif s.pending:
            code, bulk = s.pending[0], False
            slot = s.cache.victim(code, False)
            if slot is None:
                break  # a step still reads what may go
            del s.pending[0]
        else:
            break
        _count_turn(s, bulk)
        ticket = s.cache.begin(slot, code, found is not None, bulk)
        actions.append(Load(ticket, ExpertKey(*s.key_of(code)), slot))
        channels -= 1
    if s.claims and not blocked:
        _claim_resident(s)
    # PREFETCH-2: what is named goes first.
    if s.options.prefetch and not (s.pending or any(missing(s, r) for r in _waiting(s))):
        prefetch(s, actions, channels)


def _warm(s: Scheduler, actions: list[Action], channels: int) -> None:
    """FETCH-8: what the options name goes into free slots, while nobody runs who could name
    more. Nobody has asked for these experts, so they are guesses, and one that fails is let be."""
    while channels > 0 and s.warming and s.cache.free:
        code = s.warming.pop(0)
        slot = s.cache.free[-1]
        ticket = s.cache.begin(slot, code, False, False)
        actions.append(Load(ticket, ExpertKey(*s.key_of(code)), slot, guess=True))
        channels -= 1


def _count_turn(s: Scheduler, bulk: bool) -> None:
    """FETCH-4: one load in `bulk_every` belongs to prompts while both sides want the channel."""
    if bulk:
        s.loads_since_bulk = 0
    elif s.loads_since_bulk < s.options.bulk_every - 1 and any(
        r.bulk and r.need for r in s.running.values()
    ):
        s.loads_since_bulk += 1


def _bulk_turn(s: Scheduler) -> bool:
    return (
        s.loads_since_bulk >= s.options.bulk_every - 1
        and any(r.bulk and _task(s, r) is not None for r in _waiting(s))
        and _bulk_in_use(s) < s.bulk_cap()
    )


def _waiting(s: Scheduler) -> list[Request]:
    """Requests at the front (lock-step) or anywhere that may want an expert now: who waits, and
    who runs a part and has more to run."""
    return [
        r
        for r in s.running.values()
        if r.need
        and not r.claimed
        and (not s.lockstep or r.stage == s.front)
        and s.eligible(r)
    ]


def _bulk_in_use(s: Scheduler) -> int:
    """Slots that a prompt's load has taken and that a prompt still waits to use."""
    c = s.cache
    return sum(c.state[i] == LOADING or (i in c.fresh and c.code[i] in c.tasks) for i in c.bulk)


def _task(s: Scheduler, r: Request) -> int | None:
    """FETCH-3: what to read next for a visit served by tasks: most wanted first, then lowest."""
    absent = [c for c in r.need if s.absent(c)]
    if not absent:
        return None
    wanted = s.cache.wanted
    return min(absent, key=lambda c: (-wanted[c], c))


def _next_demand(s: Scheduler, choose: Chooser) -> tuple[tuple[int, int, bool] | None, bool]:
    """The next load, or a claim that fills `pending`, in fetch order.

    Returns ((code, slot, bulk) or None, blocked). Blocked: the visit whose turn it is finds no
    room; nobody else claims or loads until it does, so it cannot be starved (SCHED-8).
    """
    wishes = [r for r in _waiting(s) if missing(s, r)]
    if s.lockstep:
        return _lockstep_demand(s, wishes), False
    if s.alike:
        return _balanced_demand(s, wishes), False
    decode = [r for r in wishes if not r.bulk]
    bulk = [r for r in wishes if r.bulk]
    if bulk and (not decode or s.loads_since_bulk >= s.options.bulk_every - 1):
        cap = s.bulk_cap()
        if _bulk_in_use(s) < cap:
            r = min(bulk, key=lambda r: (r.progress, r.number))
            code = _task(s, r)
            assert code is not None
            full = len(s.cache.bulk) >= cap and not s.cache.free
            slot = _slot_for_task(s, code, full)
            if slot is not None:
                return (code, slot, True), False
            if not full or s.pending:
                return None, True
            # A full share waits for its own slots; that is no reason to hold the others up.
    if decode:
        r = _pick(s, decode, choose)
        if s.claims:
            return None, not _claim(s, r)
        code = _task(s, r)
        assert code is not None
        slot = _slot_for_task(s, code, False)
        return (None if slot is None else (code, slot, False)), False
    return None, False


def _pick(s: Scheduler, visits: list[Request], choose: Chooser) -> Request:
    """The first in fetch order; equals are ordered by arrival and offered to `choose`."""
    order = ORDERS[s.options.fetch_order]
    ranks = [order(s, r) for r in visits]
    best = min(ranks)
    equal = [r for r, rank in zip(visits, ranks, strict=True) if rank == best]
    chosen = equal[choose(equal)] if len(equal) > 1 else equal[0]
    if s.options.fetch_order == "fewest-missing":
        for r in visits:
            if r is not chosen and r.passed < s.max_lag:
                r.passed += 1
    return chosen


def _slot_for_task(s: Scheduler, code: int, bulk_only: bool) -> int | None:
    """A slot, unless what is left is promised to claims that wait for the channel."""
    if not s.cache.room(len(s.pending) + 1):
        return None
    return s.cache.bulk_victim() if bulk_only else s.cache.victim(code, False)


def _lockstep_demand(s: Scheduler, wishes: list[Request]) -> tuple[int, int, bool] | None:
    """The layer's missing experts, most wanted first; what the layer named is spared."""
    codes = {c for r in wishes for c in r.need if s.absent(c)}
    if not codes:
        return None
    wanted = s.cache.wanted
    code = min(codes, key=lambda c: (-wanted[c], c))
    slot = s.cache.victim(code, True)
    return None if slot is None else (code, slot, False)


def _balanced_demand(s: Scheduler, wishes: list[Request]) -> tuple[int, int, bool] | None:
    """FETCH-9: for the least advanced first, what most wait for. What anybody has named is spared:
    whoever waits for it can run it, however far ahead, so a slot comes free."""
    wanted = s.cache.wanted
    progress = {}
    for r in wishes:
        for c in r.need:
            if s.absent(c):
                progress[c] = min(progress.get(c, r.progress), r.progress)
    if not progress:
        return None
    code = min(progress, key=lambda c: (progress[c], -wanted[c], c))
    slot = s.cache.victim(code, True)
    return None if slot is None else (code, slot, False)


def _claim(s: Scheduler, r: Request) -> bool:
    """Hold all experts of `r` and put the missing ones in line, if all of them fit."""
    c = s.cache
    c.hold(r.need, 1)
    lacking = [code for code in r.need if s.absent(code)]
    if not c.room(len(s.pending) + len(lacking)):
        c.hold(r.need, -1)
        return False
    r.claimed = True
    s.pending.extend(lacking)
    return True


def _claim_resident(s: Scheduler) -> None:
    """Visits that need no further load claim at once, in fetch order: they go ahead (SCHED-2)."""
    order = ORDERS[s.options.fetch_order]
    able = [r for r in _waiting(s) if not r.bulk and not missing(s, r)]
    for r in sorted(able, key=lambda r: (order(s, r), r.number)):
        _claim(s, r)
