"""How bytes come out of a file: the one place where transfers meet the operating system.

Everything above this file can be tested by giving it another `Reader`: one that is slow, one that
fails on the nth read, one that finishes in an order of the test's choice. All methods are called
from several fetch threads at once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Protocol

from reference.files.regular import Identity
from reference.vocab.ids import ExpertKey


class Reader(Protocol):
    """Positional reads of regular files. Errors are OSError."""

    def open(self, path: Path, direct: bool) -> int:
        """A descriptor for reading; `direct` asks to bypass the page cache (may be refused)."""
        ...

    def stat(self, fd: int, path: Path) -> tuple[Identity, Identity]:
        """The identities of the open file and of what the path names now."""
        ...

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        """Fill `buffers` in turn from byte `offset`; the count may be short, 0 is end of file."""
        ...

    def landed(self, ticket: int, key: ExpertKey) -> None:
        """All bytes of a transfer are in its slot; its completion is told when this returns."""
        ...

    def close(self, fd: int) -> None: ...


class FileReader:
    """The real thing: open, fstat and preadv."""

    def open(self, path: Path, direct: bool) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if direct:
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.EINVAL, "no O_DIRECT on this system")
            flags |= os.O_DIRECT
        return os.open(path, flags)

    def stat(self, fd: int, path: Path) -> tuple[Identity, Identity]:
        return Identity.of(os.fstat(fd)), Identity.of(os.stat(path))

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def landed(self, ticket: int, key: ExpertKey) -> None:
        pass

    def close(self, fd: int) -> None:
        os.close(fd)


class ThrottledReader(FileReader):
    """A device of a stated rate in front of the real files, shared by all threads (XFER-9).

    Reads queue up one behind another as on one channel: a read of n bytes takes n / rate seconds
    of the channel, and its thread sleeps until its turn has passed. No credit is saved up while
    the channel is idle. `bytes` counts what was read, `latency_s` is added to every read.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = float(bytes_per_s)
        self.latency_s = latency_s
        self.bytes = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        n = super().read(fd, buffers, offset)
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + n / self.bytes_per_s
            due = self._free_at + self.latency_s
            self.bytes += n
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        return n
