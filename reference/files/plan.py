"""Finding each role's tensor in a checkpoint's files, and accounting for all others (MODEL-10)."""

from __future__ import annotations

import re
from pathlib import Path

from reference.files.families import ExpertLayout, Family
from reference.files.layout import expert_shapes, layer_roles, summarise, top_roles
from reference.files.safetensors_header import TensorRef
from reference.files.strict_json import place, show
from reference.vocab.config import ModelConfig, MoeSpec
from reference.vocab.errors import BadInput, Unsupported

WEIGHTS = ("F32", "F16", "BF16")
"""The dtypes a weight may have."""


class Plan:
    """Finds the tensor of every role that the config implies, and accounts for all others."""

    def __init__(
        self, directory: Path, config: ModelConfig, family: Family, tensors: dict[str, TensorRef]
    ) -> None:
        self.where = place(directory)
        self.tensors = tensors
        self.used: set[str] = set()
        self.absent: list[str] = []
        self.notes: list[str] = []
        self.roles: dict[str, TensorRef] = {}
        self.experts: dict[tuple[int, int], tuple[TensorRef, ...]] = {}
        self.expert_roles: tuple[str, ...] = ()
        self.tied_copy: TensorRef | None = None
        self._top(config, family)
        self._layers(config, family)
        if self.absent:
            raise BadInput(
                f"{self.where}: {len(self.absent)} tensors that config.json implies are missing: "
                f"{summarise(self.absent)}"
            )
        self._extras(config, family)

    def _find(self, names: tuple[str, ...], shape: tuple[int, ...]) -> TensorRef | None:
        """The first of `names` that is there, with its shape and dtype checked (MODEL-10)."""
        name = next((n for n in names if n in self.tensors), None)
        if name is None:
            self.absent.append(names[0])
            return None
        ref = self.tensors[name]
        self.used.add(name)
        if ref.shape != shape:
            raise BadInput(
                f"{place(ref.file)}: tensor '{name}' has shape {list(ref.shape)}; "
                f"config.json implies {list(shape)}"
            )
        if ref.dtype not in WEIGHTS:
            raise Unsupported(
                place(ref.file), f"dtype {ref.dtype} of tensor '{name}'", ", ".join(WEIGHTS)
            )
        return ref

    def _put(self, role: str, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        if ref := self._find(names, shape):
            self.roles[role] = ref

    def _top(self, config: ModelConfig, family: Family) -> None:
        for role, shape in top_roles(config):
            names = family.tensors[role]
            if role == "embed" and config.tied:
                names += family.tensors["lm_head"]
            self._put(role, names, shape)
        if config.tied and "embed" in self.roles:
            copies = [n for n in family.tensors["lm_head"] if n in self.tensors]
            if copies and copies[0] not in self.used:
                self.tied_copy = self._find((copies[0],), (config.vocab, config.hidden))

    def _layers(self, config: ModelConfig, family: Family) -> None:
        layout: ExpertLayout | None = None
        for i, layer in enumerate(config.layers):
            prefix = family.prefix.format(i=i)
            for role, shape in layer_roles(config, layer):
                names = tuple(prefix + name for name in family.layer[role])
                self._put(f"layers.{i}.{role}", names, shape)
            moe = layer.feed_forward
            if isinstance(moe, MoeSpec):
                layout = layout or self._choose(prefix, family)
                self.expert_roles = tuple(layout.roles)
                self._routed(i, prefix, layout, moe, expert_shapes(config, moe))

    def _choose(self, prefix: str, family: Family) -> ExpertLayout:
        """The layout of which a first expert's tensor is there; the usual one if none is."""
        for layout in family.layouts:
            if any(prefix + t.name.format(e=0) in self.tensors for t in layout.roles.values()):
                return layout
        return family.layouts[0]

    def _routed(
        self,
        i: int,
        prefix: str,
        layout: ExpertLayout,
        moe: MoeSpec,
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        """The experts of layer `i`: tensors of their own, or slices of stacks."""
        columns: list[list[TensorRef | None]] = []
        for role, source in layout.roles.items():
            rows, width = shapes[role]
            name = prefix + source.name
            if not source.stacked:
                columns.append(
                    [
                        self._find((name.replace("{e}", str(e)),), (rows, width))
                        for e in range(moe.experts)
                    ]
                )
                continue
            whole = self._find((name,), (moe.experts, rows * source.of, width))
            if whole is None:
                self.absent = list(dict.fromkeys(self.absent))
                return
            one = whole.nbytes // (moe.experts * source.of)
            columns.append(
                [
                    TensorRef(
                        whole.file,
                        whole.offset + (e * source.of + source.part) * one,
                        one,
                        whole.dtype,
                        (rows, width),
                    )
                    for e in range(moe.experts)
                ]
            )
        for e, refs in enumerate(zip(*columns, strict=True)):
            self.experts[i, e] = tuple(ref for ref in refs if ref is not None)

    def _extras(self, config: ModelConfig, family: Family) -> None:
        """Tensors without a role: known harmless ones are ignored, others refused (MODEL-12)."""
        layer = re.compile(re.escape(family.prefix).replace(r"\{i\}", r"(\d+)"))
        later: list[str] = []
        odd: list[str] = []
        for name in self.tensors.keys() - self.used:
            found = layer.match(name)
            if found and int(found[1]) >= len(config.layers):
                later.append(name)
            elif not name.endswith("rotary_emb.inv_freq"):
                odd.append(name)
        if odd:
            raise BadInput(
                f"{self.where}: {len(odd)} tensors have no place in the model that config.json "
                f"describes: {show(summarise(odd), 1500)}"
            )
        if later:
            self.notes.append(
                f"{len(later)} tensors of layers from {len(config.layers)} on are ignored"
            )
