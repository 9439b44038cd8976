"""How much memory a run takes, decided before anything is allocated (ENGINE-1..3).

The budget is for routed experts in host slots, and for nothing else: a slot counts from the moment
a load may write it, so what is resident and what is in flight are bounded together. The other
parts (resident weights, KV, token rows, bounce buffers) are computed here as well, so that they
can be told apart from the budget and added up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reference.files.safetensors_header import TensorRef
from reference.vocab.errors import BadInput, BudgetTooSmall

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]+)\s*")


def parse_size(text: str | int, whole: int | None = None) -> int:
    """Bytes of a size such as "4GiB", "512 MB" or "40%" (of `whole`); an int is bytes already.

    Raises BadInput for anything else, for a negative number, and for % where there is no whole.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise BadInput(f"size {text}: negative")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) and len(text) < 64 else None
    if match is None:
        raise BadInput(f"size {text!r}: not a number with one of {', '.join(UNITS)}, %")
    number, unit = match.groups()
    if unit == "%":
        if whole is None:
            raise BadInput(f"size {text!r}: % has no meaning here")
        return int(whole * float(number) / 100 + 1e-9)
    if unit not in UNITS:
        raise BadInput(f"size {text!r}: unit {unit!r} is none of {', '.join(UNITS)}, %")
    scale = UNITS[unit]
    return int(number) * scale if number.isdigit() else int(float(number) * scale)


def show_size(nbytes: int) -> str:
    """A size for people: the largest unit of 1024 that leaves at least 1, two decimals at most."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes} B"


def show_size_exact(nbytes: int) -> str:
    """Like show_size, but never less than nbytes when parsed again: for minimum budgets."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit] and nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]}{unit}"
    return f"{nbytes}B"


def available_memory() -> int:
    """Bytes that could be used without swapping: the system's own estimate, and any cgroup limit.

    Raises BadInput where the system does not tell ("auto" needs it; a stated size does not).
    """
    try:
        text = Path("/proc/meminfo").read_text()
        free = int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError) as error:
            raise BadInput("memory auto: this system does not tell; state a size") from error
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit.isdigit():
            free = min(free, max(0, int(limit) - used))
    except OSError:
        pass
    return free


@dataclass(frozen=True)
class Sizes:
    """The memory of a run, in bytes unless said otherwise.

    budget        what the caller granted to routed experts
    slots         expert slots that it buys (a count), never more than there are experts
    slot          one slot; `expert` is the largest expert's own tensors
    experts       routed experts over all layers (a count)
    resident      non-expert weights as held, when known before they are read: as stored
    kv, rows, bounce   KV pools, token rows, bounce buffers
    host          what the caller granted to the host tier; `host_slots` experts fit into it
    """

    budget: int
    slots: int
    slot: int
    expert: int
    experts: int
    resident: int = 0
    kv: int = 0
    rows: int = 0
    bounce: int = 0
    host: int = 0
    host_slots: int = 0

    @property
    def total(self) -> int:
        """Everything that is held for the whole run."""
        slots = self.slots + self.host_slots
        return slots * self.slot + self.resident + self.kv + self.rows + self.bounce


AUTO_SHARE = 0.8
"""Share of the available memory that "auto" uses, everything together."""


ALIGN = 64
"""Boundary, in bytes, of every tensor in a slot: from there the CPU backend reads it in place."""

PAGE = 4096


def round_up(n: int, to: int) -> int:
    """The least multiple of `to` that is at least n."""
    return -(-n // to) * to


def slot_size(experts: Iterable[Sequence[TensorRef]]) -> int:
    """Bytes of a slot that holds any of `experts`, each given by its tensors (ENGINE-2).

    Slots of a mebibyte and more are whole pages; smaller ones would waste too much that way.
    """
    most = max((sum(round_up(r.nbytes, ALIGN) for r in refs) for refs in experts), default=0)
    return round_up(most, PAGE) if most >= 1 << 20 else most


def expert_budget(memory: str | int, experts: int, slot: int, others: int = 0) -> int:
    """The budget in bytes that `memory` stands for.

    A percentage is of all routed experts as slots hold them, so 100% holds them all. "auto" takes
    a share of the available memory, less `others` (what the run takes beside the experts), and no
    more than all experts need. Raises BudgetTooSmall when that leaves nothing.
    """
    whole = experts * slot
    if memory == "auto":
        share = int(available_memory() * AUTO_SHARE)
        if whole and share <= others:
            raise BudgetTooSmall(
                f"memory auto: resident weights, KV and token rows take {show_size(others)} of the "
                f"{show_size(share)} that may be used: fewer --kv-tokens, a smaller --max-running "
                "or --chunk leave room for experts"
            )
        return min(whole, share - others)
    return parse_size(memory, whole)


def slots_for(budget: int, experts: int, slot: int, top_k: int) -> int:
    """Slots that `budget` bytes buy: at least top_k, at most one for every expert.

    A model without routed experts takes any budget and gets no slots. Raises BudgetTooSmall,
    naming the least budget that would do (ENGINE-3).
    """
    if experts == 0:
        return 0
    slots = min(experts, budget // slot)
    if slots < top_k:
        raise BudgetTooSmall(
            f"memory budget {budget} B holds {budget // slot} experts of {slot} B; "
            f"a token needs {top_k}: at least {show_size_exact(top_k * slot)}"
        )
    return slots


def host_tier(memory: str | int | None, experts: int, slot: int) -> tuple[int, int]:
    """(bytes, entries) of the host tier that `memory` asks for; None asks for none (TIER-1).

    A percentage is of all routed experts. Raises BudgetTooSmall below one entry, BadInput for
    anything that is no size.
    """
    if memory is None or not experts:
        return 0, 0
    budget = parse_size(memory, experts * slot)
    if budget < slot:
        raise BudgetTooSmall(
            f"host memory budget {budget} B holds no expert of {slot} B: at least "
            f"{show_size_exact(slot)}"
        )
    return budget, min(experts, budget // slot)
