"""A copy of a checkpoint in which every expert lies as a slot holds it (PACK-1).

Experts come first in each file, each from a multiple of 4096 bytes on, its tensors in the order of
a slot and from multiples of 64 bytes on; then everything else. The header is padded with spaces,
which the format allows; a hole between tensors, which it forbids, is filled by a tensor of zeros
named `__pad_N`. Sizes that are multiples anyway, as those of most models, need none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reference.files import strict_json
from reference.files.budget import ALIGN, PAGE, round_up
from reference.files.checkpoint import Checkpoint
from reference.files.config_json import family_of
from reference.files.families import Family
from reference.files.plan import PAD
from reference.files.regular import inside, read_small
from reference.files.safetensors_header import TensorRef
from reference.files.shards import INDEX, SINGLE, read_shards
from reference.vocab.errors import Unsupported

PIECE = 8 << 20
"""Bytes copied at a time."""
MAX_CONFIG = 16_000_000


@dataclass(frozen=True)
class Item:
    """One tensor of the copy. `source` None: filler."""

    name: str
    nbytes: int
    source: TensorRef | None = None


@dataclass(frozen=True)
class Copy:
    """What will be written: files by name with their items, and how many tensors are filler."""

    files: dict[str, list[Item]]
    metadata: dict[str, str]
    fillers: int
    total: int

    def header(self, name: str) -> bytes:
        """The first bytes of a file, a multiple of 4096."""
        entries: dict[str, object] = {"__metadata__": self.metadata} if self.metadata else {}
        at = 0
        for item in self.files[name]:
            ref = item.source
            entries[item.name] = {
                "dtype": ref.dtype if ref else "U8",
                "shape": list(ref.shape) if ref else [item.nbytes],
                "data_offsets": [at, at + item.nbytes],
            }
            at += item.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    def index(self) -> dict[str, object]:
        """model.safetensors.index.json of several files."""
        named = {i.name: file for file, items in self.files.items() for i in items}
        return {"metadata": {"total_size": self.total}, "weight_map": named}


def plan_copy(ckpt: Checkpoint, shard: int) -> Copy:
    """The copy of an open checkpoint, in files of about `shard` bytes.

    Raises Unsupported for experts that no reader expects one by one.
    """
    headers, tensors = read_shards(ckpt.path)
    names = {(r.file, r.offset, r.nbytes): name for name, r in tensors.items()}
    raw = strict_json.parse(read_small(inside(ckpt.path, "config.json"), MAX_CONFIG), "config.json")
    family = family_of(raw, str(ckpt.path))
    groups: list[list[Item]] = []
    starts: set[tuple[Path, int]] = set()
    for layer in ckpt.config.moe_layers:
        for expert in range(ckpt.config.experts):
            group = []
            for role, ref in zip(ckpt.expert_roles, ckpt.expert(layer, expert), strict=True):
                starts.add((ref.file, ref.offset))
                if name := names.get((ref.file, ref.offset, ref.nbytes)):
                    group.append(Item(name, ref.nbytes, tensors[name]))
                else:
                    name = _own_name(ckpt, family, role, layer, expert)
                    group.append(Item(name, ref.nbytes, ref))
            groups.append(group)
    # A stack begins where its first expert does, so nothing of it is left over.
    others = [
        Item(name, ref.nbytes, ref)
        for name, ref in tensors.items()
        if (ref.file, ref.offset) not in starts and not PAD.fullmatch(name)
    ]
    return _arranged(groups, others, shard, dict(headers[0].metadata))


def _own_name(ckpt: Checkpoint, family: Family, role: str, layer: int, expert: int) -> str:
    """The name that an expert cut out of a stack has in the layout with one tensor an expert."""
    separate = next((x for x in family.layouts if not any(
        t.stacked for t in x.roles.values())), None)
    if separate is None or role not in separate.roles or (
        separate.interleaved or separate.transposed
    ):
        raise Unsupported(
            str(ckpt.path),
            "experts stacked in one tensor, as all readers of this family expect them",
            "families that know their experts one by one",
        )
    return family.prefix.format(i=layer) + separate.roles[role].name.replace("{e}", str(expert))


def _arranged(
    groups: list[list[Item]], others: list[Item], shard: int, metadata: dict[str, str]
) -> Copy:
    files: list[list[Item]] = [[]]
    size = fillers = 0

    def fill(to: int) -> None:
        nonlocal size, fillers
        if gap := -size % to:
            files[-1].append(Item(f"__pad_{fillers}", gap))
            fillers += 1
            size += gap

    def put(item: Item) -> None:
        nonlocal size
        files[-1].append(item)
        size += item.nbytes

    for group in groups:
        room = sum(round_up(item.nbytes, ALIGN) for item in group)
        if files[-1] and size + room > shard:
            files.append([])
            size = 0
        for item in group:
            fill(ALIGN)
            put(item)
        fill(PAGE)
    for item in others:
        if files[-1] and size + item.nbytes > shard:
            files.append([])
            size = 0
        put(item)
    count = len(files)
    named = {
        SINGLE if count == 1 else f"model-{n:05}-of-{count:05}.safetensors": items
        for n, items in enumerate(files, 1)
    }
    total = sum(item.nbytes for items in files for item in items)
    return Copy(named, metadata, fillers, total)


def write_copy(
    ckpt: Checkpoint, copy: Copy, to: Path, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Writes the files of a copy into the directory `to`. `progress` hears of the bytes so far.

    Errors: OSError as the system gives it (no room is found before anything is copied, where the
    file system can tell), CoveyError when the source cannot be read or has changed.
    """
    done = 0
    for name, items in copy.files.items():
        header = copy.header(name)
        size = len(header) + sum(item.nbytes for item in items)
        fd = os.open(to / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            _write(fd, memoryview(header))
            for item in items:
                for piece in _pieces(ckpt, item):
                    _write(fd, piece)
                    done += len(piece)
                    progress(done)
            os.fsync(fd)
        finally:
            os.close(fd)
    if len(copy.files) > 1:
        text = json.dumps(copy.index(), indent=1) + "\n"
        fd = os.open(to / INDEX, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(fd, memoryview(text.encode()))
            os.fsync(fd)
        finally:
            os.close(fd)


def _pieces(ckpt: Checkpoint, item: Item) -> Iterator[memoryview]:
    """The bytes of an item, a piece at a time."""
    buffer = memoryview(bytearray(min(PIECE, item.nbytes)))
    for at in range(0, item.nbytes, PIECE):
        part = buffer[: min(PIECE, item.nbytes - at)]
        if (ref := item.source) is not None:
            whole = TensorRef(ref.file, ref.offset + at, len(part), "U8", (len(part),))
            ckpt.read_into(whole, part)
        yield part


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
