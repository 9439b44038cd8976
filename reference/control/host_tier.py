"""Bookkeeping of the host tier: which expert's bytes lie in which entry of host memory, between the
disk and the device.

Every load goes through an entry. A *hit* finds the expert there and only copies it on; a *miss*
gets an entry to read the file into. An entry is FREE, FILLING (a load writes it), READY, or
CONDEMNED: its content proved useless while others still read it. Loads pin the entry that they
write or read, and a pinned entry is given to nobody (TIER-2). Events in, answers out, as with the
slots of the device in cache.py; time, threads and bytes are the executor's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from reference.vocab.errors import IllegalEvent
from reference.vocab.ids import ExpertKey
from reference.vocab.options import Eviction

FREE, FILLING, READY, CONDEMNED = 0, 1, 2, 3


class Entry(NamedTuple):
    """Where a load finds its bytes (`hit`) or puts them first."""

    number: int
    hit: bool


class HostTier:
    """`entries` entries of host memory, each for one expert of one of `layers` layers (TIER-1).

    orders  READY experts and their entries, least recently used first: a layer each, or all in one
    loads   the entry that each load in flight has pinned, by ticket
    late    tickets of loads that were given up but have not come back

    Raises IllegalEvent where the executor breaks the protocol.
    """

    __slots__ = ("free", "keys", "late", "loads", "orders", "per_layer", "pins", "share", "state")

    def __init__(self, entries: int, layers: int = 1, eviction: Eviction = "per-layer") -> None:
        self.per_layer = eviction != "global"
        self.share = max(1, entries // max(1, layers))
        self.keys: list[ExpertKey | None] = [None] * entries
        self.state = [FREE] * entries
        self.pins = [0] * entries
        self.free = list(range(entries))[::-1]
        self.orders: dict[int, OrderedDict[ExpertKey, int]] = {}
        self.loads: dict[int, Entry] = {}
        self.late: set[int] = set()

    @property
    def available(self) -> int:
        """Loads that could begin now, whatever they ask for: entries that nothing has pinned."""
        return len(self.keys) - len({entry.number for entry in self.loads.values()})

    def find(self, key: ExpertKey) -> int | None:
        """The entry that holds the expert, ready to be read."""
        return self._order(key.layer).get(key)

    def begin(self, ticket: int, key: ExpertKey) -> Entry:
        """A load begins; its entry is pinned until `end` (TIER-2, TIER-3)."""
        if ticket in self.loads:
            raise IllegalEvent(f"load {ticket} has begun already")
        found = self.find(key)
        if found is None:
            entry = Entry(self._take(key), False)
        else:
            entry = Entry(found, True)
            self.use(key)
        self.pins[entry.number] += 1
        self.loads[ticket] = entry
        return entry

    def end(self, ticket: int, ok: bool) -> None:
        """A load has ended, and nothing of it reads or writes its entry any more (TIER-4)."""
        entry, hit = self._load(ticket)
        late = ticket in self.late
        self.late.discard(ticket)
        del self.loads[ticket]
        self.pins[entry] -= 1
        key = self.keys[entry]
        assert key is not None, "a pinned entry has a key"
        if not hit:
            if ok and not late and self.find(key) is None:
                self.state[entry] = READY
                self._order(key.layer)[key] = entry
            else:
                self._free(entry)
        elif not ok and self.state[entry] == READY:
            del self._order(key.layer)[key]
            self.state[entry] = CONDEMNED
        if self.state[entry] == CONDEMNED and not self.pins[entry]:
            self._free(entry)

    def overdue(self, ticket: int) -> None:
        """A load was given up but may still read or write its entry, which stays pinned; what it
        brings in the end is not used (TIER-5)."""
        self._load(ticket)
        self.late.add(ticket)

    def use(self, key: ExpertKey) -> None:
        """The expert is wanted, or was used on the device until now and has left it (TIER-6)."""
        order = self._order(key.layer)
        if key in order:
            order.move_to_end(key)

    def contents(self) -> Iterator[tuple[ExpertKey, int]]:
        """(expert, entry) of what can be hit, least recently used first within each order."""
        for order in self.orders.values():
            yield from order.items()

    def copy(self) -> HostTier:
        """An independent copy."""
        new = HostTier.__new__(HostTier)
        new.per_layer, new.share = self.per_layer, self.share
        new.keys, new.state, new.pins = self.keys[:], self.state[:], self.pins[:]
        new.free, new.loads, new.late = self.free[:], self.loads.copy(), self.late.copy()
        new.orders = {layer: order.copy() for layer, order in self.orders.items()}
        return new

    def key(self) -> tuple:
        """What the future depends on: entries unnumbered, tickets as an order, recency as one."""
        busy: dict[int, int] = {}
        loads = []
        for ticket, (entry, hit) in sorted(self.loads.items()):
            place = busy.setdefault(entry, len(busy))
            loads.append((place, self.keys[entry], self.state[entry], hit, ticket in self.late))
        orders = [(layer, tuple(order)) for layer, order in sorted(self.orders.items()) if order]
        return tuple(orders), tuple(loads), len(self.free)

    # -- giving an entry away (TIER-3) -----------------------------------------------------------

    def _take(self, key: ExpertKey) -> int:
        if self.free:
            entry = self.free.pop()
        else:
            victim, entry = self._victim(key.layer)
            del self._order(victim.layer)[victim]
        self.keys[entry], self.state[entry] = key, FILLING
        return entry

    def _victim(self, layer: int) -> tuple[ExpertKey, int]:
        """The least recently used expert that may go; the layers in the order of CACHE-5."""
        layers = sorted(self.orders, key=lambda at: (-len(self.orders[at]), at))
        if self.per_layer and len(self._order(layer)) >= self.share:
            layers = [layer, *layers]
        for at in layers:
            for key, entry in self.orders[at].items():
                if not self.pins[entry]:
                    return key, entry
        raise IllegalEvent("every entry of host memory is being read or written")

    def _order(self, layer: int) -> OrderedDict[ExpertKey, int]:
        return self.orders.setdefault(layer if self.per_layer else -1, OrderedDict())

    def _free(self, entry: int) -> None:
        self.keys[entry], self.state[entry] = None, FREE
        self.free.append(entry)

    def _load(self, ticket: int) -> Entry:
        if ticket not in self.loads:
            raise IllegalEvent(f"load {ticket} has no entry")
        return self.loads[ticket]
