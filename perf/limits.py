"""Memory limits for whole processes, and the disk below a path: what a fair comparison needs.

A control group counts anonymous memory and the page cache that its processes bring in: an engine
that maps its model has the rest of its limit as cache, one that reads around the cache has none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
V1 = {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes",
      "now": "memory.usage_in_bytes"}  # fmt: skip
V2 = {"limit": "memory.max", "peak": "memory.peak", "now": "memory.current"}


def controller() -> tuple[Path, dict[str, str]] | None:
    """(where groups can be made, names of the files) of a memory controller that can be written:
    version 2 first, then version 1; None without one."""
    for root in (ROOT, ROOT / "unified"):
        try:
            if "memory" in (root / "cgroup.subtree_control").read_text().split():
                if os.access(root, os.W_OK):
                    return root, V2
        except OSError:
            continue
    v1 = ROOT / "memory"
    if (v1 / V1["limit"]).exists() and os.access(v1, os.W_OK):
        return v1, V1
    return None


class Group:
    """A control group with a memory limit, bytes; `inside` makes a command run in it."""

    def __init__(self, name: str, limit: int) -> None:
        found = controller()
        if found is None:
            raise OSError("no memory controller that can be written")
        root, self.names = found
        self.version = 2 if self.names is V2 else 1
        self.path = root / name
        self.path.mkdir()
        try:
            (self.path / self.names["limit"]).write_text(str(limit))
            if self.version == 2:
                self._try("memory.swap.max", "0")
            else:
                self._try("memory.swappiness", "0")
        except OSError:
            self.path.rmdir()
            raise

    def _try(self, name: str, text: str) -> None:
        try:
            (self.path / name).write_text(text)
        except OSError:
            pass  # no swap to forbid

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, by way of a shell that enters the group first."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.path / "cgroup.procs"), *command]

    def told(self) -> dict[str, int]:
        """What is held now and was at most, and of what it consists; bytes."""
        found = {name: int((self.path / self.names[name]).read_text())
                 for name in ("now", "peak") if (self.path / self.names[name]).exists()}
        wanted = {"rss": "anonymous", "anon": "anonymous", "cache": "page_cache",
                  "file": "page_cache"}
        for line in (self.path / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in wanted:
                found[wanted[name]] = int(value)
        return found

    def close(self, timeout_s: float = 10.0) -> None:
        """Removes the group; its processes must have ended."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


def device_of(path: Path) -> Path | None:
    """The directory in /sys of the disk that holds `path`."""
    number = os.stat(path).st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return None
    place = link.resolve()
    return place if (place / "queue").exists() else place.parent


def disk_ticks(device: Path | None) -> tuple[float, int]:
    """(seconds in which the disk had something to do, bytes read) up to now."""
    if device is None:
        return 0.0, 0
    fields = (device / "stat").read_text().split()
    return int(fields[9]) / 1e3, int(fields[2]) * 512


@contextmanager
def read_ahead(device: Path | None, kib: int, say: Callable[[str], None]) -> Iterator[dict]:
    """The disk's read-ahead set to `kib` for the time of the block, and put back; `was` and `is`
    tell, in KiB. Where it may not be set that is said."""
    told: dict[str, Any] = {"was_kib": None, "is_kib": None}
    if device is None:
        say("the disk's read-ahead cannot be found")
        yield told
        return
    knob = device / "queue" / "read_ahead_kb"
    was = told["was_kib"] = told["is_kib"] = int(knob.read_text())
    changed = False
    try:
        if was != kib:
            try:
                knob.write_text(str(kib))
                changed = True
            except OSError as error:
                say(f"{knob}: {error.strerror}; read-ahead stays {was} KiB")
        told["is_kib"] = int(knob.read_text())
        yield told
    finally:
        if changed:
            knob.write_text(str(was))


def read_bytes(pid: int) -> int:
    """Bytes that a process has had read from disks, its ended children not included."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
