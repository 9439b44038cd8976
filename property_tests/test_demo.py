"""covey demo: what it says is what was measured, and "same" means compared."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from engines import COMPILED

from jax_impl.app import builtin, contest, demo, demo_text
from jax_impl.app.main import main
from jax_impl.app.text import Text
from jax_impl.fault_readers import FaultyReader
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.event_log import read_log
from reference.handle import Result
from reference.vocab.errors import BadInput, RequestFailed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=2, num_hidden_layers=2)
    return write_checkpoint(tmp_path_factory.mktemp("demo") / "model", config)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demonstration with few tokens, requests and rounds."""
    monkeypatch.setattr(demo, "TOKENS", 6)
    monkeypatch.setattr(demo, "GRID_TOKENS", 3)
    monkeypatch.setattr(demo, "GROUP", 3)
    monkeypatch.setattr(demo, "CROWDS", (1, 4))
    monkeypatch.setattr(demo, "GRID_ROUNDS", ((float("inf"), 1),))
    monkeypatch.setitem(demo.OPTIONS, "compile_cache", COMPILED)


@pytest.mark.rule("DEMO-2", "DEMO-3", "DEMO-4")
def test_the_whole_demonstration(model: Path, small: None, tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    out, logs = tmp_path / "out.json", tmp_path / "logs"
    assert main(["demo", "--model", str(model), "--pace", "0.5", "--rounds", "2", "--quiet",
                 "--json", str(out), "--logs", str(logs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "same tokens and logits: yes"
    told = json.loads(out.read_text())
    expert = 3 * 16 * 32 * 4
    assert told["bytes_per_s"] == pytest.approx(expert / (0.5 * told["step_s"]))
    assert f"paced to {told['bytes_per_s'] / 1e6:.0f} MB/s" in "\n".join(lines)
    # 2 alone, then of each of 4: 3 warm, 3 x 2 rounds, grid: 3 budgets x (1 + 4) and two warm-ups
    # of 4: each result but the first of its request is a comparison.
    results = 2 + 4 * 3 + 4 * 3 * 2 + 4 * (3 * (1 + 4) + 2 * 4)
    assert told["comparisons"] == results - 4
    assert list(told["schedulers"]) == [c.name for c in contest.CONTENDERS]
    for f in told["schedulers"].values():
        assert len(f["rounds_tokens_per_s"]) == 2 and f["sums"]["tokens"] == 2 * 3 * 6
        assert 0 <= f["full_hit_rate"] <= 1 and 0 <= f["hit_rate"] <= 1
        assert f["over_bound"] > -0.01 and 0 < f["compute_busy"] <= 1
    assert [(r["memory"], r["requests"]) for r in told["grid"]] == [
        (m, n) for m in demo.BUDGETS for n in (1, 4)]
    for row in told["grid"]:
        speeds = [f["tokens_per_s"] for f in row["figures"]]
        assert row["gains"] == pytest.approx([speeds[3] / s for s in speeds[:3]])
    wins = sum(g >= 1.05 for r in told["grid"] for g in r["gains"])
    losses = sum(g <= 0.95 for r in told["grid"] for g in r["gains"])
    assert f"of 18 comparisons balanced wins {wins} and loses {losses}" in "\n".join(lines)
    assert sum(line.count("loses") for line in lines if "%  " in line) == losses
    evictions = {"lockstep-blocking": "global", "balanced": "frequency"}
    for grouping in ("lockstep-blocking", "lockstep", "interleaved", "balanced"):
        log = read_log(logs / f"{grouping}.jsonl")
        assert log.complete and log.head["options"]["grouping"] == grouping
        assert log.head["options"]["eviction"] == evictions.get(grouping, "per-layer")


@pytest.mark.rule("DEMO-3")
def test_a_difference_is_told(model: Path, small: None, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    class Lying(FaultyReader):
        bytes_per_s = 50e6

        def __init__(self, rate: float) -> None:
            super().__init__("flip", nth=2, every=3, armed=True, where=lambda at: at > 0)

    monkeypatch.setattr(contest, "ThrottledReader", Lying)
    assert main(["demo", "--model", str(model), "--rounds", "1", "--no-table", "--quiet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "same tokens and logits: no"
    assert any(line.startswith("differs: request 'r") for line in lines)


def result(tokens: tuple[int, ...], rows: Any, error: str | None = None) -> Result:
    return Result("a", tokens, "length", error, None, (), np.array(rows, np.float32))


@pytest.mark.rule("DEMO-3")
def test_sameness_is_of_bits() -> None:
    same = contest.Sameness()
    same.see(result((1, 2), [[0.0, 1.0], [2.0, 3.0]]), "first")
    same.see(result((1, 2), [[0.0, 1.0], [2.0, 3.0]]), "again")
    same.see(result((1,), [[0.0, 1.0]]), "shorter")
    assert (same.comparisons, same.different) == (2, [])
    same.see(result((1, 2), [[-0.0, 1.0], [2.0, 3.0]]), "minus zero")
    same.see(result((1, 3), [[0.0, 1.0], [2.0, 3.0]]), "a token")
    same.see(result((1, 2, 4), [[0.0, 1.0], [2.0, 3.0], [5.0, 5.0]]), "longer")
    same.see(result((1, 2, 4), [[0.0, 1.0], [2.0, 3.0], [5.0, 6.0]]), "beyond the first")
    assert same.different == [f"request 'a', {w}" for w in (
        "minus zero", "a token", "beyond the first")]
    with pytest.raises(RequestFailed, match="EIO"):
        same.see(result((), [], "EIO"), "failed")


def test_figures_are_differences_of_totals() -> None:
    before = dict.fromkeys(contest.SUMMED, 10.0)
    after = before | {"wall_s": 14.0, "compute_s": 11.0, "channel_s": 13.0, "bytes": 710.0,
                      "tokens": 18.0, "experts_named": 20.0, "hits": 14.0, "routings": 14.0,
                      "full_hits": 11.0}
    figures = contest.Figures(rate=200.0)
    figures.add(before, after)
    f = figures.as_dict()
    assert f["tokens_per_s"] == 2.0 and f["bytes_per_token"] == 87.5
    assert (f["hit_rate"], f["full_hit_rate"]) == (0.4, 0.25)
    assert (f["channel_busy"], f["compute_busy"]) == (0.75, 0.25)
    assert f["over_bound"] == pytest.approx(4.0 / 3.5 - 1), "700 bytes at 200/s are the bound"
    unpaced = contest.Figures(rate=None)
    unpaced.add(before, after)
    assert unpaced.as_dict()["over_bound"] == pytest.approx(4.0 / 3.0 - 1)
    other = contest.Figures(None, rates=[1.0, 4.0, 2.0])
    assert contest.gain(contest.Figures(None, rates=[2.0, 4.0, 8.0]), other) == 2.0


@pytest.mark.rule("DEMO-1")
def test_the_built_in_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                            capsys: pytest.CaptureFixture[str]) -> None:
    assert builtin.model("./demo") == Path("demo")
    monkeypatch.setattr(builtin, "files", lambda package: tmp_path)
    with pytest.raises(BadInput, match="not part of this installation"):
        builtin.model("demo")
    assert main(["verify", "demo"]) == 2 and "built-in" in capsys.readouterr().err
    write_checkpoint(tmp_path / "demo_model", tiny_config("mixtral"))
    place = builtin.model("demo")
    assert place == tmp_path / "demo_model"
    assert builtin.name_of(place) == "demo" and builtin.name_of(tmp_path) == str(tmp_path)
    assert main(["verify", "demo", "--engine", "reference", "--rounds", "1", "--count", "2",
                 "--max-new-tokens", "2", "--quiet"]) == 0


def test_the_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_impl.attention_pool import lamina_demo

    for status in (0, 1):
        monkeypatch.setattr(lamina_demo, "show", lambda status=status: status)
        assert main(["demo", "--lamina"]) == status


@pytest.mark.rule("DEMO-1")
def test_the_built_in_model_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--memory", "60%", "--no-probe"]) == 0
    assert "demo: qwen3_moe, 6 layers, 6 with 32 experts, 4 a token" in capsys.readouterr().out


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_as_they_come(model: Path, terminal: bool) -> None:
    text = Text(model)
    requests = demo_text.requests(text, 96, 3, 4)
    assert len({r.prompt for r in requests}) == 3 and all(max(r.prompt) < 96 for r in requests)
    queues: list[SimpleQueue[int]] = [SimpleQueue() for _ in requests]
    handles: list[Any] = [iter(queue.get, -1) for queue in queues]
    screen = Screen(terminal)
    show = demo_text.Live(text, requests, screen).watch
    watcher = threading.Thread(target=show, args=(handles,), daemon=True)
    watcher.start()
    for token in (0, 1, 2, 3, None):
        for n, queue in reversed(list(enumerate(queues))):
            queue.put(-1 if token is None else 10 * n + token)
    watcher.join(10.0)
    lines = screen.getvalue().splitlines()
    wanted = [f"  r{n}  " + " ".join(map(str, [*r.prompt, "|", *range(10 * n, 10 * n + 4)]))
              for n, r in enumerate(requests)]
    assert not watcher.is_alive()
    if terminal:
        shown = [line.removeprefix("\x1b[3A").removeprefix("\x1b[2K") for line in lines[-3:]]
        assert shown == wanted
    else:
        assert sorted(lines) == wanted


def test_text_leaves_a_terminal_alone() -> None:
    assert demo_text._plain("a\nb\x1b[2Jc\td") == "a / b [2Jc d"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pace", "0"], "a number from 0.01 to 100 expected"),
        (["--rounds", "0"], "at least 1 expected"),
        (["--model", "nowhere"], "nowhere: no such directory"),
        (["--model", "{dense}"], "a dense model has no experts to schedule"),
        (["--model", "{model}", "--json", "{model}/no/x"], "--json: cannot write in"),
        (["--model", "{model}", "--logs", "{model}/config.json"], "config.json: File exists"),
    ],
)
def test_bad_usage(model: Path, tmp_path: Path, words: list[str], said: str,
                   capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_checkpoint(tmp_path / "dense", tiny_config("llama"))
    words = [w.format(dense=dense, model=model) for w in words]
    assert main(["demo", "--quiet", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_to_look_at_next_is_of_the_model_that_was_shown() -> None:
    shown = demo.look_next(None, "tiny")
    assert " demo " not in shown.replace("covey demo --model tiny --logs FOLDER", "")
    assert all(f"covey {word} tiny" in shown for word in ("plan", "run", "verify"))
    assert "covey demo --logs FOLDER" in demo.look_next(None, builtin.NAME)


def test_prompts_fit() -> None:
    assert len(set(demo_text.PROMPTS)) == len(demo_text.PROMPTS) >= max(demo.CROWDS)
    longest = 24 + demo.TOKENS
    assert longest <= 64 and demo.OPTIONS["kv_tokens"] >= 64 * max(demo.CROWDS)
