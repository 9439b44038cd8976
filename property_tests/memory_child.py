"""Run by test_engine_memory in a process of its own: serve, and watch this process's memory.

python memory_child.py CHECKPOINT BUDGET IO CACHE      prints one JSON object
"""

from __future__ import annotations

import json
import sys
import threading
import time

from engines import request, statm

from jax_impl.engine import JaxEngine


class Watch(threading.Thread):
    """Keeps the greatest memory figure seen, looking every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.samples = 0
        self.over = False

    def run(self) -> None:
        while not self.over:
            self.peak = max(self.peak, statm())
            self.samples += 1
            time.sleep(0.005)


def main(path: str, memory: str, io: str, cache: str) -> dict[str, object]:
    """Compile and warm up under one watch, serve under another."""
    bare = statm()
    first = Watch()
    first.start()
    with JaxEngine.open(
        path,
        memory,
        io=io,
        chunk=16,
        wide=0,
        max_running=8,
        kv_tokens=4096,
        kv_memory="64MiB",
        ignore_eos=True,
        compile_cache=cache,
    ) as engine:  # type: ignore[arg-type]
        engine.submit(request("warm", 20, 4)).result(120)
        first.over = True
        first.join()
        settled = statm()
        second = Watch()
        second.start()
        began = time.monotonic()
        handles = engine.submit_all([request(i, 10 + 8 * i, 10) for i in range(8)])
        results = [h.result(240) for h in handles]
        seconds = time.monotonic() - began
        second.over = True
        second.join()
        sizes, totals = engine.sizes, engine.totals()
    return {
        "bare": bare, "settled": settled, "compile_peak": first.peak, "peak": second.peak,
        "samples": second.samples, "seconds": seconds,
        "tokens": [list(r.tokens) for r in results], "errors": [r.error for r in results],
        "resident": sizes.resident, "kv": sizes.kv, "budget": sizes.budget, "rows": sizes.rows,
        "bounce": sizes.bounce, "slots": sizes.slots, "slot": sizes.slot, "experts": sizes.experts,
        "loads": totals["loads"], "bytes": totals["bytes"], "io": totals["io"],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:5])))
