"""Requests that are drawn: at a rate, and from ServeGen's profiles of clients."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.app.main import main
from reference.simulator.arrivals import read_arrivals, read_lengths
from reference.simulator.servegen import Window, arrivals, distribution, draw, read_windows
from reference.vocab.errors import BadInput

REQUESTS = Path(__file__).parents[2] / "shared" / "traces" / "requests"
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" \
        "30,5,35,6.0\n10,0,10,1\n20,7,27,2.9\n40,9,49,4.4\n"  # fmt: skip
ROWS = "0,0,0,,0,0\n600,2,1.5,Gamma,0.5,3\n1200,0,0,,0,0\n1800,0.5,1.2,Weibull,0.8,2\n"
IN, OUT = {100: 0.25, 300: 0.75}, {7: 0.5, 9: 0.5}
LATER = {1000: 1.0}


def dataset(**changes: Any) -> dict[str, dict[str, Any]]:
    """The lengths of a client: others from second 1500 on; `changes` for its first window."""
    first = {"input_tokens": str(IN), "output_tokens": str(OUT), "reason_ratio": "{}"}
    return {"1500": {**first, "input_tokens": str(LATER)}, "0": {**first, **changes}}


def client(folder: Path, name: str = "chunk-1", rows: str = ROWS, packed: bool = True,
           **changes: Any) -> Path:  # fmt: skip
    """Both files of a client; its trace."""
    texts = {"trace.csv": rows, "dataset.json": json.dumps(dataset(**changes))}
    for end, text in texts.items():
        if packed:
            (folder / f"{name}-{end}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{name}-{end}").write_text(text)
    return folder / f"{name}-trace.csv{'.gz' if packed else ''}"


# Lengths alone


@pytest.mark.rule("SIM-14")
def test_lengths_come_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "vidur.csv"
    path.write_text(VIDUR)
    assert read_lengths(path) == [(30, 5), (20, 7), (40, 9)]
    assert read_lengths(path, first=1, most=1, divide=3) == [(7, 3)]
    got = read_arrivals(path, rate=4.0, seed=3)
    assert [r[1:] for r in got] == [(30, 5), (20, 7), (40, 9)]
    assert got[0].at_s == 0 and got == read_arrivals(path, rate=4.0, seed=3)
    assert got != read_arrivals(path, rate=4.0, seed=4)
    path.write_text(VIDUR.split("\n")[0] + "\n" + "5,6,11,1\n" * 4000)
    many = read_arrivals(path, rate=4.0, stretch=2.0, most=4000)
    gaps = np.diff([r.at_s for r in many])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.08)
    assert (gaps < 0.5 * math.log(2)).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.rule("SIM-14")
def test_times_are_neither_made_up_nor_overridden(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(VIDUR)
    with pytest.raises(BadInput, match=r"lengths alone, no times: a rate .*--rate.*--lengths"):
        read_arrivals(path)
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match=r"rate .*; above 0 expected"):
            read_arrivals(path, rate=rate)
    with pytest.raises(BadInput, match="seed -1; at least"):
        read_arrivals(path, rate=1.0, seed=-1)
    path.write_text(VIDUR.replace("20,7", "20,x"))
    with pytest.raises(BadInput, match=r":4: .*20.*num_prefill_tokens and num_decode_tokens"):
        read_lengths(path)
    path.write_text('{"arrival_s": 1.5, "input_toks": 3, "output_toks": 4}\n')
    assert read_lengths(path) == [(3, 4)]
    with pytest.raises(BadInput, match="has times of its own"):
        read_arrivals(path, rate=1.0)


@pytest.mark.rule("SIM-12", "SIM-14")
def test_the_command_takes_lengths_and_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vidur"
    path.write_text(VIDUR)
    (tmp_path / "all").mkdir()
    client(tmp_path / "all")
    base = ["simulate", "--model", "olmoe-1b-7b", "--tokens", "16", "--requests", "2"]
    assert main([*base, "--arrivals", str(path), "--rate", "2"]) == 0
    assert "3 requests of vidur at 2 a second, seed 0, lengths" in capsys.readouterr().out
    assert main([*base, "--lengths", str(path), "--divide", "2"]) == 0
    assert "lengths of 3 requests of vidur, divided by 2" in capsys.readouterr().out
    assert main([*base, "--arrivals", str(tmp_path / "all"), "--most", "3", "--divide", "9"]) == 0
    assert "3 requests of all drawn, seed 0, lengths divided by 9" in capsys.readouterr().out
    for words, said in (
        (["--arrivals", str(path)], "a rate of requests a second (--rate)"),
        (["--lengths", str(path), "--arrivals", str(path)], "one of them expected"),
        (["--lengths", str(path), "--rate", "1"], "--rate: 1 without --arrivals"),
        (["--arrivals", str(path), "--rate", "nan"], "above 0 expected"),
    ):
        assert main([*base, *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


# ServeGen


@pytest.mark.rule("SIM-15")
@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(["Gamma", "Weibull"]),
    shape=st.floats(1e-4, 20),
    rate=st.floats(0, 3),
    seed=st.integers(0, 99),
)
def test_a_window_is_filled(family: str, shape: float, rate: float, seed: int) -> None:
    """Whatever the shape: in order, inside, as many as the rate says."""
    got = arrivals(Window(0.0, rate, family, shape), np.random.default_rng(seed))
    assert len(got) in (math.floor(rate * 600), math.floor(rate * 600) + 1)
    assert all(0 <= a <= b <= 600 for a, b in pairwise(got))
    assert not len(got) or got[-1] == 600
    assert np.array_equal(
        got, arrivals(Window(0.0, rate, family, shape), np.random.default_rng(seed))
    )


@pytest.mark.rule("SIM-15")
@pytest.mark.parametrize(
    ("family", "shape", "cv"),
    [("Gamma", 0.5, 2**0.5), ("Gamma", 4.0, 0.5), ("Weibull", 1.0, 1.0), ("Weibull", 0.5, 5**0.5)],
)
def test_gaps_are_of_the_fitted_family(family: str, shape: float, cv: float) -> None:
    """Mean exactly, CV nearly, what follows from family and shape."""
    rng = np.random.default_rng(1)
    gaps = np.diff(arrivals(Window(0.0, 50.0, family, shape), rng), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 50)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    few = [len(arrivals(Window(0.0, 0.0005, family, shape), rng)) for _ in range(2000)]
    assert np.mean(few) == pytest.approx(0.3, abs=0.04)


@pytest.mark.rule("SIM-15")
@pytest.mark.parametrize("packed", [True, False])
def test_requests_of_a_client(packed: bool, tmp_path: Path) -> None:
    """Rates, lengths and idle times of its windows; the same again, and others by another seed."""
    path = client(tmp_path, packed=packed)
    got = read_arrivals(path, most=10_000, seed=5)
    assert got == read_arrivals(path, most=10_000, seed=5)
    assert got[:40] == read_arrivals(path, most=40, seed=5)
    later = read_arrivals(path, first=1200, most=10, seed=5)
    assert [r[1:] for r in later] == [r[1:] for r in got[1200:1210]]
    assert later[9].at_s == pytest.approx(got[1209].at_s - got[1200].at_s)
    assert [r[1:] for r in got] != [r[1:] for r in read_arrivals(path, most=10_000, seed=6)]
    assert all(a.at_s <= b.at_s for a, b in pairwise(got))
    assert [len(got), len([r for r in got if r.at_s <= 600])] == [1500, 1200]
    busy, late = got[:1200], got[1200:]
    assert busy[-1].at_s <= 600 and late[0].at_s + 600 >= 1200
    assert late[-1].at_s - busy[-1].at_s == pytest.approx(1200)
    assert {r.prompt_len for r in busy} == set(IN) and {r.prompt_len for r in late} == set(LATER)
    assert {r.new_tokens for r in got} == set(OUT)
    assert np.mean([r.prompt_len for r in busy]) == pytest.approx(250, rel=0.03)
    assert np.mean([r.new_tokens for r in got]) == pytest.approx(8, rel=0.02)
    both = np.mean([r.prompt_len == 300 and r.new_tokens == 9 for r in busy])
    assert both == pytest.approx(0.375, abs=0.04)
    other = tmp_path / "elsewhere"
    (tmp_path / path.name.replace("trace.csv", "dataset.json")).rename(other)
    assert read_arrivals(path, most=40, seed=5, dataset=other) == got[:40]
    with pytest.raises(BadInput, match=r"chunk-1-dataset\.json.*No such file"):
        read_arrivals(path)


@pytest.mark.rule("SIM-15")
def test_clients_of_a_folder_are_merged(tmp_path: Path) -> None:
    """Each draws what it draws alone; one whose outputs are sometimes empty has fewer requests."""
    alone = [client(tmp_path, f"chunk-{n}", packed=n == 1) for n in (1, 2)]
    (tmp_path / "notes.md").write_text("none of them")
    apart = [read_arrivals(p, most=10_000) for p in alone]
    assert [r.at_s for r in apart[0]] != [r.at_s for r in apart[1]]
    merged = read_arrivals(tmp_path, most=10_000)
    assert len(merged) == 3000 and all(a.at_s <= b.at_s for a, b in pairwise(merged))
    ends = sorted(round(r.at_s - a[-1].at_s, 6) for a in apart for r in a)
    assert [round(r.at_s - merged[-1].at_s, 6) for r in merged] == ends
    client(tmp_path, "chunk-2", output_tokens="{0: 0.5, 3: 0.5}")
    assert len(read_arrivals(tmp_path / "chunk-2-trace.csv.gz", most=10_000)) < 1000
    with pytest.raises(BadInput, match="is a folder of several"):
        read_arrivals(tmp_path, dataset=alone[0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no client's trace in this folder"):
        read_arrivals(tmp_path / "empty")


@pytest.mark.rule("SIM-15")
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("600,2,1,Gamma,0.5", ":2: 600,2,1,Gamma,0.5: start, rate, CV"),
        ("x,2,1,Gamma,0.5,3", ":2: start: x: a number of at least 0"),
        ("599,2,1,Gamma,0.5,3", ":2: start: 599: 600 s or more after"),
        ("600,-2,1,Gamma,0.5,3", ":2: window 600: rate: -2: a number"),
        ("600,1e9,1,Gamma,0.5,3", ":2: window 600: rate: 1e9: a number of at least 0 and at most"),
        ("600,2,nan,Gamma,0.5,3", ":2: window 600: CV: nan"),
        ("600,2,1,Pareto,0.5,3", ":2: window 600: family: 'Pareto': Gamma or Weibull expected"),
        ("600,2,1,,0.5,3", ":2: window 600: family: ''"),
        ("600,2,1,Gamma,0,3", ":2: window 600: shape: 0: above 0"),
        ("600,2,1,Gamma,inf,3", ":2: window 600: shape: inf"),
        ("600,2,1,Gamma,0.5,", ":2: window 600: scale: :"),
    ],
)
def test_a_bad_window_is_refused(row: str, told: str, tmp_path: Path) -> None:
    path = client(tmp_path, rows=f"0,0,0,,0,0\n{row}\n")
    with pytest.raises(BadInput) as refused:
        read_arrivals(path)
    assert f"{path}{told}" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.rule("SIM-15")
@pytest.mark.parametrize(
    "text",
    [
        "{}", "", None, 7, {"1": 1.0}, "[1, 2]", "{1: 0.5}", "{1: 0.5, 2: 0.6}", "{1: 2}",
        "{1: -1, 2: 2}", "{-1: 1}", "{1.5: 1.0}", "{9999999999: 1.0}", "{1: 1e999}", "{1: nan}",
        "{1: 1.0, 1: 0.5}", "{1: 1.0", "{1: 1.0}}", "{1: {2: 1.0}}", "{1: 1.0}\n", "{'1': 1.0}",
        "{1: __import__('os').getpid()}", "{1: 9**9**9}", "{" * 5000 + "}" * 5000, "{1: 1 1}",
        "{1: " + "9" * 5000 + "}", "{1:" + " " * (1 << 22) + "1.0}", "{1: True}", "{e: 1.0}",
    ],
)  # fmt: skip
def test_only_a_flat_dict_of_numbers_is_a_distribution(text: Any, tmp_path: Path) -> None:
    path = client(tmp_path, input_tokens=text)
    with pytest.raises(BadInput) as refused:
        read_arrivals(path)
    told = str(refused.value)
    assert told.startswith(f"{tmp_path / 'chunk-1-dataset.json.gz'}: window 0: input_tokens: ")
    assert "such as {62: 0.25, 70: 0.75}" in told
    assert "\n" not in told and len(told) < 500


@pytest.mark.rule("SIM-15")
def test_bad_files_of_lengths_are_refused(tmp_path: Path) -> None:
    path, other = client(tmp_path), tmp_path / "d.json"
    for text, told in (
        ("[]", "an object of windows"),
        ("{}", "an object of windows"),
        ('{"soon": {}}', "window soon: seconds expected"),
        ('{"0": []}', "window 0: an object of input_tokens and output_tokens"),
        ('{"0": {}}', "window 0: input_tokens: None"),
        ('{"700": {}}', "windows from 700 on; requests from 600 on"),
        ('{"0": {}, "0": {}}', "twice"),
        ("{", "d.json"),
    ):
        other.write_text(text)
        with pytest.raises(BadInput) as refused:
            read_arrivals(path, dataset=other)
        assert told in str(refused.value) and str(other) in str(refused.value)
        assert "\n" not in str(refused.value)
    whole = path.read_bytes()
    for cut in (whole[:-9], whole[:12] + b"\xff\xff\xff" + whole[15:]):
        path.write_bytes(cut)
        with pytest.raises(BadInput, match="no ServeGen profile"):
            read_arrivals(path)
    with pytest.raises(BadInput, match="chunk-N-trace"):
        draw(other)


@pytest.mark.rule("SIM-14")
def test_vidurs_lengths() -> None:
    path = next((REQUESTS / "vidur-arxiv-lengths").glob("*.csv"), None)
    if path is None:
        pytest.skip("Vidur's lengths are not here")
    got = read_lengths(path, most=100_000)
    assert len(got) == 28257 and got[0] == (3772, 54)
    assert read_arrivals(path, rate=1.0, most=20)[3][1:] == got[3]


@pytest.mark.rule("SIM-15")
@pytest.mark.parametrize("name", ["language/m-large/chunk-104", "reason/deepseek-r1/chunk-11"])
def test_a_real_client(name: str) -> None:
    """Its first busy hours: as many as its windows say, with the mean lengths of its dataset."""
    path = REQUESTS / "servegen" / f"{name}-trace.csv.gz"
    if not path.exists():
        pytest.skip(f"{name} of ServeGen is not here")
    windows = read_windows(path)
    assert all(w.shape for w in windows if w.rate)
    first = next(i for i, w in enumerate(windows) if w.rate)
    start = windows[first].start // 21600 * 21600
    some = [w for w in windows[first:] if w.start < start + 21600]
    count = round(sum(w.rate for w in some) * 600)
    got = read_arrivals(path, most=count)
    span = windows[first].start + got[-1].at_s
    assert some[-1].start - 1200 <= span <= some[-1].start + 600
    held = json.loads(gzip.decompress(
        path.with_name(path.name.replace("trace.csv", "dataset.json")).read_bytes()
    ))  # fmt: skip
    for field, lengths in (("input_tokens", [r.prompt_len for r in got]),
                           ("output_tokens", [r.new_tokens for r in got])):  # fmt: skip
        tokens, below = distribution(held[str(int(start))][field], field)
        chances = np.diff(below, prepend=0.0)
        mean = float(tokens @ chances)
        error = math.sqrt(float((tokens - mean) ** 2 @ chances) / count)
        assert abs(np.mean(lengths) - mean) < 5 * error
