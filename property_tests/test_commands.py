"""`covey run`, `score` and `verify` from end to end, on small seeded mixtures."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_impl.app import engines, sameness, settings
from jax_impl.app import main as app
from jax_impl.app import verify as verify_command
from jax_impl.app.output import Progress
from jax_impl.app.settings import Setting
from jax_impl.app.signals import ending_as_ctrl_c
from jax_impl.app.waiting import Interrupt
from oracle.checkers import CHECKS
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.requests import Request, write_requests
from reference.vocab.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent

Capture = pytest.CaptureFixture[str]
REQUESTS = [
    Request(f"r{n}", tuple((7 * n + 3 * i) % 96 for i in range(3 + 6 * n)), 5 + n) for n in range(4)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mix") / "model", tiny_config("mixtral"),
                            seed=1)


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests") / "f.jsonl"
    write_requests(path, REQUESTS)
    return path


def run(*words: object) -> int:
    return app.main([str(word) for word in words])


# run


@pytest.mark.rule("APP-8", "APP-4", "APP-6", "APP-7", "APP-3")
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_run_check_and_replay(
    engine: str, model: Path, requests: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, log = tmp_path / "out.json", tmp_path / "events.jsonl"
    assert run("run", model, "--requests", requests, "--engine", engine, "--memory", "50%",
               "--ignore-eos", "--json", out, "--log", log, "--check") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[:4]] == ["r0", "r1", "r2", "r3"]
    assert "of the bound was reached" in said[4]
    assert said[5].endswith(f"no violation of {', '.join(CHECKS)}")
    assert said[6].endswith("actions, all decided again from the same events (S16)")

    document = json.loads(out.read_text())
    assert list(document) == ["requests", "totals"]
    assert document["totals"]["why"] == said[4]
    for row, request in zip(document["requests"], REQUESTS, strict=True):
        assert list(row)[:6] == ["id", "tokens", "text", "finish_reason", "error", "ttft_s"]
        assert (row["id"], row["text"], row["error"]) == (request.id, None, None)
        assert row["finish_reason"] == "length"
        assert len(row["tokens"]) == request.max_new_tokens == len(row["token_s"])
        assert row["ttft_s"] == row["token_s"][0] <= row["token_s"][-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "out.json"]

    assert run("check", log, "--outputs", out) == 0
    assert " records, no violation of S1, " in capsys.readouterr().out
    contradicted(log, out, capsys)
    assert run("replay", log) == 0
    assert capsys.readouterr().out.endswith("actions: the same\n")
    spoil(log, model, capsys)


def contradicted(log: Path, out: Path, capsys: Capture) -> None:
    """Another token than the log's is found in the results, and another log's in a log."""
    document = json.loads(out.read_text())
    document["requests"][0]["tokens"][1] += 1
    wrong = out.with_name("wrong.json")
    wrong.write_text(json.dumps(document))
    assert run("check", log, "--outputs", wrong) == 1
    assert ": S15: request 'r0': tokens " in capsys.readouterr().out
    other = log.with_name("other.jsonl")
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"event":"Sampled"' in line)
    record = json.loads(lines[at])
    assert record["sum"] > 0
    for change, found in (({}, ""), ({"sum": 7}, "S13"), ({"token": record["token"] + 1}, "S13")):
        other.write_text("\n".join([*lines[:at], json.dumps(record | change), *lines[at + 1:]]))
        assert run("check", log, other) == bool(found)
        said = capsys.readouterr().out.splitlines()
        assert said[-1] == "2 logs, " + (
            "1 contradictions" if found else "no contradiction between them (S12, S13, S14, S16)")
        assert not found or said[-2].startswith(f"{other}:{at + 1}: {found}: request ")
    assert run("check", log, other, "--outputs", out) == 2
    assert "one EVENTS" in capsys.readouterr().err
    wrong.write_text('{"requests": [{"id": "a"}]}')
    assert run("check", log, "--outputs", wrong) == 2
    assert "requests[0] is" in capsys.readouterr().err
    wrong.unlink()
    other.unlink()


def spoil(log: Path, model: Path, capsys: Capture) -> None:
    """A log with one load into another slot fails both `check` and `replay`; half a log neither
    is complete nor differs."""
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"action":"Load"' in line)
    slot = json.loads(lines[at])["slot"]
    wrong = log.with_name("wrong.jsonl")
    wrong.write_text("\n".join(
        [*lines[:at], lines[at].replace(f'"slot":{slot}', f'"slot":{slot + 1}'), *lines[at + 1:]])
        + "\n")
    assert run("replay", wrong) == 1
    assert capsys.readouterr().out.startswith(f"{wrong}:{at + 1}: the log has Load(")
    assert run("check", wrong) == 1
    assert " violations of " in capsys.readouterr().out.splitlines()[-1]

    # The last of several actions: what follows is an event or the next ask.
    at = next(i for i, line in enumerate(lines)
              if '"action":"Load"' in line and '"action"' not in lines[i + 1])
    missing = log.with_name("missing.jsonl")
    missing.write_text("\n".join([*lines[:at], *lines[at + 1:]]) + "\n")
    assert run("replay", missing) == 1
    assert f"{missing}:{at + 1}: the log lacks Load(" in capsys.readouterr().out
    more = log.with_name("more.jsonl")
    more.write_text("\n".join([*lines[:at + 1], lines[at], *lines[at + 1:]]) + "\n")
    assert run("replay", more) == 1
    assert ", the scheduler decides nothing more\n" in capsys.readouterr().out

    half = log.with_name("half.jsonl")
    half.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    assert run("check", half) == 1
    assert ": LOG: no end record" in capsys.readouterr().out
    assert run("check", half, "--incomplete") == 0
    assert f"{half}: no end record; the log is incomplete\n" in capsys.readouterr().out
    with half.open("a") as file:
        file.write('{"t": 1')
    assert run("check", half, "--incomplete") == 0
    at = len(lines) // 2 + 1
    assert f"{half}:{at}: cut off; the log is incomplete\n" in capsys.readouterr().out
    half.write_text(half.read_text().removesuffix('{"t": 1'))
    assert run("replay", half) == 0
    assert capsys.readouterr().out.endswith("the same (the log is incomplete)\n")


@pytest.mark.rule("APP-8")
def test_engines_and_flags_give_the_same_tokens(
    model: Path, requests: Path, tmp_path: Path
) -> None:
    found = []
    for words in (["--engine", "jax", "--memory", "30%", "--chunk", "16"],
                  ["--engine", "reference", "--memory", "100%", "--scheduler", "lockstep",
                   "--readiness", "expert", "--cache", "global", "--max-running", "2"]):
        out = tmp_path / "out.json"
        assert run("run", model, "--requests", requests, "--json", out, "--quiet", *words) == 0
        found.append([row["tokens"] for row in json.loads(out.read_text())["requests"]])
    assert found[0] == found[1]


@pytest.mark.rule("APP-8")
def test_a_rejected_request_makes_the_status_1(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, out = tmp_path / "f.jsonl", tmp_path / "out.json"
    write_requests(path, [REQUESTS[0], Request("long", tuple(range(90)), 60)])
    assert run("run", model, "--requests", path, "--engine", "reference", "--json", out,
               "--kv-tokens", 128, "--ignore-eos") == 1
    rows = json.loads(out.read_text())["requests"]
    assert [row["finish_reason"] for row in rows] == ["length", "rejected"]
    assert rows[1]["error"]
    assert rows[1]["tokens"] == []
    assert "\nlong: rejected, 0 tokens: " in capsys.readouterr().out


@pytest.mark.rule("APP-8")
def test_defaults_yield_to_what_a_request_says(model: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "f.jsonl", tmp_path / "out.json"
    path.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [1, 2, 3], "max_new_tokens": 2}\n'
                    '{"prompt": [1, 2, 3], "max_new_tokens": 0}\n')
    assert run("run", model, "--requests", path, "--engine", "reference", "--json", out,
               "--max-new-tokens", 5, "--ignore-eos") == 0
    rows = json.loads(out.read_text())["requests"]
    assert [len(row["tokens"]) for row in rows] == [5, 2, 0]
    assert rows[0]["tokens"][:2] == rows[1]["tokens"]
    assert [row["id"] for row in rows] == ["0", "1", "2"]
    assert rows[2]["ttft_s"] is None

    def sampled(*words: object) -> list[int]:
        assert run("run", model, "--requests", path, "--engine", "reference", "--json", out,
                   "--ignore-eos", *words) == 0
        return json.loads(out.read_text())["requests"][0]["tokens"]

    hot = sampled("--temperature", "2.5")
    assert hot == sampled("--temperature", "2.5") != sampled()
    path.write_text('{"prompt": [1, 2, 3], "temperature": 2.5}\n')
    assert sampled("--temperature", "0.01") == hot


@pytest.mark.rule("APP-1", "APP-2", "APP-4")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{model}/nowhere"], "nowhere: no such folder"),
        (["{requests}"], ": no such folder"),
        (["{model}", "--memory", "5%"], "at least 24KiB"),
        (["{model}", "--memory", "lots"], "'lots'"),
        (["{model}", "--memory", "-3"], "size '-3': not a number with one of"),
        (["{model}", "--scheduler", "bevy"],
         "argument --scheduler: unsupported 'bevy'; supported: interleaved, balanced, "),
        (["{model}", "--prefetch", "psychic"],
         "argument --prefetch/--predict: unsupported 'psychic'; supported: none, next-gate, "
         "activation, layer, token"),
        (["{model}", "--temperature", "nan"], "nan; a number from 0 to 1000 expected"),
        (["{model}", "--temperature", "hot"], "argument --temperature: invalid"),
        (["{model}", "--chunk", "0"], "argument --chunk: 0; at least 1 expected"),
        (["{model}", "--threads", "2"],
         "--threads: unsupported flag with --engine reference; supported: --engine jax"),
        (["{model}", "--json", "{model}/no/out.json"], "--json: cannot write in"),
        (["{model}", "--json", "{model}"], "is a directory"),
        (["{model}", "--log", "{model}/no/events"], "no/events: cannot be written"),
        (["{model}", "--max-new-tokens", "500"],
         "request 'b': 1 prompt tokens and 500 new ones; the model takes 512 together"),
    ],
)
def test_bad_usage_of_run(words: list[str], said: str, model: Path, tmp_path: Path,
                          capsys: Capture) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"id": "b", "prompt": [1]}\n' if "500" in words else '{"prompt": [1]}\n')
    if "500" in words:
        words = [*words[:-1], "512"]
        said = said.replace("500", "512")
    words = [word.format(model=model, requests=path) for word in words]
    assert run("run", *words, "--requests", path, "--engine", "reference") == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("covey run: ")
    assert said in last


@pytest.mark.rule("APP-1")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": [1, 96]}', "prompt[1] is 96; this model's token ids are 0 to 95"),
        ('{"prompt": "hello"}', "request '0': the prompt is text, but "),
        ('{"prompt": [1], "stop": ["x"]}', "request '0': a stop is text, but "),
        ('{"prompt": [1], "stop": [96]}', "stop id 96"),
        ('{"prompt": [1], "speed": 3}', "speed"),
        ("", "no requests in it"),
    ],
)
def test_bad_requests(line: str, said: str, model: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(line + "\n")
    assert run("run", model, "--requests", path, "--engine", "reference") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.rule("APP-12", "APP-11")
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_stops(engine: str, model: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    words = {f"w{n}x": n for n in range(96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0x"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))

    def rows(*given: dict[str, Any]) -> list[dict[str, Any]]:
        path, out = tmp_path / "f.jsonl", tmp_path / "out.json"
        path.write_text("".join(json.dumps(g | {"id": str(i)}) + "\n"
                                for i, g in enumerate(given)))
        assert run("run", folder, "--requests", path, "--engine", engine, "--json", out,
                   "--ignore-eos", "--max-new-tokens", 12, "--quiet") == 0
        return json.loads(out.read_text())["requests"]

    prompt = "w1x w20x w30x"
    (free,) = rows({"prompt": prompt})
    assert free["tokens"] == rows({"prompt": [1, 20, 30]})[0]["tokens"]
    assert free["text"] == " ".join(f"w{t}x" for t in free["tokens"])
    at = next(i for i in range(3, 12) if free["tokens"][i] not in free["tokens"][:i])
    stop = free["tokens"][at]
    by_id, by_text, never = rows({"prompt": prompt, "stop": [stop]},
                                 {"prompt": prompt, "stop": ["zzz", f"{stop}x"]},
                                 {"prompt": prompt, "stop": ["zzz"]})
    for row in (by_id, by_text):
        assert row["tokens"] == free["tokens"][: at + 1]
        assert (row["finish_reason"], row["error"]) == ("stop", None)
        assert len(row["token_s"]) == at + 1
    assert by_text["text"] == " ".join(f"w{t}x" for t in free["tokens"][:at]) + " w"
    assert (never["tokens"], never["finish_reason"]) == (free["tokens"], "length")


# Ctrl-C


@pytest.mark.rule("APP-5", "APP-4")
@pytest.mark.parametrize(
    ("engine", "number"), [("jax", signal.SIGINT), ("reference", signal.SIGTERM)])
def test_an_interrupted_run_is_whole(engine: str, number: int, tmp_path: Path) -> None:
    model = write_checkpoint(
        tmp_path / "model", tiny_config("mixtral", max_position_embeddings=100_000), seed=1)
    out, log, path = tmp_path / "out.json", tmp_path / "events.jsonl", tmp_path / "f.jsonl"
    write_requests(path, [Request("short", (1, 2), 2), Request("long", (3, 4), 90_000),
                          Request("late", (5,), 3, arrival_s=1e8)])
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_impl.app.main", "run", str(model), "--requests", str(path),
         "--engine", engine, "--kv-tokens", "100032", "--ignore-eos", "--json", str(out),
         "--log", str(log), "--memory", "50%", "--max-running", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    try:
        end = time.monotonic() + 120
        # Well after the short request has ended: the log is written in pieces of 64 KiB.
        while not log.exists() or log.stat().st_size < 100_000:
            assert time.monotonic() < end
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        assert not out.exists()
        process.send_signal(number)
        said, progress = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, progress
    assert "interrupted: cancelling what runs" in progress
    assert "Traceback" not in progress
    rows = {row["id"]: row for row in json.loads(out.read_text())["requests"]}
    assert [row["finish_reason"] for row in rows.values()] == ["length", "cancelled", "cancelled"]
    assert len(rows["short"]["tokens"]) == 2
    assert 0 < len(rows["long"]["tokens"]) < 90_000
    assert rows["late"]["tokens"] == []
    assert said.startswith("short: length, 2 tokens: ")
    assert run("check", log) == 0
    assert run("replay", log) == 0


@pytest.mark.rule("APP-5", "APP-4")
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "simulate --tokens 1000000"), (signal.SIGHUP, "simulate --tokens 1000000"),
     (signal.SIGTERM, "bench demo --memory 50%")],
)  # fmt: skip
def test_a_signal_leaves_no_half_written_file(
    number: signal.Signals, words: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_impl.app.main", *words.split(), "--json",
         str(tmp_path / "out.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),  # under nohup it is ignored
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < end
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert told == f"covey {words.split()[0]}: interrupted\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.rule("APP-5")
def test_a_signal_that_comes_where_nothing_can_be_raised_is_not_lost() -> None:
    code = """
import os, signal, time
from jax_impl.app.signals import ending_as_ctrl_c
class Closing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
try:
    with ending_as_ctrl_c():
        Closing()
        time.sleep(20)
except KeyboardInterrupt:
    print("interrupted", signal.getitimer(signal.ITIMER_REAL))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("interrupted (0.0, 0.0)\n", "")


@pytest.mark.rule("APP-5")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_in_an_import_waits_for_its_end(tmp_path: Path, number: str) -> None:
    (tmp_path / "slow.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{number})\n"
        "time.sleep(0.2)\nprint('imported')\n")
    code = """
import signal, time
from jax_impl.app.signals import ending_as_ctrl_c
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
try:
    with ending_as_ctrl_c():
        import slow
        time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert (done.stdout, done.stderr) == ("imported\ninterrupted\n", "")


@pytest.mark.rule("APP-4")
def test_no_command_writes_over_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("PK").mkdir()
    for file in ("E", "E2", "S", "A.csv", "PK/config.json", "PK/model.safetensors"):
        Path(file).write_text("as it was")
    for words in (
        "timeline E --png E", "timeline E --out ./E", "timeline E E2 --png E2",
        "timeline E --out X --png X", "score PK --ids S --out S", "score PK --ids S --log S",
        "score PK --ids S --log PK/model.safetensors", "plan PK --no-probe --json PK/config.json",
        "chat PK --log PK/config.json", "simulate --arrivals A.csv --json A.csv",
        "bench PK --json B --png B", "run PK --requests S --json S", "trace show E --json E",
        "trace record PK --requests S --out S",
    ):  # fmt: skip
        assert run(*words.split()) == 2, words
        assert re.search(r"is the file of |is a file of the model", capsys.readouterr().err), words
    assert {p.read_text() for p in tmp_path.rglob("*") if p.is_file()} == {"as it was"}


@pytest.mark.rule("APP-5")
def test_ignored_signals_stay_ignored() -> None:
    """As nohup wants it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_as_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.rule("APP-5")
def test_a_second_interrupt_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.noted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("interrupted") == 1


# score


@pytest.mark.rule("APP-9")
def test_score_writes_what_the_model_says(
    model: Path, requests: Path, tmp_path: Path, capsys: Capture
) -> None:
    from reference.files.checkpoint import Checkpoint
    from reference.numerics.naive import naive_logits

    found = {}
    for engine in engines.ENGINES:
        out = tmp_path / f"{engine}.safetensors"
        assert run("score", model, "--ids", requests, "--engine", engine, "--memory", "30%",
                   "--out", out, "--quiet") == 0
        found[engine] = load_file(out)
        said = capsys.readouterr().out.splitlines()
        assert said[-1].startswith("44 predicted tokens, perplexity ")
    total, predicted = 0.0, 0
    for request, line in zip(REQUESTS, said, strict=False):
        with Checkpoint.open(model) as checkpoint:
            exact = naive_logits(checkpoint, list(request.prompt), np.float64)
        for logits in (found[engine][f"logits/{request.id}"] for engine in engines.ENGINES):
            assert (logits.dtype, logits.shape) == (np.float32, (len(request.prompt), 96))
            np.testing.assert_allclose(logits, exact, atol=1e-4 * exact.std())
        logprob = exact - np.log(np.exp(exact).sum(1, keepdims=True))
        nats = -sum(logprob[i, t] for i, t in enumerate(request.prompt[1:]))
        total, predicted = total + nats, predicted + len(request.prompt) - 1
        value = float(line.split("perplexity ")[1])
        assert value == pytest.approx(math.exp(nats / (len(request.prompt) - 1)), rel=1e-3)
    assert float(said[-1].split()[-1]) == pytest.approx(math.exp(total / predicted), rel=1e-3)


@pytest.mark.rule("APP-9")
def test_a_text_that_is_not_scored_is_named(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, out = tmp_path / "f.jsonl", tmp_path / "out.safetensors"
    write_requests(path, [Request("one", (5,)), Request("long", tuple(range(90)))])
    assert run("score", model, "--ids", path, "--engine", "reference", "--out", out,
               "--kv-tokens", 64) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "one: 1 tokens, perplexity nan"
    assert said[1].startswith("long: not scored (0 of 90 rows): ")
    logits = load_file(out)
    assert np.isfinite(logits["logits/one"]).all()
    assert np.isnan(logits["logits/long"]).all()
    assert logits["logits/long"].shape == (90, 96)


@pytest.mark.rule("APP-9", "APP-4")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_score_on_a_full_disk_fails_in_one_line(
    model: Path, requests: Path, capsys: Capture
) -> None:
    assert run("score", model, "--ids", requests, "--engine", "reference",
               "--out", "/dev/full") == 1
    assert capsys.readouterr().err == "covey score: --out: /dev/full: No space left on device\n"


# verify


@pytest.mark.rule("APP-10")
def test_verify_compares_and_counts(model: Path, capsys: Capture) -> None:
    assert run("verify", model, "--engine", "reference", "--rounds", 1, "--count", 4,
               "--quiet") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    # 21 settings of 4 requests of 8 tokens; prompts of 1, 3, 9 and 24 tokens give 65 rows.
    assert last == ("84 comparisons (4 requests, 21 settings, 672 tokens, 1365 rows of logits): "
                    "all the same bits")


@pytest.mark.rule("APP-10")
def test_verify_with_the_fast_engine(model: Path, requests: Path, capsys: Capture) -> None:
    words = [f"memory=30000,scheduler={scheduler},readiness={readiness},company={company}"
             for scheduler, readiness, company in (
                 ("interleaved", "visit", "reversed"), ("lockstep", "expert", "cancelled"))]
    assert run("verify", model, "--requests", requests, *(w for s in words for w in ("--only", s)),
               "--max-running", 8, "--quiet") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("8 comparisons (4 requests, ")


class Tampered:
    """An engine whose results depend on its setting: what `verify` is there to find."""

    def __init__(self, inner: Any, how: str) -> None:
        self.inner, self.how = inner, how

    def __enter__(self) -> Tampered:
        self.inner.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.inner.__exit__(*failure)

    def submit(self, request: Request, on_logits: Callable[..., None] | None = None) -> Any:
        def flipped(position: int, row: np.ndarray) -> None:
            assert on_logits is not None
            if position == 4 and request.id == "r2":
                row = row.copy()
                row.view(np.uint32)[7] ^= 1
            on_logits(position, row)

        if self.how == "bit" and on_logits:
            return self.inner.submit(request, on_logits=flipped)
        if self.how == "prompt" and request.id == "r2" and on_logits:
            request = replace(request, prompt=(*request.prompt[:-1], 95))
        if self.how == "short" and request.id == "r2" and on_logits:
            request = replace(request, max_new_tokens=3)
        return self.inner.submit(request, on_logits=on_logits)


@pytest.mark.rule("APP-10")
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("bit", "the logits after position 4 have other bits"),
        ("prompt", r"generated token \d+ is \d+, alone it is \d+"),
        ("short", "3 tokens, alone 7"),
    ],
)
def test_verify_finds_a_difference_and_shows_it_again(
    how: str, what: str, model: Path, requests: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import re

    def tampered(kind: str, path: Path, options: dict[str, Any]) -> Any:
        from reference.engine import ReferenceEngine

        engine = ReferenceEngine.open(path, **options)
        return Tampered(engine, how if options["scheduler"] == "lockstep" else "")

    monkeypatch.setattr(verify_command.engines, "open_engine", tampered)
    assert run("verify", model, "--requests", requests, "--engine", "reference", "--rounds", 1,
               "--quiet") == 1
    *said, last = capsys.readouterr().out.splitlines()
    assert last.endswith(": 4 differ")
    assert len(said) == 8
    for found, repeat in zip(said[::2], said[1::2], strict=True):
        assert re.fullmatch(f"request 'r2' differs: {what}", found)
        words = shlex.split(repeat.removeprefix("  shown again by: "))
        assert words[:2] == ["covey", "verify"]
        assert "scheduler=lockstep," in words[-1]
    assert run(*words[1:], "--quiet") == 1
    again = capsys.readouterr().out.splitlines()
    assert again[0] == said[-2]
    assert again[1] == said[-1]
    assert again[2].startswith("4 comparisons (4 requests, 1 settings, ")


def test_a_difference_is_told_apart() -> None:
    alone = sameness.Trace((1, 2), "length", None, {0: b"a", 1: b"b"})
    assert sameness.difference(alone, alone) == ""
    assert sameness.difference(alone, replace(alone, rows={0: b"a"})) == (
        "logits after position 1 are there only once")
    assert sameness.difference(alone, replace(alone, reason="error", error="EIO")) == (
        "ended with error: EIO")


@pytest.mark.rule("APP-10")
def test_a_request_that_fails_alone_is_not_the_same(model: Path) -> None:
    def open_engine(setting: Setting) -> Any:
        return engines.open_engine("reference", model, setting.options() | {"kv_tokens": 64})

    base = Setting(10**9)
    verdict = sameness.Verdict()
    requests = [Request("ok", (1, 2), 3), Request("long", tuple(range(70)), 3)]
    list(sameness.compare(open_engine, requests, base, [replace(base, company="together")],
                          Interrupt(), verdict))
    assert [(d.id, d.what.split(":")[0]) for d in verdict.differences] == [("long", "failed alone")]


@pytest.mark.rule("APP-10")
def test_the_plan_covers() -> None:
    memories = settings.budgets(12, 2, 1000)
    assert memories == [2000, 3000, 4000, 7000, 12000]
    assert settings.budgets(2, 2, 1000) == [2000]
    assert settings.budgets(0, 0, 0) == [1]
    for rounds in (1, 2, 5):
        tried = settings.plan(memories, rounds)
        assert len(tried) == 2 * len(settings.SCHEDULERS) * 2 * rounds
        least = {s.scheduler for s in tried if s.memory == 2000}
        assert least == set(settings.SCHEDULERS)
        assert {s.readiness for s in tried} == set(settings.READINESS)
        assert {s.cache for s in tried} == set(settings.EVICTIONS)
        assert {s.chunk for s in tried} == set(settings.CHUNKS)
        assert {s.company for s in tried} == settings.COMPANIES.keys() - {"alone", "rescored"}
    assert {s.memory for s in settings.plan(memories, 2)} == set(memories)
    for setting in settings.plan(memories, 2):
        assert settings.parse(str(setting)) == setting


@pytest.mark.parametrize(
    "text", ["", "memory", "memory=0", "memory=-1", "memory=1,memory=2", "memory=1,speed=2",
             "chunk=4", "memory=1,scheduler=bevy", "memory=1,company=none", "memory=²"])
def test_a_setting_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--only: "):
        settings.parse(text)


@pytest.mark.rule("APP-1")
def test_a_bad_setting_is_bad_usage(model: Path, capsys: Capture) -> None:
    assert run("verify", model, "--only", "chunk=4") == 2
    assert capsys.readouterr().err == "covey verify: --only: memory is missing (bytes)\n"


@pytest.mark.rule("APP-10")
def test_companies_are_what_they_say() -> None:
    class Handle:
        def __init__(self, engine: Engine, request: Request) -> None:
            self.engine, self.id, self.request = engine, request.id, request
            self.cancelled = False

        def __iter__(self) -> Iterator[int]:
            for token in range(self.request.max_new_tokens or 0):
                self.engine.seen.append((self.id, token))
                yield token

        def cancel(self) -> None:
            self.engine.seen.append((self.id, "cancel"))

        def wait(self, timeout: float) -> bool:
            self.engine.seen.append((self.id, "wait"))
            return True

        def result(self) -> Any:
            from reference.handle import Result

            return Result(self.id, (7,), "length", None, 0.0, (0.0,), None)

    class Engine:
        def __init__(self) -> None:
            self.seen: list[tuple[str, object]] = []

        def submit(self, request: Request, on_logits: Any = None) -> Handle:
            self.seen.append((request.id, "submit"))
            return Handle(self, request)

    requests = [Request(name, (1, 2), 3) for name in "abc"]

    def story(company: str) -> str:
        engine = Engine()
        sameness.traces(engine, requests, company, Interrupt())
        return " ".join(f"{name[0]}{'x' if '(' in name else ''}{str(what)[0]}"
                        for name, what in engine.seen)

    assert story("together") == "as bs cs aw bw cw"
    assert story("reversed") == "cs bs as cw bw aw"
    assert story("alone") == "as aw bs bw cs cw aw bw cw"
    assert story("staggered") == "as a0 bs b0 cs c0 aw bw cw"
    assert story("halves") == "as cs bs aw cw bw"
    assert story("cancelled") == (
        "as bs cs axs bxs cxs ax0 ax1 axc bx0 bx1 bxc cx0 cx1 cxc aw bw cw axw bxw cxw")


def test_progress_of_verify_goes_to_standard_error(model: Path, capsys: Capture) -> None:
    assert run("verify", model, "--engine", "reference", "--count", 2, "--only",
               "memory=30000,company=together") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err.splitlines()[0] == "2 requests, each alone, then under 1 settings"
    assert err.splitlines()[1].startswith("same bits: 29.3 KiB, interleaved, ")
    assert Progress(quiet=True).quiet
