"""How fast it goes, against bounds that follow from what was done: overlap, and a long prompt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from engines import LIMIT_S, checkpoint, opened, request

from jax_impl.engine import JaxEngine
from jax_impl.readers import ThrottledReader

EXPERTS: dict[str, Any] = {
    "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4, "pattern": True,
}  # fmt: skip
OVERLAP = 1.15


def in_flight(engine: JaxEngine, kinds: tuple[str, ...]) -> int:
    """How many records of these kinds lie between a step's start and its end."""
    inside, count = False, 0
    for record in engine.records[1:]:
        kind = record.get("event") or record.get("action")
        if kind in ("Compute", "Computed"):
            inside = kind == "Compute"
        elif inside and kind in kinds:
            count += 1
    return count


def reading_meanwhile(engine: JaxEngine) -> float:
    """The share of the steps' time that passed with a read under way."""
    reads, computing, both, total, last = 0, False, 0.0, 0.0, 0.0
    for record in engine.records[1:]:
        now = record.get("t", last)
        total += (now - last) * computing
        both += (now - last) * (computing and reads > 0)
        last = now
        kind = record.get("event") or record.get("action")
        reads += {"Load": 1, "Loaded": -1}.get(kind, 0)
        computing = {"Compute": True, "Computed": False}.get(kind, computing)
    return both / total


@pytest.mark.rule("ENGINE-5", "ENGINE-9")
def test_fetching_and_computing_overlap() -> None:
    """The best of at most four runs: what else the machine does can only add to a run's time, and
    it is the engine that is judged. The bound is the same for each."""
    ratios: list[float] = []
    while len(ratios) < 4 and (not ratios or min(ratios) > OVERLAP):
        ratios.append(overlap())
    assert min(ratios) <= OVERLAP, ratios


def overlap() -> float:
    """Time of one run over the greater of what was computed and what was read."""
    path = checkpoint("qwen3_moe", hidden_size=128, moe_intermediate_size=256, **EXPERTS)
    reader = ThrottledReader(80e6)
    options: dict[str, Any] = {"max_running": 16, "chunk": 8, "max_rows": 16, "kv_tokens": 2048}
    with opened(path, "50%", reader=reader, io="buffered", **options) as engine:
        handles = engine.submit_all([request(i, 4 + i % 5, 8) for i in range(12)])
        assert all(h.result(LIMIT_S).error is None for h in handles)
    t = engine.totals()
    assert t["bytes"] == reader.bytes and t["fetch_s"] == t["bytes"] / reader.bytes_per_s
    assert t["fetch_s"] > 1.0 and t["compute_s"] > 0.15, "both sides had work"
    ratio = t["wall_s"] / max(t["compute_s"], t["fetch_s"])
    print(f"overlap: {ratio:.3f} of the bound, {why_not(t)}")
    assert reading_meanwhile(engine) > 0.8
    assert t["of_bound"] == pytest.approx(1 / ratio)
    return ratio


def why_not(t: dict[str, Any]) -> str:
    return ", ".join(f"{k} {t[k]:.3f}" for k in ("wall_s", "compute_s", "fetch_s", "other_s"))


@pytest.mark.rule("ENGINE-5")
def test_the_blocking_baseline_does_not_overlap() -> None:
    with opened(memory="30%", scheduler="lockstep-blocking") as engine:
        for h in engine.submit_all([request(i, 4, 4) for i in range(4)]):
            h.result(LIMIT_S)
    assert in_flight(engine, ("Load", "Loaded")) == 0


def gaps(times: list[float], start: float, end: float) -> list[float]:
    """Times between tokens that both came within [start, end]."""
    inside = [t for t in times if start <= t <= end]
    return [b - a for a, b in pairwise(inside)]


def prompt_steps(engine: JaxEngine, prompt: int) -> list[float]:
    """Seconds of each step that ran a chunk of request `prompt`."""
    began: dict[int, float] = {}
    took = []
    for r in engine.records[1:]:
        if r.get("action") == "Compute" and any(p[0][0] == prompt for p in r["parts"]):
            began[r["step"]] = r["t"]
        elif r.get("event") == "Computed" and r["step"] in began:
            took.append(r["t"] - began.pop(r["step"]))
    return took


@pytest.mark.rule("ENGINE-11")
def test_a_prompt_of_2000_tokens_does_not_stop_the_others() -> None:
    path = checkpoint(
        "qwen3_moe", hidden_size=64, moe_intermediate_size=128, max_position_embeddings=4096,
        **EXPERTS,
    )  # fmt: skip
    options: dict[str, Any] = {
        "max_running": 8, "chunk": 64, "max_rows": 64, "kv_tokens": 8192, "kv_block": 64,
        "io": "buffered", "reader": ThrottledReader(200e6),
    }  # fmt: skip
    with opened(path, "30%", **options) as engine:
        decoders = engine.submit_all([request(i, 6, 900) for i in range(4)])
        for handle in decoders:
            for _, _ in zip(range(24), handle, strict=False):
                pass
        prompt = engine.submit(request("long", 2000, 1))
        long = prompt.result(LIMIT_S * 2)
        for handle in decoders:
            handle.cancel()
        results = [h.result(LIMIT_S) for h in decoders]
    assert long.error is None and long.ttft_s is not None
    start = prompt._submitted - decoders[0]._submitted
    end = start + long.ttft_s
    before = [g for r in results for g in gaps(list(r.token_s[4:]), 0.0, start)]
    during = [g for r in results for g in gaps(list(r.token_s), start, end)]
    assert len(before) >= 60 and len(during) >= 60
    assert all(r.tokens and len(r.tokens) < 900 for r in results), "they decoded all the while"
    steps = prompt_steps(engine, prompt.number)
    assert len(steps) > 2000 // 64
    mean_before, mean_during = sum(before) / len(before), sum(during) / len(during)
    visits = len(engine.config.moe_layers) + 1
    allowed = (1 + engine.options.bulk_every) * mean_before + visits * sum(steps) / len(steps)
    print(
        f"time per token {mean_before * 1e3:.1f} ms before, {mean_during * 1e3:.1f} ms during; "
        f"allowed {allowed * 1e3:.1f} ms; the prompt took {long.ttft_s:.1f} s"
    )
    assert mean_during <= allowed
