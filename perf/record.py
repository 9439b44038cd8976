"""Saving a measurement with what is needed to judge it: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from jax_impl.head import versions

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The processor, cores, memory and how busy they are."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model n"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model, "cores": os.cpu_count(), "memory_bytes": memory,
        "system": platform.platform(), "load": list(os.getloadavg()),
    }  # fmt: skip


def commit() -> str:
    """The commit of this checkout, with "+" where files differ from it; "unknown" without git."""
    try:
        root = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, check=True,
                              capture_output=True, text=True).stdout.strip()  # fmt: skip
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, check=True,
                                 capture_output=True, text=True).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed.strip() else "")


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Writes perf/results/NAME-DATE.json; a second one of a day gets a number."""
    RESULTS.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    paths = (RESULTS / f"{name}-{today}{n}.json" for n in ["", *(f"-{i}" for i in range(2, 100))])
    path = next(path for path in paths if not path.exists())
    command = " ".join([Path(sys.executable).name, "-m", f"perf.{Path(sys.argv[0]).stem}",
                        *sys.argv[1:]])
    document = {"machine": machine(), "versions": versions(), "commit": commit(),
                "command": command, **figures}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)
    return path
