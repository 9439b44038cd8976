"""Chats as the model's own template writes them, rendered where it does no harm (TEXT-6, TEXT-9).

The template is code that came with the weights. It runs in template_worker.py: another process, in
jinja2's immutable sandbox, with limits on time, memory, files and output.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_impl.app.extras import how_to_get, missing
from jax_impl.app.tokenizer_config import ChatTemplate
from reference.files.strict_json import show
from reference.vocab.errors import BadInput, CoveyError

WORKER = Path(__file__).with_name("template_worker.py")
SECONDS = 5.0
CHARACTERS = 1 << 22
MEMORY = 512 << 20
START_S = 60.0
"""How long the worker may take to begin: nothing of the template runs then."""
CONTEXT_MAX = 16 << 20
RESERVED = ("messages", "add_generation_prompt", "tools", "documents")

Message = Mapping[str, Any]


class Renderer:
    """Renders one template for many chats. Thread-safe; a context manager.

    special      special tokens by their roles
    seconds      of wall clock for one rendering; then the process is killed
    characters   of output at most;  memory  address space of the process, in bytes
    """

    def __init__(
        self,
        template: ChatTemplate,
        special: Mapping[str, str] | None = None,
        *,
        seconds: float = SECONDS,
        characters: int = CHARACTERS,
        memory: int = MEMORY,
    ) -> None:
        self.template = template
        self._special = dict(special or {})
        self._seconds, self._characters, self._memory = seconds, characters, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._path = _where_jinja2_is(template.name)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """The text of a chat. `more` is what else the template shall see.

        Raises BadInput when the template refuses, fails, or takes too long (TEXT-9).
        """
        context: dict[str, Any] = {"tools": None, "documents": None} | self._special | more
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        asked = {
            "name": self.template.name, "source": self.template.source, "context": context,
            "characters": self._characters, "cpu": int(self._seconds) + 1,
        }  # fmt: skip
        line = json.dumps(asked).encode() + b"\n"
        if len(line) > CONTEXT_MAX:
            raise BadInput(f"{self.template.name}: the chat has {len(line)} bytes, at most "
                           f"{CONTEXT_MAX} are rendered")
        with self._lock:
            reply = self._ask(line)
        if "error" in reply:
            at = f" line {reply['line']}" if reply.get("line") else ""
            raise BadInput(f"{self.template.name}{at}: {show(reply['error'], 400)}")
        text: str = reply["text"]
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadInput(f"{self.template.name}: it writes a lone surrogate") from None
        return text

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._kill()

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # -- the process; the lock is held

    def _ask(self, line: bytes) -> dict[str, Any]:
        process = self._process or self._start()
        return self._exchange(process, line, self._seconds, "the template takes more than "
                              f"{self._seconds:g} s")

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if
                   name in os.environ}  # fmt: skip
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(WORKER)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", env=environ,
                start_new_session=True,  # a Ctrl-C on the terminal is not for it
            )  # fmt: skip
        except OSError as error:
            raise CoveyError(f"no process for the chat template: {error.strerror}") from None
        first = {"path": self._path, "memory": self._memory}
        told = self._exchange(process, json.dumps(first).encode() + b"\n", START_S,
                              f"jinja2 has not been loaded within {START_S:g} s")
        if told.get("ready") is not True:
            self._kill()
            raise BadInput(f"{self.template.name}: jinja2 {told.get('version')} has known ways out "
                           f"of its sandbox; 3.1.6 or later is needed {how_to_get('text')}")
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], line: bytes, seconds: float, late: str
    ) -> dict[str, Any]:
        """Sends a line and waits for one; whatever goes wrong ends the process."""
        assert process.stdin is not None and process.stdout is not None
        end = time.monotonic() + seconds
        data = bytearray()
        most = 12 * self._characters + 4096  # a character is at most two escapes of six bytes
        send, receive = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(send, False)
        try:
            while not data.endswith(b"\n"):
                left = end - time.monotonic()
                if left <= 0:
                    raise BadInput(f"{self.template.name}: {late}")
                readable, writable, _ = select.select([receive], [send] if line else [], [], left)
                if writable:
                    line = line[os.write(send, line[:65536]) :]
                if readable:
                    piece = os.read(receive, 1 << 16)
                    if not piece:
                        raise BadInput(f"{self.template.name}: {self._ended(process)}")
                    data += piece
                    if len(data) > most:
                        raise BadInput(f"{self.template.name}: too much output")
            return json.loads(data)
        except BrokenPipeError:
            said = self._ended(process)
            self._kill()
            raise BadInput(f"{self.template.name}: {said}") from None
        except BaseException:
            self._kill()
            raise

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        """What became of a process that says no more."""
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "its process said nothing more"
        if code == -signal.SIGXCPU:
            return f"the template takes more than {self._seconds:g} s"
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        return f"the template ended its process {how}"

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # what was still to be written has no reader


def _where_jinja2_is(name: str) -> list[str]:
    """The folders from which the worker imports jinja2 and what it needs. Raises BadInput."""
    folders: list[str] = []
    for package in ("jinja2", "markupsafe"):
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise BadInput(f"{name}: {missing(package, 'text')}")
        folders.append(str(Path(spec.submodule_search_locations[0]).resolve().parent))
    return list(dict.fromkeys(folders))
