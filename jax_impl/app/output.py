"""Where results go: files that are whole or absent, and progress that stays off standard output."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from reference.vocab.errors import BadInput, CoveyError

OUTPUTS = ("log", "json", "out", "png", "save_residency")
"""What a command calls the files that it writes."""
MODEL_FILES = ("*.safetensors*", "*config.json", "*token*", "vocab*", "merges*", "*template*",
               "*.model", "*.bin", "*.gguf", "README*", "LICENSE*")  # fmt: skip
"""What a model's folder has of its own."""
NO_INPUTS = (*OUTPUTS, "residency", "logs")
"""What experts were hot may be written where it was read; a folder of logs is no model."""


def places_of_their_own(args: Mapping[str, Any]) -> None:
    """Refuses outputs that would write over one another, what is read or the model (APP-4)."""
    taken: dict[str, str] = {}
    folders: set[str] = set()
    for name, value in args.items():
        for path in value if isinstance(value, list) else [value]:
            if name in NO_INPUTS or not isinstance(path, str | Path) or not os.path.exists(path):
                continue
            place = os.path.realpath(path)
            if os.path.isdir(place):
                folders.add(place)
            elif os.path.isfile(place):
                taken[place] = name.upper() if name == "events" else flag_of(name)
    for name in OUTPUTS:
        path = args.get(name)
        if not isinstance(path, Path) or (path.exists() and not path.is_file()):
            continue  # a device takes anything; what else is no file is refused where it is opened
        place = os.path.realpath(path)
        if place in taken:
            raise BadInput(f"{flag_of(name)}: {path} is the file of {taken[place]} too")
        folder, file = os.path.split(place)
        if path.exists() and folder in folders and any(fnmatch(file, p) for p in MODEL_FILES):
            raise BadInput(f"{flag_of(name)}: {path} is a file of the model")
        taken[place] = flag_of(name)


def flag_of(name: str) -> str:
    """`--save-residency` for save_residency."""
    return f"--{name.replace('_', '-')}"


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
