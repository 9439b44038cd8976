"""From one row of logits to one token, on the host, in float64, without any hidden state.

The draw depends on the logits, the options, the request's seed and the token's position, and on
nothing else: not on the batch, the engine, the order of requests or the NumPy version. So the
exponential and the random number are worked out here from additions and multiplications of
float64 and from integers, which are the same everywhere.

Anatomy: check -> (greedy) -> temperature -> top-k -> top-p -> draw.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.vocab.errors import BadInput, RequestFailed

Array = NDArray[Any]

_MASK = (1 << 64) - 1
# Multipliers and key increments of Philox4x64, as published with the generator.
_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238  # ln 2 to 33 bits, so that its products with |n| < 2^11 are exact
_LN2_LOW = 1.9082149292705877e-10  # the rest of ln 2
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
_EXP_FLOOR = -708.0  # below, exp is taken as 0: no subnormal results


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x64-10: four 64-bit words that look random, a function of counter and key only."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = a * _M0, c * _M1
        a, b, c, d = (p1 >> 64) ^ b ^ k0, p1 & _MASK, (p0 >> 64) ^ d ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-53, keyed by (seed, position) (SAMPLE-5)."""
    word = philox4x64((position & _MASK, 0, 0, 0), (seed & _MASK, 0))[0]
    return (word >> 11) * 2.0**-53


def exp(x: Array) -> Array:
    """e^x for float64 x <= 0 (-inf included) -> float64, within 2 units of the last place.

    x = n ln 2 + r with |r| <= ln 2 / 2; Taylor's polynomial to r^13 by Horner's rule; times 2^n.
    Only operations whose result IEEE 754 fixes, in a fixed order (SAMPLE-6).
    """
    tiny = x < _EXP_FLOOR
    x = np.where(tiny, 0.0, x)
    n = np.rint(x * _LOG2_E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        y = y * r + coefficient
    return np.where(tiny, 0.0, np.ldexp(y, n.astype(np.int32)))


def ranking(scores: Array) -> Array:
    """Indices of scores [V], highest first, equal ones by the lower index."""
    return np.argsort(-scores, kind="stable")


def best(scores: Array, k: int) -> Array:
    """The k best of scores [V], 0 < k <= V, as ascending indices, without sorting all of them.

    equivalent to: np.sort(ranking(scores)[:k])
    """
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def kept(logits: Array, temperature: float, top_k: int, top_p: float) -> tuple[Array, Array]:
    """The tokens that may be drawn, ascending, and their weights (not normalised), both [n].

    SAMPLE-3: temperature first, then top-k, then top-p over what top-k left.
    """
    with np.errstate(over="ignore"):  # a tiny temperature leaves the greatest: the rest get -inf
        scores = (logits - logits.max()) / temperature
    tokens = np.arange(len(scores))
    if 0 < top_k < len(scores):
        # SAMPLE-4: exactly top_k stay; at the boundary the lower index wins.
        tokens = best(scores, top_k)
    weights = exp(scores[tokens])
    if top_p < 1.0:
        order = ranking(scores[tokens])
        reached = np.cumsum(weights[order])
        # SAMPLE-4: the shortest run of the likeliest with at least top_p of the mass, never empty.
        count = 1 + int(np.count_nonzero(reached < top_p * reached[-1]))
        inside = np.sort(order[:count])
        tokens, weights = tokens[inside], weights[inside]
    return tokens, weights


def sample(
    logits: Array, *, temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> int:
    """The token that follows `position` tokens, from logits [V].

    temperature  0: the largest logit, lower index first (SAMPLE-2); else a positive factor
    top_k        how many stay; 0 for all
    top_p        mass that stays, in (0, 1]; 1 for all
    seed         the request's; position: tokens before this one, prompt included

    Raises RequestFailed for logits that are NaN, +inf or all -inf (SAMPLE-1), BadInput for options
    outside their range.
    """
    if not (temperature >= 0 and math.isfinite(temperature) and 0 < top_p <= 1 and top_k >= 0):
        raise BadInput(
            f"sampling: temperature {temperature}, top_k {top_k}, top_p {top_p}; "
            "right would be temperature >= 0, top_k >= 0, 0 < top_p <= 1"
        )
    row = np.asarray(logits, np.float64)
    if not np.isfinite(row.max(initial=-np.inf)):  # SAMPLE-1: the max of a row with a NaN is NaN
        raise RequestFailed(f"position {position}: no token can be chosen from these logits")
    if temperature == 0:
        return int(row.argmax())
    tokens, weights = kept(row, temperature, top_k, top_p)
    # SAMPLE-5: the first token, by index, at which the running sum exceeds u times the whole.
    reached = np.cumsum(weights)
    threshold = uniform(seed, position) * reached[-1]
    first = int(np.searchsorted(reached, threshold, side="right"))
    if first == len(tokens):  # u * total was rounded up to total
        first = int(np.flatnonzero(weights)[-1])
    return int(tokens[first])
