"""The command's face: statuses, one-line errors, whole files, what is imported when."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_impl.app import main as app
from jax_impl.app.output import (
    Progress,
    WholeFile,
    finite,
    places_of_their_own,
    write_json,
)
from jax_impl.app.text import Text
from reference.vocab.errors import BadInput, CoveyError

Capture = pytest.CaptureFixture[str]


def covey(*words: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jax_impl.app.main", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.rule("APP-2")
def test_help_lists_every_command_without_heavy_imports() -> None:
    program = (
        "import sys; from jax_impl.app.main import main; status = main(['--help']);"
        "heavy = {'jax', 'numpy', 'safetensors', 'tokenizers'} & sys.modules.keys();"
        "sys.exit(status or ' '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in app.COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.rule("APP-2")
@pytest.mark.parametrize("command", sorted(app.COMMANDS))
def test_the_help_of_a_command_needs_no_jax(command: str) -> None:
    program = (
        f"import sys; from jax_impl.app.main import main; status = main(['{command}', '--help']);"
        "sys.exit(status or ' '.join({'jax', 'tokenizers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: covey {command} ")


@pytest.mark.rule("APP-1")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rum"], "covey: no command 'rum'; there are: demo, plan, run, "),
        (["check"], "covey check: the following arguments are required: EVENTS"),
        (["check", "--incompl", "x"], "covey check: unrecognized arguments: --incompl"),
        (["check", "/nowhere/at/all"], "covey check: /nowhere/at/all: "),
        (["replay", "/nowhere/at/all"], "covey replay: /nowhere/at/all: "),
    ],
)
def test_bad_usage_is_status_2(words: list[str], said: str, capsys: Capture) -> None:
    assert app.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1


@pytest.mark.rule("APP-1")
def test_no_command_shows_the_overview(capsys: Capture) -> None:
    assert app.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: covey COMMAND")
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("covey ")


@pytest.mark.rule("APP-1")
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BadInput("a: bad\n  thing\x1b[31m"), 2, "covey check: a: bad thing?[31m"),
        (CoveyError("the run failed"), 1, "covey check: the run failed"),
        (KeyboardInterrupt(), 130, "covey check: interrupted"),
        (OSError(28, "No space left on device"), 1, "covey check: No space left on device"),
        (OSError(13, "Permission denied", "a"), 1, "covey check: a: Permission denied"),
    ],
)
def test_failures_are_one_line(
    error: BaseException, status: int, line: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax_impl.app import check

    def fail(path: Path, **given: object) -> None:
        raise error

    monkeypatch.setattr(check, "read_log", fail)
    assert app.main(["check", "x"]) == status
    assert capsys.readouterr() == ("", line + "\n")


@pytest.mark.rule("APP-1", "APP-3")
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jax_impl.app.main", "--help"],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.rule("APP-1", "APP-3")
def test_closed_or_narrow_output_is_no_traceback() -> None:
    program = "import sys; sys.argv = ['covey', {!r}]; from jax_impl.app.main import main; {}"
    closed = program.format("--help", "sys.stdin = sys.stdout = None; main(); sys.stdin.read()")
    done = subprocess.run(
        [sys.executable, "-c", closed], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    narrow = program.format("--help", "main(); print('\\u00e9')")
    done = subprocess.run(
        [sys.executable, "-c", narrow],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "\\xe9", "")


@pytest.mark.rule("APP-1")
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_impl.app import check

    def fail(path: Path, **given: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(check, "read_log", fail)
    with pytest.raises(ZeroDivisionError):
        app.main(["check", "x"])


# Files


@pytest.mark.rule("APP-4")
def test_a_result_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    with WholeFile("--json", target) as out:
        out.file.write("half")
        assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert target.read_text() == "old"
    with WholeFile("--json", target) as out:
        write_json(out, {"a": [1.5, math.nan, math.inf], "b": "é"})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": [1.5, None, None], "b": "é"}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.rule("APP-4")
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^--json: cannot write in .*nowhere: No such file"):
        WholeFile("--json", tmp_path / "nowhere" / "out.json")
    with pytest.raises(BadInput, match=r"^--out: .* is a directory$"):
        WholeFile("--out", tmp_path)


@pytest.mark.rule("APP-4")
def test_outputs_write_over_nothing_that_counts(tmp_path: Path) -> None:
    model, asked, out = tmp_path / "m", tmp_path / "asked", tmp_path / "out"
    model.mkdir()
    (model / "model.safetensors").touch()
    asked.touch()
    (tmp_path / "again").symlink_to(out)
    device = Path("/dev/null")
    told = {"model": model, "requests": asked, "events": [asked, device], "residency": out}
    for good in (
        {"log": out, "json": model / "new", "png": None, "out": 3}, {"save_residency": out},
        {"log": device, "json": device},
    ):  # fmt: skip
        places_of_their_own(told | good)
    with pytest.raises(BadInput, match=r"^--json: .* is the file of --log too$"):
        places_of_their_own(told | {"log": out, "json": tmp_path / "again"})
    with pytest.raises(BadInput, match=r"^--json: .* is the file of EVENTS too$"):
        places_of_their_own(told | {"json": asked})
    with pytest.raises(BadInput, match=r"^--out: .* is the file of --ids too$"):
        places_of_their_own({"ids": str(asked), "out": asked})
    with pytest.raises(BadInput, match=r"^--log: .* is a file of the model$"):
        places_of_their_own(told | {"log": model / "model.safetensors"})


@pytest.mark.rule("APP-4")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_failed_run() -> None:
    with pytest.raises(CoveyError, match=r"^--json: /dev/full: No space left on device$") as caught:
        with WholeFile("--json", "/dev/full") as out:
            write_json(out, {"a": 1})
    assert caught.value.exit_code == 1
    assert Path("/dev/full").exists()


def test_finite_goes_all_the_way_down() -> None:
    assert finite({"a": (1, {"b": -math.inf}), 2: "x"}) == {"a": [1, {"b": None}], "2": "x"}


@pytest.mark.rule("APP-3")
def test_progress_overwrites_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, live, quiet = io.StringIO(), Terminal(), Terminal()
    for progress in (Progress(stream=plain), Progress(stream=live), Progress(True, quiet)):
        progress.show("10 of 20")
        progress.show("9")
        progress.say("done")
    assert plain.getvalue() == "done\n"
    assert live.getvalue() == "\r10 of 20\r9       \r" + " " * 1 + "\rdone\n"
    assert quiet.getvalue() == ""


# Text


@pytest.mark.rule("APP-11")
def test_text_needs_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(tmp_path)
    assert text.decode([1, 2]) is None
    with pytest.raises(BadInput, match=r"^F:1: the prompt is text, but .* has no tokenizer.json"):
        text.encode("hello", "F:1")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"tokenizer.json: not a tokenizer: "):
        Text(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BadInput, match=r"the package tokenizers is missing"):
        Text(tmp_path).encode("hello", "F:1")


@pytest.mark.rule("APP-11")
def test_text_goes_there_and_back(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "<unk>": 1, "a": 2, "covey": 3, "flies": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path)
    assert text.why_not == ""
    assert text.encode("a covey flies", "F:1") == (0, 2, 3, 4)
    assert text.decode((0, 2, 3, 4)) == "a covey flies"


def test_a_head_cannot_make_a_reader_allocate_without_bound() -> None:
    from reference.files.log_head import MOST, options_of
    from reference.vocab.options import ControlOptions

    head = {"options": ControlOptions((0,), 4, 2, 4).__dict__ | {"layers": [0], "warm": []}}
    assert options_of(head).slots == 4
    head["options"]["slots"] = MOST + 1
    with pytest.raises(BadInput, match="slots"):
        options_of(head)


def test_auto_says_what_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference.files import budget

    monkeypatch.setattr(budget, "available_memory", lambda: 1 << 20)
    with pytest.raises(BadInput, match="--max-running"):
        budget.expert_budget("auto", 8, 4096, others=1 << 30)
    assert budget.expert_budget("auto", 8, 4096, others=0) == 8 * 4096
