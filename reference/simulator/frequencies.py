"""Routes with given frequencies of experts, by domain: for models of which only counts are known.

The counts that allenai/OLMoE publishes (scripts/routing_output, rewritten as npz) say how often
each expert of three layers was chosen over a domain's text. A request belongs to one domain; its
tokens choose independently of each other, each expert as often as counted (SIM-9).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from reference.files.packed import DAMAGED
from reference.files.regular import reason
from reference.simulator.synthetic import top
from reference.vocab.errors import BadInput

ROUNDS, DRAWS = 15, 2048
"""Of the search for weights: how often they are corrected, and by how many draws."""


def read_counts(path: str | Path) -> dict[str, np.ndarray]:
    """{domain: counts [layers, E]} of an npz with arrays "<domain>/counts". Raises BadInput."""
    found: dict[str, np.ndarray] = {}
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            for name in held.files:
                if name.endswith("/counts"):
                    found[name.removesuffix("/counts")] = held[name]
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}") from None
    except (*DAMAGED, AttributeError):
        raise BadInput(f"{path}: not an npz of arrays") from None
    if not found:
        raise BadInput(f"{path}: no array '<domain>/counts' in it")
    for name, counts in found.items():
        if counts.ndim != 2 or not np.issubdtype(counts.dtype, np.integer) or counts.min() < 0:
            raise BadInput(f"{path}: {name}/counts: {counts.dtype} {list(counts.shape)}; counts "
                           "[layers, experts] expected")  # fmt: skip
        if (counts.sum(1) == 0).any():
            raise BadInput(f"{path}: {name}/counts: a layer without any choice")
    return found


class FrequencyRouter:
    """Routes of requests whose experts have counted frequencies; request n is of the (n mod
    domains)-th domain. Each depends on (seed, request) alone.

    counts: {domain: [counted layers, E]}. Model layer i of `layers` has the frequencies of the
    counted layer nearest in depth, its experts renamed, the same for all domains.
    """

    def __init__(
        self, counts: Mapping[str, np.ndarray], layers: int, top_k: int, seed: int = 0
    ) -> None:
        self.domains = tuple(counts)
        self.experts = next(iter(counts.values())).shape[1]
        self.top_k = top_k
        self.seed = seed
        rng = np.random.Generator(np.random.PCG64([seed, 0]))
        self.names = np.stack([rng.permutation(self.experts) for _ in range(layers)])
        self._score = {d: self._scores(counts[d], layers, rng) for d in self.domains}

    def _scores(self, counts: np.ndarray, layers: int, rng: np.random.Generator) -> np.ndarray:
        """float32 [layers, E]: what makes the greatest K of score + Gumbel noise as frequent as
        counted."""
        counted = len(counts)
        scores = [self._fit(row / row.sum(), rng) for row in counts]
        nearest = [round(i * (counted - 1) / max(1, layers - 1)) for i in range(layers)]
        out = np.empty((layers, self.experts), np.float32)
        for i, which in enumerate(nearest):
            out[i, self.names[i]] = scores[which]
        return out

    def _fit(self, share: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        wanted = np.clip(share * self.top_k, 1e-6, 1.0 - 1e-6)
        score = np.log(wanted)
        for _ in range(ROUNDS):
            noise = rng.gumbel(size=(DRAWS, self.experts))
            chosen = np.bincount(top(score + noise, self.top_k).ravel(), minlength=self.experts)
            score += 0.7 * np.log(wanted / np.maximum(chosen / DRAWS, 0.2 / DRAWS))
        return score

    def request(self, request: int, tokens: int) -> np.ndarray:
        """uint16 [tokens, layers, K], experts in rank order."""
        rng = np.random.Generator(np.random.PCG64([self.seed, 1, request]))
        score = self._score[self.domains[request % len(self.domains)]]
        noise = rng.gumbel(size=(tokens, *score.shape)).astype(np.float32)
        return top(score + noise, self.top_k).astype(np.uint16)
