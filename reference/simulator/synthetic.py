"""A synthetic router whose statistics are those of measured ones (SIM-9).

The score of expert e for token t of request r at layer l is a sum of independent unit normals,

    sqrt(c_g) G[l,e] + sqrt(c_r) R[r,l,e] + sqrt(c_f) A[r,t,l,e] + sqrt(c_n) noise,

global, per request, slowly changing (first-order autoregressive over t with coefficient rho) and
fresh; the shares c add up to 1, and the token's experts are the K greatest scores. Two requests
then correlate by c_g, a request with itself far away by c_g + c_r, and d tokens apart by
c_g + c_r + c_f rho^d. Layers are independent of each other, which real ones are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
BLOCK = 32
"""Tokens whose scores are made at a time."""


@dataclass(frozen=True)
class RouterShares:
    """Shares of one layer; what c_g, c_r and c_f leave is noise."""

    c_g: float
    c_r: float
    c_f: float
    rho: float

    @property
    def c_n(self) -> float:
        """The share of fresh noise."""
        return max(0.0, 1.0 - self.c_g - self.c_r - self.c_f)


def overlap(c: float, experts: int, top_k: int) -> float:
    """The expected share of a token's experts that another token with score correlation c chooses
    too: P(z2 > tau | z1 > tau) for bivariate normal z1, z2 and tau = the (1 - K/E) quantile."""
    share = top_k / experts
    tau = _NORMAL.inv_cdf(1.0 - share)
    if c >= 1.0:
        return 1.0
    width = (8.0 - tau) / 400
    spread = math.sqrt(1.0 - c * c)
    total = 0.0
    for i in range(400):
        z = tau + (i + 0.5) * width
        total += _NORMAL.pdf(z) * (1.0 - _NORMAL.cdf((tau - c * z) / spread)) * width
    return total / share


@cache
def correlation(wanted: float, experts: int, top_k: int) -> float:
    """The inverse of `overlap`, by bisection; 0 for what is below chance, K/E."""
    low, high = 0.0, 1.0 - 1e-9
    for _ in range(40):
        middle = (low + high) / 2
        if overlap(middle, experts, top_k) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class SyntheticRouter:
    """Routes of any number of requests; each depends on (seed, request) alone, and a longer one
    begins as a shorter one does.

    shares: one entry a layer with experts; experts E, top_k K.
    """

    def __init__(
        self, shares: Sequence[RouterShares], experts: int, top_k: int, seed: int = 0
    ) -> None:
        self.shares = tuple(shares)
        self.experts = experts
        self.top_k = top_k
        self.seed = seed
        rng = np.random.Generator(np.random.PCG64([seed, 0]))
        self.common = rng.standard_normal((len(self.shares), experts), np.float32)
        self._root = {
            name: np.sqrt(np.array([getattr(s, name) for s in self.shares], np.float32))[:, None]
            for name in ("c_g", "c_r", "c_f", "c_n")
        }
        self._rho = np.array([s.rho for s in self.shares], np.float32)[:, None]

    def request(self, request: int, tokens: int) -> np.ndarray:
        """uint16 [tokens, layers, K], experts in rank order."""
        blocks = [top(score, self.top_k) for score, _ in self._blocks(request, tokens)]
        return np.concatenate(blocks).astype(np.uint16)

    def chances(self, request: int, tokens: int) -> np.ndarray:
        """float32 [tokens, layers, E]: how likely each token of `request` is to choose each expert,
        for one who knows all scores of the tokens before it, part by part: that a normal score with
        the known mean passes a threshold (by the logistic approximation), which is so high that K
        are expected to."""
        shares = self._root["c_f"] ** 2 * (1.0 - self._rho**2) + self._root["c_n"] ** 2
        steep = 1.702 / np.sqrt(np.maximum(shares, 1e-6))
        return np.concatenate([
            _passing(steep * known, self.top_k) for _, known in self._blocks(request, tokens)
        ])  # fmt: skip

    def _blocks(self, request: int, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(scores, what of them is known a token before), float32 [up to BLOCK, layers, E]."""
        rng = np.random.Generator(np.random.PCG64([self.seed, 1, request]))
        shape = self.common.shape
        own = rng.standard_normal(shape, np.float32)
        slow = rng.standard_normal(shape, np.float32)
        keep, fresh = self._rho, np.sqrt(1.0 - self._rho**2)
        fixed = self._root["c_g"] * self.common + self._root["c_r"] * own
        for first in range(0, tokens, BLOCK):
            noise = rng.standard_normal((min(BLOCK, tokens - first), 2, *shape), np.float32)
            score = fixed + self._root["c_n"] * noise[:, 1]
            known = np.empty_like(score)
            for i in range(len(score)):
                slow = keep * slow
                known[i] = slow
                slow = slow + fresh * noise[i, 0]
                score[i] += self._root["c_f"] * slow
            yield score, fixed + self._root["c_f"] * known


def _passing(height: np.ndarray, k: int) -> np.ndarray:
    """1 / (1 + exp(threshold - height)), the threshold such that the last axis adds up to k."""
    low = height.min(-1, keepdims=True) - 40.0
    high = height.max(-1, keepdims=True) + 40.0
    for _ in range(24):
        middle = (low + high) / 2
        above = _logistic(height - middle).sum(-1, keepdims=True) > k
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return _logistic(height - high)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(np.clip(-x, -60.0, 60.0)))


def top(score: np.ndarray, k: int) -> np.ndarray:
    """The k greatest along the last axis, the greatest first; equal ones by index."""
    chosen = np.argpartition(-score, k - 1, axis=-1)[..., :k]
    chosen.sort(axis=-1)
    order = np.argsort(-np.take_along_axis(score, chosen, -1), axis=-1, kind="stable")
    return np.take_along_axis(chosen, order, -1)


QWEN3_LAG1 = tuple(
    float(x)
    for x in """
    .07 .23 .23 .31 .32 .38 .41 .55 .38 .47 .37 .37 .42 .32 .35 .43 .34 .31 .54 .58 .44 .44 .40 .34
    .40 .28 .36 .40 .35 .35 .67 .64 .51 .47 .41 .36 .41 .26 .35 .39 .31 .27 .27 .44 .38 .47 .32 .16
    """.split()
)
"""Share of experts that the next token keeps, layers 0 to 47 of Qwen3-30B-A3B, six experts a token:
worked out from the route traces that github.com/Helldez/BigMoeOnEdge publishes (Apache-2.0)."""


def by_lag1(kept: Sequence[float], experts: int, top_k: int) -> tuple[RouterShares, ...]:
    """Shares of layers of which so much was measured to be kept from one token to the next, K of E
    experts a token; divided as in Qwen3 between what requests share (0.36), what a request keeps
    (0.40) and what it forgets within a few tokens (0.24, rho 0.45; slower where a layer keeps so
    much that nothing is left for noise). Fitted with the factor 1.04 to Qwen3's cache hits."""
    out = []
    for share in kept:
        c = 1.04 * correlation(share, experts, top_k)
        slow = min(0.24 * c / 0.45, max(1e-6, 1.0 - 0.76 * c))
        out.append(RouterShares(0.36 * c, 0.40 * c, slow, min(0.24 * c / slow, 0.999)))
    return tuple(out)


def qwen3_shares() -> tuple[RouterShares, ...]:
    """48 layers, 128 experts; for the 8 a token that the model has."""
    return by_lag1(QWEN3_LAG1, 128, 6)


def deepseek_v2_lite_shares(layers: int = 26) -> tuple[RouterShares, ...]:
    """64 experts, 6 a token: near uniform over requests."""
    return (RouterShares(0.014, 0.135, 0.48, 0.52),) * layers


def gpt_oss_shares(layers: int) -> tuple[RouterShares, ...]:
    """From 0.20, what gpt-oss-120b's published trace keeps with 2 of 128 experts a token
    (BigMoeOnEdge, one prompt): what requests share is Qwen3's, for want of a second prompt."""
    return by_lag1((0.20,) * layers, 128, 2)


def olmoe_shares(layers: int) -> tuple[RouterShares, ...]:
    """64 experts, 8 a token: 0.25 to 0.47 is kept by layer, taken to rise evenly."""
    kept = [0.25 + 0.22 * i / max(1, layers - 1) for i in range(layers)]
    return by_lag1(kept, 64, 8)


def uniform_shares(layers: int) -> tuple[RouterShares, ...]:
    """No favourites and no memory: the worst case for a cache, and near to Mixtral."""
    return (RouterShares(0.0, 0.0, 0.0, 0.0),) * layers
