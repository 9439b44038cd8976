"""A cache that knows the router's chances: they are chances, and it makes good use of them."""

from __future__ import annotations

import numpy as np
import pytest

from reference.simulator.hits import belady_hits, lockstep_hits
from reference.simulator.informed import InformedCache, somebody
from reference.simulator.synthetic import (
    RouterShares,
    SyntheticRouter,
    deepseek_v2_lite_shares,
    qwen3_shares,
    uniform_shares,
)


@pytest.mark.rule("SIM-9", "BOUND-8")
@pytest.mark.parametrize("model", ["qwen3", "deepseek", "uniform"])
def test_chances_are_what_happens(model: str) -> None:
    """Of all that was given a chance of so much, so much was chosen."""
    shares, experts, k = {
        "qwen3": (qwen3_shares()[:12], 128, 8), "deepseek": (deepseek_v2_lite_shares(6), 64, 6),
        "uniform": (uniform_shares(4), 8, 2),
    }[model]  # fmt: skip
    router = SyntheticRouter(shares, experts, k, seed=3)
    chance = router.chances(1, 300)
    chosen = np.zeros(chance.shape, bool)
    np.put_along_axis(chosen, router.request(1, 300).astype(np.int64), True, -1)
    bins = 0
    for low in np.arange(0, 1, 0.1):
        among = (chance >= low) & (chance < low + 0.1)
        if among.sum() > 1000:
            bins += 1
            assert chosen[among].mean() == pytest.approx(chance[among].mean(), abs=0.05)
    assert bins >= {"qwen3": 6, "deepseek": 4, "uniform": 1}[model]
    longer = router.chances(1, 40)
    assert (longer == chance[:40]).all()


def informed_loads(router: SyntheticRouter, requests: int, tokens: int, slots: int) -> list[int]:
    """Loads of each round."""
    routes = [router.request(r, tokens) for r in range(requests)]
    chance = [somebody(c) for c in zip(*[router.chances(r, tokens + 1) for r in range(requests)],
                                       strict=True)]  # fmt: skip
    cache = InformedCache(slots, chance[0])
    out = []
    for t in range(tokens):
        out.append(sum(
            cache.serve(i, np.unique([r[t, i] for r in routes]), chance[t + 1][i])
            for i in range(len(router.shares))
        ))  # fmt: skip
        assert cache.here.sum() <= slots
    return out


@pytest.mark.rule("BOUND-8")
@pytest.mark.parametrize(("share", "requests"), [(0.5, 8), (0.25, 2), (0.75, 4)])
def test_it_reads_less_than_who_counts_and_more_than_who_knows(share: float, requests: int) -> None:
    router = SyntheticRouter(qwen3_shares()[8:20], 128, 8, seed=2)
    tokens, skip, slots = 90, 40, int(share * 12 * 128)
    informed = sum(informed_loads(router, requests, tokens, slots)[skip:])
    routes = [router.request(r, tokens) for r in range(requests)]
    counted = min(lockstep_hits(routes, 128, slots, e, skip).loads
                  for e in ("per-layer", "lfru", "frequency"))  # fmt: skip
    known = belady_hits(routes, 128, slots, False, skip, together=False).loads
    assert known < informed < counted


@pytest.mark.rule("BOUND-8")
def test_by_hand() -> None:
    """Two layers of three experts, three slots. What is sure comes before what may not come, and of
    what is alike the layer that comes later goes first."""
    sure, half = 1.0, 0.5
    chance = np.array([[sure, half, 0.0], [sure, half, 0.0]])
    cache = InformedCache(3, chance)
    # From layer 0 on: 0/0 is 0 visits away, 1/0 is 1, 0/1 is 0 + 2, 1/1 is 1 + 2.
    assert cache.here.tolist() == [True, True, False, True, False, False]
    assert cache.serve(0, np.array([0, 1]), chance[0]) == 0
    # 1/1 is read; 1/0 is 2 visits away, 0/0 1, 1/1 2 + 2, 0/1 1 + 2: 1/1 goes again.
    assert cache.serve(1, np.array([0, 1]), chance[1]) == 1
    assert cache.here.tolist() == [True, True, False, True, False, False]
    # 0/2 is read, and now it is known that 0/1 will not come.
    assert cache.serve(0, np.array([2]), np.array([sure, 0.0, sure])) == 1
    assert cache.here.tolist() == [True, False, True, True, False, False]


@pytest.mark.rule("BOUND-8")
def test_what_never_changes_is_read_once() -> None:
    router = SyntheticRouter((RouterShares(1.0, 0.0, 0.0, 0.0),) * 3, 16, 4, seed=1)
    assert sum(informed_loads(router, 4, 10, 12)) == 0
    assert sum(informed_loads(router, 4, 10, 9)) == 10 * 3  # at its best: the least for 9 slots
