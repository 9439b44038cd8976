"""Where results go: files that are whole or absent, and progress that stays off standard output."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from reference.vocab.errors import BadInput, CoveyError


def places_of_their_own(outputs: dict[str, Path | None], model: Path, requests: Path) -> None:
    """Refuses outputs, by flag, that would write over one another, the requests or the model."""
    taken = {os.path.realpath(requests): "--requests"}
    for flag, path in outputs.items():
        if path is None or (path.exists() and not path.is_file()):
            continue  # a device takes anything; what else is no file is refused where it is opened
        place = os.path.realpath(path)
        if place in taken:
            raise BadInput(f"{flag}: {path} is the file of {taken[place]} too")
        if path.exists() and os.path.dirname(place) == os.path.realpath(model):
            raise BadInput(f"{flag}: {path} is a file of the model")
        taken[place] = flag


class WholeFile:
    """A file that appears under its name only when it is complete (APP-4).

    Opening makes a temporary file beside the target, so an unwritable place is found before the
    run and not after it. `commit` renames; leaving without it removes the temporary file.
    Raises BadInput when the place cannot be written.
    """

    def __init__(self, flag: str, target: str | Path, mode: str = "w") -> None:
        self.flag, self.target = flag, Path(target)
        if self.target.is_dir():
            raise BadInput(f"{flag}: {self.target} is a directory")
        if self.target.exists() and not self.target.is_file():
            # A device or a pipe (/dev/stdout) has no whole state: it is written in place.
            self.temporary = self.target
        else:
            try:
                handle, name = tempfile.mkstemp(
                    prefix=f".{self.target.name}.", dir=self.target.parent or Path())
            except OSError as error:
                raise BadInput(
                    f"{flag}: cannot write in {self.target.parent}: {error.strerror}") from None
            os.close(handle)
            self.temporary = Path(name)
        self.file: IO[Any] = open(self.temporary, mode,  # noqa: SIM115
                                  encoding=None if "b" in mode else "utf-8")

    def commit(self) -> None:
        """Flushes, renames onto the target. Raises CoveyError when the disk does not take it."""
        try:
            self.file.flush()
            if self.temporary != self.target:
                os.fsync(self.file.fileno())
            self.file.close()
            if self.temporary != self.target:
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(self.temporary, 0o666 & ~umask)
                os.replace(self.temporary, self.target)
        except OSError as error:
            raise CoveyError(f"{self.flag}: {self.target}: {error.strerror}") from None

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            self.file.close()
        except OSError:
            pass  # the disk is full, and commit has said so
        if self.temporary != self.target:
            self.temporary.unlink(missing_ok=True)


def write_json(out: WholeFile, document: dict[str, Any]) -> None:
    """Writes `document` as one JSON text and commits it: one line for each member, and for each
    item of a member that is a list. NaN and infinities become null."""

    def line(value: Any) -> str:
        return json.dumps(finite(value), allow_nan=False, ensure_ascii=False)

    members = []
    for name, value in document.items():
        many = isinstance(value, list) and value
        text = "[\n" + ",\n".join(map(line, value)) + "\n]" if many else line(value)
        members.append(f"{line(name)}: {text}")
    try:
        out.file.write("{\n" + ",\n".join(members) + "\n}\n")
    except OSError as error:
        raise CoveyError(f"{out.flag}: {out.target}: {error.strerror}") from None
    out.commit()


def finite(value: Any) -> Any:
    """`value` with every float that JSON has no name for replaced by None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


class Progress:
    """Lines on standard error; on a terminal the last one is overwritten in place (APP-3)."""

    def __init__(self, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.live = self.stream.isatty()
        self._width = 0

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """One line that also `--quiet` lets through: the run goes on without something."""
        self.clear()
        print(text, file=self.stream, flush=True)

    def show(self, text: str) -> None:
        """The current state; kept only on a terminal."""
        if self.live and not self.quiet:
            text = text[:119]
            print("\r" + text.ljust(self._width), end="", file=self.stream, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        """Takes the current state away, before results go to the same terminal."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=self.stream, flush=True)
            self._width = 0
