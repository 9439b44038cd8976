"""Fetch threads: they fill slots from the checkpoint's own files and tell when they are done.

Nothing here waits by looking again and again: a thread sleeps in its queue or in its read, and a
completion is a call of `post`. The owner of the loop asks for `next_deadline` and calls `expire`
then; a load that is overdue is reported while its thread may still be writing, so its slot stays
out of use until the thread really returns and the load is told a second and last time (XFER-7).
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_impl import host_stage
from jax_impl.host_stage import HostStage, Lease, device_sum
from jax_impl.loads import ChannelStats, Job, Transferred
from jax_impl.readers import FileReader, Reader
from jax_impl.slots import Place, SlotPool, layout, private_memory
from jax_impl.spans import Io, OpenFiles, ReadFailed, Span, Stopped, bounce_size, plan, read_span
from reference.files.budget import PAGE
from reference.files.regular import Identity
from reference.files.safetensors_header import TensorRef
from reference.vocab.ids import ExpertKey

__all__ = ["ChannelStats", "Transferred", "Transfers"]

STUCK_MAX = 8
"""Threads beyond `threads` that may be started in place of ones that do not come back."""


class Transfers:
    """Loads experts into the slots of a pool, `threads` at a time.

    experts     the tensors of an expert, in the order in which a kernel takes them
    keys        every expert that may be asked for (files are opened and spans measured at once)
    post        called from a fetch thread with each Transferred
    io          auto: direct where the file system takes it, else buffered (XFER-3)
    deadline_s  seconds after which a load is reported overdue
    check       compute `sum` of every load
    host        the tier that loads go through; `pool` is then its memory (TIER-1)

    `start`, `expire` and `next_deadline` belong to one thread. Raises BadInput or Unsupported when
    a file cannot be opened or read in the way that was asked for.
    """

    def __init__(
        self,
        pool: SlotPool,
        experts: Callable[[ExpertKey], Sequence[TensorRef]],
        keys: Iterable[ExpertKey],
        post: Callable[[Transferred], None],
        *,
        threads: int = 4,
        io: Io = "auto",
        reader: Reader | None = None,
        pins: dict[Path, Identity] | None = None,
        deadline_s: float = 60.0,
        check: bool = False,
        host: HostStage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.threads = threads
        self.deadline_s = deadline_s
        self.stats = ChannelStats()
        self._pool = pool
        self._post = post
        self._check = check
        self._clock = clock
        self._reader: Reader = reader or FileReader()
        self._plans: dict[ExpertKey, tuple[tuple[Place, ...], tuple[Span, ...]]] = {}
        for key in keys:
            refs = experts(key)
            places = layout(refs)
            self._plans[key] = places, plan(refs, places)
        spans = [s for _, group in self._plans.values() for s in group]
        self._files = OpenFiles(self._reader, (s.file for s in spans), io, pins)
        self.io = self._files.io
        bent = [s for s in spans if host is not None or not s.straight(pool.slot_bytes)]
        self._bounce = 0 if self.io == "buffered" else bounce_size(bent)
        self._own = host.staging_bytes if host is not None else 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[int, Job] = {}  # in flight and not overdue
        self._stuck: dict[int, Job] = {}  # overdue, thread not back
        self._busy_since = 0.0
        self._closing = False
        self._workers: list[threading.Thread] = []
        self._most_workers = 0
        for _ in range(threads if self._plans else 0):
            self._hire()

    @property
    def bounce_bytes(self) -> int:
        """Bytes of all bounce buffers (a thread that does not come back costs one more)."""
        return (self._bounce + self._own) * self._most_workers

    @property
    def idle(self) -> int:
        """Loads that would start at once: threads, and entries of the host tier (TIER-2)."""
        with self._lock:
            idle = len(self._workers) - len(self._open) - len(self._stuck)
        return idle if self.host is None else max(0, min(idle, self.host.tier.available))

    def bytes_of(self, key: ExpertKey) -> int:
        """Bytes of an expert's tensors."""
        return sum(p.nbytes for p in self._plans[key][0])

    def places(self, key: ExpertKey) -> tuple[Place, ...]:
        """Where the expert's tensors lie in whatever slot holds it."""
        return self._plans[key][0]

    def start(self, ticket: int, key: ExpertKey, slot: int) -> dict[str, Any]:
        """Begin to write `slot`. It must not be read by anything any more. Returns what the log
        says of where the bytes come from (TIER-7)."""
        job = Job(ticket, key, slot, self._clock())
        with self._lock:
            if any(j.slot == slot for j in (*self._open.values(), *self._stuck.values())):
                raise AssertionError(f"slot {slot} is still being written")  # S7
            if not self._open:
                self._busy_since = job.started
            self._open[ticket] = job
        if self.host is not None:
            job.lease = self.host.begin(ticket, key, slot, self.places(key))
        self._jobs.put(job)
        return job.lease.record(self.bytes_of(key)) if job.lease else {"from": "disk"}

    def heard(self, done: Transferred) -> None:
        """The owner of the loop has taken a completion, in the order of its log."""
        if self.host is not None:
            self.host.heard(done.ticket, done.key, done.slot, done.error is None, done.drained)

    def checksum(self, slot: int, key: ExpertKey, handle: tuple[jax.Array, ...]) -> int:
        """CRC-32 of the expert in a slot as it is now (XFER-10)."""
        if self.host is None:
            return self._pool.checksum(slot, self.places(key))
        return device_sum(handle)

    def next_deadline(self) -> float | None:
        """When the oldest load becomes overdue, on the clock's scale; None when none is open."""
        with self._lock:
            if not self._open:
                return None
            return min(j.started for j in self._open.values()) + self.deadline_s

    def expire(self) -> list[Transferred]:
        """Loads that have become overdue since the last call; others go on in new threads."""
        now = self._clock()
        with self._lock:
            late = [j for j in self._open.values() if now - j.started >= self.deadline_s]
            for job in late:
                job.overdue = True
                self._leave(self._open.pop(job.ticket), now)
                self._stuck[job.ticket] = job
                self.stats.overdue += 1
                if len(self._workers) < self.threads + STUCK_MAX:
                    self._hire()
        text = f"not read within {self.deadline_s:g} s"
        return [self._told(j, f"expert {j.key.layer}.{j.key.expert}: {text}", False) for j in late]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop. True when all threads are back; else what they use is left open for them."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        for _ in workers:
            self._jobs.put(None)
        end = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
        back = not any(worker.is_alive() for worker in workers)
        if back:
            self._files.close()
            if self.host is not None:
                self.host.close()
        return back

    # -- fetch threads

    def _hire(self) -> None:
        name = f"covey-fetch-{len(self._workers)}"
        worker = threading.Thread(target=self._work, name=name, daemon=True)
        self._workers.append(worker)
        self._most_workers = max(self._most_workers, len(self._workers))
        worker.start()

    def _work(self) -> None:
        bounce = private_memory(max(PAGE, self._bounce)) if self._bounce else None
        own = host_stage.staging(self._own) if self._own else None
        while (job := self._jobs.get()) is not None:
            done = self._transfer(job, bounce, own)
            with self._lock:
                if job.overdue:
                    del self._stuck[job.ticket]
                else:
                    self._leave(self._open.pop(job.ticket), self._clock())
                self.stats.loads += 1
                self.stats.failed += done.error is not None
                self.stats.bytes += done.nbytes if done.error is None else 0
                surplus = len(self._workers) > self.threads + len(self._stuck)
                if surplus:
                    self._workers.remove(threading.current_thread())
            self._post(done)
            del done, job  # whoever has them now decides how long a slot's arrays live
            if surplus:
                return

    def _transfer(
        self, job: Job, bounce: mmap.mmap | None, own: np.ndarray | None
    ) -> Transferred:
        """Read, look at the file again, make the arrays. Never raises (XFER-8)."""
        try:
            extra: dict[str, Any] = {}
            if job.lease is not None:
                extra["handle"], extra["sum"] = self._through(job, job.lease, bounce, own)
            else:
                view = self._pool.view(job.slot)
                self._read(job.key, view, bounce)
                places = self.places(job.key)
                extra["handle"] = self._pool.handle(job.slot, places)
                if self._check:
                    extra["sum"] = self._pool.checksum(job.slot, places)
            self._reader.landed(job.ticket, job.key)
            return self._told(job, None, True, **extra)
        except ReadFailed as error:
            return self._told(job, str(error), True)
        except BaseException as error:  # a bug or no memory: still told, or the run would hang
            return self._told(job, f"{type(error).__name__}: {error}", True)

    def _read(self, key: ExpertKey, view: np.ndarray, bounce: mmap.mmap | None) -> None:
        spans = self._plans[key][1]
        for span in spans:
            read_span(self._reader, self._files, span, view, bounce, self._go_on)
        for file in {span.file for span in spans}:
            self._files.verify(file)

    def _through(
        self, job: Job, lease: Lease, bounce: mmap.mmap | None, own: np.ndarray | None
    ) -> tuple[tuple[jax.Array, ...], int | None]:
        """By way of the host tier: what was not there is read into it, then copied on."""
        assert self.host is not None
        if lease.fault is not None:
            raise lease.fault
        arrays, lease.arrays = lease.arrays, ()
        if not lease.hit:
            view = self.host.buffer(lease.entry, own)
            self._read(job.key, view, bounce)
            arrays = self.host.keep(lease.entry, view, self.places(job.key), self._check)
        return self.host.arrive(lease.entry, arrays, self._check)

    def _go_on(self) -> None:
        if self._closing:
            raise Stopped("closing")

    def _leave(self, job: Job, now: float) -> None:
        """Account for a load that is in flight no longer (lock held)."""
        if not self._open:
            self.stats.busy_s += now - self._busy_since

    def _told(self, job: Job, error: str | None, drained: bool, **extra: Any) -> Transferred:
        source = "host" if job.lease is not None and job.lease.hit else "disk"
        return Transferred(
            job.ticket, job.key, job.slot, self.bytes_of(job.key),
            self._clock() - job.started, error, drained, source=source, **extra,
        )  # fmt: skip
