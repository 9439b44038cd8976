"""From one row of logits to one token, on the host, in float64, without any hidden state.

The draw depends on the logits, the options, the request's seed and the token's position, and on
nothing else: not on the batch, the engine, the order of requests or the NumPy version. So the
exponential and the random number are worked out here from additions and multiplications of
float64 and from integers, which are the same everywhere.

Anatomy: check -> penalties -> (greedy) -> temperature -> top-k -> top-p -> min-p -> draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.vocab.errors import RequestFailed
from reference.vocab.sampling import Choice, Logprobs, Sampling

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
_ATANH = tuple(1.0 / n for n in range(25, -1, -2))  # 1/25, 1/23, ... 1


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


def log(x: float) -> float:
    """ln x for a positive float64 -> float64, within 2 units of the last place of max(|ln x|, 1).

    x = m 2^n with sqrt(1/2) <= m < sqrt(2); ln m = 2 artanh(f) with f = (m - 1) / (m + 1), whose
    series to f^25 is summed by Horner's rule (SAMPLE-6).
    """
    m, n = math.frexp(x)
    if m < 0.7071067811865476:
        m, n = 2.0 * m, n - 1
    f = (m - 1.0) / (m + 1.0)
    square = f * f
    y = _ATANH[0]
    for coefficient in _ATANH[1:]:
        y = y * square + coefficient
    return n * _LN2_HIGH + (2.0 * f * y + n * _LN2_LOW)


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


def likeliest(scores: Array, n: int) -> Array:
    """The n best of scores [V], best first, equal ones by the lower index; all if n > V."""
    if not n:
        return np.arange(0)
    inside = best(scores, min(n, len(scores)))
    return inside[ranking(scores[inside])]


def penalised(logits: Array, how: Sampling, tokens: Sequence[int], prompt: int) -> Array:
    """Logits [V] after the penalties for `tokens`, of which the first `prompt` were given.

    SAMPLE-7: first the repetition penalty, over prompt and answer; then the frequency penalty and
    the presence penalty, over the answer.
    """
    if not how.penalised:
        return logits
    logits = logits.copy()
    if how.repetition_penalty != 1:
        seen = np.unique(np.asarray(tokens, np.int64))
        row = logits[seen]
        r = how.repetition_penalty
        logits[seen] = np.where(row > 0, row / r, row * r)
    answer = np.asarray(tokens[prompt:], np.int64)
    made, times = np.unique(answer, return_counts=True)
    logits[made] -= how.frequency_penalty * times
    logits[made] -= how.presence_penalty
    return logits


def kept(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[Array, Array]:
    """The tokens that may be drawn, ascending, and their weights (not normalised), both [n].

    SAMPLE-3: temperature first, then top-k, then top-p over what top-k left, then min-p.
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
    if min_p > 0.0:
        # SAMPLE-8: the likeliest token has weight 1, and every filter leaves it.
        inside = np.flatnonzero(weights >= min_p)
        tokens, weights = tokens[inside], weights[inside]
    return tokens, weights


def logprobs(row: Array, token: int, n: int) -> Logprobs:
    """What the model itself thought of `token` and of the n likeliest, from logits [V] float64.

    SAMPLE-10: neither penalties nor temperature nor filters are in it.
    """
    scores = row - row.max()
    whole = log(float(np.cumsum(exp(scores))[-1]))
    top = likeliest(row, n)
    return Logprobs(
        float(scores[token] - whole),
        tuple(zip(top.tolist(), (scores[top] - whole).tolist(), strict=True)),
    )


def choose(logits: Array, how: Sampling, tokens: Sequence[int], prompt: int) -> Choice:
    """The token that follows `tokens`, of which the first `prompt` were given, from logits [V].

    Raises RequestFailed for logits that are NaN, +inf or all -inf (SAMPLE-1). The result depends on
    these arguments alone: nothing of another request's is among them (SAMPLE-9).
    """
    row = np.asarray(logits, np.float64)
    position = len(tokens)
    if not np.isfinite(row.max(initial=-np.inf)):  # SAMPLE-1: the max of a row with a NaN is NaN
        raise RequestFailed(f"position {position}: no token can be chosen from these logits")
    token = _drawn(penalised(row, how, tokens, prompt), how, position)
    told = None if how.logprobs is None else logprobs(row, token, how.logprobs)
    return Choice(token, told)


def sample(
    logits: Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
    min_p: float = 0.0,
) -> int:
    """The token that follows `position` tokens, from logits [V], where no penalty looks back.

    Options as in `Sampling`. Raises RequestFailed (SAMPLE-1), BadInput for options out of range.
    """
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return choose(logits, how, range(position), 0).token


def _drawn(row: Array, how: Sampling, position: int) -> int:
    if how.temperature == 0:
        return int(row.argmax())  # SAMPLE-2
    tokens, weights = kept(row, how.temperature, how.top_k, how.top_p, how.min_p)
    # SAMPLE-5: the first token, by index, at which the running sum exceeds u times the whole.
    reached = np.cumsum(weights)
    threshold = uniform(how.seed, position) * reached[-1]
    first = int(np.searchsorted(reached, threshold, side="right"))
    if first == len(tokens):  # u * total was rounded up to total
        first = int(np.flatnonzero(weights)[-1])
    return int(tokens[first])
