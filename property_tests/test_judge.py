"""Engines and schedulers of another kind are judged by their logs: docs/judge.md, and LOG-8."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jax_impl.app import main as app
from oracle.checkers import CHECKS, check_log, check_logs, judged
from oracle.checkers.claims import PARTS, WHOLE
from property_tests.log_breaks import BREAKS, DENSE_BREAKS, HEAD, dense, good, option
from property_tests.refusals import refused
from reference.files.event_log import options_of, read_log
from reference.vocab.options import ControlOptions

PAGE = (Path(__file__).parent.parent / "docs" / "judge.md").read_text(encoding="utf-8")
OURS = [*ControlOptions.__dataclass_fields__]


def fenced(word: str) -> str:
    """The text of the page's one block of this kind."""
    (block,) = re.findall(rf"^```{word}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return block


def printed(command: str) -> list[str]:
    """What the page says that a command prints."""
    lines = [*PAGE.splitlines(), ""]
    at = lines.index(f"    $ {command}") + 1
    end = next(i for i in range(at, len(lines)) if not re.match(r"    [^$]", lines[i]))
    return [line[4:] for line in lines[at:end]]


def covey(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    status = app.main(list(words))
    out = capsys.readouterr()
    return status, (out.out + out.err).splitlines()


@pytest.mark.rule("LOG-8", "LOG-1", "APP-6")
def test_the_log_in_the_page_is_accepted_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = fenced("json")
    Path("mine.jsonl").write_text(text)
    assert covey(capsys, "check", "mine.jsonl") == (0, printed("covey check mine.jsonl"))
    for missing in ('"slot": 0, ', '"event": "Loaded", ', '"top_k": 1, ', '"slot_bytes": 8, '):
        assert missing in text
        Path("mine.jsonl").write_text(text.replace(missing, ""))
        assert covey(capsys, "check", "mine.jsonl")[0] == 2, missing
    for line in text.splitlines(keepends=True)[1:]:  # none of its lines can go
        record = json.loads(line)
        if "ask" not in record:
            Path("mine.jsonl").write_text(text.replace(line, ""))
            assert covey(capsys, "check", "mine.jsonl")[0] == 1, line


@pytest.mark.rule("LOG-8", "LOG-4", "APP-7")
def test_the_engine_in_the_page_is_judged_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serial.py").write_text(fenced("python"))
    for name, flags in (("serial", []), ("broken", ["--forgetful"])):
        words = [sys.executable, "serial.py", *flags]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        Path(f"{name}.jsonl").write_text(done.stdout)
    assert covey(capsys, "check", "serial.jsonl") == (0, printed("covey check serial.jsonl"))
    status, lines = covey(capsys, "check", "broken.jsonl")
    assert (status, lines[1:2]) == (1, printed("covey check broken.jsonl"))
    assert {v.property for v in check_log(read_log("broken.jsonl"))} == {"S9"}
    status, (line,) = covey(capsys, "replay", "serial.jsonl")
    assert status == 2 and "serial.jsonl:1: decided by serial; only what this project's" in line
    status, (line,) = covey(capsys, "timeline", "serial.jsonl")
    assert status == 0 and line.startswith("serial, cache of its own: ")
    # The same engine twice: its tokens can be compared; who decides with a clock need not repeat.
    status, lines = covey(capsys, "check", "serial.jsonl", "broken.jsonl")
    assert lines[-2:] == [
        "2 logs, no contradiction between them (S12, S13, S14)",
        "S16 not judged for serial.jsonl, broken.jsonl: no grouping of ours is claimed",
    ]


def foreign(log: list[dict[str, Any]], *without: str, **more: Any) -> list[dict[str, Any]]:
    """The log as one of another scheduler, that leaves out some options."""
    log = copy.deepcopy(log)
    option(scheduler="mine", **more)(log)
    for name in without:
        del log[0]["options"][name]
    return log


@pytest.mark.rule("LOG-8")
def test_who_claims_all_is_judged_as_ours_is() -> None:
    for make, breaks in ((good, BREAKS), (dense, DENSE_BREAKS)):
        assert check_log(foreign(make())) == []
        for _, _, change in breaks:
            log = copy.deepcopy(make())
            change(log)
            assert check_log(foreign(log)) == check_log(log) != []
    assert judged(foreign(good())[0]) == (list(CHECKS), "")
    assert judged(HEAD) == (list(CHECKS), "")


SHAPE = ("layers", "experts", "top_k", "slots")
PROMISES = [name for name in HEAD["options"] if name not in SHAPE and name != "chunk"]


@pytest.mark.rule("LOG-8", "SAFE-2", "SAFE-11", "LIVE-3", "LIVE-5")
def test_what_is_not_promised_is_not_judged_and_told() -> None:
    """Of each break: who promises the chunk alone is told the same, but for what the line says."""
    lost: set[tuple[str, str]] = set()
    for make, breaks in ((good, BREAKS), (dense, DENSE_BREAKS)):
        assert check_log(foreign(make(), *PROMISES)) == []
        for _, _, change in breaks:
            log = copy.deepcopy(make())
            change(log)
            before, after = check_log(log), check_log(foreign(log, *PROMISES))
            assert set(after) <= set(before)
            lost |= {(v.property, re.sub(r"[\d\[\]]+", "n", v.text)) for v in {*before} - {*after}}
    properties, line = judged(foreign(good(), *PROMISES)[0])
    assert properties == [name for name in CHECKS if name not in WHOLE]
    assert line.startswith("not judged, for want of options in the head: L1 (grouping); L3 (g")
    assert all(f"{name} {what} ({o})" in line for name, what, o in PARTS)
    assert {name for name, _ in lost} == {"S2", "S10", "S11", "S14", "S15", *WHOLE}, lost


@pytest.mark.rule("LOG-8", "LIVE-3")
@pytest.mark.parametrize("name", sorted({o for needs in WHOLE.values() for o in needs}))
def test_each_option_that_a_property_needs_is_named(name: str) -> None:
    properties, line = judged(foreign(good(), name)[0])
    gone = [p for p, needs in WHOLE.items() if name in needs]
    assert properties == [p for p in CHECKS if p not in gone]
    assert all(f"{p} ({name})" in line for p in gone)


@pytest.mark.rule("LOG-8", "SAFE-16")
def test_only_who_claims_a_grouping_must_decide_the_same_again() -> None:
    other = copy.deepcopy(dense())
    del other[6]
    claimed = check_logs({"one": foreign(dense()), "two": foreign(other)})
    assert claimed
    free = [foreign(log, "grouping") for log in (dense(), other)]
    assert check_logs({"one": free[0], "two": free[1]}) == []


@pytest.mark.rule("LOG-8", "SAFE-11")
def test_who_names_no_block_says_what_is_set_aside() -> None:
    log = foreign(dense(), "kv_block")
    assert check_log(log) == []
    option(kv_tokens=11)(log)  # 4 and 8 are set aside together
    assert {v.property for v in check_log(log)} == {"S11"}


@pytest.mark.rule("SAFE-13")
def test_logs_that_are_not_compared_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, engine in (("one", "a"), ("two", "a"), ("three", "b")):
        lines = foreign([{**HEAD, "engine": engine}, *good()[1:]])
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, said = covey(capsys, "check", "one", "two", "three")
    assert status == 0
    assert said[-1] == "bits of three not compared with those of one: their heads differ in engine"
    assert "bits of two" not in "".join(said)
    status, (line,) = covey(capsys, "check", "one", "one")
    assert status == 2 and "the same file twice" in line


@pytest.mark.rule("LOG-8", "SAFE-11")
def test_as_many_lanes_are_idle_as_the_head_has_left() -> None:
    log = foreign(good(), "grouping")
    for record in log:
        if "ask" in record:
            record["ask"][1] += 1
    assert {v.property for v in check_log(log)} == {"S11"}
    log[0] = {**log[0], "lanes": 2}
    assert check_log(log) == []


@pytest.mark.rule("LOG-4")
def test_a_log_without_asks_is_told_what_it_lacks() -> None:
    (found,) = check_log([record for record in good() if "ask" not in record])
    assert found.property == "LOG" and "[idle channels, idle compute lanes]" in found.text


@pytest.mark.rule("LOG-8", "FILE-1")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler": 3}, "options.scheduler is 3; a name"),
        ({"scheduler": ""}, "a name is needed"),
        ({"scheduler": "mine", "slots": ...}, "options lack slots"),
        ({"scheduler": "mine", "max_runing": 2}, "unknown option 'max_runing'"),
        ({"scheduler": "mine", "max_running": "2"}, "options.max_running is 2; needs an integer"),
        ({"scheduler": "mine", "grouping": "serial"}, "options.grouping is serial; needs inter"),
        ({"scheduler": "mine", "chunk": 0}, "options.chunk is 0; at least 1"),
        ({"grouping": "mine"}, "gives its own name, options.scheduler (docs/judge.md)"),
        ({}, "gives its own name, options.scheduler (docs/judge.md)"),
    ],
)
def test_a_head_that_says_too_little_or_too_much(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shape = dict.fromkeys(OURS, 1) if "grouping" in options else {}
    shape |= {"layers": [0], "experts": 2, "top_k": 1, "slots": 1}
    shape |= {"warm": [], "grouping": "balanced", "readiness": "visit", "eviction": "lfu",
              "fetch_order": "first-come"} if "grouping" in options else {}  # fmt: skip
    both = {k: v for k, v in {**shape, **options}.items() if v is not ...}
    path = tmp_path / "log"
    path.write_text(json.dumps({**HEAD, "options": both}) + "\n")
    refused(lambda: read_log(path), "log:1: ", words)


@pytest.mark.rule("LOG-8")
def test_nobody_decides_again_for_another_scheduler(tmp_path: Path) -> None:
    refused(lambda: options_of(foreign(good())[0]), "decided by mine")
    path = tmp_path / "log"
    for name in ("lanes", "channels", "host_slots"):
        path.write_text(json.dumps({**foreign(good())[0], name: "2"}) + "\n")
        refused(lambda: read_log(path), f"{name} is 2; a count")
