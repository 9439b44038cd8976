"""covey bench: what it says is what was measured, and the model that benchmarks are made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import COMPILED

from jax_impl.app import bench, bench_picture, bench_table, contest, machine
from jax_impl.app.main import main
from jax_impl.engine import JaxEngine
from oracle.tiny import tiny_config, write_checkpoint
from reference.handle import Result
from reference.vocab.errors import BadInput
from reference.vocab.options import SCHEDULERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=2, num_hidden_layers=2)
    return write_checkpoint(tmp_path_factory.mktemp("bench") / "model", config)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is compiled once for all tests, and the probe of the disk is short."""
    real = JaxEngine.open.__func__  # type: ignore[attr-defined]

    def opened(cls: Any, path: Any, **options: Any) -> Any:
        return real(cls, path, compile_cache=COMPILED, chunk=4, **options)

    monkeypatch.setattr(JaxEngine, "open", classmethod(opened))
    monkeypatch.setattr(bench.Bench, "disk_rate", short_probe)


def short_probe(self: bench.Bench, memory: str) -> float:
    from jax_impl.app import estimate
    from reference.files.checkpoint import Checkpoint

    with Checkpoint.open(self.model) as ckpt:
        rate, self.io = estimate.read_rate(ckpt, self.args.threads, seconds=0.05)
    return rate


FAST = ["--prompt-tokens", "6", "--new-tokens", "6", "--rounds", "2", "--quiet"]


@pytest.mark.rule("BENCH-1", "BENCH-2", "BENCH-3")
def test_a_measurement(model: Path, small: None, tmp_path: Path,
                       capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []
    real = contest.Contest.run

    def spied(self: Any, entry: Any, requests: Any, *more: Any) -> Any:
        ran.append((entry.where, ",".join(r.id for r in requests)))
        return real(self, entry, requests, *more)

    monkeypatch.setattr(contest.Contest, "run", spied)
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    assert main(["bench", str(model), "--memory", "75%,4KiB", "--requests", "3,1", *FAST,
                 "--schedulers", "interleaved,lockstep/global", "--json", str(out)]) == 2
    assert "at least" in capsys.readouterr().err and not ran and not out.exists()
    assert main(["bench", str(model), "--memory", "75%,50%", "--requests", "3,1", *FAST,
                 "--schedulers", "interleaved,lockstep/global", "--json", str(out),
                 "--png", str(png)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "same tokens: yes"
    told = json.loads(out.read_text())
    assert told["machine"]["cores"] and told["versions"]["jax"] and told["commit"]
    assert (told["options"]["compute"], told["rounds"]) == ("f32", 2)
    assert [(r["memory"], r["requests"]) for r in told["rows"]] == [
        ("75%", 1), ("75%", 3), ("50%", 1), ("50%", 3)]
    for row in told["rows"]:
        assert list(row["schedulers"]) == ["interleaved", "lockstep/global"]
        for f in row["schedulers"].values():
            n, sums = row["requests"], f["sums"]
            assert sums["tokens"] == 2 * 6 * n and len(f["rounds_tokens_per_s"]) == 2
            assert f["of_bound"] == pytest.approx(
                max(sums["compute_s"], sums["channel_s"]) / sums["wall_s"])
            assert 0 < f["of_bound"] <= 1.0001 and f["loaded_bytes"] == sums["bytes"] > 0
            assert f["disk_bytes"] >= 0.95 * sums["bytes"] or told["io"] != "direct"
            assert 0 < f["tpot_s"]["p50"] <= f["tpot_s"]["p99"] and f["ttft_s"]["p50"] > 0
    # The same requests for all in a round, others before; 8 runs a budget and two warm-ups.
    for memory in ("75%", "50%"):
        mine = [(where.split(" with ")[0], ids) for where, ids in ran if where.endswith(memory)]
        assert sorted(mine[:2]) == [(s, "s2r0,s2r1,s2r2") for s in row["schedulers"]]
        assert len(mine) == 2 + 2 * 2 * 2
        for one, two in zip(mine[2::2], mine[3::2], strict=True):
            assert one[1] == two[1] and {one[0], two[0]} == set(row["schedulers"])
    assert told["comparisons"] == 2 * 2 * (1 + 2) * 3 + 2 * 2 * 2 * 1 - 3 * 3
    table = [line for line in lines if "interleaved" in line and line.strip()[0] in "13"]
    assert len(table) == 4 and f"{told['rows'][0]['schedulers']['interleaved']['of_bound']:.0%}" \
        in table[0]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(bench_picture.series(told)) == ["75%", "50%"]
    assert [n for n, _ in bench_picture.series(told)["50%"]["lockstep/global"]] == [1, 3]


@pytest.mark.parametrize("budgets", [1, 3])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_picture_holds_its_legend_and_its_title(budgets: int, count: int) -> None:
    """However few budgets and however long the names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures = {"tokens_per_s": 2.0, "rounds_tokens_per_s": [1, 3], "of_bound": 0.5,
               "bytes_per_token": 1e6}
    names = [f"lockstep-blocking/global/expert/{n}" for n in range(count)]
    figure = bench_picture.picture({
        "model": "a-model-with-a-long-name", "options": {"compute": "bf16"}, "commit": "0" * 12,
        "machine": {"processor": "A Processor (R) with 99 of this and that", "cores": 2},
        "rows": [{"memory": f"{m}0%", "requests": r, "schedulers": dict.fromkeys(names, figures)}
                 for m in range(1, 1 + budgets) for r in (1, 8)]})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    for part in (legend, figure._suptitle):
        box = part.get_window_extent(canvas.get_renderer())
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


@pytest.mark.rule("BENCH-2")
def test_a_difference_is_told(model: Path, small: None, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    real = contest.Contest.run

    def lying(self: Any, entry: Any, requests: Any, *more: Any) -> Any:
        results = real(self, entry, requests, *more)
        if entry.contender.name == "lockstep":
            self.same.see(replace(results[0], tokens=(*results[0].tokens[:-1], -1)), entry.where)
        return results

    monkeypatch.setattr(contest.Contest, "run", lying)
    assert main(["bench", str(model), "--memory", "50%", "--requests", "2", *FAST,
                 "--schedulers", "interleaved,lockstep"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "same tokens: no"
    assert any(line.startswith("differs: request 's") and "lockstep" in line for line in lines)


def test_engines_one_after_another(model: Path, small: None, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench.Bench, "fit", lambda self, room: False)
    assert main(["bench", str(model), "--memory", "50%", "--requests", "1", *FAST,
                 "--schedulers", "interleaved,lockstep"]) == 0
    out = capsys.readouterr().out
    assert "engines one after another" in out and out.splitlines()[-1] == "same tokens: yes"


@pytest.mark.rule("BENCH-4")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{dense}"], "a dense model has no experts to schedule"),
        (["{model}", "--schedulers", "fast"], f"unsupported 'fast'; supported: {SCHEDULERS[0]}"),
        (["{model}", "--schedulers", "lockstep/soon"], "'lockstep/soon': unsupported 'soon'"),
        (["{model}", "--schedulers", "lockstep/global/per-layer"], "unsupported 'per-layer'"),
        (["{model}", "--schedulers", "lockstep,lockstep"], "one is named twice"),
        (["{model}", "--requests", "0"], "at least 1 expected"),
        (["{model}", "--requests", "1,x"], "numbers with commas expected"),
        (["{model}", "--new-tokens", "1"], "at least 2 are needed"),
        (["{model}", "--prompt-tokens", "600"], "632 together; the model takes 512"),
        (["{model}", "--memory", "1KiB"], "at least"),
        (["{model}", "--json", "{model}/no/x"], "--json: cannot write in"),
    ],
)
def test_bad_usage(model: Path, tmp_path: Path, words: list[str], said: str,
                   capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_checkpoint(tmp_path / "dense", tiny_config("llama"))
    words = [w.format(dense=dense, model=model) for w in words]
    assert main(["bench", "--quiet", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.rule("BENCH-4")
def test_memory_that_is_not_there(model: Path, small: None, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "available_memory", lambda: 1000)
    assert main(["bench", str(model), "--memory", "50%", "--requests", "1", *FAST]) == 2
    assert "1000 B are free" in capsys.readouterr().err


def test_words_of_a_scheduler() -> None:
    one = bench.contender("lockstep/expert/global")
    assert one.options == {"scheduler": "lockstep", "cache": "global", "readiness": "expert"}
    assert (one.name, one.cache) == ("lockstep/expert/global", "global")
    with pytest.raises(BadInput, match="--schedulers"):
        bench.contender("")


def result(*times: float) -> Result:
    return Result("a", tuple(range(len(times))), "length", None, times[0], times, None)


@pytest.mark.rule("BENCH-3")
def test_figures() -> None:
    # All decode between 2.0 (the last first token) and 6.0 (the first last one): 4 + 2 tokens.
    runs = [result(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), result(2.0, 4.0, 6.0, 8.0)]
    assert bench_table.decode_rate(runs) == pytest.approx(6 / 4.0)
    assert bench_table.decode_rate([result(1.0, 2.0), result(3.0, 4.0)]) is None
    figures = contest.Figures(None, rates=[1.0, 3.0], results=[*runs, *runs])
    figures.sums |= {"wall_s": 10.0, "compute_s": 4.0, "channel_s": 8.0, "bytes": 800.0,
                     "tokens": 20.0, "steps": 5.0, "visits": 15.0}
    told = bench_table.told(figures, 900, rate=200.0)
    assert (told["tokens_per_s"], told["decode_tokens_per_s"]) == (2.0, pytest.approx(1.5))
    assert (told["of_bound"], told["of_disk"]) == (0.8, 0.4)
    assert (told["bytes_per_token"], told["channel_bytes_per_s"]) == (40.0, 100.0)
    assert (told["disk_bytes"], told["loaded_bytes"], told["visits_per_step"]) == (900, 800.0, 3.0)
    assert told["tpot_s"] == {"p50": 2.0, "p99": 2.0} and told["ttft_s"]["p50"] == 2.0
    assert bench_table.told(figures, 0, None)["of_disk"] is None
    assert bench_table.quantile([], 0.5) is None


def test_pages_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 4096)
    assert machine.drop_pages(tmp_path) in (True, False)
    before = machine.disk_bytes()
    assert before is None or before >= 0
    assert machine.setting().keys() == {"machine", "versions", "commit"}
