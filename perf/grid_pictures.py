"""Pictures of a grid: what happened in its cells, by scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

Found = dict[str, Any]

COLOURS = {
    "on-demand-blocking-global": "#9e9e9e", "on-demand-overlapped-layer": "#424242",
    "lockstep-lfru": "#8d6e63", "mixtral-offloading": "#f4a261", "layerscope": "#e76f51",
    "klotski-layer": "#e9c46a", "micro-queues": "#7e57c2", "bevy": "#4fc3f7",
    "ours-alone": "#1e88e5", "ours": "#0d47a1",
}  # fmt: skip
"""Schedulers of the pictures, and their colours."""
OWN = ("ours", "ours-alone", "bevy")


def draw(found: Found, folder: Path) -> list[Path]:
    """All that the cells give enough for, as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = [c for c in found["cells"] if "ours" in c["schedulers"]]
    made = (
        _concurrency(cells, folder), _map(cells, folder), _stalls(cells, folder),
        _bars(cells, folder, "fetches", "experts read a token, over on-demand with an LRU a layer",
              _relative("fetches_per_token")),
        _bars(cells, folder, "lag", "greatest lag in tokens", _plain("lag_max_tokens")),
        _bars(cells, folder, "batch", "requests a step with experts, by requests in flight",
              _batch),
        _accuracy(cells, folder),
    )  # fmt: skip
    return [path for path in made if path is not None]


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False,
                           layout="constrained")  # fmt: skip


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _series(cells: Sequence[Found]) -> Iterator[tuple[tuple[str, str, float], list[Found]]]:
    def place(c: Found) -> tuple[str, str, float]:
        return c["platform"], c["model"], c["cache_share"]

    for key, group in groupby(sorted(cells, key=lambda c: (*place(c), c["requests"])), key=place):
        yield key, list(group)


def _concurrency(cells: Sequence[Found], folder: Path) -> Path | None:
    """Tokens a second over requests, where a setting has three counts of them or more."""
    curves = [(k, cs) for k, cs in _series(cells) if len({c["requests"] for c in cs}) >= 3][:8]
    if not curves:
        return None
    columns = min(4, len(curves))
    figure, axes = _figure(4 * columns, 3.4 * -(-len(curves) // columns), columns,
                           -(-len(curves) // columns))  # fmt: skip
    for axis, ((platform, model, share), cs) in zip(axes.flat, curves, strict=False):
        for name, colour in COLOURS.items():
            points = [(c["requests"], c["schedulers"][name]["tokens_per_s"]) for c in cs
                      if name in c["schedulers"]]  # fmt: skip
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=name,
                          linewidth=2.2 if name in OWN else 1.2)  # fmt: skip
        axis.plot([c["requests"] for c in cs], [1 / c["compute_s_a_token"] for c in cs],
                  color="black", linestyle=":", label="all experts resident")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="requests",
                 title=f"{model}, {share:.1%} cached\n{platform}")  # fmt: skip
        axis.set_xticks([c["requests"] for c in cs], [str(c["requests"]) for c in cs])
        axis.set_xticks([], minor=True)
    axes[0, 0].set_ylabel("tokens/s")
    axes[0, 0].legend(fontsize=6)
    return _save(figure, folder / "concurrency.png")


MAPS = (
    ("ours_over_on_demand_global_lru", "over on-demand, blocking, one LRU"),
    ("ours_over_best_predictive", "over the best predictive"),
    ("ours_over_best_per_layer_overlapped", "over overlapped, an LRU a layer"),
    ("ours_over_best_baseline", "over the best of all"),
)


def _map(cells: Sequence[Found], folder: Path) -> Path | None:
    """Speed-up by cache share and requests: the geometric mean over platforms and models."""
    if not cells:
        return None
    shares = sorted({c["cache_share"] for c in cells})
    counts = sorted({c["requests"] for c in cells})
    figure, axes = _figure(15, 3.6, len(MAPS))
    for axis, (key, title) in zip(axes.flat, MAPS, strict=True):
        for x, share in enumerate(shares):
            for y, requests in enumerate(counts):
                values = [c[key] for c in cells if c.get(key)
                          and (c["cache_share"], c["requests"]) == (share, requests)]  # fmt: skip
                if values:
                    mean = geometric_mean(values)
                    axis.scatter(x, y, s=900, marker="s", c=[mean], cmap="RdYlGn", vmin=0.5,
                                 vmax=2.0)  # fmt: skip
                    axis.text(x, y, f"{mean:.2f}\n({len(values)})", ha="center", va="center",
                              fontsize=7)  # fmt: skip
        axis.set(xlim=(-0.6, len(shares) - 0.4), ylim=(-0.6, len(counts) - 0.4), title=title,
                 xlabel="share of experts in slots")  # fmt: skip
        axis.set_xticks(range(len(shares)), [f"{s:g}" for s in shares])
        axis.set_yticks(range(len(counts)), [str(n) for n in counts])
    axes[0, 0].set_ylabel("requests")
    return _save(figure, folder / "speed-up.png")


def _stalls(cells: Sequence[Found], folder: Path) -> Path | None:
    """Where the compute unit's and the channel's time went, mean over cells."""
    names = [n for n in COLOURS if any(n in c["schedulers"] for c in cells)]
    if not names:
        return None
    figure, axes = _figure(13, 0.4 * len(names) + 2.2, 2)
    halves = (
        ("compute_busy", ("compute waits for experts", "compute held back",
                          "compute waits for requests")),
        ("channel_busy", ("channel: nothing is missing", "channel held back")),
    )  # fmt: skip
    for axis, (busy, stalls) in zip(axes.flat, halves, strict=True):
        left = [0.0] * len(names)
        for part, colour in zip((busy, *stalls), ("#1565c0", "#e76f51", "#f4a261", "#bdbdbd"),
                                strict=False):  # fmt: skip
            widths = []
            for n in names:
                of = [c["schedulers"][n] for c in cells if n in c["schedulers"]]
                widths.append(sum(f[part] if part == busy else f["stalls"][part] for f in of)
                              / len(of))  # fmt: skip
            axis.barh(names, widths, left=left, color=colour, label=part.replace("_", " "))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set(xlim=(0, 1), xlabel="share of the time, mean over cells")
        axis.invert_yaxis()
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes[0, 1].set_yticks([])
    return _save(figure, folder / "stalls.png")


Value = Callable[[Found, str], float | None]


def _plain(key: str) -> Value:
    return lambda c, n: c["schedulers"][n].get(key)


def _relative(key: str) -> Value:
    def value(c: Found, n: str) -> float | None:
        base = c["schedulers"].get("on-demand-overlapped-layer", {}).get(key)
        return c["schedulers"][n][key] / base if base else None

    return value


def _batch(c: Found, n: str) -> float | None:
    mean = c["schedulers"][n].get("batch_mean")
    return None if mean is None else mean / c["requests"]


def _bars(
    cells: Sequence[Found], folder: Path, name: str, title: str, value: Value
) -> Path | None:
    """The median over cells by scheduler, and each cell as a dot."""
    rows: list[tuple[str, str, list[float]]] = []
    for n, colour in COLOURS.items():
        found = [v for c in cells if n in c["schedulers"] and (v := value(c, n)) is not None]
        if found:
            rows.append((n, colour, found))
    if not rows:
        return None
    figure, axes = _figure(8, 0.45 * len(rows) + 1.4)
    axis = axes[0, 0]
    for y, (_, colour, found) in enumerate(rows):
        axis.barh(y, median(found), color=colour)
        axis.scatter(found, [y] * len(found), s=6, color="black", alpha=0.4)
    axis.set_yticks(range(len(rows)), [n for n, _, _ in rows])
    axis.invert_yaxis()
    axis.set_xlabel(title + " (bar: median, dots: cells)")
    return _save(figure, folder / f"{name}.png")


def _accuracy(cells: Sequence[Found], folder: Path) -> Path | None:
    """Recall of predictors over all experts, and over those that were not there."""
    rows = list(_recalls(cells))
    if not rows:
        return None
    figure, axes = _figure(8, 0.5 * len(rows) + 1.4)
    axis = axes[0, 0]
    for y, (_, overall, absent) in enumerate(rows):
        axis.barh(y - 0.2, median(overall), height=0.38, color="#90a4ae")
        axis.barh(y + 0.2, median(absent), height=0.38, color="#c62828")
    axis.set_yticks(range(len(rows)), [n for n, _, _ in rows])
    axis.invert_yaxis()
    axis.set(xlim=(0, 1), xlabel="named experts that were predicted: all (grey), and those not "
             "resident (red); median over cells")  # fmt: skip
    return _save(figure, folder / "accuracy.png")


def _recalls(cells: Iterable[Found]) -> Iterator[tuple[str, list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for c in cells:
        for n, s in c["schedulers"].items():
            said = s.get("prediction") or {}
            if s["kind"] != "predictive" or not said:
                continue
            both = said["overall"]["recall"], said["absent"]["recall"]
            if None not in both:
                lists = found.setdefault(n, ([], []))
                lists[0].append(both[0])
                lists[1].append(both[1])
    for n, (overall, absent) in found.items():
        yield n, overall, absent
