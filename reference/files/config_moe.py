"""The feed-forward layers of a config.json: routed or dense, and packing (MODEL-8, MODEL-16)."""

from __future__ import annotations

from typing import Any, NoReturn

from reference.files.families import MXFP4, ExpertLayout, Family
from reference.files.strict_json import show
from reference.vocab.config import (
    ActivationSpec,
    DenseSpec,
    ExpertStorage,
    MoeSpec,
    PackedSpec,
    RouterSpec,
    SharedExpertSpec,
)
from reference.vocab.errors import BadInput, Unsupported

PACKINGS = "fp8 (e4m3) with a weight_block_size, mxfp4, or unpacked F32, F16 or BF16 weights"


def packing(family: Family, raw: dict[str, Any], where: str) -> PackedSpec | None:
    """What quantization_config says of the weights (MODEL-16).

    Errors: Unsupported for a method, or a form of one, that this version cannot unpack.
    """
    told = raw.get("quantization_config")
    if told is None:
        return None
    table = told if isinstance(told, dict) else {}
    method = table.get("quant_method", told)
    said = f"quantization_config '{show(method, 40)}'"
    if method == "mxfp4" and any(layout.packed == "mxfp4" for layout in family.layouts):
        return MXFP4
    if method != "fp8":
        raise Unsupported(where, said, f"{PACKINGS}; take an unpacked copy of the model")
    block = table.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_block, block)):
        said = f"{said} with weight_block_size {show(block, 40)}"
        raise Unsupported(where, said, f"{PACKINGS}, of two sizes")
    for key, allowed in (("fmt", ("e4m3", None)), ("activation_scheme", ("dynamic", None))):
        if table.get(key) not in allowed:
            raise Unsupported(where, f"{said} with {key} {show(table[key], 40)}", str(allowed[0]))
    return PackedSpec("fp8_block", (block[0], block[1]))


def _is_block(size: Any) -> bool:
    return type(size) is int and 1 <= size <= 1 << 20


def feed_forwards(
    family: Family, v: dict[str, Any], packed: PackedSpec | None, where: str
) -> list[MoeSpec | DenseSpec]:
    """One spec a layer; `v` are the resolved fields (MODEL-8). Errors: BadInput."""
    dense = DenseSpec(v["dense.intermediate"], bias=v["dense.bias"])
    moe = _moe(family, v, packed, where) if v["moe.experts"] else None
    last = v["layers"] - 1 if v["moe.last"] == -1 else v["moe.last"]
    specs: list[MoeSpec | DenseSpec] = []
    for i in range(v["layers"]):
        routed = (i + 1) % v["moe.step"] == 0 and v["moe.first"] <= i <= last
        if moe and routed and i not in v["moe.dense_layers"]:
            specs.append(moe)
            continue
        if not dense.intermediate:
            name = "dense.intermediate" if "dense.intermediate" in family.config else "moe.experts"
            _missing(name, family, where)
        specs.append(dense)
    return specs


def _missing(name: str, family: Family, where: str) -> NoReturn:
    """A field that this model needs was not given, or is zero."""
    raise BadInput(f"{where}: {family.config[name].keys[0]} of at least 1 is needed")


def _moe(family: Family, v: dict[str, Any], packed: PackedSpec | None, where: str) -> MoeSpec:
    experts, top_k = v["moe.experts"], v["moe.top_k"]
    if top_k > experts:
        key = family.config["moe.top_k"].keys[0]
        raise BadInput(f"{where}: {key} is {top_k}; at most the {experts} experts can be chosen")
    if not top_k:
        _missing("moe.top_k", family, where)
    if not v["moe.intermediate"]:
        _missing("moe.intermediate", family, where)
    storage = usual_storage(family, packed)
    check_rows(v["hidden"], v["moe.intermediate"], storage, where)
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        intermediate=v["moe.intermediate"],
        router=_router(family, v, where),
        activation=ActivationSpec(
            v["activation.kind"], v["activation.limit"], v["activation.alpha"]
        ),
        expert_bias=v["moe.bias"],
        shared=_shared(v),
        storage=storage,
    )


def usual_storage(family: Family, packed: PackedSpec | None) -> ExpertStorage:
    """How experts are stored as far as config.json tells; a checkpoint's tensors decide."""

    def fits(layout: ExpertLayout) -> bool:
        return (layout.packed == "mxfp4") == (packed is not None and packed.kind == "mxfp4")

    layout = next((x for x in family.layouts if fits(x)), None)
    if layout is None:
        return ExpertStorage()
    split = packed is not None and packed.kind == "fp8_block" and not layout.interleaved
    return layout.storage(packed if split else None)


def check_rows(hidden: int, intermediate: int, storage: ExpertStorage, where: str) -> None:
    """32 numbers of a row share a scale of mxfp4; half a group is not defined (NUM-19)."""
    if storage.packed is not None and storage.packed.kind == "mxfp4":
        for name, width in (("hidden_size", hidden), ("intermediate_size", intermediate)):
            if width % 32:
                raise Unsupported(where, f"mxfp4 with {name} {width}", "multiples of 32")


def _router(family: Family, v: dict[str, Any], where: str) -> RouterSpec:
    grouped = v["router.grouped"]
    groups, top_groups = (v["router.groups"], v["router.top_groups"]) if grouped else (1, 1)
    experts, top_k, score = v["moe.experts"], v["moe.top_k"], v["router.group_score"]
    width = experts // groups
    least = 2 if score == "top2_sum" and groups > 1 else 1
    if experts % groups or not 1 <= top_groups <= groups or width < least:
        raise BadInput(
            f"{where}: {top_groups} of {groups} groups of {experts} experts; a divisor of the "
            f"experts with at least {least} in a group, and at most all groups, are needed"
        )
    if top_groups * width < top_k:
        raise BadInput(f"{where}: {top_groups} groups of {width} experts do not hold {top_k}")
    if v["router.score"] == "sparsemixer" and top_k != 2:
        key = family.config["moe.top_k"].keys[0]
        raise Unsupported(where, f"{key} {top_k} with this router", "2")
    return RouterSpec(
        score=v["router.score"],
        renormalise=v["router.renormalise"],
        renorm_eps=v["router.renorm_eps"],
        renorm_min=v["router.renorm_min"],
        scale=v["router.scale"],
        bias=v["router.bias"],
        selection_bias=v["router.selection_bias"],
        groups=groups,
        top_groups=top_groups,
        group_score=score,
        jitter=v["router.jitter"],
    )


def _shared(v: dict[str, Any]) -> SharedExpertSpec | None:
    """Stated by its width, or as a number of experts that are one of so many times the width."""
    width = v["shared.intermediate"] or v["shared.count"] * v["moe.intermediate"]
    if not width:
        return None
    return SharedExpertSpec(width, gated=v["shared.gated"], bias=v["shared.bias"])
