"""The header of a safetensors file, read and checked without trusting it (FILE-4 to FILE-6).

Layout: 8 bytes little-endian length n, n bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {..}}`, then the data. The
offsets count from the end of the header and must cover the data exactly, without hole or overlap.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.regular import Identity, open_regular, pread_into, reason
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

MAX_HEADER = 100_000_000
MAX_DIMS = 8
MAX_DIM = 1 << 48

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Width of one element of each known dtype, in bits."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor's bytes are: `nbytes` from absolute `offset` in `file`, row-major."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. `identity` pins the file that was read."""

    file: Path
    identity: Identity
    tensors: dict[str, TensorRef]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file `path`; no tensor data is read.

    Errors: BadInput, one line naming the file, the field, its value and what would be right.
    """
    where = place(path)
    fd, identity = open_regular(path)
    size = identity.size
    try:
        if size < 8:
            raise BadInput(f"{where}: {size} bytes; a safetensors file has at least 8")
        prefix = bytearray(8)
        pread_into(fd, memoryview(prefix), 0, where)
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER:
            raise BadInput(
                f"{where}: header length {length} is over the limit of {MAX_HEADER} bytes; "
                "this is not a safetensors file, or it is damaged"
            )
        if 8 + length > size:
            raise BadInput(
                f"{where}: header length {length} is more than the file's {size} bytes hold: "
                "the file is truncated"
            )
        text = bytearray(length)
        pread_into(fd, memoryview(text), 8, where)
    except OSError as e:
        raise BadInput(f"{where}: cannot be read: {reason(e)}") from None
    finally:
        os.close(fd)
    if text[:1] != b"{":
        raise BadInput(f"{where}: the header does not begin with '{{'")
    entries = strict_json.parse(bytes(text), f"{where}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadInput(f"{where}: __metadata__ must be an object of strings")
    return Header(path, identity, _tensors(path, where, entries, 8 + length, size), metadata)


def _tensors(
    path: Path, where: str, entries: dict[str, Any], start: int, size: int
) -> dict[str, TensorRef]:
    """Check every entry alone (FILE-5), then that together they cover the data (FILE-6)."""
    data = size - start
    tensors: dict[str, TensorRef] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        dtype, shape, begin, end = _entry(where, name, entry)
        nbits = BITS[dtype]
        for dim in shape:
            nbits *= dim
        if nbits != 8 * (end - begin):
            raise BadInput(
                f"{where}: tensor '{show(name)}': shape {list(shape)} of {dtype} needs "
                f"{nbits / 8:g} bytes, but data_offsets span {end - begin}"
            )
        tensors[name] = TensorRef(path, start + begin, end - begin, dtype, shape)
        spans.append((begin, end, name))
    spans.sort()
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            what = "overlap the tensor before it" if begin < reached else "leave a hole before it"
            raise BadInput(
                f"{where}: tensor '{show(name)}': data_offsets [{begin}, {end}] {what}; "
                f"they must begin at {reached}"
            )
        reached = end
    if reached != data:
        what = "the file is truncated" if reached > data else "bytes that belong to no tensor"
        raise BadInput(f"{where}: {size} bytes, but the header describes {start + reached}: {what}")
    return tensors


def _entry(where: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one entry (FILE-5)."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        ok = len(entry) == 3 and type(shape) is list and type(offsets) is list
    except (KeyError, TypeError, IndexError):
        ok = False
        dtype = shape = offsets = None
    if not ok or shape is None or offsets is None:
        raise BadInput(
            f"{where}: tensor '{show(name)}': needs exactly dtype, shape and data_offsets "
            f"(got {show(entry, 60)})"
        )
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadInput(
            f"{where}: tensor '{show(name)}': unknown dtype {show(dtype, 30)}; "
            f"known: {', '.join(BITS)}"
        )
    if len(shape) > MAX_DIMS:
        raise BadInput(f"{where}: tensor '{show(name)}': {len(shape)} dimensions; at most 8")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= MAX_DIM:
            raise BadInput(
                f"{where}: tensor '{show(name)}': shape {show(shape, 60)}: "
                f"integers from 0 to {MAX_DIM} are needed"
            )
    if len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        raise BadInput(
            f"{where}: tensor '{show(name)}': data_offsets {show(offsets, 60)}: "
            "two integers are needed"
        )
    begin, end = offsets
    if not 0 <= begin <= end:
        raise BadInput(
            f"{where}: tensor '{show(name)}': data_offsets [{show(begin)}, {show(end)}]: "
            "0 <= begin <= end is needed"
        )
    return dtype, tuple(shape), begin, end
