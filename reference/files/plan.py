"""Finding each role's tensor in a checkpoint's files, and accounting for all others (MODEL-10)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from reference.files.families import Family
from reference.files.finder import FP8, Finder
from reference.files.layout import SCALE, Shape, layer_roles, scale_shape, summarise, top_roles
from reference.files.plan_experts import Experts
from reference.files.safetensors_header import TensorRef
from reference.files.strict_json import show
from reference.vocab.config import LayerSpec, ModelConfig, MoeSpec
from reference.vocab.errors import BadInput, Unsupported

PAD = re.compile(r"__pad_\d+")
"""Filler between tensors, as `covey pack` writes it."""


class Plan:
    """Finds the tensor of every role that the config implies, and accounts for all others.

    config        the description, with what only the tensors tell: how experts are stored
    roles         every role but the routed experts' -> its tensor
    experts       (layer, expert) -> its tensors, in the order of `expert_roles`
    tied_copy     a stored output head that must equal the embedding
    """

    def __init__(
        self, directory: Path, config: ModelConfig, family: Family, tensors: dict[str, TensorRef]
    ) -> None:
        self.finder = Finder(directory, tensors)
        self.notes: list[str] = []
        self.roles: dict[str, TensorRef] = {}
        self.tied_copy: TensorRef | None = None
        self._top(config, family)
        for i, layer in enumerate(config.layers):
            prefix = family.prefix.format(i=i)
            for role, shape in layer_roles(config, layer):
                names = tuple(prefix + name for name in family.layer[role])
                self._put(f"layers.{i}.{role}", names, shape, config)
        found = Experts(self.finder, config, family)
        self.experts = found.refs
        self.expert_roles = found.roles
        if absent := self.finder.absent:
            raise BadInput(
                f"{self.finder.where}: {len(absent)} tensors that config.json implies are "
                f"missing: {summarise(absent)}"
            )
        self._extras(config, family)
        self.config = _stored_so(config, found)

    def _put(self, role: str, names: tuple[str, ...], shape: Shape, config: ModelConfig) -> None:
        packed = len(shape) == 2 and self.finder.is_fp8(names)
        if not packed:
            if ref := self.finder.find(names, shape):
                self.roles[role] = ref
            return
        if config.packed is None or config.packed.kind != "fp8_block":
            raise Unsupported(
                self.finder.where,
                f"tensor '{self.finder.first(names)}' with a scale",
                "such a tensor where quantization_config of config.json states weight_block_size",
            )
        ref = self.finder.find(names, shape, (FP8,))
        scale = self.finder.scale(names, scale_shape(config.packed, shape))
        if ref and scale:
            self.roles[role], self.roles[role + SCALE] = ref, scale

    def _top(self, config: ModelConfig, family: Family) -> None:
        for role, shape in top_roles(config):
            names = family.tensors[role]
            if role == "embed" and config.tied:
                names += family.tensors["lm_head"]
            self._put(role, names, shape, config)
        if config.tied and "embed" in self.roles:
            copies = [n for n in family.tensors["lm_head"] if n in self.finder.tensors]
            if copies and copies[0] not in self.finder.used:
                self.tied_copy = self.finder.find((copies[0],), (config.vocab, config.hidden))

    def _extras(self, config: ModelConfig, family: Family) -> None:
        """Tensors without a role: known harmless ones are ignored, others refused (MODEL-12)."""
        layer = re.compile(re.escape(family.prefix).replace(r"\{i\}", r"(\d+)"))
        later: list[str] = []
        odd: list[str] = []
        unused = self.finder.tensors.keys() - self.finder.used
        beside = [name for name in unused if name.startswith(family.ignore)]
        for name in unused.difference(beside):
            found = layer.match(name)
            if found and int(found[1]) >= len(config.layers):
                later.append(name)
            elif not name.endswith("rotary_emb.inv_freq") and not PAD.fullmatch(name):
                odd.append(name)
        if odd:
            raise BadInput(
                f"{self.finder.where}: {len(odd)} tensors have no place in the model that "
                f"config.json describes: {show(summarise(odd), 1500)}"
            )
        if later:
            self.notes.append(
                f"{len(later)} tensors of layers from {len(config.layers)} on are ignored"
            )
        if beside:
            self.notes.append(f"{len(beside)} tensors that are no part of the model are ignored")


def _stored_so(config: ModelConfig, found: Experts) -> ModelConfig:
    """The description with the storage of the experts that was found."""

    def layer(spec: LayerSpec) -> LayerSpec:
        if not isinstance(spec.feed_forward, MoeSpec):
            return spec
        return replace(spec, feed_forward=replace(spec.feed_forward, storage=found.storage))

    if found.storage is None:
        return config
    return replace(config, layers=tuple(map(layer, config.layers)))
