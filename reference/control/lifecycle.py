"""From arrival to the terminal action: what each event does to the requests and the slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference.control.prefetch import predicted
from reference.control.requests import AWAITING, RUNNING, WAITING, Request
from reference.vocab import events as ev
from reference.vocab.actions import Action, Admit, Finish, Reason, Reject
from reference.vocab.errors import IllegalEvent

if TYPE_CHECKING:
    from reference.control.scheduler import Scheduler


def admit(s: Scheduler, actions: list[Action]) -> None:
    """ADMIT-2: in order of arrival, while the head fits; nobody passes it."""
    while s.queue and len(s.running) < s.options.max_running and s.queue[0].blocks <= s.kv_free:
        r = s.queue.pop(0)
        s.kv_free -= r.blocks
        open_chunk(s, r, 0)
        s.running[r.number] = r
        actions.append(Admit(r.number))


def open_chunk(s: Scheduler, r: Request, chunk: int) -> None:
    """Go to a chunk's entry. On entering a class (prompt, decode) the request's progress
    becomes the least there, so that newcomers and old ones share alike (SCHED-6)."""
    was = s.prompting(r) if chunk else None
    r.open_chunk(chunk, s.options.chunk)
    kind = s.prompting(r)
    if kind != was:
        others = [o.progress for o in s.running.values() if o is not r and s.prompting(o) == kind]
        r.progress = min(others, default=0)
        if s.options.grouping == "balanced":  # equal progress is to mean the same layer
            stages = len(s.options.layers) + 1
            r.progress = -(-r.progress // stages) * stages


def finish(s: Scheduler, r: Request, reason: Reason, error: str = "") -> None:
    """The one terminal action of an admitted request; whatever it held is released."""
    if r.need:
        s.cache.want(r.need, -1, not s.claims or r.bulk)
    if r.claimed:
        s.cache.hold(r.need, -1)
        s.pending = [c for c in s.pending if c in s.cache.holds]
    if r.number in s.routed_order:
        s.routed_order.remove(r.number)
    s.kv_free += r.blocks
    s.guesses.drop(r.number)
    s.cache.policy.ended(r.number)
    del s.running[r.number]
    s.terminal.append(Finish(r.number, reason, error))
    if s.fails:
        s.fails = {c: n for c, n in s.fails.items() if c in s.cache.wanted}
    if not any(o.bulk for o in s.running.values()):
        s.loads_since_bulk = s.steps_since_bulk = 0


def end_visit(s: Scheduler, r: Request) -> None:
    """A visit's last part is done: on to the next chunk, or wait for the executor's word."""
    r.progress += 1
    r.running = ()
    final = r.final_prompt_chunk(s.options.chunk)
    if r.stage == len(s.options.layers) - 1 and r.chunk < final:
        open_chunk(s, r, r.chunk + 1)
    else:
        r.status = AWAITING


def arrived(s: Scheduler, e: ev.Arrived) -> None:
    """ADMIT-1: wait in the queue; what can never fit is refused at once (ADMIT-3)."""
    if e.request <= s.last_number:
        raise IllegalEvent(f"request {e.request} arrived after request {s.last_number}")
    if e.prompt_len < 1 or e.max_new_tokens < 0:
        raise IllegalEvent(f"{e}: prompt_len >= 1 and max_new_tokens >= 0 expected")
    s.last_number = e.request
    o = s.options
    blocks = -(-(e.prompt_len + e.max_new_tokens) // o.kv_block)
    if s.draining:
        s.terminal.append(Reject(e.request, "draining"))
    elif blocks > o.kv_tokens // o.kv_block:  # ADMIT-3
        s.terminal.append(
            Reject(
                e.request,
                f"prompt of {e.prompt_len} plus {e.max_new_tokens} new tokens needs "
                f"{blocks * o.kv_block} KV tokens; the capacity is {o.kv_tokens}",
            )
        )
    else:
        s.queue.append(Request(e.request, e.prompt_len, e.max_new_tokens, blocks))


def routed(s: Scheduler, e: ev.Routed) -> None:
    """SCHED-1: the visit at the next layer with experts begins; it names what it needs."""
    number, chunk, layer = e.visit
    r = s.running.get(number)
    if r is None and number <= s.last_number:
        return  # ended meanwhile (CANCEL-2)
    stage = -1 if r is None else r.stage + 1
    if (
        r is None
        or r.status != AWAITING
        or chunk != r.chunk
        or stage >= len(s.options.layers)
        or layer != s.options.layers[stage]
        or len(e.experts) != r.rows
    ):
        raise IllegalEvent(f"{e} does not fit the request's state")
    k, n = s.options.top_k, s.options.experts
    for token in e.experts:
        if len(token) != k or len(set(token)) != k or min(token) < 0 or max(token) >= n:
            raise IllegalEvent(f"{e.visit}: {token} is not {k} distinct experts below {n}")
    r.stage = stage
    r.status = WAITING
    r.passed = 0
    base = stage * s.experts
    r.need = tuple(sorted({base + x for token in e.experts for x in token}))
    s.balance.named(stage, r.need, len(s.running))
    s.cache.name(number, r.need)
    s.cache.want(r.need, 1, not s.claims or r.bulk)
    s.routed_order.append(number)
    s.guesses.passed(number, (chunk, stage))


def loaded(s: Scheduler, e: ev.Loaded) -> None:
    """CACHE-7: the expert can be read from now on."""
    s.balance.loaded(e.ns)
    if current(s, e.ticket):
        s.fails.pop(s.cache.loaded(e.ticket), None)


def load_failed(s: Scheduler, e: ev.LoadFailed) -> None:
    """FETCH-6: try again a bounded number of times, then fail those who need the expert."""
    code = s.cache.failed(e.ticket, e.drained) if current(s, e.ticket) else -1
    if code < 0:
        return
    s.guesses.lost(code)
    fails = s.fails.get(code, 0) + 1
    if fails <= s.options.retries:
        s.fails[code] = fails
        if code in s.cache.holds:
            s.pending.insert(0, code)
        elif code not in s.cache.wanted:
            del s.fails[code]
        return
    s.fails.pop(code, None)
    layer, expert = s.key_of(code)
    for r in list(s.running.values()):
        if code in r.need:
            error = f"expert {expert} of layer {layer} cannot be read: {e.error}"
            if r.status == RUNNING:
                doom(s, r, error)
            else:
                finish(s, r, "error", error)


def doom(s: Scheduler, r: Request, error: str) -> None:
    """End a request as soon as its running step does."""
    s.cache.want(r.need, -1, not s.claims or r.bulk)
    r.need = ()
    r.doomed = ("error", error)


def current(s: Scheduler, ticket: int) -> bool:
    """CACHE-8: the ticket still concerns a slot; otherwise its completion changes nothing."""
    if not 0 < ticket < s.cache.next_ticket:
        raise IllegalEvent(f"ticket {ticket} was never issued")
    return ticket in s.cache.flying


def computed(s: Scheduler, e: ev.Computed) -> None:
    """SCHED-9: the step's slots are no longer read; its visits go on."""
    s.balance.computed(e.step, e.ns)
    end_step(s, e.step, (), "")


def failed(s: Scheduler, e: ev.Failed) -> None:
    """SCHED-10: the requests of a failed step fail, and no others."""
    numbers = s.steps.get(e.step, ((), ()))[0]
    end_step(s, e.step, e.requests or numbers, e.error)


def end_step(s: Scheduler, step: int, failed: tuple[int, ...], error: str) -> None:
    """Release the slots, then settle every request of the step."""
    if step not in s.steps:
        raise IllegalEvent(f"step {step} is not running")
    numbers, slots = s.steps.pop(step)
    for slot in slots:
        s.cache.release(slot)
    for number in numbers:
        r = s.running[number]
        if r.doomed is not None:
            finish(s, r, *r.doomed)
        elif number in failed:
            finish(s, r, "error", error)
        elif r.last:
            end_visit(s, r)
        else:
            r.status, r.running = WAITING, ()


def sampled(s: Scheduler, e: ev.Sampled) -> None:
    """SCHED-11: one more token, or the end of the text."""
    r = s.running.get(e.request)
    if r is None and e.request <= s.last_number:
        return  # ended meanwhile (CANCEL-2)
    if r is None or r.status != AWAITING or r.stage != len(s.options.layers) - 1:
        raise IllegalEvent(f"{e} does not fit the request's state")
    r.sampled += e.token is not None
    if e.stop:
        finish(s, r, "stop")
    elif r.sampled >= r.max_new:
        finish(s, r, "length")
    else:
        open_chunk(s, r, r.chunk + 1)


def cancelled(s: Scheduler, e: ev.Cancelled) -> None:
    """CANCEL-1: from any state; at once, or as soon as the running step ends."""
    for i, q in enumerate(s.queue):
        if q.number == e.request:
            del s.queue[i]
            s.terminal.append(Finish(e.request, "cancelled"))
            return
    r = s.running.get(e.request)
    if r is None:
        return
    if r.status == RUNNING:
        if r.doomed is None:
            doom(s, r, "")
        r.doomed = ("cancelled", "")
    else:
        finish(s, r, "cancelled")


def drain(s: Scheduler, e: ev.Drain) -> None:
    """ADMIT-4: refuse what waits; what runs goes on."""
    s.draining = True
    for q in s.queue:
        s.terminal.append(Reject(q.number, "draining"))
    s.queue = []


HANDLERS = {
    ev.Arrived: arrived,
    ev.Routed: routed,
    ev.Predicted: predicted,
    ev.Loaded: loaded,
    ev.LoadFailed: load_failed,
    ev.Computed: computed,
    ev.Sampled: sampled,
    ev.Failed: failed,
    ev.Cancelled: cancelled,
    ev.Drain: drain,
}
