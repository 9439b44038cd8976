"""Attention in parts: any legal share of heads, and the own position merged elsewhere, in bits."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.attention_pool.kernels import store
from jax_impl.kernels.attention import attend_v0, own_v0, past_v0
from reference.control.attention_partition import head_share, legal_head_shares

ROWS, WIDTH = 8, 6


def drawn(groups: int, m: int, dim: int, block: int, latent: bool) -> dict[str, Any]:
    """Queries, own keys and values, pools with NaN where nothing was written, tables."""
    draw = np.random.default_rng(groups * 100 + m * 10 + dim)

    def some(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    blocks = ROWS * WIDTH
    positions = draw.integers(0, WIDTH * block, ROWS).astype(np.int32)
    positions[0] = 0
    return {
        "q": some(ROWS, groups, m, dim), "k": some(ROWS, groups, dim),
        "v": some(ROWS, groups, dim // 2), "sink": some(groups, m),
        "keys": some(blocks + 1, groups, block, dim),
        "values": None if latent else some(blocks + 1, groups, block, dim // 2),
        "tables": draw.permutation(blocks).reshape(ROWS, WIDTH).astype(np.int32),
        "positions": positions,
    }  # fmt: skip


@pytest.mark.rule("LAMINA-2", "LAMINA-3", "LAMINA-13", "JAX-5")
@pytest.mark.parametrize(
    ("groups", "m", "window", "sink", "latent"),
    [(4, 1, None, False, False), (2, 2, 9, True, False), (1, 4, None, False, True)],
)
def test_every_legal_share_of_heads_and_both_orders(
    groups: int, m: int, window: int | None, sink: bool, latent: bool
) -> None:
    """MHA, GQA with a window and sinks, MLA's one head: the past before the write or after it, on
    b devices for every legal b, against one call behind one write."""
    d = drawn(groups, m, 16, 4, latent)
    scale, live = 0.25, np.ones(ROWS, bool)
    at = (d["tables"], d["positions"])
    sinks = d["sink"] if sink else None
    width = d["v"].shape[-1]
    write = jax.jit(store)
    past = jax.jit(partial(past_v0, "f32", width=width, scale=scale, window=window))
    own = jax.jit(partial(own_v0, "f32", scale=scale))
    whole = jax.jit(partial(attend_v0, "f32", scale=scale, window=window))
    stored = write(d["keys"], d["values"], d["k"], None if latent else d["v"], *at, live)
    want = np.asarray(whole(d["q"], d["k"], d["v"], *stored, *at, sink=sinks))
    assert np.isfinite(want).all()
    for devices in legal_head_shares([groups]):
        for first in ("past", "write"):
            parts = []
            for i in range(devices):
                share = head_share(i, devices, groups)
                mine = slice(share.start, share.stop)
                cut = {n: None if d[n] is None else np.ascontiguousarray(d[n][:, mine])
                       for n in ("q", "k", "v", "keys", "values")}  # fmt: skip
                pools = (cut["keys"], cut["values"])
                v = None if latent else cut["v"]
                if first == "write":
                    pools = write(*pools, cut["k"], v, *at, live)
                part = past(cut["q"], *pools, *at)
                mine_sinks = None if sinks is None else sinks[mine]
                parts.append(np.asarray(own(part, cut["q"], cut["k"], cut["v"], mine_sinks)))
            got = np.concatenate(parts, axis=1)
            assert got.tobytes() == want.tobytes(), (devices, first)
