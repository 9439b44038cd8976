"""`covey chat`, from a pipe and on a terminal: CHAT-1 to CHAT-4."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from jax_impl.app.main import main
from oracle.tiny import tiny_config, write_checkpoint
from property_tests.engines import checkpoint
from property_tests.text_models import begins, characters, model_with_text
from reference.engine import ReferenceEngine
from reference.files.requests import Request

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if 'bad' in m.content %}"
    "{{ raise_exception('no such words') }}{% endif %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if tag is defined %}{{ tag }}{% endif %}a:"
)
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_text(checkpoint(), tmp_path_factory.mktemp("chat") / "model",
                           begins(characters(), "<s>"), CONFIG, TEMPLATE)  # fmt: skip


class Pipe(io.TextIOWrapper):
    """Standard input that is no terminal."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode("utf-8", "surrogateescape")))


def chat(monkeypatch: pytest.MonkeyPatch, model: Path, typed: str, *words: object) -> int:
    monkeypatch.setattr(sys, "stdin", Pipe(typed))
    return main(["chat", str(model), "--engine", "reference", "--quiet", *map(str, words)])


def answers(model: Path, prompts: list[str], new: int = 10, **more: Any) -> list[str]:
    """What the model says to prompts of characters, special tokens written out; by the engine."""
    made = characters()
    stop = () if more.pop("on", False) else (2,)
    with ReferenceEngine.open(model, kv_tokens=1024) as engine:
        said = []
        for prompt in prompts:
            ids = tuple(made.encode(prompt, add_special_tokens=False).ids)
            result = engine.submit(Request("x", ids, new, stop=stop, **more)).result(60)
            said.append(made.decode(list(result.tokens)))
        return said


@pytest.mark.rule("CHAT-1", "CHAT-2", "FILE-14", "TEXT-5")
def test_each_line_is_a_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = ["--max-new-tokens", 10, "--temperature", 0.9, "--seed", 3, "--system", "S"]
    assert chat(monkeypatch, model, "one\n\ntwo\r\n/reset\none\n/exit\nthree\n", *words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    how: dict[str, Any] = {"temperature": 0.9, "seed": 3}
    (first,) = answers(model, ["<s>s:S;u:one;a:"], **how)
    (second,) = answers(model, [f"<s>s:S;u:one;a:{first};u:two;a:"], **how)
    assert first
    assert first != second
    assert out == f"{first}\n{second}\n{first}\n"


@pytest.mark.rule("CHAT-1", "CHAT-2")
def test_without_a_template_text_is_continued(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert chat(monkeypatch, model, "one\ntwo", "--no-template", "--max-new-tokens", 10) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (first,) = answers(model, ["<s>one"], on=True)
    (second,) = answers(model, [f"<s>one{first}\ntwo"], on=True)
    assert out == f"{first}\n{second}\n"


@pytest.mark.rule("CHAT-1", "CHAT-4")
def test_turns_without_an_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    typed = "one\na bad word\n/nothing at all\n" + "x" * 600 + "\ntwo\n"
    assert chat(monkeypatch, model, typed, "--max-new-tokens", 8) == 1
    out, err = capsys.readouterr()
    (first,) = answers(model, ["<s>u:one;a:"], 8)
    (second,) = answers(model, [f"<s>u:one;a:{first};u:two;a:"], 8)
    assert out == f"{first}\n{second}\n"  # what had no answer is no part of the conversation
    lines = err.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"covey chat: \S+chat_template.jinja line 1: no such words", lines[0])
    assert lines[1].startswith("covey chat: no command '/nothing'; /reset forgets")
    assert re.match(r"covey chat: the conversation has \d+ tokens and there is room for 512, the "
                    r"answer included; /reset", lines[2])  # fmt: skip


@pytest.mark.rule("CHAT-2")
def test_bad_bytes_and_what_else_the_template_sees(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert chat(monkeypatch, model, "h\udcffi\nx", "--max-new-tokens", 6, "--template-args",
                '{"tag": "T"}') == 0
    out = capsys.readouterr().out
    (first,) = answers(model, ["<s>u:h\N{REPLACEMENT CHARACTER}i;Ta:"], 6)
    assert out.startswith(first + "\n")


@pytest.mark.rule("CHAT-4", "APP-1", "APP-2")
@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        ("tokenizer", [], "a chat needs a tokenizer, but "),
        ("template", [], "chat_template.jinja line 2: Encountered unknown tag 'nothing'"),
        ("slow", [], "chat_template.jinja: the template takes more than"),
        ("system", ["--system", "x"], "chat_template.jinja line 1: no system role"),
        ("", ["--template-args", "[]"], "--template-args: an object is needed, not an array"),
        ("", ["--template-args", "{"], "--template-args: not JSON"),
        ("", ["--template-args", '{"messages": []}'], "--template-args: 'messages' cannot be"),
        ("", ["--temperature", "-1"], "argument --temperature: -1; a number from 0"),
        ("", ["--max-new-tokens", "0"], "argument --max-new-tokens: 0; at least 1"),
        ("", ["--memory", "1B"], "at least"),
        ("model", [], "no such folder"),
    ],
)
def test_what_is_wrong_is_told_before_the_first_line(
    spoil: str, words: list[str], said: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Capture,
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    if spoil == "tokenizer":
        (folder / "tokenizer.json").unlink()
    if spoil == "model":
        shutil.rmtree(folder)
    monkeypatch.setattr("jax_impl.app.chat_template.Renderer.__init__.__kwdefaults__",
                        {"seconds": 1.5, "characters": 1000, "memory": 256 << 20})
    sources = {
        "template": "x\n{% nothing %}",
        "slow": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
                  "{% endif %}",
    }
    if spoil in sources:
        (folder / "chat_template.jinja").write_text(sources[spoil])
    assert chat(monkeypatch, folder, "hello\n", *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("covey chat: ")
    assert said in last
    assert "Traceback" not in err


# A terminal


class Terminal:
    """`covey chat` at the other end of a pseudo-terminal."""

    def __init__(self, *words: object) -> None:
        self.seen = ""
        self.end, inner = pty.openpty()

        # The terminal becomes the process's own, so that Ctrl-C is a signal there.
        program = ("import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
                   "from jax_impl.app.main import main; sys.exit(main(sys.argv[1:]))")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", *map(str, words)],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(inner)

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def until(self, pattern: str, seconds: float = 90.0) -> str:
        """Reads until `pattern` matches what came since the last match; returns that."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"{pattern!r} is not in {self.seen[-2000:]!r}"
            if select.select([self.end], [], [], 0.2)[0]:
                try:
                    piece = os.read(self.end, 65536)
                except OSError:  # the other side is closed
                    piece = b""
                assert piece, f"the end came before {pattern!r}: {self.seen[-2000:]!r}"
                self.seen += piece.decode("utf-8", "replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end():]
        return before

    def interrupt(self, pattern: str) -> str:
        """Ctrl-C at the prompt, until `pattern` is there: from showing the prompt until it waits
        for a key, readline does not see a signal before the next one."""
        for _ in range(20):
            self.type("\x03")
            try:
                return self.until(pattern, 4.0)
            except AssertionError:
                assert self.process.poll() is None, self.seen
        raise AssertionError(f"{pattern!r} is not in {self.seen!r}")

    def close(self) -> int:
        try:
            while os.read(self.end, 65536):
                pass
        except OSError:
            pass
        status = self.process.wait(30)
        os.close(self.end)
        return status

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself and takes long conversations."""
    folder = tmp_path_factory.mktemp("endless")
    config = tiny_config("mixtral", max_position_embeddings=100_000, eos_token_id=None)
    plain = write_checkpoint(folder / "plain", config, seed=1)
    return model_with_text(plain, folder / "model", characters(), {}, TEMPLATE)


@pytest.mark.rule("CHAT-3", "CHAT-1")
@pytest.mark.parametrize("engine", ["reference", "jax"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(
    engine: str, endless: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with Terminal(endless, "--engine", engine, "--max-new-tokens", 6000, "--temperature", 1,
                  "--memory", "50%", "--log", log) as terminal:
        terminal.until(r"Ctrl-C stops an answer")
        terminal.until("> ")
        terminal.type("one\n")
        terminal.until(r"one\r?\n[^\n]{20}")
        terminal.type("\x03")
        said = terminal.until(r"\[stopped: (\d+) tokens")
        assert "Traceback" not in said
        terminal.until("> ")
        terminal.interrupt(r"again to leave, or /exit")
        terminal.until("> ")
        terminal.type("/reset\n")
        terminal.until(r"\[forgotten\]")
        terminal.until("> ")
        terminal.type("two\n")
        terminal.until(r"two\r?\n[^\n]{20}")
        terminal.type("\x03")
        terminal.until(r"\[stopped: (\d+) tokens")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.close() == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["request"] for e in events if e.get("event") == "Cancelled"] == [0, 1]
    assert "end" in events[-1]


@pytest.mark.rule("CHAT-3", "APP-1")
def test_twice_at_the_prompt_leaves(endless: Path) -> None:
    with Terminal(endless, "--engine", "reference") as terminal:
        terminal.until("> ")
        terminal.interrupt("again to leave")
        terminal.until("> ")
        said = terminal.interrupt("interrupted")
        assert "Traceback" not in said
        assert terminal.close() == 130
