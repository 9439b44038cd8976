"""Saving a measurement with what is needed to judge it: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from jax_impl.app.machine import commit, machine, setting

__all__ = ["RESULTS", "commit", "machine", "setting", "write_result"]

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Writes perf/results/NAME-DATE.json; a second one of a day gets a number."""
    RESULTS.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    paths = (RESULTS / f"{name}-{today}{n}.json" for n in ["", *(f"-{i}" for i in range(2, 100))])
    path = next(path for path in paths if not path.exists())
    command = " ".join([Path(sys.executable).name, "-m", f"perf.{Path(sys.argv[0]).stem}",
                        *sys.argv[1:]])
    document = {**setting(), "command": command, **figures}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)
    return path
