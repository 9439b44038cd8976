"""Which descriptions this engine can run. Everything else is refused, nothing is ignored."""

from __future__ import annotations

from jax_impl.kernels import rope
from reference.vocab.config import (
    ActivationSpec,
    AttentionSpec,
    ModelConfig,
    MoeSpec,
    PackedSpec,
    RopeSpec,
    RouterSpec,
)
from reference.vocab.errors import BadInput, Unsupported


def require_supported(config: ModelConfig, where: str) -> None:
    """Raises Unsupported for the first value of the description that no kernel here implements
    (NUM-8)."""
    check = _Check(where)
    check.known("norm", config.norm.kind, ("rms", "layer"))
    if config.packed is not None:
        check.packed("packed weights", config.packed)
    for i, spec in enumerate(config.layers):
        here = f" in layer {i}"
        check.attention(spec.attention, config.norm.kind, here)
        check.activation(spec.feed_forward.activation, here)
        if isinstance(spec.feed_forward, MoeSpec):
            check.router(spec.feed_forward.router, spec.feed_forward.experts, here)
            check.storage(spec.feed_forward, here)


def require_sizes(tile: int, wide: int, counts: dict[str, int]) -> None:
    """Raises BadInput for a count below 1, or a wide tile that small ones do not fill."""
    for name, value in (*counts.items(), ("tile", tile)):
        if value < 1:
            raise BadInput(f"{name}: {value}, need at least 1")
    if wide % tile:
        raise BadInput(f"wide: {wide}, need a multiple of tile {tile} or 0")


class _Check:
    def __init__(self, where: str) -> None:
        self.where = where

    def need(self, good: bool, what: str, supported: str) -> None:
        if not good:
            raise Unsupported(self.where, what, supported)

    def known(self, name: str, value: str, values: tuple[str, ...], here: str = "") -> None:
        self.need(value in values, f"{name} {value}{here}", ", ".join(values))

    def attention(self, a: AttentionSpec, norm: str, here: str) -> None:
        self.known("attention", a.kind, ("gqa", "mla"), here)
        self.need(a.window is None or a.window > 0, f"window {a.window}{here}", "1 or more")
        self.known("norm of q and k", a.qk_norm, ("none", "head", "flat"), here)
        self.need(a.qk_norm == "none" or norm == "rms", f"norm {norm} of q and k{here}", "norm rms")
        width = a.rope_dim if a.kind == "mla" else a.head_dim
        if a.kind == "mla":
            plain = a.qk_norm == "none" and a.clip is None
            self.need(plain, f"norm or clip of q and k in MLA{here}", "none")
            self.need(a.rope is not None, f"MLA without rope{here}", "rope of rope_dim entries")
            good = a.head_dim == a.nope_dim + a.rope_dim and min(a.kv_rank, a.nope_dim) > 0
            self.need(good, f"widths of MLA{here}", "head_dim = nope_dim + rope_dim, kv_rank > 0")
        else:
            good = a.heads % a.kv_heads == 0
            self.need(good, f"{a.heads} heads over {a.kv_heads}{here}", "a multiple")
        if a.rope is not None:
            self.rope(a.rope, width, here)

    def rope(self, r: RopeSpec, width: int, here: str) -> None:
        self.known("rope", r.kind, rope.SUPPORTED, here)
        good = 0 < r.dims <= width and r.dims % 2 == 0
        self.need(good, f"rope over {r.dims} entries{here}", f"an even number up to {width}")
        if r.kind == "dynamic":
            good = r.dims > 2 and r.original_max_position > 0
            self.need(good, f"dynamic rope of {r.dims} entries{here}", "4 or more, with a limit")
        if r.kind == "longrope":
            for name, factors in (("short", r.short_factor), ("long", r.long_factor)):
                good = len(factors) == r.dims // 2 or (name == "long" and not factors)
                self.need(good, f"{len(factors)} {name} factors{here}", f"{r.dims // 2}")

    def activation(self, spec: ActivationSpec, here: str) -> None:
        self.known("activation", spec.kind, ("silu_gated", "clamped_gated"), here)

    def router(self, r: RouterSpec, experts: int, here: str) -> None:
        self.known(
            "router score", r.score, ("softmax", "sigmoid", "topk_softmax", "sparsemixer"), here
        )
        plain = r.groups == 1 and not r.selection_bias
        self.need(
            plain or r.score in ("softmax", "sigmoid"),
            f"groups or selection bias with {r.score}{here}",
            "softmax, sigmoid",
        )
        if r.groups == 1:
            return
        self.known("group score", r.group_score, ("max", "top2_sum"), here)
        least = 2 if r.group_score == "top2_sum" else 1
        good = experts % r.groups == 0 and experts // r.groups >= least
        self.need(good, f"{experts} experts in {r.groups} groups{here}", "equal groups")
        self.need(0 < r.top_groups <= r.groups, f"{r.top_groups} groups{here}", f"1..{r.groups}")

    def storage(self, f: MoeSpec, here: str) -> None:
        s = f.storage
        self.known("experts stored", s.gate_up, ("split", "interleaved"), here)
        if s.packed is not None:
            self.packed(f"packed experts{here}", s.packed)
            self.need(not s.transposed, f"packed and transposed experts{here}", "[out, in]")

    def packed(self, what: str, spec: PackedSpec) -> None:
        self.known(f"{what} of kind", spec.kind, ("fp8_block", "mxfp4"))
        self.need(min(spec.block) > 0, f"{what} in blocks of {spec.block}", "blocks of 1 or more")
