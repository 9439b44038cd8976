"""The words of `numbers` and `files` examples (specs/README.md): text in, text out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from reference import sampling
from reference.files import strict_json
from reference.files.budget import parse_size
from reference.files.requests import request_from
from reference.files.safetensors_header import read_header
from reference.numerics import attention, experts, formats, norms, packed, rope, router
from reference.vocab.config import ActivationSpec, RopeSpec, RouterSpec
from reference.vocab.sampling import Sampling

f4 = np.float32


def floats(text: str) -> np.ndarray:
    """float32 numbers between blanks."""
    return np.array([float(x) for x in text.split()], f4)


def show(values: Any) -> str:
    """The shortest decimals that are these float32 numbers."""
    return " ".join(np.format_float_positional(f4(x), trim="-") for x in np.ravel(values))


def split(text: str) -> tuple[dict[str, Any], str]:
    """`name=value name=value: rest`: settings, and the rest. A name alone is true."""
    front, colon, rest = text.rpartition(": ")
    out: dict[str, Any] = {}
    for name, equals, value in (x.partition("=") for x in front.split()):
        number = value.replace(".", "").replace("-", "").isdigit()
        out[name] = (json.loads(value) if number else value) if equals else True
    return out, rest if colon else text


def _bf16(text: str) -> str:
    return " ".join(f"0x{int(bits):04X}" for bits in formats.f32_to_bf16(floats(text)))


def _e4m3(text: str) -> str:
    codes = np.array([int(x, 16) for x in text.split()], np.uint8)
    return show(packed.e4m3_to_f32(codes))


def _mxfp4(text: str) -> str:
    """The first numbers of a row of 32; the bytes that are not given are 0."""
    how, given = split(text)
    codes = np.zeros((1, 1, 16), np.uint8)
    said = [int(x, 16) for x in given.split()]
    codes[0, 0, : len(said)] = said
    row = packed.unpack_mxfp4(codes, np.array([[how["scale"]]], np.uint8))[0]
    return show(row[: 2 * len(said)])


def _rms(text: str) -> str:
    how, given = split(text)
    x = floats(given)
    return show(norms.rms_norm(x, np.ones_like(x), how["eps"]))


def _silu(text: str) -> str:
    return show(experts.silu(floats(text)))


def _clamped(text: str) -> str:
    how, given = split(text)
    gate, up = floats(given)
    spec = ActivationSpec("clamped_gated", limit=how["limit"], alpha=how["alpha"])
    return show(experts.clamped(np.array([gate]), np.array([up]), spec))


def _frequencies(text: str) -> str:
    how, _ = split(text + ": ")
    return show(rope.inverse_frequencies(RopeSpec(**how)))


def _turn(text: str) -> str:
    """A quarter turn of each pair of one head."""
    how, given = split(text)
    x = floats(given)
    pairs = how.get("dims", len(x)) // 2
    cos, sin = np.zeros(pairs, f4), np.ones(pairs, f4)
    return show(rope.rotate(x[None], cos, sin, how.get("interleaved", False)))


def _merge(text: str) -> str:
    """One query with scale 1 and one entry over (key, value) pairs, in parts between bars."""
    how, given = split(text)
    done = None
    for block in given.split("|"):
        k, v = floats(block).reshape(-1, 2).T
        q = np.array([[how["q"]]], f4)
        done = attention.merge(done, attention.part(q, k[:, None], v[:, None], f4(1)))
    assert done is not None
    return show(done.acc / done.total[:, None])


def _route(text: str) -> str:
    how, given = split(text)
    k = how.pop("k")
    bias = how.pop("bias", None)
    spec = RouterSpec(**how, selection_bias=bias is not None)
    extra = None if bias is None else np.array([float(b) for b in bias.split(",")], f4)
    chosen, weights = router.route(floats(given), spec, k, 0, extra)
    return f"{' '.join(map(str, chosen))} weights {show(weights)}"


def _combine(text: str) -> str:
    """Weights and outputs in rank order, between bars."""
    weights, outputs = (floats(x) for x in text.split("|"))
    return show(experts.combine(weights, outputs[:, None]))


def _philox(text: str) -> str:
    how, _ = split(text + ": ")
    word = sampling.philox4x64((how["position"], 0, 0, 0), (how["seed"], 0))[0]
    return f"0x{word:016X}"


def _sample(text: str) -> str:
    how, given = split(text)
    position, prompt = how.pop("position", 1), how.pop("prompt", 0)
    tokens = [int(x) for x in str(how.pop("tokens", "")).split(",") if x] or [0] * position
    return str(sampling.choose(floats(given), Sampling(**how), tokens, prompt).token)


def _json(text: str) -> str:
    strict_json.parse(text.encode("utf-8", "surrogatepass"), "it")
    return "accepted"


def _safetensors(text: str) -> str:
    """A header as JSON, and how many bytes of data follow it."""
    how, header = text.split(" ", 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        head = header.encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(int(how)))
        return f"accepted, {', '.join(sorted(read_header(path).tensors))}"


def _request(text: str) -> str:
    r = request_from(strict_json.parse(text, "it"), "it").resolve(32)
    s = r.sampling()
    return f"id '{r.id}', {r.max_new_tokens} new, temperature {s.temperature:g}, seed {s.seed}"


def _size(text: str) -> str:
    """A size, of so many bytes where it is a share."""
    how, _, whole = text.partition(" of ")
    return str(parse_size(how, int(whole) if whole else None))


NUMBERS: dict[str, Callable[[str], str]] = {
    "bf16": _bf16, "e4m3": _e4m3, "mxfp4": _mxfp4, "rms": _rms, "silu": _silu,
    "clamped": _clamped, "frequencies": _frequencies, "quarter-turn": _turn, "attend": _merge,
    "route": _route, "combine": _combine, "philox": _philox, "sample": _sample,
}  # fmt: skip
FILES: dict[str, Callable[[str], str]] = {
    "json": _json, "safetensors": _safetensors, "request": _request, "size": _size,
}  # fmt: skip
