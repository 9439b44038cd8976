"""A measurement as a picture: tokens a second and bytes a token over requests at a time."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from jax_impl.app.extras import missing
from jax_impl.app.output import WholeFile
from jax_impl.app.picture import colour
from reference.vocab.errors import BadInput, CoveyError

FONT = 8
MIN_INCHES, LETTER_INCHES, KEY_INCHES = 4.3, 0.08, 0.6
"""The least width of a picture, and about what a letter of FONT and a legend's key take of it."""


def ready() -> None:
    """Raises BadInput without matplotlib: before hours are spent, not after."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        raise BadInput(f"--png: {missing('matplotlib', 'plot')}") from None


def series(document: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, dict[str, Any]]]]]:
    """budget -> scheduler -> (requests, figures), in the order in which they were measured."""
    found: dict[str, dict[str, list[tuple[int, dict[str, Any]]]]] = {}
    for row in document["rows"]:
        for name, figures in row["schedulers"].items():
            found.setdefault(row["memory"], {}).setdefault(name, []).append(
                (row["requests"], figures))
    return found


def draw(document: dict[str, Any], out: WholeFile) -> None:
    """Writes a PNG. Raises CoveyError when the disk refuses."""
    try:
        picture(document).savefig(out.file, format="png")
    except OSError as error:
        raise CoveyError(f"--png: {out.target}: {error.strerror}") from None


def picture(document: dict[str, Any]) -> Any:
    """A matplotlib Figure, a column a budget. Dashed: the bound of each scheduler's own work, which
    is its speed divided by the share that it reached."""
    from matplotlib.figure import Figure

    budgets = series(document)
    crowds = sorted({row["requests"] for row in document["rows"]})
    width = max(MIN_INCHES, 1.2 + 3.1 * len(budgets))
    figure = Figure(figsize=(width, 5.6), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(budgets), squeeze=False, sharex=True, sharey="row")
    for column, (memory, schedulers) in enumerate(budgets.items()):
        for n, (name, points) in enumerate(schedulers.items()):
            crowd = [c for c, _ in points]
            speed = [f["tokens_per_s"] for _, f in points]
            low = [min(f["rounds_tokens_per_s"]) for _, f in points]
            high = [max(f["rounds_tokens_per_s"]) for _, f in points]
            bound = [f["tokens_per_s"] / f["of_bound"] if f["of_bound"] else 0.0
                     for _, f in points]
            above = axes[0][column]
            above.plot(crowd, speed, "o-", color=colour(n), label=name, markersize=4)
            above.fill_between(crowd, low, high, color=colour(n), alpha=0.15, linewidth=0)
            above.plot(crowd, bound, "--", color=colour(n), linewidth=0.8)
            axes[1][column].plot(crowd, [f["bytes_per_token"] / 1e6 for _, f in points], "o-",
                                 color=colour(n), markersize=4)
        axes[0][column].set_title(f"{memory} of the experts in memory", fontsize=9)
        axes[1][column].set_xlabel("requests at a time", fontsize=9)
        axes[1][column].set_xscale("log", base=2)
        axes[1][column].set_xticks(crowds, [str(c) for c in crowds])
        for row in (0, 1):
            axes[row][column].grid(alpha=0.25)
            axes[row][column].tick_params(labelsize=8)
    for row in (0, 1):
        axes[row][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("tokens/s (dashed: bound)", fontsize=9)
    axes[1][0].set_ylabel("MB read a token", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns(width, labels),
                  fontsize=FONT, frameon=False)
    m = document["machine"]
    title = (f"{document['model']}, {document['options']['compute']}: {m['processor']}, "
             f"{m['cores']} cores, commit {document['commit']}")
    figure.suptitle("\n".join(wrap(title, int(width / LETTER_INCHES))), fontsize=FONT)
    return figure


def columns(width: float, labels: Sequence[str]) -> int:
    """How many columns of a legend fit into so many inches."""
    one = KEY_INCHES + LETTER_INCHES * max(map(len, labels), default=0)
    return max(1, min(4, len(labels), int(width / one)))
