"""The comparison of schedulers: its ratios and targets, its file, its page, its command."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf import counting, grid, grid_page, grid_report, grid_run
from perf.grid_cells import Cell, format_of
from perf.grid_run import run_scheduler
from perf.traps import one_by_one
from perf.workers import done_by
from reference.control import eviction_frequency
from reference.simulator import models, platforms
from reference.simulator.costs import Roofline
from reference.simulator.schedulers import preset


def made_cell(requests: int = 8, **rates: float) -> dict[str, Any]:
    """A cell as run_cell gives it, with these tokens/s."""
    found = {}
    for name, rate in rates.items():
        p = preset(name.replace("_", "-"))
        found[p.name] = {
            "tokens_per_s": rate, "end_to_end_per_s": rate / 2, "kind": p.kind, "cache": p.cache,
            "eviction": p.options.get("eviction", ""), "grouping": p.options.get("grouping", ""),
            "bound_share": 0.9, "bound_share_least": 0.8, "compute_over_fetch": 1.0,
            "queueing_limit": 0.9, "tpot_p50": 1.0, "tpot_p99": 1.5, "channel_busy": 0.8,
            "compute_busy": 0.5, "both_busy": 0.4, "fetches_per_token": 2.0 * rate,
        }  # fmt: skip
    return {"platform": "p", "model": "m", "cache_share": 0.5, "requests": requests,
            "processor_seconds": 1.0, "schedulers": found}  # fmt: skip


@pytest.mark.rule("GRID-6")
def test_ratios_are_over_the_best_of_their_kind() -> None:
    c = grid_report.ratios(made_cell(
        ours=12, ours_alone=9, bevy=11, oracle=40, fiddler=30, ktransformers=20, balanced=13,
        informed=16, belady=18, ours_oracle=15, ours_3_ahead=14,
        on_demand_blocking_global=3, on_demand_overlapped_layer=6, lockstep_lfru=8, layerscope=10,
        layerscope_layer=7, mixtral_offloading=5, micro_queues=2,
    ))  # fmt: skip
    assert c["best_baseline"] == "layerscope" and c["ours_over_best_baseline"] == 1.2
    assert c["ours_over_best_predictive"] == 1.2
    assert c["ours_over_best_predictive_per_layer"] == 12 / 7
    assert c["ours_over_best_per_layer_overlapped"] == 12 / 7
    assert c["ours_over_on_demand_global_lru"] == 4
    assert c["ours_over_best_baseline_with_cpu"] == 0.4
    assert c["ours_over_cpu_misses"] == 0.4
    assert c["ours_over_informed"] == 0.75
    assert c["informed_over_best_per_layer_overlapped"] == 16 / 7
    assert c["informed_over_best_predictive"] == pytest.approx(1.6)
    assert c["belady_over_best_per_layer_overlapped"] == pytest.approx(18 / 7)
    assert c["ours_oracle_over_best_predictive"] == pytest.approx(1.5)
    assert c["ours_3_ahead_over_best_predictive"] == pytest.approx(1.4)
    assert c["ours_oracle_3_over_best_predictive"] is None
    assert c["ours_oracle_bound_share"] == 0.9 and c["ours_oracle_3_bound_share"] is None
    assert c["ours_over_bevy"] == 12 / 11
    assert c["ours_alone_over_best_baseline"] == pytest.approx(0.9)
    assert c["ours_alone_over_on_demand_global_lru"] == pytest.approx(3)
    assert c["ours_alone_bound_share"] == 0.9
    assert c["bound_share"] == 0.9
    assert c["end_to_end_over_best_baseline"] == 1.2
    alone = grid_report.ratios(made_cell(ours=1.0))
    assert alone["ours_over_best_baseline"] is None
    assert "ours_over_best_baseline" not in grid_report.ratios(made_cell(bevy=1.0))


@pytest.mark.rule("GRID-6")
def test_targets_are_judged_over_their_cells() -> None:
    cells = [grid_report.ratios(made_cell(n, ours=rate, lockstep_lfru=1, mixtral_offloading=0.5))
             for n, rate in ((8, 0.9), (16, 2.0), (32, 3.0), (4, 0.5))]  # fmt: skip
    found = grid_report.summary(cells)
    targets = found["targets"]
    never = targets["never below 0.97 x the best baseline"]
    assert (never["found"], never["met"], never["cells"]) == (0.5, False, 4)
    assert "x4" in never["worst"][0]
    middle = next(t for name, t in targets.items() if name.startswith("median over the best"))
    assert (middle["found"], middle["met"], middle["cells"]) == (4.0, True, 3)
    assert targets["TPOT p99 over p50, the greatest"]["met"]
    assert len(found["compute and fetch within 1.3x of each other"]) == 3
    text = grid_report.table({"summary": found, "cells": cells, "skipped": []})
    assert "NOT MET never below" in text and text.count("lockstep-lfru") >= 4


def test_garbage_is_looked_for_between_cells_whatever_happens() -> None:
    @grid_run.uncollected()
    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()


@pytest.mark.rule("CACHE-14")
def test_other_weights_of_the_counts_are_tried_and_put_back() -> None:
    cell = counting.cell_of("h200-pcie5/gpt-oss-20b/0.5/2")
    before = vars(eviction_frequency).copy(), eviction_frequency.Named.PASSES
    plain, shipped = counting.run(cell, "1,0,0,12"), counting.run(cell, "1,3,8,32")
    assert shipped[1] < plain[1]  # reads
    assert counting.run(cell, "1,3,8,32") == shipped
    assert (vars(eviction_frequency), eviction_frequency.Named.PASSES) == before
    platform, model = platforms.load(cell.platform), models.load(cell.model)
    costs = Roofline(platform, model, None, format_of(platform, model))
    past = grid_run.lately(cell.model, cell.requests)
    as_it_is = run_scheduler(cell, preset("lockstep-frequency"), costs, past)
    assert shipped == (as_it_is["tokens_per_s"], as_it_is["fetches_per_token"])


@pytest.mark.rule("GRID-6")
def test_a_cell_that_is_near_is_told_with_what_more_knowing_is_worth() -> None:
    made = made_cell(ours=3.0, ours_oracle=4.0) | {
        "layers": 4, "transfer_s": 0.5, "compute_s_a_token": 0.25, "halves_compute_s_a_token": 0.5,
    }
    found = grid_report.summary([grid_report.ratios(made)])
    (line,) = found["compute and fetch within 1.3x of each other"]
    assert line.endswith(
        "bound share 0.900, queueing limit 0.900, N/(N+1) 0.889; all of the next layer known "
        "0.900; a read takes 1.00 of a layer's computing, 12.00 reads a layer, in halves 2.00 "
        "times the computing"
    )
    share = "all of the next layer known: least share of the bound (requests >= 8)"
    assert (found["targets"][share]["found"], found["targets"][share]["met"]) == (0.9, True)


@pytest.mark.rule("GRID-6")
def test_worth_is_told_by_what_limits() -> None:
    cells = [made_cell(ours=9.0, ours_alone=3.0, lockstep_frequency=2.0),
             made_cell(ours=4.0, ours_alone=4.0, bevy=1.0),
             made_cell(ours=9.0, ours_alone=1.0, lockstep_frequency=2.0)]  # fmt: skip
    cells = [grid_report.ratios(c) for c in cells]
    cells[2]["compute_over_fetch"] = 0.5
    found = grid_report.worth(cells)["the schedule alone, same cache"]
    assert found["both"] == [1.5, 1.5, 1.5, 1] and found["reading"] == [0.5, 0.5, 0.5, 1]
    assert "compute" not in found
    assert [grid_report.regime({"compute_over_fetch": x}) for x in (None, 2.0, 1.2, 0.8, 0.7)] == [
        "compute", "compute", "both", "both", "reading"]  # fmt: skip


@pytest.mark.rule("GRID-8")
def test_the_page_is_made_from_a_result() -> None:
    made = [made_cell(ours=3.0, lockstep_frequency=2.0, layerscope=2.5,
                      on_demand_overlapped_layer=1.0)]  # fmt: skip
    made[0]["schedulers"]["layerscope"]["prediction"] = {
        "overall": {"recall": 0.9}, "absent": {"recall": 0.4}}  # fmt: skip
    done = [grid_report.ratios(c | {"stored": "bf16"}) for c in made]
    found = {"cells": done, "skipped": [], "summary": grid_report.summary(done), "commit": "c0ffee",
             "command": "python -m perf.grid", "seconds": 12.0, "processor_seconds": 9.0,
             "machine": {"cores": 2, "load": [7.0, 7.0, 7.0]}}  # fmt: skip
    page = "a\n" + "\n".join(
        f"{grid_page.BEGIN.format(p)}old{grid_page.END.format(p)} text" for p in grid_page.PARTS
    )
    filled_in = grid_page.fill(page, found)
    assert filled_in.startswith("a\n") and "old" not in filled_in
    assert filled_in.count(" text") == len(grid_page.PARTS)
    assert "commit c0ffee" in filled_in and "**not met**" in filled_in
    assert "| p | m | bf16 | 0.5 | 8 | 3.0 | - | 1.200 | 3.000 | 1.200 | - |" in filled_in
    assert "| layerscope | 0.5 | 0.90 | 0.40 | 1 |" in filled_in
    assert "| 8 at a time | - | 1.20 (1.20 to 1.20) | 3.00 (3.00 to 3.00) | 1 |" in filled_in
    assert "| `ours` | 80% | 50% | 40% | 80% |" in filled_in
    assert "| m | - | - | 2.00 (2.00 to 2.00) | - | - | 1 |" in filled_in
    assert grid_page.fill(filled_in, found) == filled_in
    with pytest.raises(ValueError, match="grid setting"):
        grid_page.fill("nothing", found)


@pytest.mark.rule("GRID-8")
def test_the_page_has_its_marks_and_its_result() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "reproduction.md").read_text()
    named = re.findall(r"perf/results/grid-[a-z]+-[0-9-]+\.json", page)
    assert named
    for name in set(named):
        assert (root / name).is_file(), name
    main = json.loads((root / named[0]).read_text())
    assert grid_page.fill(page, main) == page, "python -m perf.grid_page"


def test_one_by_one_misses_what_together_would_have_kept() -> None:
    a, b = [[[0, 1]]] * 3, [[[1, 2]]] * 3
    routes = [np.array(x, np.uint16) for x in (a, b)]
    # Two slots: 0 1 | 1 2 -> 2 puts 0 out, then 0 puts 1 out, 1 puts 2 out: 3 of 4 miss a step.
    assert one_by_one(routes, 2, 0) == (2 + 1 + 3 + 3) / 12
    assert one_by_one(routes, 3, 1) == 0


@pytest.mark.rule("GRID-7")
def test_a_later_run_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cell = tmp_path / "g.json", Cell("p", "m", 0.5, 8)
    monkeypatch.setattr(grid, "code", lambda: "one")
    out = grid.Output(path, "ci", False)
    out.add(made_cell(ours=2.0, lockstep_lfru=1.0))
    out.write(out.document([cell]))
    saved = json.loads(path.read_text())
    assert saved["cells"][0]["ours_over_best_baseline"] == 2.0
    assert {"machine", "versions", "commit", "seconds", "command", "summary"} <= set(saved)
    assert [p.name for p in tmp_path.iterdir()] == ["g.json"]
    assert list(grid.Output(path, "ci", False).cells) == [cell]
    assert not grid.Output(path, "ci", True).cells
    assert not grid.Output(path, "all", False).cells
    monkeypatch.setattr(grid, "code", lambda: "two")
    assert not grid.Output(path, "ci", False).cells


@pytest.mark.rule("GRID-7")
def test_the_digest_is_of_what_the_figures_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = grid.code()
    assert before == grid.code()
    for folder in (*grid.SOURCES, "perf"):
        (tmp_path / folder).mkdir(parents=True)
    for part in ("cells", "run"):
        (tmp_path / "perf" / f"grid_{part}.py").write_text("")
    monkeypatch.setattr(grid, "ROOT", tmp_path)
    empty = grid.code()
    (tmp_path / "reference/simulator/x.toml").write_text("a = 1")
    assert len({before, empty, grid.code()}) == 3


@pytest.mark.rule("GRID-7")
def test_cells_of_earlier_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of other cells into the same file; those asked for come first, in their order."""
    path, one, other = tmp_path / "g.json", Cell("p", "m", 0.5, 8), Cell("p", "m", 0.5, 4)
    for cell in (one, other):
        out = grid.Output(path, "ci", False)
        out.skipped |= {Cell("q", "m", 0.5, cell.requests): {**cell.as_dict(), "platform": "q"}}
        out.add(made_cell(cell.requests, ours=2.0, lockstep_lfru=1.0))
        out.write(out.document([cell]))
    saved = json.loads(path.read_text())
    assert [c["requests"] for c in saved["cells"]] == [4, 8]
    assert [c["requests"] for c in saved["skipped"]] == [8, 4]
    assert saved["processor_seconds"] == 2.0
    assert list(grid.Output(path, "ci", False).cells) == [other, one]


def _damaged(change: Any) -> str:
    cell = made_cell(ours=2.0, lockstep_lfru=1.0)
    document = {"code": grid.code(), "schedulers": "ours", "seconds": 1.0, "skipped": [],
                "command": "c", "cells": [cell]}  # fmt: skip
    change(document, cell)
    return json.dumps(document)


@pytest.mark.rule("GRID-7")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no result of the grid (Expecting value"),
        ('{"cells": [', "no result of the grid (Expecting value"),
        ("[]", "no result of the grid ([]; an object expected)"),
        (lambda d, c: d.pop("cells"), "a damaged result of the grid (KeyError: 'cells')"),
        (lambda d, c: d.update(cells=None), "a damaged result of the grid (TypeError: "),
        (lambda d, c: d.update(cells=[[1]]), "a damaged result of the grid (TypeError: "),
        (lambda d, c: d.update(seconds="x"), "a damaged result of the grid (ValueError: "),
        (lambda d, c: c.pop("platform"), "a damaged result of the grid (KeyError: 'platform')"),
        (lambda d, c: c.pop("processor_seconds"), "a damaged result of the grid (KeyError: "),
        (lambda d, c: c.update(schedulers={}), "a cell without schedulers"),
        (lambda d, c: c["schedulers"]["ours"].pop("tokens_per_s"), "(KeyError: 'tokens_per_s')"),
    ],
)
def test_a_damaged_result_is_refused(
    text: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "g.json"
    path.write_text(text if isinstance(text, str) else _damaged(text))
    words = ["--cells", "slice", "--schedulers", "ours", "--json", str(path)]
    assert grid.main(words) == 2
    error = capsys.readouterr().err
    assert f"perf.grid: --json: {path}: " in error and told in error
    assert error.count("\n") == 1 and "--fresh begins anew" in error


@pytest.mark.rule("GRID-7")
def test_what_cannot_be_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"--cells": "slice", "--json": str(tmp_path / "g.json")}
    (tmp_path / "file").write_text("")
    for words, told in (
        ({"--schedulers": "nope"}, "scheduler: unknown 'nope'; there are: on-demand"),
        ({"--json": str(tmp_path)}, "is a directory"),
        ({"--json": str(tmp_path / "file" / "g.json")}, "--json: "),
        ({"--csv": str(tmp_path)}, "--csv: "),
    ):
        assert grid.main([w for pair in (good | words).items() for w in pair]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        grid.main(["--json", "x", "--processes", "0"])
    assert "0; at least 1 expected" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    cell = Cell("jetson-thor", "olmoe-1b-7b", 0.5, 1)
    nobody = grid.run([cell], tmp_path / "n.json", "fiddler")
    assert nobody["skipped"][0]["reason"] == "schedulers: none of fiddler can be there"


def _work(what: str) -> str:
    if what == "die":
        os._exit(7)
    return {"good": "done"}[what]


@pytest.mark.rule("GRID-7")
def test_a_worker_that_fails_or_dies_is_heard() -> None:
    assert list(done_by(_work, [("good",)] * 3, 1)) == [(("good",), "done")] * 3
    with pytest.raises(RuntimeError, match=r"(?s)\('bad',\): Traceback.*KeyError: 'bad'"):
        list(done_by(_work, [("good",), ("bad",)], 2))
    with pytest.raises(RuntimeError, match=r"\('die',\): its process died: 7"):
        list(done_by(_work, [("die",), ("good",)], 2))


LONG = """
import signal
from pathlib import Path
from perf import grid
from perf.grid_cells import Cell
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
grid.chosen = lambda name: [Cell("rtx-4090-pcie4", "olmoe-1b-7b", i / 2000, 1)
                            for i in range(500, 1500)]
raise SystemExit(grid.main(["--json", "g.json", "--schedulers", "ktransformers"]))
"""


@pytest.mark.rule("GRID-7", "APP-5")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_with_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C comes to all processes of a terminal, the others to one; what is done is saved."""
    root = str(Path(grid.__file__).parents[1])
    run = subprocess.Popen(
        [sys.executable, "-c", LONG], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stderr is not None
    try:
        assert "/1000 rtx-4090" in run.stderr.readline()
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
        assert run.wait(30) == (130 if number != signal.SIGKILL else -9)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and _group(run.pid):
            time.sleep(0.05)
        assert not _group(run.pid)
    finally:
        if _group(run.pid):
            os.killpg(run.pid, signal.SIGKILL)
    if number != signal.SIGKILL:
        assert "perf.grid: interrupted; cells that are done are in g.json" in run.stderr.read()
        assert [p.name for p in tmp_path.iterdir()] == ["g.json"]
    run.stderr.close()
    assert 1 <= len(json.loads((tmp_path / "g.json").read_text())["cells"]) < 1000


def _group(number: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("words", "said"), [
    (["--cells", "x"], "--cells: 'x'; PLATFORM/MODEL/SHARE/REQUESTS"),
    (["--cells", "jetson-thor/none/0.5/1"], "--cells: 'jetson-thor/none/0.5/1'; PLATFORM"),
    (["--cells", "jetson-thor/olmoe-1b-7b/2/1"], "--cells: 'jetson-thor/olmoe-1b-7b/2/1'; PLATF"),
    (["--weights", "1,2"], "--weights: '1,2'; ONCE,RUNS,LAST,PASSES"),
    (["--weights", "0,0,0,1"], "--weights: '0,0,0,1'; ONCE,RUNS,LAST,PASSES"),
])  # fmt: skip
def test_bad_cells_and_weights_are_told_in_a_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["counting", *words])
    with pytest.raises(SystemExit, match=re.escape(said)):
        counting.main()
