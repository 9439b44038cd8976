"""What a measurement has to say of itself: the machine, how busy it was, versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from jax_impl.head import versions


def machine() -> dict[str, Any]:
    """The processor, cores, memory, how busy they are, and with what priority this runs."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model n"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model, "cores": os.cpu_count(), "memory_bytes": memory,
        "system": platform.platform(), "load": list(os.getloadavg()), "nice": os.nice(0),
    }  # fmt: skip


def commit() -> str:
    """The commit of the checkout that this file lies in, with "+" where files differ from it;
    "unknown" outside a checkout and without git."""
    try:
        root = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, check=True,
                              capture_output=True, text=True).stdout.strip()  # fmt: skip
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, check=True,
                                 capture_output=True, text=True).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed.strip() else "")


def setting() -> dict[str, Any]:
    """What every saved figure has beside it."""
    return {"machine": machine(), "versions": versions(), "commit": commit()}


def disk_bytes() -> int | None:
    """Bytes that this process has had read from disks up to now; None where that is not told."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    except (OSError, StopIteration):
        return None


def drop_pages(folder: Path) -> bool:
    """Asks the system to forget what it keeps of a model's files; False where it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in sorted(folder.iterdir()):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    return True
