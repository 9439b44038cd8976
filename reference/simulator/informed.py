"""What a cache would read that knows how likely everybody is to choose what, but not what they will
choose (BOUND-8).

A shipped policy can only count what was named. Of routes that a SyntheticRouter draws the chances
themselves are known: nothing that is learned from the past says more about what comes, so how many
loads this policy saves tells how much a better cache could be worth. It is no bound in the strict
sense: it looks at each expert by itself, and chance may favour another policy for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEAST = 1e-6
"""Chances below count as this."""


def somebody(chances: Sequence[np.ndarray]) -> np.ndarray:
    """The chance that one request at least names an expert; of each request [..., E]."""
    return 1.0 - np.prod([1.0 - c for c in chances], axis=0)


class InformedCache:
    """Slots for experts of lock-step; when one is needed, out goes what is expected to be named
    furthest ahead: as many layers as its own is away, and a round for each time that it is not.

    slots   of all layers together; at first they hold what is expected soonest from layer 0 on
    chance  float [layers, E]: that somebody names the expert when its layer comes next
    """

    def __init__(self, slots: int, chance: np.ndarray) -> None:
        self.layers, self.experts = chance.shape
        self.slots = slots
        self.rounds = 1.0 / np.maximum(chance, LEAST) - 1.0
        self.here = np.zeros(chance.size, bool)
        self.here[np.argsort(self._ahead(-1), kind="stable")[:slots]] = True

    def _ahead(self, now: int) -> np.ndarray:
        """[layers * E]: visits of layers until the expert is named, expected after `now`."""
        away = (np.arange(self.layers) - now - 1) % self.layers
        return (away[:, None] + self.layers * self.rounds).reshape(-1)

    def serve(self, layer: int, needed: np.ndarray, chance: np.ndarray) -> int:
        """All requests visit `layer` and need the experts `needed`, distinct numbers in it;
        `chance` [E] is that of its next visit. How many are read. They are used one by one: after
        the visit any of all that was there may be gone."""
        codes = layer * self.experts + needed
        loads = int((~self.here[codes]).sum())
        self.here[codes] = True
        self.rounds[layer] = 1.0 / np.maximum(chance, LEAST) - 1.0
        over = int(self.here.sum()) - self.slots
        if over > 0:
            ahead = np.where(self.here, self._ahead(layer), -1.0)
            self.here[np.argpartition(-ahead, over - 1)[:over]] = False
        return loads
