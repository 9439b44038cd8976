"""One request as the control plane sees it: small integers, a hand-written copy and key."""

from __future__ import annotations

from reference.vocab.actions import Reason

QUEUED, WAITING, RUNNING, AWAITING = 0, 1, 2, 3
"""In the queue; at a visit and not computing; in a step; computed, outcome not yet told."""


class Request:
    """stage: -1 at ENTRY, else the ordinal of the layer with experts. chunk, rows: the piece of
    text in work and its token count. need: expert codes still to run at this visit, ascending.
    claimed: all of `need` is held (CACHE-3). progress: visits since the request entered its class
    (prompt or decode) plus the least progress in that class then (SCHED-6). passed: how often
    another was served first at this visit (FETCH-7). doomed: it ends as soon as its step does.
    """

    __slots__ = (
        "blocks", "chunk", "claimed", "doomed", "last", "max_new", "need", "number", "passed",
        "progress", "prompt_len", "rows", "running", "sampled", "stage", "status",
    )  # fmt: skip

    def __init__(self, number: int, prompt_len: int, max_new: int, blocks: int) -> None:
        self.number = number
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.blocks = blocks
        self.status = QUEUED
        self.stage = -1
        self.chunk = 0
        self.rows = 0
        self.need: tuple[int, ...] = ()
        self.running: tuple[int, ...] = ()
        self.last = False
        self.claimed = False
        self.progress = 0
        self.passed = 0
        self.sampled = 0
        self.doomed: tuple[Reason, str] | None = None

    def copy(self) -> Request:
        """An independent copy."""
        new = Request.__new__(Request)
        new.number = self.number
        new.prompt_len = self.prompt_len
        new.max_new = self.max_new
        new.blocks = self.blocks
        new.status = self.status
        new.stage = self.stage
        new.chunk = self.chunk
        new.rows = self.rows
        new.need = self.need
        new.running = self.running
        new.last = self.last
        new.claimed = self.claimed
        new.progress = self.progress
        new.passed = self.passed
        new.sampled = self.sampled
        new.doomed = self.doomed
        return new

    def key(self, base: tuple[int, int]) -> tuple:
        """What the future depends on; progress relative to the least of its class."""
        return (
            self.status, self.stage, self.chunk, self.need, self.running, self.last, self.claimed,
            self.progress - base[self.bulk] if self.status else 0,
            self.sampled, self.doomed, self.prompt_len, self.max_new, self.passed,
        )  # fmt: skip

    @property
    def bulk(self) -> bool:
        """The visit carries several tokens of a prompt."""
        return self.rows > 1

    def open_chunk(self, chunk: int, size: int) -> None:
        """Go to the entry of a chunk; `size` is the prompt tokens of a full chunk."""
        self.chunk = chunk
        self.stage = -1
        self.status = WAITING
        self.rows = max(1, min(size, self.prompt_len - chunk * size))

    def final_prompt_chunk(self, size: int) -> int:
        """The number of the chunk that ends the prompt."""
        return (self.prompt_len - 1) // size
