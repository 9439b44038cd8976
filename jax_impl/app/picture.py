"""A timeline as a picture: channel and compute as lanes, requests as colours (TIME-2)."""

from __future__ import annotations

from typing import Any

from jax_impl.app.extras import missing
from jax_impl.app.history import History
from jax_impl.app.output import WholeFile
from reference.vocab.errors import BadInput, CoveyError

COLOURS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5",
    "#9c6b4e", "#2f7f86", "#b8a02c", "#c2456b",
)  # fmt: skip
OTHER = "#9498a0"
COMPUTE_LANE = 2.2
"""Height of the compute lane, in channel lanes."""


def draw(histories: list[tuple[str, History]], out: WholeFile) -> None:
    """Writes a PNG. Raises BadInput without matplotlib, CoveyError when the disk refuses."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput(f"--png: {missing('matplotlib', 'plot')}") from None
    heights = [h.lanes + COMPUTE_LANE + 1.2 for _, h in histories]
    figure = Figure(figsize=(11, 0.7 + 0.27 * sum(heights)), dpi=110, layout="constrained")
    axes = figure.subplots(len(histories), 1, squeeze=False, sharex=True,
                           height_ratios=heights)[:, 0]
    longest = max(h.end - h.start for _, h in histories)
    for axis, (title, history) in zip(axes, histories, strict=True):
        _panel(axis, title, history)
    axes[-1].set_xlabel("seconds" if longest >= 1 else "milliseconds")
    axes[-1].set_xlim(0, longest * scale(longest))
    _legend(figure, axes[0], histories)
    try:
        figure.savefig(out.file, format="png")
    except OSError as error:
        raise CoveyError(f"--png: {out.target}: {error.strerror}") from None


def scale(longest: float) -> float:
    """What a second is on the axis."""
    return 1.0 if longest >= 1 else 1e3


def colour(number: int) -> str:
    """A request's colour."""
    return COLOURS[number % len(COLOURS)]


def bars(history: History) -> dict[tuple[str, float, float], list[tuple[float, float]]]:
    """(colour, bottom, height) -> [(start, length)] in seconds from the history's start.

    A load has the colour of the first request that waits for it (grey: nobody does). A step is
    striped in the colours of its requests: the more stripes, the larger the group.
    """
    found: dict[tuple[str, float, float], list[tuple[float, float]]] = {}

    def put(colour: str, bottom: float, height: float, start: float, end: float) -> None:
        span = (start - history.start, max(end - start, 0.0))
        found.setdefault((colour, bottom, height), []).append(span)

    for load in history.loads:
        bottom = COMPUTE_LANE + 0.4 + (history.lanes - 1 - load.lane)
        put(colour(load.wanted[0]) if load.wanted else OTHER, bottom, 0.86, load.start, load.end)
    for step in history.steps:
        stripe = COMPUTE_LANE / max(1, len(step.rows))
        for i, number in enumerate(sorted(step.rows)):
            put(colour(number), i * stripe, stripe, step.start, step.end)
    return found


def _panel(axis: Any, title: str, history: History) -> None:
    span = history.end - history.start
    factor = scale(span)
    for (shade, bottom, height), spans in bars(history).items():
        axis.broken_barh([(a * factor, n * factor) for a, n in spans], (bottom, height),
                         facecolors=shade, linewidth=0.15, edgecolor="white")
    channel, compute = history.busy()
    tokens = sum(len(life.tokens) for life in history.lives.values())
    axis.set_title(
        f"{title}: {tokens} tokens in {span:.2f} s ({tokens / span:.0f}/s), channel busy "
        f"{channel / span:.0%}, compute busy {compute / span:.0%}", fontsize=9, loc="left")
    middle = COMPUTE_LANE + 0.4 + history.lanes / 2
    axis.set_yticks([COMPUTE_LANE / 2, middle], ["compute", "channel"], fontsize=9)
    axis.set_ylim(-0.15, COMPUTE_LANE + 0.4 + history.lanes)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)


def _legend(figure: Any, axis: Any, histories: list[tuple[str, History]]) -> None:
    from matplotlib.patches import Patch

    lives = {n: life.id for _, h in histories for n, life in h.lives.items()}
    if 1 < len(lives) <= len(COLOURS):
        patches = [Patch(color=colour(n), label=lives[n]) for n in sorted(lives)]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8,
                      frameon=False, handlelength=1.0)
