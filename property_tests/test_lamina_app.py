"""`covey lamina`: plans, tables, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jax_impl.app.main import main
from oracle.tiny import tiny_config, write_checkpoint


@pytest.mark.rule("LAMINA-22")
def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = ["lamina", "plan", "70B", "--trace", "kimi-conv", "--cost", "60", "--token-ms", "50",
             "--json", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "H100 alone" in printed and "ktokens/$" in printed
    found = json.loads(out.read_text())["pools"]
    assert found and all(c["served"]["price"] <= 60 for c in found)
    assert all(c["served"]["token_s"] <= 0.050001 for c in found)
    rates = [c["served"]["tokens_per_s"] / c["served"]["price"] for c in found]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.rule("LAMINA-22")
def test_plans_for_a_checkpoint_and_none_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "m", tiny_config("mixtral"))
    assert main(["lamina", "plan", str(model), "--trace", "100,20", "--partition", "request"]) == 0
    assert "100,20: 100 + 20 tokens" in capsys.readouterr().out
    assert main(["lamina", "plan", "65B", "--token-ms", "1"]) == 1
    assert "no configuration" in capsys.readouterr().out


@pytest.mark.rule("LAMINA-22", "LAMINA-5")
def test_a_plan_for_latent_attention_from_its_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3 at one byte a weight: 671 GB, and 61 layers of 512 + 64 cached bytes. Its one
    latent head cannot be shared out, whole requests can."""
    told = json.loads((Path(__file__).parent / "configs" / "DeepSeek-V3.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told["config"]))
    out = tmp_path / "plan.json"
    out.write_text("old")
    words = ["lamina", "plan", str(tmp_path), "--bytes", "1", "--max-compute", "32"]
    assert main([*words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "671.0 GB of weights, 35136 KV bytes a token" in printed
    assert {c["memory"] for c in json.loads(out.read_text())["pools"]} == {1}
    assert main([*words, "--partition", "request", "--json", str(out)]) == 0
    capsys.readouterr()
    assert {c["memory"] for c in json.loads(out.read_text())["pools"]} == set(range(1, 17))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "plan.json"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "90B"], "no directory"),
        (["plan", "70B", "--trace", "nowhere"], "no file"),
        (["plan", "70B", "--trace", "0,5"], "at least 1 token"),
        (["plan", "70B", "--trace", "9" * 40 + ",1"], "no file"),
        (["plan", "70B", "--trace", "\u00b2,1"], "no file"),
        (["plan", "70B", "--cost", "nan"], "--cost"),
        (["plan", "70B", "--token-ms", "0"], "--token-ms"),
        (["plan", "70B", "--compute", "Z80"], "H100"),
        (["plan", "70B", "--network", "tcp"], "fhbn"),
        (["plan", "70B", "--efficiency", "2,1,1"], "three shares"),
        (["plan", "70B", "--usable", "0"], "--usable"),
        (["plan", "70B", "--max-memory", "0"], "--max-memory"),
        (["plan", "70B", "--json", "/nowhere/x.json"], "cannot write in /nowhere"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lamina", *words]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1


@pytest.mark.rule("LAMINA-16")
def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lamina", "tables"]) == 0
    text = capsys.readouterr().out
    row = next(x for x in text.splitlines() if x.startswith("70B   azure-conv"))
    assert row.split()[-4:] == ["2.30", "0.94", "0.50", "1.03"]
    assert "B = 8: 12.9%" in text


@pytest.mark.rule("LAMINA-16")
def test_pool_sizes_are_swept_over_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More memory devices serve more until compute is the limit; more compute helps less."""
    rows = "".join(f"t,{900 + 7 * i % 400},{100 + 3 * i % 90}\n" for i in range(6000))
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    words = ["lamina", "sweep", "70B", "--trace", str(tmp_path / "t.csv")]
    assert main([*words, "--partition", "head"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(lines[2].split()[1:]) == {"-"}  # one H100 does not hold the weights
    assert lines[5:] == ["-: the weights do not fit into so many compute devices"]
    two, four = ([float(x) for x in line.replace("(", " ").replace(")", " ").split()[1::2]]
                 for line in lines[3:5])
    assert two[1] > 1.7 * two[0] and two[3] < 1.05 * two[2]
    assert four[0] < two[1] and four[3] > 1.5 * two[3]
    assert main(["lamina", "sweep", "33B", "--trace", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
