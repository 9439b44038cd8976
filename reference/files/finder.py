"""The tensors of a directory, looked up by name and checked (MODEL-10, MODEL-17)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reference.files.layout import Shape
from reference.files.safetensors_header import TensorRef
from reference.files.strict_json import place
from reference.vocab.errors import BadInput, Unsupported

WEIGHTS = ("F32", "F16", "BF16")
"""The dtypes that an unpacked weight may have."""
FP8, FP8_SUFFIX = "F8_E4M3", "_scale_inv"
"""The dtype of a packed matrix, and what the name of its scale has more (MODEL-17)."""


class Finder:
    """The tensors of a directory; remembers which were used and which were looked for in vain."""

    def __init__(self, directory: Path, tensors: dict[str, TensorRef]) -> None:
        self.where = place(directory)
        self.tensors = tensors
        self.used: set[str] = set()
        self.absent: dict[str, None] = {}

    def find(
        self, names: tuple[str, ...], shape: Shape, dtypes: tuple[str, ...] = WEIGHTS
    ) -> TensorRef | None:
        """The first of `names` that is there, with its shape and dtype checked (MODEL-10).

        A vector may be stored with axes of length 1 before its own.
        """
        name = self.first(names)
        if name is None:
            self.absent[names[0]] = None
            return None
        ref = self.tensors[name]
        self.used.add(name)
        if len(shape) == 1 and ref.shape == (1,) * (len(ref.shape) - 1) + shape:
            ref = replace(ref, shape=shape)
        if ref.shape != shape:
            raise BadInput(
                f"{place(ref.file)}: tensor '{name}' has shape {list(ref.shape)}; "
                f"config.json implies {list(shape)}"
            )
        if ref.dtype not in dtypes:
            raise Unsupported(
                place(ref.file), f"dtype {ref.dtype} of tensor '{name}'", ", ".join(dtypes)
            )
        return ref

    def first(self, names: tuple[str, ...]) -> str | None:
        """The first of `names` that is there."""
        return next((n for n in names if n in self.tensors), None)

    def is_fp8(self, names: tuple[str, ...]) -> bool:
        """Whether the matrix of that name is packed: the scale beside it says so (MODEL-17)."""
        name = self.first(names)
        return name is not None and name + FP8_SUFFIX in self.tensors

    def scale(self, names: tuple[str, ...], shape: Shape) -> TensorRef | None:
        """The scale of the packed matrix of that name."""
        name = self.first(names) or names[0]
        return self.find((name + FP8_SUFFIX,), shape, ("F32", "BF16"))
