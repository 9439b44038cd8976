"""The pipeline as a picture: replicas and memory devices as lanes, batches as colours."""

from __future__ import annotations

from typing import IO, Any

from jax_impl.app import builtin, demo_text
from jax_impl.app.extras import missing
from jax_impl.app.text import Text
from jax_impl.attention_pool import lamina_demo
from jax_impl.attention_pool.engine import LaminaEngine
from reference.files.checkpoint import Checkpoint
from reference.vocab.errors import BadInput, CoveyError

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c")
Bar = tuple[float, float, int]
"""(began, ended, batch), seconds."""


def lanes(engine: LaminaEngine) -> list[tuple[str, list[Bar]]]:
    """Every device with what it did, of an engine that was opened with `timed`."""
    out: list[tuple[str, list[Bar]]] = []
    for worker in engine.workers:
        bars = [(b, e, batch) for batch, _, b, e in worker.history]
        out.append((f"replica {worker.number}", bars))
    for device in engine.pool.devices:
        bars = [(b, e, engine.batch_of_tile[tile]) for tile, _, b, e in device.history]
        out.append((f"memory {device.number}", bars))
    return out


def window(found: list[tuple[str, list[Bar]]], turns: int) -> tuple[float, float]:
    """From the middle of the run on, as long as so many turns of the first replica took."""
    bars = sorted(found[0][1])
    if not bars:
        raise BadInput("nothing ran that could be drawn")
    first = len(bars) // 2
    last = min(first + turns, len(bars)) - 1
    return bars[first][0], bars[last][1]


def draw(engine: LaminaEngine, out: IO[bytes], turns: int = 18) -> None:
    """Write a PNG. Raises BadInput without matplotlib, CoveyError when it cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput(missing("matplotlib", "plot")) from None
    found = lanes(engine)
    start, end = window(found, turns)
    figure = Figure(figsize=(10, 0.8 + 0.5 * len(found)), dpi=110, layout="constrained")
    axis: Any = figure.subplots()
    for y, (_, bars) in enumerate(reversed(found)):
        for began, ended, batch in bars:
            if ended > start and began < end:
                low, high = max(began, start), min(ended, end)
                axis.broken_barh(
                    [((low - start) * 1e3, (high - low) * 1e3)], (y - 0.38, 0.76),
                    facecolors=COLOURS[batch % len(COLOURS)], edgecolor="white", linewidth=0.4,
                )  # fmt: skip
    axis.set_yticks(range(len(found)), [name for name, _ in reversed(found)])
    axis.set_xlim(0, (end - start) * 1e3)
    axis.set_xlabel("milliseconds")
    o = engine.options
    axis.set_title(
        f"{o.batches} batches in flight, {len(engine.workers)} replicas, {o.memory_devices} "
        f"memory devices; a colour a batch", fontsize=9,
    )  # fmt: skip
    try:
        figure.savefig(out, format="png")
    except OSError as error:
        raise CoveyError(f"picture: {error.strerror}") from None


def run(out: IO[bytes], batches: int, memory: int, order: str) -> None:
    """Run the built-in model over two pools and draw a stretch of the middle of it."""
    lamina_demo.enough_devices(max(1, batches - 1) + memory)
    path = builtin.folder()
    with Checkpoint.open(path) as checkpoint:
        vocab = checkpoint.config.vocab
    requests = demo_text.requests(Text(path), vocab, 4 * batches, lamina_demo.NEW)
    with LaminaEngine.open(
        path, batches=batches, memory_devices=memory, max_batch=4, order=order,
        kv_tokens=4 * batches * 128, timed=True, progress=lamina_demo.progress,
        **lamina_demo.COMMON,
    ) as engine:  # fmt: skip
        for handle in engine.submit_all(requests):
            handle.result(lamina_demo.WAIT_S)
    lamina_demo.done()
    draw(engine, out)
