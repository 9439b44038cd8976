"""perf/gpu_check.sh runs to its end on a processor, and says what it would say of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.gpu_bits import differing

ROOT = Path(__file__).parent.parent


@pytest.mark.rule("NUM-12", "TIER-8")
def test_the_quick_check_runs_to_its_end_on_a_processor(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "perf" / "gpu_check.sh", out, "--quick", "--folder", tmp_path],
        env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["ok"] and report["quick"] and report["platform"] == "cpu"
    assert report["backend"]["pinned"] and report["versions"]["jax"]
    parts = report["parts"]
    assert set(parts) == {"transfers", "overlap", "engine", "bits"}
    ways = {row["way"]: row for row in parts["transfers"]["rows"] if row["usable"]}
    assert set(ways) == {"pageable", "pinned"}, "no processor reads memory by itself"
    assert all(row["equal"] and row["gb_per_s"] > 0 for row in ways.values())
    assert all(row["in_place"] for row in parts["transfers"]["donated"])
    assert {row["way"] for row in parts["overlap"]["rows"]} == {"pageable", "pinned"}
    engine = {row["device_share"]: row for row in parts["engine"]["rows"]}
    assert set(engine) == {25, 50, 100} and all(row["same"] for row in engine.values())
    assert engine[100]["loads"] == 0, "everything stayed on the device"
    assert engine[25]["loads"] == engine[25]["host_loads"] > engine[50]["host_loads"] > 0
    assert all(row["disk_bytes"] == 0 for row in engine.values()), "and in host memory"
    assert all(row["tokens_per_s"] <= row["bound_tokens_per_s"] * 1.01 for row in engine.values())
    (model,) = parts["bits"]["models"]
    assert model["equal"] and model["rows"] > 400 and not model["differing"]
    assert not list(tmp_path.glob("covey-check-*")), "checkpoints are gone"


def test_a_row_that_depends_on_its_neighbours_is_named() -> None:
    alone = {(0, 0): [b"a", b"b"], (1, 0): [b"c", b"d"]}
    assert differing({(0, 0): [b"a", b"b"]}, alone) == []
    assert differing({(1, 0): [b"c", b"x"], (0, 0): [b"a", b"b"]}, alone) == [[1, 0, 1]]
