"""What limits, and whether it pays to go apart (SCHED-13). Only what events tell is used.

Requests that go on together share reads and a step's overhead; requests that go apart keep the
channel busy while others compute. Apart pays where reading is the limit, where there is enough
computing to hide behind it, and where the experts that all need at a layer leave room in its share
of the slots: else what comes for the one drives out what the other is about to name.
"""

from __future__ import annotations

MEMORY = 64
"""Steps after which the time spent until then counts half."""
WORTH = 2, 5
"""At least so much computing to so much reading."""
SPARE = 3, 5
"""At most so much where guesses keep the channel busy anyway; else at most as much."""
CROWDED = 2, 3
"""At most so much of a layer's slots for what all need there."""
WEIGHT = 8
"""The weight of what was known about crowds, beside one more that was counted."""


class Balance:
    """reading, computing: nanoseconds, the older ones counting less. crowd: distinct experts that
    all running requests name at a layer, in 1/WEIGHT, averaged alike; `passes` counts the next."""

    __slots__ = ("computing", "crowd", "experts", "most", "passes", "reading", "share")

    def __init__(self, slots: int, layers: int, experts: int, guesses: bool) -> None:
        self.most = SPARE if guesses else (1, 1)
        self.share = slots // max(1, layers)
        self.experts = experts
        self.reading = self.computing = self.crowd = 0
        self.passes: dict[int, tuple[int, int]] = {}

    def copy(self) -> Balance:
        """An independent copy."""
        new = Balance.__new__(Balance)
        new.most = self.most
        new.share = self.share
        new.experts = self.experts
        new.reading = self.reading
        new.computing = self.computing
        new.crowd = self.crowd
        new.passes = self.passes.copy()
        return new

    def loaded(self, ns: int) -> None:
        """A transfer made the channel so much busier."""
        self.reading += ns

    def computed(self, step: int, ns: int) -> None:
        """A step took so long."""
        self.computing += ns
        if step % MEMORY == 0:
            self.reading //= 2
            self.computing //= 2

    def named(self, stage: int, codes: tuple[int, ...], running: int) -> None:
        """A visit of a stage has named experts. When as many visits have as requests run, the
        stage's crowd is known."""
        mask, visits = self.passes.get(stage, (0, 0))
        for code in codes:
            mask |= 1 << code % self.experts
        if visits + 1 < running:
            self.passes[stage] = mask, visits + 1
            return
        self.passes[stage] = 0, 0
        distinct = mask.bit_count()
        old = self.crowd or WEIGHT * distinct
        self.crowd = old + distinct - old // WEIGHT

    @property
    def apart(self) -> bool:
        """Whether going apart pays."""
        (least, of_it), (most, of_that), (crowded, full) = WORTH, self.most, CROWDED
        return (
            most * self.reading >= of_that * self.computing
            and of_it * self.computing >= least * self.reading
            and full * self.crowd <= crowded * self.share * WEIGHT
        )
