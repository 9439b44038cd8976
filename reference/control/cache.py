"""Bookkeeping of the expert slots: who lies where, who may be overwritten.

Experts are integers here, `code = layer ordinal * experts + expert`, so that copying and hashing
stay cheap. A slot is FREE, LOADING (a transfer writes it), READY, or QUARANTINED: its transfer
was given up but may still write, so nobody gets the slot until that ticket is heard of (CACHE-9).
Every question costs what is kept or in flight, not what is cached: caches have thousands of slots.
"""

from __future__ import annotations

from collections.abc import Iterable

from reference.control.eviction_counts import POLICIES

FREE, LOADING, READY, QUARANTINED = 0, 1, 2, 3


class ExpertCache:
    """Slots and the three ways in which an expert is kept.

    holds    claims of visits that wait for all their experts together (CACHE-3)
    readers  slot -> running steps that read it
    fresh    slots read for a task and not yet used: kept while such a task waits (CACHE-4)

    `wanted[code]` counts the waiting visits that have named the expert, `tasks[code]` those among
    them that run it by itself, as soon as it is there. `bulk` are the slots that came for a prompt.
    `policy` orders the READY slots (eviction.py): the only recency and the only counts that there
    are. `flying` maps tickets to the slots that they may still write.
    """

    __slots__ = (
        "bulk", "code", "flying", "free", "fresh", "holds", "next_ticket", "policy", "readers",
        "state", "tasks", "wanted", "where",
    )  # fmt: skip

    def __init__(self, slots: int, layers: int, experts: int, eviction: str) -> None:
        self.policy = POLICIES[eviction](slots, layers, experts)
        self.code = [-1] * slots
        self.state = [FREE] * slots
        self.free = list(range(slots))[::-1]
        self.flying: dict[int, int] = {}
        self.readers: dict[int, int] = {}
        self.fresh: dict[int, None] = {}
        self.bulk: dict[int, None] = {}
        self.where: dict[int, int] = {}
        self.holds: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.tasks: dict[int, int] = {}
        self.next_ticket = 1

    def copy(self) -> ExpertCache:
        """An independent copy."""
        new = ExpertCache.__new__(ExpertCache)
        new.policy = self.policy.copy()
        new.code = self.code[:]
        new.state = self.state[:]
        new.free = self.free[:]
        new.flying = self.flying.copy()
        new.readers = self.readers.copy()
        new.fresh = self.fresh.copy()
        new.bulk = self.bulk.copy()
        new.where = self.where.copy()
        new.holds = self.holds.copy()
        new.wanted = self.wanted.copy()
        new.tasks = self.tasks.copy()
        new.next_ticket = self.next_ticket
        return new

    def key(self, running: Iterable[int]) -> tuple:
        """What the future depends on, slots unnumbered: they are interchangeable; so are requests,
        which are told by their place among the `running`.

        READY experts as the policy orders them and what else it remembers, transfers in order of
        issue. Claims, wants and readers follow from the requests' state and are left out.
        """
        code, fresh, bulk, state = self.code, self.fresh, self.bulk, self.state
        place = {s: i for i, s in enumerate(bulk)}  # prompts' slots go in order of arrival
        return (
            tuple([
                tuple([(code[s], s in fresh, place.get(s, -1)) for s in order])
                for order in self.policy.ranks()
            ]),
            tuple([
                (state[s], code[s], s in fresh, place.get(s, -1)) for s in self.flying.values()
            ]),
            self.policy.extra(running),
        )  # fmt: skip

    # -- questions -------------------------------------------------------------------------

    def present(self, code: int) -> bool:
        """The expert can be read now."""
        slot = self.where.get(code)
        return slot is not None and self.state[slot] == READY

    def loading(self) -> int:
        """Transfers whose slot still belongs to them."""
        return sum(1 for s in self.flying.values() if self.state[s] == LOADING)

    def evictable(self, slot: int) -> bool:
        """The slot may be overwritten."""
        code = self.code[slot]
        return (
            self.state[slot] == READY
            and slot not in self.readers
            and code not in self.holds
            and not (slot in self.fresh and code in self.tasks)
        )

    def room(self, slots: int) -> bool:
        """At least so many slots could be given away now."""
        kept = {self.where[c] for c in self.holds if self.present(c)}
        kept.update(self.readers)
        kept.update(s for s in self.fresh if self.state[s] == READY and self.code[s] in self.tasks)
        return len(self.code) - len(self.flying) - len(kept) >= slots

    # -- giving a slot away (CACHE-5, CACHE-6) -----------------------------------------------

    def victim(self, code: int, strict: bool) -> int | None:
        """The slot to overwrite with `code`: a free one, else the first of the policy's that may
        go. An expert that a waiting visit has named goes only when nothing else may (never, with
        `strict`)."""
        if self.free:
            return self.free[-1]
        fallback = None
        for order in self.policy.victims(code):
            slot = self._oldest(order, strict)
            if slot is not None and self.code[slot] not in self.wanted:
                return slot
            fallback = slot if fallback is None else fallback
        return fallback

    def bulk_victim(self) -> int | None:
        """Like `victim`, among the slots that came for prompts; the first to come goes first."""
        return self._oldest(self.bulk, False)

    def _oldest(self, order: Iterable[int], strict: bool) -> int | None:
        fallback = None
        for slot in order:
            if self.evictable(slot):
                if self.code[slot] not in self.wanted:
                    return slot
                if fallback is None and not strict:
                    fallback = slot
        return fallback

    def begin(self, slot: int, code: int, fresh: bool, bulk: bool) -> int:
        """Start a transfer of `code` into `slot`; what lay there is gone. Returns the ticket."""
        if self.state[slot] == READY:
            self.policy.drop(slot, self.code[slot])
            self._forget(slot)
        self.free.pop()  # this slot: `victim` offers the last, `_forget` puts it last
        self.state[slot] = LOADING
        self.code[slot] = code
        if fresh:
            self.fresh[slot] = None
        if bulk:
            self.bulk[slot] = None
        self.where[code] = slot
        self.policy.begin(code)
        ticket = self.next_ticket
        self.next_ticket += 1
        self.flying[ticket] = slot
        return ticket

    def _forget(self, slot: int) -> None:
        del self.where[self.code[slot]]
        self.policy.gone(self.code[slot])
        self.fresh.pop(slot, None)
        self.bulk.pop(slot, None)
        self._set_free(slot)

    def _set_free(self, slot: int) -> None:
        self.state[slot] = FREE
        self.code[slot] = -1
        self.free.append(slot)

    # -- completions -----------------------------------------------------------------------

    def loaded(self, ticket: int) -> int:
        """The transfer has ended well; returns its expert. A quarantined slot becomes free, its
        content unused (-1)."""
        slot = self.flying.pop(ticket)
        if self.state[slot] == QUARANTINED:
            self._set_free(slot)
            return -1
        self.state[slot] = READY
        self.policy.arrive(slot, self.code[slot])
        return self.code[slot]

    def failed(self, ticket: int, drained: bool) -> int:
        """The transfer has failed; returns the expert it was for, or -1 if that was known."""
        slot = self.flying[ticket]
        known = self.state[slot] == QUARANTINED
        code = -1 if known else self.code[slot]
        if not known:
            self._forget(slot)
            if not drained:
                self.free.pop()
                self.state[slot] = QUARANTINED
        elif drained:
            self._set_free(slot)
        if drained:
            del self.flying[ticket]
        return code

    # -- use -------------------------------------------------------------------------------

    def read(self, code: int, bulk: bool, promote: bool) -> int:
        """A step reads the expert: the policy counts it as used, and it is no longer fresh.

        A prompt's use (`bulk`) does not promote it, and what came for a prompt goes first
        afterwards, so that prompts do not flush what decoding visits live on (FETCH-4).
        """
        slot = self.where[code]
        self.readers[slot] = self.readers.get(slot, 0) + 1
        self.fresh.pop(slot, None)
        if not bulk:
            self.bulk.pop(slot, None)
        if not bulk or promote:
            self.policy.use(slot, code)
        elif slot in self.bulk:
            self.policy.demote(slot, code)
        return slot

    def release(self, slot: int) -> None:
        """A step that read the slot is over."""
        add(self.readers, (slot,), -1)

    def name(self, request: int, codes: tuple[int, ...]) -> None:
        """A visit of a request has named these experts, all of one layer."""
        self.policy.named(request, [
            (code, self.where[code] if self.present(code) else -1, code not in self.wanted)
            for code in codes
        ])  # fmt: skip

    def want(self, codes: tuple[int, ...], by: int, task: bool) -> None:
        """Count (+1) or discount (-1) a waiting visit's named experts."""
        add(self.wanted, codes, by)
        if task:
            add(self.tasks, codes, by)

    def hold(self, codes: tuple[int, ...], by: int) -> None:
        """Count (+1) or discount (-1) a claim."""
        add(self.holds, codes, by)


def add(counts: dict[int, int], codes: tuple[int, ...], by: int) -> None:
    """Add `by` to every count, dropping those that reach zero."""
    for code in codes:
        n = counts.get(code, 0) + by
        if n:
            counts[code] = n
        else:
            del counts[code]
