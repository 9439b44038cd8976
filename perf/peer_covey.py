"""Covey as a child of perf.peers: the same protocol as perf/peer_llama.py.

    python -m perf.peer_covey MODEL MEMORY SLOTS TOKENS_A_SLOT '{"scheduler": ...}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from jax_impl.engine import JaxEngine
from jax_impl.head import versions
from reference.files.requests import Request
from reference.handle import Result

SUMS = ("wall_s", "compute_s", "channel_s", "bytes", "tokens")


def main() -> None:
    """The child's life."""
    model, memory, slots, each, options = sys.argv[1:6]
    told = json.loads(options)
    with JaxEngine.open(model, memory=int(memory), ignore_eos=True, max_running=int(slots),
                        kv_tokens=int(slots) * int(each), **told) as engine:
        answer({"ready": True, "version": versions()["jax"], "system": engine.totals()["io"],
                "held_bytes": engine.sizes.total, "expert_budget": engine.sizes.budget})
        for line in sys.stdin:
            job = json.loads(line)
            answer(run(engine, job["prompts"], job["new"]))


def answer(document: dict[str, Any]) -> None:
    """One line to the parent."""
    print(json.dumps(document), flush=True)


def run(engine: JaxEngine, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """One job: all prompts at once, to their ends."""
    before = engine.totals()
    handles = engine.submit_all(
        Request(f"r{n}", tuple(prompt), new) for n, prompt in enumerate(prompts))
    results: list[Result] = [handle.result() for handle in handles]
    after = engine.totals()
    sums = {name: after[name] - before[name] for name in SUMS}
    texts = ["".join(f" w{t}." for t in r.tokens) for r in results]
    return {"seconds": sums["wall_s"], "token_s": [list(r.token_s) for r in results],
            "texts": texts, "errors": [r.error for r in results if r.error], "sums": sums}


if __name__ == "__main__":
    main()
