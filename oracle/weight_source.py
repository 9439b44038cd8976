"""Seeded values of weights, as bytes in a storage format.

The values of a role depend only on the seed and on the role: not on the NumPy version (raw 64-bit
words of PCG64), not on how the tensors are named, stacked or spread over shards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from reference.files.layout import Shape

SIZE = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}
"""Bytes a stored element."""
PIECE = 1 << 20
"""Values generated at a time."""
PATTERN = 1 << 18
"""Values of the block that a patterned checkpoint repeats."""

Form = Literal["plain", "fp8", "fp8_scale", "fp4", "fp4_scale"]
"""What a tensor's numbers are: values, or packed matrices and their scales."""
_FP8_DEVIATION = 16.0
_FP4_DEVIATION = math.sqrt(68.5 / 8)
"""Standard deviation of the packed numbers before their scale; 4-bit ones are all as likely."""


class Source:
    """Draws the values of a role. scale: on the deviation of every matrix; pattern: see `PATTERN`;
    tied: the embedding serves as head too."""

    def __init__(self, seed: int, scale: float, pattern: bool, tied: bool) -> None:
        self.seed, self.scale, self.tied = seed, scale, tied
        self.block = self._uniform("pattern", PATTERN) if pattern else None

    def _words(self, role: str) -> np.random.PCG64:
        digest = hashlib.sha256(f"{self.seed}:{role}".encode()).digest()
        return np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def _uniform(self, role: str, count: int) -> np.ndarray:
        return _spread(self._words(role).random_raw(count))

    def pieces(
        self, role: str, shape: Shape, dtype: str, inputs: int, form: Form = "plain"
    ) -> Iterator[bytes]:
        """The stored bytes of a role, in pieces of at most `PIECE` values.

        inputs   what a matrix sums over: its values get a deviation of about inputs ** -0.5
        """
        count = math.prod(shape)
        words = self._words(role)
        if form == "fp4":
            for done in range(0, count, PIECE):
                codes = words.random_raw(min(PIECE, count - done)) >> np.uint64(56)
                yield codes.astype("u1").tobytes()
            return
        mean, deviation = self._moments(role, inputs, form)
        if self.block is not None:
            start = int(words.random_raw(1)[0]) % PATTERN
            ring = encode(mean + deviation * np.roll(self.block, -start), dtype)
            for done in range(0, count, PATTERN):
                yield ring[: (min(PATTERN, count - done)) * SIZE[dtype]]
            return
        for done in range(0, count, PIECE):
            values = _spread(words.random_raw(min(PIECE, count - done)))
            yield encode(mean + deviation * values, dtype)

    def _moments(self, role: str, inputs: int, form: Form) -> tuple[float, float]:
        """Mean and standard deviation: norms near 1, biases small, matrices 1/sqrt(inputs)."""
        kind = role.rsplit(".", 1)[-1]
        fan = self.scale / math.sqrt(inputs)
        if form == "fp8":
            return 0.0, _FP8_DEVIATION
        if form == "fp8_scale":
            return fan / _FP8_DEVIATION, 0.2 * fan / _FP8_DEVIATION
        if form == "fp4_scale":  # exponents
            return 127.0 + math.log2(fan / _FP4_DEVIATION), 0.7
        if kind.endswith("norm"):
            return 1.0, 0.1
        if kind.endswith("_bias"):
            return 0.0, 0.1 * self.scale
        if kind == "sinks":
            return 0.0, 1.0
        if kind == "router":
            return 0.0, 2.0 / math.sqrt(inputs) * self.scale
        if kind == "embed" and not self.tied:
            return 0.0, 0.5 * self.scale
        return 0.0, 1.0 / math.sqrt(inputs) * self.scale


def _spread(words: np.ndarray) -> np.ndarray:
    """64-bit words as float64, uniform with mean 0 and standard deviation 1."""
    return ((words >> np.uint64(11)) * 2.0**-53 - 0.5) * math.sqrt(12.0)


def encode(values: np.ndarray, dtype: str) -> bytes:
    """float64 values as little-endian bytes of a dtype, rounded to nearest even.

    U8 rounds to integers; F8_E4M3 takes values up to 448.
    """
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    if dtype == "U8":
        return np.rint(values).astype("u1").tobytes()
    if dtype == "F8_E4M3":
        return _e4m3(values).tobytes()
    single = values.astype("<f4")
    if dtype == "F32":
        return single.tobytes()
    bits = single.view("<u4")
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2").tobytes()


def _e4m3(values: np.ndarray) -> np.ndarray:
    """Sign, exponent 4 (bias 7), fraction 3: codes 0..126 ascend in magnitude, 127 is a NaN."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    grid = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10)
    )
    size = np.abs(values)
    assert size.max(initial=0.0) <= grid[-1]
    above = np.searchsorted(grid, size).clip(1, 126)
    low, high = size - grid[above - 1], grid[above] - size
    down = (low < high) | ((low == high) & (above % 2 == 1))
    return (np.where(down, above - 1, above) | np.where(np.signbit(values), 128, 0)).astype("u1")
