"""Two pools in one process against the monolithic engine, bit for bit and byte for byte.

The engines run in `lamina_child`, a process with seven CPU devices; here is what it must
have found.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_impl.app.main import main
from jax_impl.app.replay_pools import replay_pools
from jax_impl.holdings import Holdings
from jax_impl.kv import KvKind
from oracle.checkers.pools import check_pools
from reference.files.event_log import read_log
from reference.files.requests import Request
from reference.handle import RequestHandle

pytestmark = pytest.mark.timeout(900)  # the first test waits for the child
ROOT = Path(__file__).resolve().parent.parent
PIPELINES = {
    # name: (memory devices, heads shared out, overlap, context moves exactly as in rotation)
    "mha head 2, n=3": (2, True, True, True),
    "gqa request 2, n=4, queue": (2, False, True, False),
    "gqa head 2, n=2, no overlap": (2, True, False, True),
    "mqa request 2, n=1": (2, False, True, True),
    "moe resident, n=2": (1, True, True, True),
    "moe slots, n=3, queue": (1, True, True, False),
    "mla request 2, n=3, prefill": (2, False, True, True),
    "windows head 2, n=2, prefill": (2, True, True, True),
}
PREFILLED = tuple(n for n in PIPELINES if n.endswith("prefill"))
OFFLOADED = ("moe 50%, head 2", "moe 50%, request 3", "mla 40%, no overlap", "mla 40%, request 2")
NOTHING = dict.fromkeys(("rows", "blocks", "requests", "handles", "prompts", "backlog"), 0)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pools")
    done = subprocess.run(
        [sys.executable, "-m", "property_tests.lamina_child", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "7"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.rule("LAMINA-13", "LAMINA-2", "JAX-5")
@pytest.mark.parametrize("name", PIPELINES)
def test_pools_give_the_bits_of_the_monolithic_engine(ran: dict, name: str) -> None:
    """Tokens, greedy and drawn, and the logits of every position; other orders of arrival."""
    found = ran[name]
    assert found["same"] and found["failure"] == "None"
    assert found["missing"] == NOTHING
    assert found["no_new_programs"]
    early = found["early"] / found["asks"]
    assert (early > 0.3) if PIPELINES[name][2] else (early == 0)
    # Time that attention had to itself before its own keys came, only where queries go first.
    assert (found["hidden_s"] > 0) == PIPELINES[name][2]


@pytest.mark.rule("LAMINA-13", "LAMINA-2", "LAMINA-3", "LAMINA-4", "LAMINA-5")
@pytest.mark.parametrize("attention", ["mha", "gqa", "mqa", "mla"])
def test_every_partition_gives_the_bits_of_the_monolithic_engine(ran: dict, attention: str) -> None:
    """Whole engines: every legal share of heads up to four devices, two and three devices for whole
    requests, one to four batches, with overlap and without (three pipelines a partition here; by
    hand all 120: `python -m property_tests.lamina_child FOLDER every`)."""
    mine = {n: f for n, f in ran["matrix"].items() if n.startswith(attention)}
    assert len(mine) >= 9 and {f["overlap"] for f in mine.values()} == {True, False}
    for name, found in mine.items():
        assert found["same"] and found["failure"] == "None", name
        assert found["measured"] == found["formula"] > 0 and found["quiet"], name
        assert found["missing"] == NOTHING, name
        assert (found["early"] > 0) == found["overlap"], name


@pytest.mark.rule("LAMINA-5", "LAMINA-10", "LAMINA-1")
@pytest.mark.parametrize("name", PIPELINES)
def test_bytes_are_the_formula(ran: dict, name: str) -> None:
    found, (devices, shared, _, exact) = ran[name], PIPELINES[name]
    assert found["measured"] == found["formula"] > 0
    assert found["to_memory"] == found["to_memory_formula"]
    assert found["quiet"], "a tile is still under way in the protocol"
    if shared:
        assert found["by_device"] == [found["formula"] // devices] * devices
    else:
        assert sum(found["by_device"]) == found["formula"]
    if exact:
        assert found["context"] == found["context_formula"]
    else:  # a queue keeps a batch where its context is, when it can
        assert 0 < found["context"] <= found["context_formula"]
    assert (found["context"] > 0) == (found["replicas"] > 1)


@pytest.mark.rule("LAMINA-11")
@pytest.mark.parametrize("name", PIPELINES)
def test_kv_is_in_the_memory_pool_and_nowhere_else(ran: dict, name: str) -> None:
    found = ran[name]
    assert found["compute_kv"] == found["compute_pools"] == 0
    assert found["memory_kv"] > 0


@pytest.mark.rule("LAMINA-11")
def test_every_byte_on_a_device_is_accounted_for(ran: dict) -> None:
    """All arrays that live on a compute device are weights and the bank of rows, to the byte; on a
    memory device all are KV, but for a tile's queries and what was attended."""
    held = ran["held"]
    assert len(held["compute"]) == 2 and len(held["memory"]) == 2
    assert all(there == told > 0 for there, told in held["compute"])
    assert all(told <= there <= told + 2 * held["queries"] for there, told in held["memory"])


@pytest.mark.rule("LAMINA-21", "LAMINA-13", "LAMINA-1")
@pytest.mark.parametrize("name", OFFLOADED)
def test_experts_offloaded_and_attention_elsewhere(ran: dict, name: str) -> None:
    """A mixture under part of its experts' memory, the engine's own scheduler and log; MLA too."""
    found = ran[name]
    assert found["same"] and found["failure"] == "None"
    assert found["loads"] > 20
    assert found["measured"] == found["formula"]
    assert found["quiet"] and found["tiles"] > 0
    assert found["violations"] == [] and found["kv_bytes"] > 0
    assert not any(found["missing"].values())


@pytest.mark.rule("LAMINA-20", "LAMINA-13")
def test_turns_wait_for_experts_that_do_not_fit(ran: dict) -> None:
    """Replicas with 10 slots for 2 layers of 8 experts: the same bits (above), many more reads."""
    found = ran["moe slots, n=3, queue"]
    assert found["loads"] > 50 and found["resident"] <= 10
    assert ran["moe resident, n=2"]["loads"] == 0


@pytest.mark.rule("LAMINA-25")
@pytest.mark.parametrize(
    "name", [n for n in PIPELINES if n.startswith(("mha", "gqa request", "mla"))]
)
def test_lost_devices_change_no_token(ran: dict, name: str) -> None:
    """Replicas and memory devices forget all they hold while requests run."""
    found = ran[name]
    assert found["lost_same"] and found["lost_missing"] == NOTHING
    # A lost memory device costs the rows of its requests again, whole texts at most each time.
    assert found["rows"] <= found["lost_rows"] <= 5 * found["rows"]
    if name.startswith("mha"):  # heads shared out: every request had a part of it
        assert found["rows"] < found["lost_rows"]


@pytest.mark.rule("LAMINA-12", "LAMINA-5")
@pytest.mark.parametrize("name", PREFILLED)
def test_prompts_are_pulled_in_the_gaps(ran: dict, name: str) -> None:
    """A prefill worker runs the prompts, once each; the memory devices pull the bytes of the
    formula, and never while they are asked something, though decoding goes on."""
    found = ran[name]
    assert found["pulled"] == found["pulled_formula"] == found["pull_bytes"] > 0
    assert found["pulls"] > 10 and found["pulls_while_busy"] == 0
    assert found["pulls_between"] > 0
    assert found["prompt_rows"] == 57  # of all requests together: no prompt ran through a batch


@pytest.mark.rule("LAMINA-12", "LAMINA-25", "ENGINE-12")
@pytest.mark.parametrize("name", PREFILLED)
def test_losses_and_cancels_on_the_way_leave_nothing_behind(ran: dict, name: str) -> None:
    """Workers and memory devices that forget all while prompts are pulled; requests given up."""
    found = ran[name]
    assert found["lost_handover_same"] == [True] * 4
    assert found["cancelled_kept"] and set(found["cancelled_reasons"]) <= {"cancelled", "length"}
    assert found["handover_missing"] == NOTHING


@pytest.mark.rule("LAMINA-4", "LAMINA-21")
@given(st.integers(0, 10**9))
def test_whole_requests_always_find_room_on_one_device(seed: int) -> None:
    """Requests admitted by their total alone, whole ones on b devices of (K + (b - 1) m) / b
    blocks: none ever lacks room, whatever comes and goes, layers with windows among them."""
    rng = Random(seed)
    b, size, total = rng.randrange(2, 5), 4, rng.randrange(2, 40)
    longest = rng.randrange(1, total + 1)
    each = -(-(total + (b - 1) * longest) // b)
    rings = rng.choice([[longest], [1, longest], [longest, 2], [2, 1]])
    kinds = [KvKind(None, (i,), min(r, longest), b * each, b) for i, r in enumerate(rings)]
    held, blocks, number = Holdings(1, kinds, size), {}, 0
    for _ in range(60):
        n = rng.randrange(1, longest + 1)
        if sum(blocks.values()) + n <= total and rng.random() < 0.7:
            new = rng.randrange(size)
            request = Request(str(number), (1,) * (n * size - new), new)
            held.admit(RequestHandle(request, number, 0.0, lambda n: None, False, None, None))
            parts = {x // each for k in held.running[number].table.blocks for x in k}
            assert len(parts) == 1
            blocks[number] = n
            number += 1
        elif blocks:
            gone = rng.choice(sorted(blocks))
            held.end(gone)
            del blocks[gone]
    for gone in blocks:
        held.end(gone)
    assert held.missing() == {"rows": 0, "blocks": 0, "requests": 0}


@pytest.mark.rule("LAMINA-26")
def test_a_failing_device_fails_one_batchs_requests_and_no_others(ran: dict) -> None:
    found = ran["gqa head 2, n=2, no overlap"]
    assert found["errors"] == ["memory device 0: the device is on fire"]
    assert found["unharmed"] >= 2 and found["unharmed_same"]
    assert found["cancelled"] in ("cancelled", "error")
    assert found["then_same"] and found["then_missing"] == NOTHING


@pytest.mark.rule("ENGINE-13")
def test_the_caller_may_say_which_token_is_the_last(ran: dict) -> None:
    found = ran["gqa head 2, n=2, no overlap"]
    assert found["stop_heard"] and found["stop_reasons"] == ["stop", "error"]
    assert "the caller's own" in found["stop_error"]
    assert found["stop_others"] and found["stop_missing"] == NOTHING


@pytest.mark.rule("LAMINA-23", "LAMINA-24")
def test_a_users_function_over_two_devices(ran: dict) -> None:
    """Converted, and run with its cache on the memory device: the bits of the slices in turn."""
    found = ran["function"]
    assert found["same"] and found["placed"]
    assert found["measured"] == found["formula"]  # q, k, v and what was attended, all [R, D]
    assert found["kept"] == [found["stream"]] * 2


@pytest.mark.rule("LAMINA-3")
def test_what_cannot_be_is_refused(ran: dict) -> None:
    told = ran["refused"]
    assert "1, 2" in told["heads"] and "divides the 2 KV heads" in told["heads"]
    assert "divides the 1 KV heads" in told["mla heads"]
    assert "jax_num_cpu_devices to 9" in told["devices"]
    assert "no option batch" in told["option"]
    assert "expert_slots: 2; at least" in told["slots"]
    assert "queue" in told["order"] and "one block" in told["kv"]


# The log


@pytest.mark.rule("LAMINA-27", "LAMINA-28", "LAMINA-1", "LAMINA-5")
@pytest.mark.parametrize("name", PIPELINES)
def test_logs_hold_and_are_decided_again(ran: dict, name: str) -> None:
    """Losses, failures and cancels among them."""
    log = read_log(ran[name]["log"], pools=True)
    assert log.complete and check_pools(log) == []
    again = replay_pools(log, name)
    assert again.difference == "" and again.complete
    assert again.actions > 50 and again.asks > 50
    kinds = {m[0] for r in log.records for m in r.get("wire", ())}
    assert {"open", "q", "kv", "a"} <= kinds and ("pull" in kinds) == (name in PREFILLED)


def first(records: list[dict], word: str, name: str, n: int = 0, **fields: Any) -> int:
    """Where the n-th record with this name and these fields is."""
    return [i for i, r in enumerate(records) if r.get(word) == name
            and all(r[k] == v for k, v in fields.items())][n]  # fmt: skip


def message(records: list[dict], kind: str, n: int = 3) -> list:
    return [m for r in records for m in r.get("wire", ()) if m[0] == kind][n]


def _swap(records: list[dict]) -> None:
    q, kv = message(records, "q"), message(records, "kv")
    q[0], kv[0] = "kv", "q"


def _drop(word: str, name: str, n: int = 0, **fields: Any) -> Callable[[list[dict]], None]:
    return lambda records: records.pop(first(records, word, name, n, **fields)) and None


def _wider(kind: str) -> Callable[[list[dict]], None]:
    def change(records: list[dict]) -> None:
        message(records, kind)[-1] += 4

    return change


def _set(word: str, name: str, n: int, **to: Any) -> Callable[[list[dict]], None]:
    return lambda records: records[first(records, word, name, n)].update(to)


def _early(records: list[dict]) -> None:
    """A request is in its first token before its prompt has come."""
    i = first(records, "event", "Pulled", 5)
    records.insert(first(records, "action", "Turn", 8, slice=0), records.pop(i))
    request = records[first(records, "event", "Pulled", 0)]["request"]
    turn = next(r for r in records if r.get("action") == "Turn" and r["slice"] == 0
                and any(s[0] == request for s in r["spans"]))  # fmt: skip
    records.remove(turn)
    records.insert(first(records, "action", "Prefill", 0, request=request) + 1, turn)


@pytest.mark.rule("LAMINA-28")
@pytest.mark.parametrize(
    ("found", "change"),
    [
        ("P1", _swap),
        ("P1", lambda r: message(r, "a").__setitem__(2, 0 if message(r, "a")[2] else 1)),
        ("P1", lambda r: message(r, "context").__setitem__(2, 9)),
        ("P2", _wider("q")), ("P2", _wider("kv")), ("P2", _wider("a")), ("P2", _wider("pull")),
        ("P2", _wider("context")),
        ("P3", _drop("action", "Finish")), ("P3", _drop("action", "Place")),
        ("P3", lambda r: r.insert(-1, dict(r[first(r, "action", "Finish", 0)]))),
        ("P4", _set("action", "Place", 1, devices=[0, 1])),
        ("P4", lambda r: [x.update(devices=[0]) for x in r if x.get("action") == "Place"]),
        ("P5", _drop("event", "AttentionDone", 3)), ("P5", _drop("event", "SliceDone", 3)),
        ("P5", _set("action", "Turn", 4, slice=7)),
        ("P5", lambda r: r[first(r, "action", "Turn", 0, slice=0)]["spans"][0].__setitem__(1, 3)),
        ("P6", _drop("event", "Pulled")), ("P6", _early), ("P6", _drop("event", "Prefilled")),
        ("P6", lambda r: message(r, "pull").__setitem__(3, 1 - message(r, "pull")[3])),
        ("P7", lambda r: [x.update(replica=1 - x["replica"]) for x in r
                          if x.get("action") == "Turn" and x["slice"] == 1]),
        ("LOG", lambda r: r.pop() and None),
    ],
)  # fmt: skip
def test_a_log_with_a_fault_is_found_out(
    ran: dict, found: str, change: Callable[[list[dict]], Any]
) -> None:
    log = read_log(ran["mla request 2, n=3, prefill"]["log"], pools=True)
    if found == "P4":
        log.head["options"]["blocks"] = 11  # as full as it gets with requests on both devices
    change(log.records)
    assert found in {v.property for v in check_pools(log)}
    if found == "P5":
        assert replay_pools(log, "log").difference


@pytest.mark.rule("LAMINA-27", "LAMINA-28", "APP-6", "APP-7")
def test_covey_checks_and_replays_such_a_log(
    ran: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ran["mha head 2, n=3"]["log"]
    assert main(["check", log]) == main(["replay", log]) == 0
    assert "no violation of P1, P2" in capsys.readouterr().out
    lines = Path(log).read_text().splitlines()
    for number, old, new, told in (
        (0, '"layers":2', '"layers":0', "options.layers is 0"),
        (0, '"order":"rotation"', '"order":"any"', "rotation or queue"),
        (0, '"pools":1', '"pools":7', "version 7"),
        (1, '"Arrived"', '"Came"', "known: Arrived"),
        (1, '"request":0', '"request":-1', "Arrived.request is -1"),
    ):
        bad = tmp_path / "bad.jsonl"
        changed = [*lines]
        assert old in changed[number]
        changed[number] = changed[number].replace(old, new, 1)
        bad.write_text("\n".join(changed) + "\n")
        assert main(["check", str(bad)]) == 2
        err = capsys.readouterr().err
        assert told in err and f"bad.jsonl:{number + 1}" in err and len(err.splitlines()) == 1
    assert main(["timeline", log]) == 2 and "another pool" in capsys.readouterr().err
    assert main(["check", log, log]) == 2 and "alone" in capsys.readouterr().err
