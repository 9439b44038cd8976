"""Finding the tensors of the routed experts, in whatever layout they are (MODEL-13, MODEL-17)."""

from __future__ import annotations

from dataclasses import replace

from reference.files.config_moe import check_rows
from reference.files.families import ExpertLayout, ExpertTensor, Family
from reference.files.finder import FP8, WEIGHTS, Finder
from reference.files.layout import SCALE, Shape, expert_shapes
from reference.files.safetensors_header import TensorRef
from reference.vocab.config import ExpertStorage, ModelConfig, MoeSpec
from reference.vocab.errors import Unsupported


class Experts:
    """The routed experts of all layers.

    refs      (layer, expert) -> tensors in the order of `roles`
    storage   how they are stored, the same in every layer; None for a model without experts
    """

    def __init__(self, finder: Finder, config: ModelConfig, family: Family) -> None:
        self.finder, self.config = finder, config
        self.refs: dict[tuple[int, int], tuple[TensorRef, ...]] = {}
        self.roles: tuple[str, ...] = ()
        self.storage: ExpertStorage | None = None
        layout: ExpertLayout | None = None
        for i in config.moe_layers:
            prefix = family.prefix.format(i=i)
            if layout is None:
                layout = self._choose(prefix, family)
                self.storage = self._storage(prefix, layout)
            moe = config.layers[i].feed_forward
            assert isinstance(moe, MoeSpec) and self.storage is not None
            check_rows(config.hidden, moe.intermediate, self.storage, finder.where)
            shapes = expert_shapes(config, replace(moe, storage=self.storage))
            self.roles = tuple(shapes)
            self._layer(i, prefix, layout, moe.experts, shapes)

    def _choose(self, prefix: str, family: Family) -> ExpertLayout:
        """The layout of which a first expert's tensor is there; the usual one if none is."""
        for layout in family.layouts:
            names = (
                prefix + t.name.format(e=0) for r, t in layout.roles.items() if "bias" not in r
            )
            if any(name in self.finder.tensors for name in names):
                return layout
        return family.layouts[0]

    def _storage(self, prefix: str, layout: ExpertLayout) -> ExpertStorage:
        """FP8 is seen by the scale beside the first expert's matrices (MODEL-17)."""
        names = [prefix + t.name.format(e=0) for t in layout.roles.values()]
        if not any(self.finder.is_fp8((name,)) for name in names):
            return layout.storage()
        packed = self.config.packed
        if any(t.stacked for t in layout.roles.values()):
            raise Unsupported(self.finder.where, "FP8 experts stacked in one tensor", "one by one")
        if packed is None or packed.kind != "fp8_block" or layout.interleaved:
            raise Unsupported(
                self.finder.where,
                f"tensor '{names[0]}' with a scale",
                "such a tensor where quantization_config of config.json states weight_block_size",
            )
        return layout.storage(packed)

    def _layer(
        self, i: int, prefix: str, layout: ExpertLayout, count: int, shapes: dict[str, Shape]
    ) -> None:
        """The experts of layer `i`: tensors of their own, or slices of stacks."""
        columns: list[list[TensorRef | None]] = []
        for role, shape in shapes.items():
            source = layout.roles.get(role)
            if source is not None and source.stacked:
                columns.append(self._slices(prefix, source, count, role, shape))
                continue
            name = prefix + layout.roles[role.removesuffix(SCALE)].name
            each = (name.replace("{e}", str(e)) for e in range(count))
            if role.endswith(SCALE):
                columns.append([self.finder.scale((n,), shape) for n in each])
            else:
                columns.append([self.finder.find((n,), shape, self._dtypes(role)) for n in each])
        for e, refs in enumerate(zip(*columns, strict=True)):
            self.refs[i, e] = tuple(ref for ref in refs if ref is not None)

    def _dtypes(self, role: str) -> tuple[str, ...]:
        """The dtypes that a role's tensor may have."""
        packed = self.storage.packed if self.storage else None
        if packed is None or role.endswith("_bias"):
            return WEIGHTS
        return ("U8",) if packed.kind == "mxfp4" else (FP8,)

    def _slices(
        self, prefix: str, source: ExpertTensor, count: int, role: str, shape: Shape
    ) -> list[TensorRef | None]:
        """Every expert's share of a stack [count, of * rows, ..]."""
        part, of = source.part, source.of
        stack = (count, of * shape[0], *shape[1:])
        whole = self.finder.find((prefix + source.name,), stack, self._dtypes(role))
        if whole is None:
            return [None] * count
        one = whole.nbytes // (count * of)
        return [
            TensorRef(whole.file, whole.offset + (e * of + part) * one, one, whole.dtype, shape)
            for e in range(count)
        ]
