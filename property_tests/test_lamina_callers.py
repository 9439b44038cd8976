"""Callers of a LaminaEngine who raise, close or lose where they should not, and its bad options.

The engines run in `lamina_callers`, a process with four CPU devices; here is what it must have
found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test waits for the child
ROOT = Path(__file__).resolve().parent.parent
WAYS = ("prefill 0", "prefill 1")
NOTHING = dict.fromkeys(("rows", "blocks", "requests", "handles", "prompts", "backlog"), 0)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "property_tests.lamina_callers",
         str(tmp_path_factory.mktemp("callers"))],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.rule("LAMINA-29", "ENGINE-13")
@pytest.mark.parametrize("way", WAYS)
def test_a_callback_is_its_own_requests_trouble(ran: dict, way: str) -> None:
    found = ran[way]["callbacks"]
    for name, told in found.items():
        assert told["other"] and told["quick"], name
    yes = found.pop("true, and no bool")
    assert (yes["reason"], yes["error"]) == ("stop", None)
    assert {told["reason"] for told in found.values()} == {"error"}
    for name, text in {
        "exit in stop_at": "SystemExit: 3", "exit in on_logits": "SystemExit: 3",
        "error in on_logits": "the caller's own",
        "close in stop_at": "close: called from a request's callback",
        "close in on_logits": "close: called from a request's callback",
        "lose in stop_at": "lose: called from a request's stop_at",
    }.items():  # fmt: skip
        assert text in found[name]["error"], name
    assert ran[way]["after"] and ran[way]["failure"] == "None" and ran[way]["missing"] == NOTHING


@pytest.mark.rule("LAMINA-25", "LAMINA-29")
@pytest.mark.parametrize("way", WAYS)
def test_only_a_device_that_there_is_can_be_lost(ran: dict, way: str) -> None:
    told = ran[way]["lose"]
    prefill = int(way[-1])
    assert told == {
        "replica 99": "BadInput: lose: replica 99; there are 1, numbered from 0",
        f"prefill {prefill}":
            f"BadInput: lose: prefill {prefill}; there are {prefill}, numbered from 0",
        "memory 'x'": "BadInput: lose: memory 'x'; there are 1, numbered from 0",
        "memory -1": "BadInput: lose: memory -1; there are 1, numbered from 0",
        "nope 0": "BadInput: lose: kind 'nope'; one of replica, memory, prefill expected",
        "['replica'] 0": "BadInput: lose: kind ['replica']; one of replica, memory, prefill "
                         "expected",
        "replica 0": "nothing",
    }  # fmt: skip


@pytest.mark.rule("LAMINA-29")
@pytest.mark.parametrize("way", WAYS)
def test_closed_from_several_threads_at_once(ran: dict, way: str) -> None:
    found = ran[way]
    assert found["threads"] == 0 and found["complete"]
    for what in ("lose closed", "submit closed"):
        assert found[what] == "CoveyError: the engine is closed"


@pytest.mark.rule("LAMINA-29", "ENGINE-7")
def test_an_engine_that_failed_gives_everything_back(ran: dict) -> None:
    assert all(text.startswith("CoveyError: the engine failed") for text in ran["failed"])
    assert ran["failed threads"] == 0 and ran["failed fds"] == 0 and ran["failed log"]
    assert "the engine failed" in ran["dead thread"] and "gone" in ran["dead thread"]
    assert ran["dead thread failure"] == "MemoryError('gone')"


@pytest.mark.rule("LAMINA-29", "ENGINE-8")
def test_what_is_refused_leaves_nothing(ran: dict) -> None:
    assert "expert_slots: 1; at least 2" in ran["refused slots"]
    assert "set jax_num_cpu_devices to 10" in ran["refused devices"]
    assert ran["refused fds"] == 0 and not ran["refused log"]
    for name, text in ran["options"].items():
        assert text.startswith("BadInput: ") and "expected" in text, name
