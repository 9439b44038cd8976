"""A checkpoint directory, opened for reading by position (FILE-1 to FILE-10, MODEL-10, MODEL-11).

Opening reads config.json and the headers of the weight files and checks every tensor that the model
needs; weights are read later, tensor by tensor, with `pread`. Nothing is mapped into memory.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from reference.files import strict_json
from reference.files.config_json import family_of, model_config, with_generation
from reference.files.plan import Plan
from reference.files.regular import Identity, inside, open_regular, pread_into, read_small, reason
from reference.files.safetensors_header import TensorRef
from reference.files.shards import model_directory, read_shards
from reference.files.strict_json import place
from reference.vocab.errors import BadInput, CoveyError

__all__ = ["RAW", "Checkpoint", "TensorRef"]

MAX_CONFIG = 16_000_000
RAW: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"), "U8": np.dtype("u1"), "I8": np.dtype("i1"), "BOOL": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "F8_E8M0": np.dtype("u1"),
    "U16": np.dtype("<u2"), "I16": np.dtype("<i2"), "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"), "U64": np.dtype("<u8"), "I64": np.dtype("<i8"),
}  # fmt: skip
"""The NumPy type that holds a dtype's bits; types NumPy has not are unsigned integers."""
_COMPARE = 16 << 20


class Checkpoint:
    """An open model directory. Safe to use from several threads.

    path, config           the directory and what the model is
    expert_roles           the names of an expert's tensors, in the order of `expert()`
    notes                  what was ignored, in words
    """

    def __init__(self, path: Path, plan: Plan, identity: dict[Path, Identity]) -> None:
        self.path = path
        self.config = replace(plan.config, notes=tuple(plan.notes))
        self.notes = self.config.notes
        self.expert_roles = plan.expert_roles
        self._roles = plan.roles
        self._experts = plan.experts
        self._identity = identity
        self._largest: dict[int, int] = {}
        for (layer, _), refs in plan.experts.items():
            size = sum(ref.nbytes for ref in refs)
            self._largest[layer] = max(size, self._largest.get(layer, 0))
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open and check a directory.

        Errors: BadInput or Unsupported, one line naming file, field, value and what is right.
        """
        directory = model_directory(Path(path))
        file = inside(directory, "config.json")
        where = place(file)
        raw = strict_json.parse(read_small(file, MAX_CONFIG), where)
        config = model_config(raw, where)
        if os.path.lexists(directory / "generation_config.json"):
            file = inside(directory, "generation_config.json")
            more = strict_json.parse(read_small(file, MAX_CONFIG), place(file))
            config = with_generation(config, more, place(file))
        headers, tensors = read_shards(directory)
        plan = Plan(directory, config, family_of(raw, where), tensors)
        if raw.get("auto_map"):
            plan.notes.append("the folder brings code of its own (auto_map), which is not run")
        self = cls(directory, plan, {h.file: h.identity for h in headers})
        if plan.tied_copy is not None:
            self._check_copy(plan.roles["embed"], plan.tied_copy)
        return self

    # -- what there is ---------------------------------------------------------------------------

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files."""
        return tuple(self._identity)

    @property
    def pins(self) -> dict[Path, Identity]:
        """The identity of each weight file when it was opened (FILE-9)."""
        return dict(self._identity)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role but the routed experts'."""
        return tuple(self._roles)

    def has(self, role: str) -> bool:
        """Whether the model has this tensor (a tied model has no "lm_head": use "embed")."""
        return role in self._roles

    def tensor(self, role: str) -> TensorRef:
        """Where the tensor of a role is. Errors: KeyError for a role that this model lacks."""
        return self._roles[role]

    def expert(self, layer: int, expert: int) -> tuple[TensorRef, ...]:
        """The tensors of one routed expert, in the order of `expert_roles`."""
        return self._experts[layer, expert]

    def expert_bytes(self, layer: int | None = None) -> int:
        """Bytes of the largest routed expert, of one layer or of all; 0 for a dense model."""
        if layer is None:
            return max(self._largest.values(), default=0)
        return self._largest.get(layer, 0)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts together."""
        return sum(ref.nbytes for refs in self._experts.values() for ref in refs)

    @property
    def non_expert_bytes(self) -> int:
        """Bytes of all other tensors, as stored."""
        return sum(ref.nbytes for ref in self._roles.values())

    # -- reading ---------------------------------------------------------------------------------

    def read(self, ref: TensorRef) -> np.ndarray:
        """The tensor's raw bits in a new array of its shape (BF16 as uint16, see `RAW`).

        Errors: BadInput if the file was replaced, changed or truncated since it was opened
        (FILE-9); CoveyError if the system cannot read it.
        """
        out = np.empty(ref.shape, RAW[ref.dtype])
        if ref.nbytes:
            self.read_into(ref, out.reshape(-1).view(np.uint8).data)
        return out

    def read_into(self, ref: TensorRef, buffer: memoryview) -> None:
        """Fill `buffer` (exactly `ref.nbytes` bytes) with the tensor's bytes. Errors as `read`."""
        if len(buffer) != ref.nbytes:
            raise ValueError(f"a buffer of {len(buffer)} bytes for a tensor of {ref.nbytes}")
        where = place(ref.file)
        fd = self._fd(ref.file)
        try:
            pread_into(fd, buffer, ref.offset, where)
        except OSError as e:
            span = f"bytes {ref.offset} to {ref.offset + ref.nbytes}"
            raise CoveyError(f"{where}: {span} cannot be read: {reason(e)}") from None
        self.check_unchanged(ref.file, fd)

    def open_fd(self, file: Path, extra_flags: int = 0) -> int:
        """A new descriptor for a weight file, which the caller closes; `extra_flags` as O_DIRECT.

        Errors: BadInput if the file is not the one that was opened; OSError (EINVAL) where the
        file system does not take the flags.
        """
        fd, identity = open_regular(file, extra_flags)
        if identity != self._identity[file]:
            os.close(fd)
            raise _changed(file)
        return fd

    def check_unchanged(self, file: Path, fd: int | None = None) -> None:
        """Errors: BadInput if the file behind the path, or `fd`, is not what was opened."""
        pinned = self._identity[file]
        try:
            same = Identity.of(os.stat(file)) == pinned
            same = same and (fd is None or Identity.of(os.fstat(fd)) == pinned)
        except OSError:
            same = False
        if not same:
            raise _changed(file)

    def _fd(self, file: Path) -> int:
        with self._lock:
            if file not in self._fds:
                self._fds[file] = self.open_fd(file)
            return self._fds[file]

    def _check_copy(self, embed: TensorRef, copy: TensorRef) -> None:
        """A tied model's lm_head must equal the embedding (MODEL-11).

        All bytes are compared up to 16 MiB, beyond that 256 blocks spread evenly.
        """
        same = embed.nbytes == copy.nbytes and embed.dtype == copy.dtype
        blocks = 256 if embed.nbytes > _COMPARE else 1
        length = _COMPARE // blocks if blocks > 1 else embed.nbytes
        for b in range(blocks if same else 0):
            start = (embed.nbytes - length) * b // max(1, blocks - 1)
            pieces = [
                self.read(TensorRef(r.file, r.offset + start, length, "U8", (length,)))
                for r in (embed, copy)
            ]
            same = same and np.array_equal(pieces[0], pieces[1])
        if not same:
            raise BadInput(
                f"{place(copy.file)}: tie_word_embeddings is true, but the output head differs "
                "from the embedding; with tie_word_embeddings false both would be used"
            )

    def close(self) -> None:
        """Close the descriptors. Reading again opens them anew, if the files are the same."""
        with self._lock:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            self.close()


def _changed(file: Path) -> BadInput:
    return BadInput(
        f"{place(file)}: was replaced, changed or removed while in use; open the model again"
    )
