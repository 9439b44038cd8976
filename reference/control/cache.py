"""Bookkeeping of the expert slots: who lies where, who may be overwritten.

Experts are integers here, `code = layer ordinal * experts + expert`, so that copying and hashing
stay cheap. A slot is FREE, LOADING (a transfer writes it), READY, or QUARANTINED: its transfer
was given up but may still write, so nobody gets the slot until that ticket is heard of (CACHE-9).
"""

from __future__ import annotations

FREE, LOADING, READY, QUARANTINED = 0, 1, 2, 3


class ExpertCache:
    """Slots, recency and the three ways in which an expert is kept.

    holds    claims of visits that wait for all their experts together (CACHE-3)
    readers  running steps that read the slot
    fresh    loaded for a task and not yet used: kept while such a task waits (CACHE-4)

    `wanted[code]` counts the waiting visits that have named the expert, `tasks[code]` those among
    them that run it by itself, as soon as it is there. `order` lists READY slots, least recently
    used first; it is the only recency there is.
    """

    __slots__ = (
        "bulk", "code", "experts", "fresh", "holds", "in_layer", "next_ticket", "order",
        "per_layer", "readers", "share", "slots", "state", "tasks", "ticket", "wanted", "where",
    )  # fmt: skip

    def __init__(self, slots: int, layers: int, experts: int, per_layer: bool) -> None:
        self.slots = slots
        self.experts = max(1, experts)
        self.per_layer = per_layer
        self.share = max(1, slots // max(1, layers))
        self.code = [-1] * slots
        self.state = [FREE] * slots
        self.ticket = [0] * slots
        self.readers = [0] * slots
        self.fresh = [False] * slots
        self.bulk = [False] * slots
        self.in_layer = [0] * max(1, layers)
        self.order: list[int] = []
        self.where: dict[int, int] = {}
        self.holds: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.tasks: dict[int, int] = {}
        self.next_ticket = 1

    def copy(self) -> ExpertCache:
        """An independent copy."""
        new = ExpertCache.__new__(ExpertCache)
        new.slots = self.slots
        new.experts = self.experts
        new.per_layer = self.per_layer
        new.share = self.share
        new.next_ticket = self.next_ticket
        new.code = self.code[:]
        new.state = self.state[:]
        new.ticket = self.ticket[:]
        new.readers = self.readers[:]
        new.fresh = self.fresh[:]
        new.bulk = self.bulk[:]
        new.in_layer = self.in_layer[:]
        new.order = self.order[:]
        new.where = self.where.copy()
        new.holds = self.holds.copy()
        new.wanted = self.wanted.copy()
        new.tasks = self.tasks.copy()
        return new

    def key(self) -> tuple:
        """What the future depends on, slots unnumbered: they are interchangeable.

        READY experts in order of recency, transfers in order of issue, then the quarantined.
        Claims and wants follow from the requests' state and are left out.
        """
        code, fresh, bulk, state = self.code, self.fresh, self.bulk, self.state
        ready = tuple([(code[s], fresh[s], bulk[s]) for s in self.order])
        moving = [
            (self.ticket[s], state[s], code[s], fresh[s], bulk[s])
            for s in range(self.slots)
            if state[s] == LOADING or state[s] == QUARANTINED
        ]
        moving.sort()
        return ready, tuple([m[1:] for m in moving])

    # -- questions -------------------------------------------------------------------------

    def present(self, code: int) -> bool:
        """The expert can be read now."""
        slot = self.where.get(code)
        return slot is not None and self.state[slot] == READY

    def coming(self, code: int) -> bool:
        """The expert can be read now or is being transferred."""
        return code in self.where

    def loading(self) -> int:
        """Transfers whose slot still belongs to them."""
        return sum(1 for s in self.state if s == LOADING)

    def evictable(self, slot: int, strict: bool = False) -> bool:
        """The slot may be overwritten; `strict` also spares what a waiting visit named."""
        if self.state[slot] != READY or self.readers[slot]:
            return False
        code = self.code[slot]
        if code in self.holds or (self.fresh[slot] and code in self.tasks):
            return False
        return not (strict and code in self.wanted)

    def available(self, strict: bool = False) -> int:
        """Slots that could be given away now."""
        free = sum(1 for s in self.state if s == FREE)
        return free + sum(1 for s in self.order if self.evictable(s, strict))

    # -- giving a slot away (CACHE-5, CACHE-6) -----------------------------------------------

    def victim(self, code: int, strict: bool, bulk_only: bool) -> int | None:
        """The slot to overwrite with `code`: a free one, else the least recently used that may go.

        per-layer: within the newcomer's layer once that layer has its even share of the slots,
        else from the layer that is furthest above its share. Not a partition. An expert that a
        waiting visit has named goes only when nothing else may (never, with `strict`).
        """
        if not bulk_only:
            for slot in range(self.slots):
                if self.state[slot] == FREE:
                    return slot
        able = [s for s in self.order if self.evictable(s, strict)]
        if bulk_only:
            able = [s for s in able if self.bulk[s]]
        able = [s for s in able if self.code[s] not in self.wanted] or able
        if not able:
            return None
        if not self.per_layer:
            return able[0]
        layer = code // self.experts
        own = [s for s in able if self.code[s] // self.experts == layer]
        if own and self.in_layer[layer] >= self.share:
            return own[0]
        rich = max(self.in_layer[self.code[s] // self.experts] for s in able)
        return next(s for s in able if self.in_layer[self.code[s] // self.experts] == rich)

    def begin(self, slot: int, code: int, fresh: bool, bulk: bool) -> int:
        """Start a transfer of `code` into `slot`; what lay there is gone. Returns the ticket."""
        if self.state[slot] == READY:
            self._forget(slot)
        self.state[slot] = LOADING
        self.code[slot] = code
        self.fresh[slot] = fresh
        self.bulk[slot] = bulk
        self.where[code] = slot
        self.in_layer[code // self.experts] += 1
        self.ticket[slot] = self.next_ticket
        self.next_ticket += 1
        return self.ticket[slot]

    def _forget(self, slot: int) -> None:
        if self.state[slot] == READY:
            self.order.remove(slot)
        del self.where[self.code[slot]]
        self.in_layer[self.code[slot] // self.experts] -= 1
        self.state[slot] = FREE
        self.code[slot] = -1
        self.ticket[slot] = 0
        self.fresh[slot] = self.bulk[slot] = False

    # -- completions -----------------------------------------------------------------------

    def slot_of_ticket(self, ticket: int) -> int | None:
        """The slot that this transfer writes, or None when it no longer concerns any (CACHE-8)."""
        try:
            return self.ticket.index(ticket)
        except ValueError:
            return None

    def loaded(self, slot: int) -> None:
        """The transfer has ended well. A quarantined slot becomes free, its content unused."""
        self.ticket[slot] = 0
        if self.state[slot] == QUARANTINED:
            self.state[slot] = FREE
            return
        self.state[slot] = READY
        self.order.append(slot)

    def failed(self, slot: int, drained: bool) -> int:
        """The transfer has failed; returns the expert it was for, or -1 if that was known."""
        if self.state[slot] == QUARANTINED:
            if drained:
                self.state[slot] = FREE
                self.ticket[slot] = 0
            return -1
        code, ticket = self.code[slot], self.ticket[slot]
        self._forget(slot)
        if not drained:
            self.state[slot] = QUARANTINED
            self.ticket[slot] = ticket
        return code

    # -- use -------------------------------------------------------------------------------

    def read(self, code: int, bulk: bool, promote: bool) -> int:
        """A step reads the expert: it becomes the most recent and is no longer fresh.

        A prompt's use (`bulk`) does not promote it, and what came for a prompt goes first
        afterwards, so that prompts do not flush what decoding visits live on (FETCH-4).
        """
        slot = self.where[code]
        self.readers[slot] += 1
        self.fresh[slot] = False
        if not bulk or promote:
            self.bulk[slot] = self.bulk[slot] and bulk
            self.order.remove(slot)
            self.order.append(slot)
        elif self.bulk[slot]:
            self.order.remove(slot)
            self.order.insert(0, slot)
        return slot

    def release(self, slot: int) -> None:
        """A step that read the slot is over."""
        self.readers[slot] -= 1

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
