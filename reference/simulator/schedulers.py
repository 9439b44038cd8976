"""The schedulers of the comparison as data: every policy that others published and that this
project's control plane can follow, beside its own (GRID-1).

kind
    baseline    realistic and causal: decides from what has been named, guesses nothing
    predictive  realistic and causal: lock-step that reads ahead what a predictor expects
    cpu         realistic and causal, on more hardware: the processor beside a discrete GPU computes
                missed experts too (cpu_misses.py)
    ours        requests go on each for itself: the published idea, and this project's scheduler
    bound       knows what nobody can know
Each published scheme has the cache that it was published with (`cache` "published"), and where that
is not one LRU a layer, a twin that has (`cache` "per-layer").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from reference.simulator.costs import Reading
from reference.simulator.models import ModelShape
from reference.vocab.errors import BadInput
from reference.vocab.options import EVICTIONS

Kind = Literal["baseline", "predictive", "cpu", "ours", "bound"]


@dataclass(frozen=True)
class Preset:
    """A scheduler of the comparison.

    options   fields of ControlOptions; `prefetch` counts in parts of the model's top_k: 1.0 is all
    predict   a name for `reference.prediction.simulated`, "next-gate" for the accuracy that was
              published for the model, "token" for that of a table by token id, "" for none
    reading   how it reads the disk where that is its point; None: as all others do
    """

    name: str
    kind: Kind
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    predict: str = ""
    cache: Literal["published", "per-layer"] = "published"
    reading: Reading | None = None

    def policies(self, model: ModelShape) -> dict[str, Any]:
        """Keyword arguments for reference.simulator.run.control."""
        given = dict(self.options)
        if "prefetch" in given:
            given["prefetch"] = max(1, round(given["prefetch"] * model.top_k))
        return given

    def predictor(self, model: ModelShape) -> str:
        """What `simulate` calls the predictor."""
        if self.predict == "token":
            return TOKEN_TABLE.get(model.name, OTHER_TABLES)
        return NEXT_GATE.get(model.name, OTHER_GATES) if self.predict == "next-gate" else (
            self.predict)  # fmt: skip


NEXT_GATE = {
    "mixtral-8x7b": "next-gate-mixtral",
    "deepseek-v2-lite": "next-gate-dsv2-lite",
    "qwen3-30b-a3b": "next-gate-qwen3",
}
OTHER_GATES = "next-gate-qwen3"
"""gpt-oss and OLMoE: nothing published; the best of the others, in the baseline's favour."""

TOKEN_TABLE = {"mixtral-8x7b": "token-mixtral", "olmoe-1b-7b": "token-olmoe"}
OTHER_TABLES = "token-olmoe"
"""The others: nothing published; the better of the two, in the baseline's favour."""

LOCKSTEP: dict[str, Any] = {"grouping": "lockstep"}
BLOCKING: dict[str, Any] = {"grouping": "lockstep-blocking"}
BEVY: dict[str, Any] = {"grouping": "interleaved", "readiness": "visit",
                        "fetch_order": "least-progress", "eviction": "per-layer"}  # fmt: skip
OURS: dict[str, Any] = {
    "grouping": "balanced",
    "eviction": "frequency" if "frequency" in EVICTIONS else "lfru",
}
AHEAD: dict[str, Any] = {"prefetch": 1.0}
_BEVY = "Bevy's public summary (Yu, Lee: Accelerating Offloading-Based MoE Inference by " \
        "Interleaving Concurrent Requests): the idea; details are this project's"  # fmt: skip

PRESETS: tuple[Preset, ...] = (
    # On demand, in lock-step.
    Preset("on-demand-blocking-global", "baseline",
           "llama.cpp and others: copied when missed, nothing computed meanwhile, one LRU as the "
           "page cache is; read as fast as the disk can", {**BLOCKING, "eviction": "global"}),
    Preset("on-demand-blocking-layer", "baseline", "the same with one LRU a layer",
           {**BLOCKING, "eviction": "per-layer"}, cache="per-layer"),
    Preset("on-demand-overlapped-global", "baseline",
           "what is there is computed while the rest is read; one LRU",
           {**LOCKSTEP, "eviction": "global"}),
    Preset("on-demand-overlapped-layer", "baseline", "the same with one LRU a layer",
           {**LOCKSTEP, "eviction": "per-layer"}, cache="per-layer"),
    Preset("memory-mapped", "baseline",
           "llama.cpp with mmap: page faults, 128 KiB read ahead, one at a time",
           {**BLOCKING, "eviction": "global"}, reading=Reading(1, 128 << 10, 1)),
    # Other caches under overlapped lock-step.
    Preset("lockstep-lfu", "baseline", "least frequently used", {**LOCKSTEP, "eviction": "lfu"}),
    Preset("lockstep-lfru", "baseline",
           "frequency, of equals the least recent: best online policy of 2608.07911",
           {**LOCKSTEP, "eviction": "lfru"}),
    Preset("lockstep-least-stale", "baseline", "SpecMD: what this pass has not touched goes first",
           {**LOCKSTEP, "eviction": "least-stale"}),
    Preset("lockstep-known-demand", "baseline",
           "HOBBIT (2411.01433), its distance in layers, then frequency; no prefetch",
           {**LOCKSTEP, "eviction": "known-demand"}),
    Preset("lockstep-adaptive", "baseline", "AdapMoE (2408.10284): slots move between layers",
           {**LOCKSTEP, "eviction": "adaptive"}),
    # Asynchronous, without guesses.
    Preset("micro-queues", "baseline",
           "AMoE (2505.08944): a queue a layer, the defrag score; its experts were all in memory",
           {"grouping": "micro-queues", "readiness": "expert", "eviction": "per-layer"}),
    # Predictive, in lock-step.
    Preset("mixtral-offloading", "predictive",
           "2312.17238: the next layer's gate on this layer's state; LRU a layer, as published",
           {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "next-gate"),
    Preset("adapmoe", "predictive", "2408.10284: next gate, slots divided by what layers need",
           {**LOCKSTEP, **AHEAD, "eviction": "adaptive"}, "next-gate"),
    Preset("hobbit", "predictive",
           "2411.01433: next gate, cache by recency, frequency and layer distance; one precision",
           {**LOCKSTEP, **AHEAD, "eviction": "known-demand"}, "next-gate"),
    Preset("moe-infinity", "predictive",
           "2401.14361: the nearest of the stored activation matrices; activation-aware cache, "
           "here frequency then recency", {**LOCKSTEP, **AHEAD, "eviction": "lfru"}, "activation"),
    Preset("moe-infinity-layer", "predictive", "the same with one LRU a layer",
           {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "activation", "per-layer"),
    Preset("promoe", "predictive",
           "2410.22134: a trained predictor a layer, here an oracle that is right nine times in "
           "ten; LRU a layer, as published", {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "0.9"),
    Preset("layerscope", "predictive",
           "2509.23638: 0.94 of the top four right; cache by popularity",
           {**LOCKSTEP, **AHEAD, "eviction": "lfru"}, "0.94"),
    Preset("layerscope-layer", "predictive", "the same with one LRU a layer",
           {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "0.94", "per-layer"),
    Preset("layer-table", "predictive",
           "a statistical predictor that counts neighbouring layers and the last token; no paper's",
           {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "layer"),
    Preset("token-table", "predictive",
           "a table by token id, here an oracle as right as tables of OLMoE's and Mixtral's "
           "published counts; no paper's", {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "token"),
    Preset("klotski", "predictive",
           "2502.06888: all requests as one group; hot experts of the next layer from a "
           "correlation table, 0.59 right, most wanted first; experts are streamed: one LRU",
           {**LOCKSTEP, "prefetch": 0.5, "eviction": "global"}, "0.589"),
    Preset("klotski-layer", "predictive", "the same with one LRU a layer",
           {**LOCKSTEP, "prefetch": 0.5, "eviction": "per-layer"}, "0.589", "per-layer"),
    # Missed experts computed by the processor.
    Preset("fiddler", "cpu",
           "2402.07033: popular experts stay; each missed one where it is done sooner"),
    Preset("ktransformers", "cpu",
           "popular experts stay; all others by the processor, beside the GPU"),
    # What nobody can know.
    Preset("oracle", "bound", "the next layer is known, in lock-step, one LRU a layer",
           {**LOCKSTEP, **AHEAD, "eviction": "per-layer"}, "perfect"),
    Preset("belady", "bound", "lock-step whose cache knows all that comes, no more than the "
           "longer of its reads and its compute counted", {"eviction": "global"}),
    Preset("informed", "bound", "the same with a cache that knows how likely each request is to "
           "choose each expert, but not what it will choose", {"eviction": "global"}),
    Preset("bevy-oracle", "bound", "the next layer is known, on top of Bevy",
           {**BEVY, **AHEAD}, "perfect"),
    Preset("ours-oracle", "bound", "the next layer is known, on top of `ours-alone`",
           {**OURS, **AHEAD}, "perfect"),
    Preset("ours-3-ahead", "bound", "`ours`, told as well of the next three layers at a time",
           {**OURS, **AHEAD}, "0.94@3"),
    Preset("ours-oracle-3", "bound", "the next three layers are known, on top of `ours-alone`",
           {**OURS, **AHEAD}, "perfect@3"),
    # Requests at their own pace.
    Preset("bevy", "ours", _BEVY, BEVY),
    Preset("bevy-expert", "ours", "Bevy, each expert run as soon as it is there",
           {**BEVY, "readiness": "expert"}),
    Preset("bevy-next-gate", "ours", "Bevy with a next-gate predictor on top",
           {**BEVY, **AHEAD}, "next-gate"),
    Preset("bevy-activation", "ours", "Bevy with activation matrices on top",
           {**BEVY, **AHEAD}, "activation"),
    Preset("bevy-layer-table", "ours", "Bevy with the statistical predictor on top",
           {**BEVY, **AHEAD}, "layer"),
    Preset("lockstep-frequency", "ours", "lock-step over the cache of `ours-alone`: its worth",
           {**LOCKSTEP, "eviction": OURS["eviction"]}),
    Preset("balanced", "ours", "the self-balancing scheduler over one LRU a layer",
           {"grouping": "balanced", "eviction": "per-layer"}, cache="per-layer"),
    Preset("ours-alone", "ours", "the self-balancing scheduler with its own cache", OURS),
    Preset("ours", "ours", "the same, with guesses as good as the best baseline's: 0.94 right",
           {**OURS, **AHEAD}, "0.94"),
    Preset("ours-next-gate", "ours", "`ours-alone` with a next-gate predictor on top",
           {**OURS, **AHEAD}, "next-gate"),
)  # fmt: skip

BY_NAME = {p.name: p for p in PRESETS}


def preset(name: str) -> Preset:
    """The preset of a name. Raises BadInput for an unknown one."""
    if name not in BY_NAME:
        raise BadInput(f"scheduler: unknown {name!r}; there are: {', '.join(BY_NAME)}")
    return BY_NAME[name]
