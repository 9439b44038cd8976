"""Opening and reading regular files, and noticing when they change (FILE-3, FILE-4, FILE-9).

Files are read by position with `pread`, never mapped: a file that shrinks under a mapping kills the
process, a short `pread` is an error message.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Identity:
    """What pins one version of a file: its place, its size in bytes, its time of change in ns."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @staticmethod
    def of(found: os.stat_result) -> Identity:
        """The identity in a stat result."""
        return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def reason(error: OSError) -> str:
    """The operating system's words for an error, without the path."""
    return os.strerror(error.errno) if error.errno else place(error)


def root_of(directory: Path) -> tuple[str, ...]:
    """Real directories in which the files of a model directory may lie.

    That is the directory itself, and for a snapshot in a hub cache
    (`models--NAME/snapshots/REVISION`, whose files are links) its `models--NAME/blobs`.
    """
    real = os.path.realpath(directory)
    snapshots, _ = os.path.split(real)
    repository, name = os.path.split(snapshots)
    if name == "snapshots" and os.path.basename(repository).startswith("models--"):
        return (real, os.path.join(repository, "blobs"))
    return (real,)


def inside(directory: Path, name: str) -> Path:
    """The file `name` of a model directory, once it is sure that it lies there (FILE-3).

    Errors: BadInput for a name that is not a bare file name, and for a link that leads outside
    (a hub cache's own links into its blobs are inside).
    """
    where = place(directory)
    bare = bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")
    if not bare:
        raise BadInput(f"{where}: '{show(name)}' is not a bare file name of this directory")
    path = directory / name
    real = os.path.realpath(path)
    if not any(real.startswith(root + os.sep) for root in root_of(directory)):
        raise BadInput(f"{where}: '{show(name)}' is a link that leads out of the directory")
    return path


def open_regular(path: Path, extra_flags: int = 0) -> tuple[int, Identity]:
    """A descriptor (owned by the caller) and the identity of a regular file.

    The type is looked at before opening (opening a pipe may wait, a device may act) and again on
    the descriptor. Errors: BadInput if it is not there, not readable, or not a regular file.
    """
    where = place(path)
    try:
        _require_regular(os.stat(path), where)
        fd = os.open(path, _FLAGS | extra_flags)
    except FileNotFoundError:
        raise BadInput(f"{where}: no such file") from None
    except OSError as e:
        if extra_flags and e.errno == errno.EINVAL:
            raise  # the flag is not supported here; the caller knows what to do
        raise BadInput(f"{where}: cannot be opened: {reason(e)}") from None
    try:
        found = os.fstat(fd)
        _require_regular(found, where)
    except BaseException:
        os.close(fd)
        raise
    return fd, Identity.of(found)


def _require_regular(found: os.stat_result, where: str) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    what = kinds.get(stat.S_IFMT(found.st_mode), "something else")
    raise BadInput(f"{where}: is {what}; a regular file is needed")


def pread_into(fd: int, buffer: memoryview, offset: int, where: str) -> None:
    """Fill `buffer` (bytes) from `offset`, going on after short reads and interruptions.

    Errors: BadInput at the end of the file; OSError as the system gives it.
    """
    done, size = 0, len(buffer)
    while done < size:
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except InterruptedError:
            continue
        if got == 0:
            raise BadInput(
                f"{where}: ends at byte {offset + done}, but {size} bytes from byte {offset} "
                "are needed: the file is truncated"
            )
        done += got


def read_small(path: Path, limit: int) -> bytes:
    """The whole of a regular file of at most `limit` bytes.

    Errors: BadInput for a larger file, or as `open_regular`.
    """
    fd, identity = open_regular(path)
    where = place(path)
    try:
        if identity.size > limit:
            raise BadInput(f"{where}: {identity.size} bytes; at most {limit} are read")
        data = bytearray(identity.size)
        pread_into(fd, memoryview(data), 0, where)
    except OSError as e:
        raise BadInput(f"{where}: cannot be read: {reason(e)}") from None
    finally:
        os.close(fd)
    return bytes(data)
