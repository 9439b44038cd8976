"""What the head of an event log says of the model and of what the bits depend on."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from reference.files.checkpoint import Checkpoint


def describe(ckpt: Checkpoint) -> dict[str, Any]:
    """The model, for the head of a log."""
    c = ckpt.config
    return {
        "path": str(ckpt.path), "family": c.family, "hidden": c.hidden, "layers": len(c.layers),
        "vocab": c.vocab, "experts": c.experts, "top_k": c.top_k,
        "layer_bytes": [_layer_bytes(ckpt, layer) for layer in c.moe_layers],
    }  # fmt: skip


def _layer_bytes(ckpt: Checkpoint, layer: int) -> int | None:
    """Bytes of every routed expert of a layer; None where they are not of one size."""
    sizes = {sum(r.nbytes for r in ckpt.expert(layer, e)) for e in range(ckpt.config.experts)}
    return sizes.pop() if len(sizes) == 1 else None


def versions() -> dict[str, str]:
    """What the bits depend on: results are claimed for one machine and one set of these."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("covey", "jax", "jaxlib", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
