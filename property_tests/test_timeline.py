"""covey timeline: the trace and the picture say what the log says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jax_impl.app.history import history_of, union
from jax_impl.app.main import main
from jax_impl.app.picture import COLOURS, bars
from oracle.tiny import tiny_config, write_checkpoint
from reference.engine import ReferenceEngine
from reference.files.event_log import Log, read_log
from reference.files.requests import Request
from reference.simulator.costs import CostModel


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run in virtual time: five requests, prompts of up to three chunks."""
    folder = tmp_path_factory.mktemp("timeline")
    model = write_checkpoint(folder / "model", tiny_config("mixtral"))
    log = folder / "events.jsonl"
    with ReferenceEngine.open(model, memory="40%", chunk=4, max_running=4, log=log,
                              ignore_eos=True, costs=CostModel()) as engine:
        handles = engine.submit_all(
            [Request(f"r{i}", tuple(range(1, 3 + 2 * i)), 3 + i) for i in range(5)])
        for handle in handles:
            handle.result()
    return log


def pairs(log: Log, start: str, ends: tuple[str, ...], key: str) -> dict[int, tuple[float, float]]:
    """Number -> (begin, end) straight from the records."""
    begun, done = {}, {}
    for r in log.records:
        if r.get("action") == start:
            begun[r[key]] = r["t"]
        elif r.get("event") in ends:
            done[r[key]] = (begun[r[key]], r["t"])
    return done


def traced(events: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["timeline", str(events), "--out", str(out), *words]) == 0
    return json.loads(out.read_text())["traceEvents"]


@pytest.mark.rule("TIME-1")
def test_the_trace_has_every_load_step_and_token_at_its_time(events: Path, tmp_path: Path) -> None:
    log = read_log(events)
    slices = [e for e in traced(events, tmp_path / "t.json") if e["ph"] == "X"]
    zero = log.records[0]["t"]
    loads = pairs(log, "Load", ("Loaded",), "ticket")
    steps = pairs(log, "Compute", ("Computed",), "step")
    keys = {r["ticket"]: r["key"] for r in log.records if r.get("action") == "Load"}
    shown = {e["args"]["ticket"]: e for e in slices if "ticket" in e["args"]}
    assert len(loads) > 20 and shown.keys() == loads.keys()
    for ticket, (start, end) in loads.items():
        e = shown[ticket]
        assert e["name"] == "{}/{}".format(*keys[ticket])
        assert e["ts"] == pytest.approx((start - zero) * 1e6, abs=0.01)
        assert e["dur"] == pytest.approx((end - start) * 1e6, abs=0.01)
    shown = {e["args"]["step"]: e for e in slices if "step" in e["args"]}
    assert shown.keys() == steps.keys()
    for r in (r for r in log.records if r.get("action") == "Compute"):
        e, (start, end) = shown[r["step"]], steps[r["step"]]
        rows = {}
        for (number, chunk, _), _, _ in r["parts"]:
            left = 2 + 2 * number - 4 * chunk
            rows[f"r{number}"] = min(4, left) if left > 0 else 1
        assert e["args"]["requests"] == rows
        name = "entry" if r["layer"] < 0 else f"layer {r['layer']}"
        assert e["name"].startswith(f"{name}: {sum(rows.values())} row")
        assert e["dur"] == pytest.approx((end - start) * 1e6, abs=0.01)
    tokens = [e for e in traced(events, tmp_path / "t.json") if e["ph"] == "i"]
    sampled = [r for r in log.records if r.get("event") == "Sampled"]
    assert len(tokens) == len(sampled) == sum(3 + i for i in range(5))


@pytest.mark.rule("TIME-1")
def test_lanes_and_tracks_hold_one_thing_at_a_time(events: Path, tmp_path: Path) -> None:
    every = traced(events, tmp_path / "t.json")
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in every:
        if e["ph"] == "X":
            assert e["dur"] >= 0 and e["ts"] >= 0
            tracks.setdefault((e["pid"], e["tid"]), []).append(e)
    names = {(e["pid"], e["tid"]) for e in every if e["name"] == "thread_name"}
    assert names == tracks.keys() and len(names) >= 5 + 1 + 2
    for slices in tracks.values():
        slices.sort(key=lambda e: (e["ts"], e["dur"]))
        for a, b in pairwise(slices):
            assert a["ts"] + a["dur"] <= b["ts"] + 0.01
    states = {e["name"].split(":")[0] for e in every if e["ph"] == "X" and e["pid"] == 3}
    assert states == {"queued", "waiting", "computing"}


def test_busy_time_is_that_of_the_virtual_clock(events: Path) -> None:
    log = read_log(events)
    channel, compute = history_of(log).busy()
    totals = log.records[-1]["end"]
    assert compute == pytest.approx(totals["compute_s"], rel=1e-6)
    latency = CostModel().latency_s * totals["loads"]
    assert totals["channel_s"] - 1e-9 <= channel <= totals["channel_s"] + latency + 1e-9
    assert union([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4


@pytest.mark.rule("TIME-1")
def test_a_part_of_it(events: Path, tmp_path: Path) -> None:
    whole = history_of(read_log(events))
    length = whole.end - whole.start
    words = ("--from", f"{length / 4:.9f}", "--for", f"{length / 2:.9f}")
    part = [e for e in traced(events, tmp_path / "t.json", *words) if e["ph"] == "X"]
    states = sum(len(life.states) for life in whole.lives.values())
    assert 0 < len(part) < len(whole.loads) + len(whole.steps) + states
    assert all(e["ts"] + e["dur"] <= length / 2 * 1e6 + 0.02 for e in part)
    cut = whole.cut(whole.start + length / 4, whole.start + length * 3 / 4)
    assert cut.busy()[1] < whole.busy()[1]
    assert len([e for e in part if "step" in e["args"]]) == len(cut.steps)
    half, out = f"{length / 2:.9f}", tmp_path / "two.json"
    assert main(["timeline", str(events), str(events), "--from", "0", "--from", half, "--for", half,
                 "--out", str(out)]) == 0
    shown = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    steps = [e["args"]["step"] for e in shown if "step" in e["args"]]
    assert set(steps) == {step.number for step in whole.steps}
    assert len(steps) <= len(whole.steps) + 1, "at most one step lies in both halves"


@pytest.mark.rule("TIME-2")
def test_the_picture(events: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "t.png"
    assert main(["timeline", str(events), str(events), "--png", str(out)]) == 0
    assert out.stat().st_size < 300_000
    pixels = (image.imread(str(out))[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    found = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in pixels}
    assert set(COLOURS[:5]) <= found and not set(COLOURS[5:]) & found
    history = history_of(read_log(events))
    drawn = bars(history)
    area = sum(height * n for (_, b, height), spans in drawn.items() if b < 2.2 for _, n in spans)
    assert area == pytest.approx(2.2 * sum(s.end - s.start for s in history.steps))
    assert sum(len(spans) for (_, b, _), spans in drawn.items() if b > 2.2) == len(history.loads)


@pytest.mark.rule("TIME-3")
def test_a_log_that_was_cut_off(events: Path, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    lines = events.read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:20])
    slices = [e for e in traced(cut, tmp_path / "t.json") if e["ph"] == "X"]
    assert slices and "cut off" in capsys.readouterr().out
    log = read_log(cut)
    begun = [r for r in log.records if r.get("action") == "Load"]
    assert len([e for e in slices if "ticket" in e["args"]]) == len(begun)


@pytest.mark.rule("TIME-1")
def test_a_failed_load_and_a_cancelled_request(events: Path) -> None:
    head = read_log(events).head
    log = Log(head, [
        {"t": 1.0, "event": "Arrived", "request": 0, "prompt_len": 1, "max_new_tokens": 2},
        {"t": 1.0, "action": "Admit", "request": 0},
        {"t": 1.1, "event": "Routed", "visit": [0, 0, 0], "experts": [[3, 4]]},
        {"t": 1.2, "action": "Load", "ticket": 1, "key": [0, 3], "slot": 0, "guess": False},
        {"t": 1.2, "action": "Load", "ticket": 2, "key": [0, 4], "slot": 1, "guess": False},
        {"t": 1.5, "event": "LoadFailed", "ticket": 1, "error": "EIO", "drained": False},
        {"t": 1.6, "event": "Loaded", "ticket": 2},
        {"t": 1.7, "event": "Cancelled", "request": 0},
        {"t": 1.7, "action": "Finish", "request": 0, "reason": "cancelled", "error": ""},
        {"t": 1.9, "action": "Load", "ticket": 3, "key": [0, 5], "slot": 2, "guess": True},
    ])  # fmt: skip
    history = history_of(log)
    first, second, third = history.loads
    assert (first.error, first.end, first.lane) == ("EIO", 1.9, 0), "it may still be writing"
    assert (second.lane, second.wanted) == (1, (0,))
    assert third.lane == 1, "lane 0 is not free"
    assert third.wanted == () and third.guess and third.end == 1.9
    life = history.lives[0]
    assert (life.reason, life.end, [s.what for s in life.states]) == (
        "cancelled", 1.7, ["queued", "waiting", "waiting"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{model}"], "config.json"),
        (["{events}", "--from", "1e9"], "--from: 1e+09 s; the log ends"),
        (["{events}", "--from", "-1"], "seconds, at least 0, expected"),
        (["{events}", "--from", "0", "--from", "1"], "--from: 2 times for 1 logs"),
        (["{events}", "--out", "{events}/x"], "--out: cannot write in"),
        (["nowhere"], "nowhere"),
    ],
)
def test_bad_input(events: Path, words: list[str], said: str,
                   capsys: pytest.CaptureFixture[str]) -> None:
    places = {"model": str(events.parent / "model" / "config.json"), "events": str(events)}
    assert main(["timeline", *(word.format(**places) for word in words)]) == 2
    assert said in capsys.readouterr().err
