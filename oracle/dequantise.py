"""An unpacked float32 copy of a packed checkpoint, made with torch's own types.

transformers runs packed weights on some accelerators only; what it says of the copy is what any
engine has to say of the original. Nothing here is shared with an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def dequantised(path: Path, out: Path) -> Path:
    """`path` itself if its config.json has no quantization_config, else a copy in `out`."""
    config = json.loads((path / "config.json").read_text("utf-8"))
    packing = config.pop("quantization_config", None)
    if packing is None:
        return path
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    if packing["quant_method"] == "mxfp4":
        wide = _mxfp4(torch, tensors)
    else:
        wide = _fp8(torch, tensors, packing["weight_block_size"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({name: t.contiguous() for name, t in wide.items()}, out / "model.safetensors")
    return out


def _fp8(torch: Any, tensors: dict[str, Any], block: list[int]) -> dict[str, Any]:
    """weight * scale_inv, each scale spread over its block."""
    wide: dict[str, Any] = {}
    for name, t in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        wide[name] = t.to(torch.float32)
        if t.dtype == torch.float8_e4m3fn:
            scale = tensors[name + "_scale_inv"].to(torch.float32)
            spread = torch.kron(scale, torch.ones(*block))
            wide[name] = wide[name] * spread[: t.shape[0], : t.shape[1]]
    return wide


def _mxfp4(torch: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """By transformers' own conversion, which also transposes."""
    from transformers.integrations.mxfp4 import (  # pyright: ignore[reportMissingImports]
        convert_moe_packed_tensors,
    )

    wide: dict[str, Any] = {}
    for name, t in tensors.items():
        if name.endswith("_blocks"):
            scales = tensors[name.removesuffix("_blocks") + "_scales"]
            wide[name.removesuffix("_blocks")] = convert_moe_packed_tensors(
                t, scales, dtype=torch.float32
            )
        elif not name.endswith("_scales"):
            wide[name] = t.to(torch.float32)
    return wide
