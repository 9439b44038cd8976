"""Bringing one expert's bytes from its files into a slot, in the calling thread.

Tensors that lie one after another in a file are read together. Two ways (XFER-3): *buffered*
reads scatter straight into the slot; *direct* reads go around the page cache, need 4 KiB
boundaries on both sides, and therefore fetch the enclosing span into a bounce buffer from which
one copy puts each tensor on its place. Where a file holds an expert as a slot does (`covey pack`),
direct reads need no bounce buffer either (XFER-11).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jax_impl.readers import Reader
from jax_impl.slots import Place, private_memory
from reference.files.budget import ALIGN, PAGE, round_up
from reference.files.regular import Identity
from reference.files.safetensors_header import TensorRef
from reference.vocab.errors import BadInput, Unsupported

Io = Literal["auto", "direct", "buffered"]

BOUNCE_MAX = 8 << 20
"""Largest bounce buffer, bytes: longer spans are read in pieces."""

_INTERRUPTS_MAX = 1000
_STANDSTILLS_MAX = 8


class ReadFailed(Exception):
    """A transfer cannot be completed; the text names the file, the place and the reason."""


class Stopped(ReadFailed):
    """The transfers are being closed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` at `offset` of the file belong at `target` of the slot."""

    offset: int
    nbytes: int
    target: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of one file, and the pieces that it consists of. Between pieces there may be
    filler, where the slot has as much of it."""

    file: Path
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def image(self) -> int | None:
        """Where the span as a whole belongs in the slot, if it lies there as in the file."""
        shifts = {p.target - p.offset for p in self.pieces}
        return self.offset + shifts.pop() if len(shifts) == 1 else None

    def straight(self, slot_bytes: int) -> bool:
        """Whether a direct read can fill the slot itself: whole pages of the file are whole pages
        of the slot. What follows the span within its last page falls into the slot's unused end."""
        at = self.image
        return at is not None and self.offset % PAGE == at % PAGE == slot_bytes % PAGE == 0


def plan(refs: Sequence[TensorRef], places: Sequence[Place]) -> tuple[Span, ...]:
    """The reads that bring tensors `refs` to `places`, as few as the files allow."""
    pieces = sorted(
        (ref.file, ref.offset, ref.nbytes, place.offset)
        for ref, place in zip(refs, places, strict=True)
        if ref.nbytes
    )
    spans: list[Span] = []
    for file, offset, nbytes, target in pieces:
        piece = Piece(offset, nbytes, target)
        if spans and spans[-1].file == file:
            last = spans[-1]
            gap, image = offset - last.end, last.image
            same = image is not None and target - offset == image - last.offset
            whole = last.nbytes == sum(p.nbytes for p in last.pieces)
            if (gap == 0 and (same or whole)) or (0 < gap < ALIGN and same):
                end = offset + nbytes - last.offset
                spans[-1] = Span(file, last.offset, end, (*last.pieces, piece))
                continue
        spans.append(Span(file, offset, nbytes, (piece,)))
    return tuple(spans)


def bounce_size(spans: Iterable[Span]) -> int:
    """Bytes of a bounce buffer for direct reads of these spans."""
    longest = max((round_up(s.end, PAGE) - s.offset // PAGE * PAGE for s in spans), default=0)
    return min(longest, BOUNCE_MAX)


class OpenFiles:
    """Descriptors of the shards, pinned to what they were when the checkpoint was opened.

    A file that was changed, cut or replaced since then fails every later load from it (XFER-6):
    half an old and half a new model would be worse than an error.
    """

    def __init__(
        self,
        reader: Reader,
        paths: Iterable[Path],
        io: Io,
        pins: dict[Path, Identity] | None = None,
    ) -> None:
        self._reader = reader
        self._fds: dict[Path, int] = {}
        self._direct: dict[Path, bool] = {}
        self._pins: dict[Path, Identity] = {}
        try:
            for path in sorted(set(paths)):
                self._fds[path], self._direct[path] = self._open(path, io)
                self._pins[path] = (pins or {}).get(path) or reader.stat(self._fds[path], path)[0]
        except OSError as error:
            self.close()
            raise BadInput(f"{error.filename or 'shard'}: {error.strerror or error}") from error

    def _open(self, path: Path, io: Io) -> tuple[int, bool]:
        """A descriptor, and whether it is direct: decided by reading the first page (XFER-3)."""
        if io != "buffered":
            fd = -1
            try:
                fd = self._reader.open(path, True)
                self._reader.read(fd, [memoryview(private_memory(PAGE))], 0)
                return fd, True
            except OSError as error:
                if fd >= 0:
                    self._reader.close(fd)
                if io == "direct":
                    refused = error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
                    if not refused:
                        raise
                    raise Unsupported(str(path), "direct reads here", "--io buffered") from error
        return self._reader.open(path, False), False

    @property
    def io(self) -> str:
        """How the files are read: direct, buffered, or mixed."""
        kinds = {"direct" if d else "buffered" for d in self._direct.values()}
        return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "buffered"

    def descriptor(self, path: Path) -> tuple[int, bool]:
        return self._fds[path], self._direct[path]

    def verify(self, path: Path) -> None:
        """Raise ReadFailed unless the file is what it was."""
        was = self._pins[path]
        try:
            opened, named = self._reader.stat(self._fds[path], path)
        except OSError as error:
            raise ReadFailed(f"{path}: {error.strerror or error}") from error
        if opened.size != was.size:
            raise ReadFailed(f"{path}: {opened.size} bytes now, {was.size} when it was opened")
        if opened != was:
            raise ReadFailed(f"{path}: changed since it was opened")
        if (named.device, named.inode) != (was.device, was.inode):
            raise ReadFailed(f"{path}: replaced by another file since it was opened")

    def close(self) -> None:
        while self._fds:
            self._reader.close(self._fds.popitem()[1])


def read_span(
    reader: Reader,
    files: OpenFiles,
    span: Span,
    slot: np.ndarray,
    bounce: mmap.mmap | None,
    check: Callable[[], None],
) -> None:
    """Fill the slot's places from one span. `check` is called between reads and may raise.

    Raises ReadFailed; short and interrupted reads are continued (XFER-4), an end of file before
    the span's end is an error (XFER-5).
    """
    fd, direct = files.descriptor(span.file)
    straight = span.straight(len(slot)) and slot.ctypes.data % PAGE == 0
    whole = span.image if not direct or straight else None
    page = memoryview(bounce) if direct and bounce is not None and whole is None else None
    at, standstills = span.offset, 0
    while at < span.end:
        check()
        if page is not None:
            start = at // PAGE * PAGE
            want = min(round_up(span.end, PAGE) - start, len(page))
            n = _read(reader, fd, [page[:want]], start, span)
        elif whole is not None:
            start = at // PAGE * PAGE if direct else at
            last = round_up(span.end, PAGE) if direct else span.end
            stop = min(last, start + BOUNCE_MAX)
            view = slot[whole + start - span.offset : whole + stop - span.offset]
            n = _read(reader, fd, [view.data], start, span)
        else:
            start = at
            n = _read(reader, fd, _targets(span, slot, at), start, span)
        got = min(start + n, span.end)
        if n == 0:
            files.verify(span.file)
            raise ReadFailed(f"{span.file}: ends at byte {at}, an expert needs it to {span.end}")
        if got <= at:  # a direct read that gave less than the bytes before the wanted one
            standstills += 1
            if standstills > _STANDSTILLS_MAX:
                files.verify(span.file)
                raise ReadFailed(f"{span.file}: no progress at byte {at}")
            continue
        if page is not None:
            _scatter(span, slot, page, start, at, got)
        at = got


def _read(reader: Reader, fd: int, buffers: list[memoryview], offset: int, span: Span) -> int:
    for _ in range(_INTERRUPTS_MAX):
        try:
            return reader.read(fd, buffers, offset)
        except InterruptedError:
            continue
        except OSError as error:
            reason = error.strerror or os.strerror(error.errno or 0)
            raise ReadFailed(f"{span.file}: reading at byte {offset}: {reason}") from error
    raise ReadFailed(f"{span.file}: reading at byte {offset}: interrupted without end")


def _targets(span: Span, slot: np.ndarray, at: int) -> list[memoryview]:
    """The parts of the slot that the span's bytes from `at` on belong to, in file order."""
    rest: list[memoryview] = []
    for p in span.pieces:
        skip = max(0, at - p.offset)
        if skip < p.nbytes:
            rest.append(slot[p.target + skip : p.target + p.nbytes].data)
    return rest


def _scatter(span: Span, slot: np.ndarray, page: memoryview, base: int, a: int, b: int) -> None:
    """Copy bytes [a, b) of the file, which lie in `page` from file offset `base`, to the slot."""
    source = np.frombuffer(page, dtype=np.uint8)
    for p in span.pieces:
        lo, hi = max(a, p.offset), min(b, p.offset + p.nbytes)
        if lo < hi:
            target = p.target + lo - p.offset
            slot[target : target + hi - lo] = source[lo - base : hi - base]
