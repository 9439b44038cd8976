"""Which experts were hot: kept from one run to the next, so that a run begins with a useful cache.

    {"residency": 1, "fingerprint": "sha256:..", "model": {..},
     "experts": [[layer, expert, heat], ..]}

The hottest come first. Heat is how many visits named the expert, and half of what an earlier file
said. The fingerprint is of what routes: the description and the routers' weights, so that a copy
of the model in another layout shares it and a model with other routers does not (WARM-3).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.checkpoint import Checkpoint
from reference.files.regular import read_small
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

VERSION = 1
MAX_BYTES = 64_000_000

Heat = Mapping[tuple[int, int], float]


def fingerprint(ckpt: Checkpoint) -> str:
    """Of the experts' numbers and of all routers' bytes, in the order of the layers."""
    c = ckpt.config
    told = [c.family, c.hidden, len(c.layers), list(c.moe_layers), c.experts, c.top_k]
    digest = hashlib.sha256(json.dumps(told).encode())
    for layer in c.moe_layers:
        for role in ("router", "router_bias", "selection_bias"):
            if ckpt.has(name := f"layers.{layer}.{role}"):
                digest.update(ckpt.read(ckpt.tensor(name)).tobytes())
    return f"sha256:{digest.hexdigest()}"


def document(ckpt: Checkpoint, heat: Heat, before: Heat | None = None) -> dict[str, Any]:
    """What is written: the heat of a run and half of what was known before, hottest first."""
    total: dict[tuple[int, int], float] = {key: value / 2 for key, value in (before or {}).items()}
    for key, value in heat.items():
        total[key] = total.get(key, 0.0) + value
    c = ckpt.config
    order = sorted(total, key=lambda key: (-total[key], key))
    return {
        "residency": VERSION,
        "fingerprint": fingerprint(ckpt),
        "model": {"family": c.family, "layers": len(c.layers), "experts": c.experts,
                  "top_k": c.top_k},
        "experts": [[*key, total[key]] for key in order if total[key] >= 0.01],
    }  # fmt: skip


def read_residency(path: Path, ckpt: Checkpoint) -> dict[tuple[int, int], float]:
    """Heat by (layer, expert), the hottest first.

    Errors: BadInput for a file that is not one, for another model, and for experts that it has not.
    """
    where = place(path)
    found = strict_json.parse(read_small(path, MAX_BYTES), where)
    if not isinstance(found, dict) or found.get("residency") != VERSION:
        raise BadInput(f"{where}: not a residency file of version {VERSION}")
    if found.get("fingerprint") != (ours := fingerprint(ckpt)):
        raise BadInput(
            f"{where}: is of another model (fingerprint {show(found.get('fingerprint'), 24)}; "
            f"this one has {ours[:19]}..)"
        )
    entries = found.get("experts")
    heat: dict[tuple[int, int], float] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        if not (isinstance(entry, list) and len(entry) == 3 and _is_expert(ckpt, entry[:2])):
            raise BadInput(f"{where}: experts: {show(entry, 60)}; [layer, expert, heat] is needed")
        key, value = (entry[0], entry[1]), entry[2]
        if type(value) not in (int, float) or not value >= 0 or key in heat:
            raise BadInput(f"{where}: experts: {show(entry, 60)} is there twice or has no heat")
        heat[key] = float(value)
    return dict(sorted(heat.items(), key=lambda item: (-item[1], item[0])))


def _is_expert(ckpt: Checkpoint, key: list[Any]) -> bool:
    return (
        all(type(x) is int for x in key)
        and key[0] in ckpt.config.moe_layers
        and 0 <= key[1] < ckpt.config.experts
    )


def warm_order(hottest_first: Sequence[tuple[int, int]], slots: int) -> tuple[tuple[int, int], ...]:
    """What to read into `slots` free slots, in order (WARM-2).

    Layers share alike: the hottest of each, then the second of each, and so on, since every token
    needs as many experts of every layer. What fits is read coldest first, so that the hottest are
    the most recent and the last to be evicted.
    """
    rank: dict[int, int] = {}
    ranked = []
    for position, (layer, expert) in enumerate(hottest_first):
        rank[layer] = rank.get(layer, -1) + 1
        ranked.append((rank[layer], position, (layer, expert)))
    return tuple(key for _, _, key in sorted(ranked)[:slots])[::-1]
