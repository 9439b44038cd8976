"""Whose prompt runs on which prefill worker, and whose KV is still there (LAMINA-12). Pure.

A worker runs one prompt at a time and keeps its keys and values until the memory pool has pulled
them all; while it holds `held` prompts, the one in work among them, it begins no other.
"""

from __future__ import annotations

from reference.vocab.errors import BadInput, IllegalEvent


class Prompts:
    """workers  prefill workers;  held  prompts of which a worker has keys and values at a time."""

    def __init__(self, workers: int, held: int = 2) -> None:
        if workers < 0 or held < 1:
            raise BadInput(f"prefill workers {workers}, held {held}: at least 0 and 1 expected")
        self.held = held
        self.waiting: list[int] = []
        self.making: list[int | None] = [None] * workers
        self.holds: list[list[int]] = [[] for _ in range(workers)]
        self._again: list[list[int]] = [[] for _ in range(workers)]

    def wait(self, request: int) -> None:
        """The request has its place in the memory pool; its prompt may run."""
        self.waiting.append(request)

    def start(self) -> list[tuple[int, int]]:
        """(request, worker) of the prompts that begin now, in order of waiting."""
        begun = []
        for worker, making in enumerate(self.making):
            queue = self._again[worker] or self.waiting
            if making is None and queue and len(self.holds[worker]) < self.held:
                request = queue.pop(0)
                self.making[worker] = request
                self.holds[worker].append(request)
                begun.append((request, worker))
        return begun

    def made(self, worker: int, request: int) -> None:
        """The worker is through with the prompt, also with one that nobody wants any more."""
        if self.making[worker] != request:
            raise IllegalEvent(f"worker {worker} does not run the prompt of request {request}")
        self.making[worker] = None

    def drop(self, request: int) -> None:
        """All was pulled, or nobody wants it any more: the worker keeps it no longer."""
        for requests in (self.waiting, *self.holds, *self._again):
            if request in requests:
                requests.remove(request)

    def lost(self, worker: int) -> tuple[int, ...]:
        """The worker has lost what it held and what it ran: those prompts begin again there."""
        gone, self.holds[worker] = self.holds[worker], []
        self.making[worker] = None
        self._again[worker][:0] = gone
        return tuple(gone)
