"""A model of which only config.json is there: the sizes of its tensors, from the description.

For planning before anything is downloaded. It answers what a Checkpoint answers about sizes, and
reads no weights (PLAN-4).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from reference.files import strict_json
from reference.files.config_json import model_config
from reference.files.finder import FP8
from reference.files.layout import (
    SCALE,
    Shape,
    expert_shapes,
    layer_roles,
    scale_shape,
    top_roles,
)
from reference.files.regular import inside, read_small
from reference.files.safetensors_header import BITS, TensorRef
from reference.files.shards import INDEX, SINGLE, model_directory
from reference.files.strict_json import place
from reference.vocab.config import ModelConfig, MoeSpec

MAX_CONFIG = 16_000_000
UNTOLD = "BF16"
"""The dtype taken where config.json names none."""
PLAIN = ("router", "shared_router")
"""Matrices of a layer that no packed checkpoint packs."""


def is_bare(path: str | os.PathLike[str]) -> bool:
    """Whether the directory has a config.json and no safetensors weights."""
    directory = Path(path)
    return os.path.lexists(directory / "config.json") and not any(
        os.path.lexists(directory / name) for name in (SINGLE, INDEX)
    )


class BareModel:
    """What config.json says of tensors that are not there. `assumed` tells what it does not say."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path, self.config = path, config
        self.notes = config.notes
        dtype = config.stored or UNTOLD
        self.assumed = [
            f"no weights here: sizes follow from config.json at {dtype}"
            + ("" if config.stored else ", which it does not name")
        ]
        self._file = path / "config.json"
        self._dtype = dtype
        self._roles: dict[str, TensorRef] = {}
        for role, shape in top_roles(config):
            self._roles[role] = self._ref(dtype, shape)
        packed = config.packed
        for i, layer in enumerate(config.layers):
            for role, shape in layer_roles(config, layer):
                name = f"layers.{i}.{role}"
                fp8 = packed is not None and packed.kind == "fp8_block" and len(shape) == 2
                if packed is None or not fp8 or role in PLAIN:
                    self._roles[name] = self._ref(dtype, shape)
                else:
                    self._roles[name] = self._ref(FP8, shape)
                    self._roles[name + SCALE] = self._ref("F32", scale_shape(packed, shape))
        if packed is not None and packed.kind == "fp8_block":
            self.assumed.append("every matrix of a layer but its router is taken to be FP8")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> BareModel:
        """Reads and checks config.json. Errors: BadInput, Unsupported, as Checkpoint.open."""
        directory = model_directory(Path(path))
        file = inside(directory, "config.json")
        raw = strict_json.parse(read_small(file, MAX_CONFIG), place(file))
        return cls(directory, model_config(raw, place(file)))

    def _ref(self, dtype: str, shape: Shape) -> TensorRef:
        nbytes = math.prod(shape) * BITS[dtype] // 8
        return TensorRef(self._file, 0, nbytes, dtype, shape)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role but the routed experts'."""
        return tuple(self._roles)

    def tensor(self, role: str) -> TensorRef:
        """The size of the tensor of a role; its place means nothing."""
        return self._roles[role]

    def has(self, role: str) -> bool:
        """Whether the model has this tensor."""
        return role in self._roles

    @property
    def expert_roles(self) -> tuple[str, ...]:
        """The names of an expert's tensors."""
        return tuple(self._expert_shapes(self.config.moe_layers[0]))

    def _expert_shapes(self, layer: int) -> dict[str, Shape]:
        moe = self.config.layers[layer].feed_forward
        assert isinstance(moe, MoeSpec)
        return expert_shapes(self.config, moe)

    def expert(self, layer: int, expert: int) -> tuple[TensorRef, ...]:
        """The sizes of a routed expert's tensors, in the order of `expert_roles`."""
        moe = self.config.layers[layer].feed_forward
        assert isinstance(moe, MoeSpec) and 0 <= expert < moe.experts
        packed = moe.storage.packed
        refs = []
        for role, shape in self._expert_shapes(layer).items():
            if packed is None or role.endswith("_bias"):
                dtype = self._dtype
            elif role.endswith(SCALE):
                dtype = "F32" if packed.kind == "fp8_block" else "U8"
            else:
                dtype = FP8 if packed.kind == "fp8_block" else "U8"
            refs.append(self._ref(dtype, shape))
        return tuple(refs)

    def expert_bytes(self, layer: int | None = None) -> int:
        """Bytes of the largest routed expert, of one layer or of all; 0 for a dense model."""
        layers = self.config.moe_layers if layer is None else (layer,)
        return max((sum(r.nbytes for r in self.expert(la, 0)) for la in layers), default=0)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts together."""
        each = (sum(r.nbytes for r in self.expert(la, 0)) for la in self.config.moe_layers)
        return self.config.experts * sum(each)

    @property
    def non_expert_bytes(self) -> int:
        """Bytes of all other tensors, as stored."""
        return sum(ref.nbytes for ref in self._roles.values())
