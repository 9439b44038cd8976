"""The tables of docs/reproduction.md, from the grid's JSON: put between marks in the page (GRID-8).

    python -m perf.grid_page RESULT.json docs/reproduction.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from perf.grid_report import OURS

Found = dict[str, Any]
BEGIN, END = "<!-- grid {} -->", "<!-- end {} -->"


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(c) for c in cells) + " |"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}" if x < 10 else f"{x:.1f}"


def setting(found: Found) -> str:
    """How and where it was made."""
    m = found["machine"]
    return (
        f"`{found['command']}`: {len(found['cells'])} cells, {len(found['skipped'])} left out, "
        f"{found['seconds']:.0f} s on {m['cores']} cores that other programs shared (load "
        f"{m['load'][0]:.0f}; {found['processor_seconds']:.0f} processor seconds); commit "
        f"{found['commit']}. Virtual time does not depend on that."
    )


def targets(found: Found) -> str:
    """Each target: wanted, found, met, the worst three cells."""
    lines = [_row("target", "wanted", "found", "", "cells", "worst cells"), "|" + "---|" * 6]
    for name, t in found["summary"]["targets"].items():
        worst = "<br>".join(" ".join(w.split()) for w in t["worst"][:3])
        met = "met" if t["met"] else "**not met**"
        lines.append(_row(name, t["wanted"], _number(t["found"]), met, t["cells"], worst))
    return "\n".join(lines)


def worth(found: Found) -> str:
    """What each part is worth, by what limits."""
    lines = [_row("what", "reading limits", "both alike", "computing limits"), "|---|---|---|---|"]
    for title, w in found["summary"]["worth"].items():
        cells = [
            f"{w[k][1]:.2f} ({w[k][0]:.2f} to {w[k][2]:.2f}, {w[k][3]})" if k in w else "-"
            for k in ("reading", "both", "compute")
        ]
        lines.append(_row(f"{title}: `{w['one']}` over `{w['other']}`", *cells))
    return "\n".join(lines)


CELL = (
    ("ours_over_on_demand_global_lru", "on demand"), ("ours_over_best_predictive", "predictive"),
    ("ours_over_best_per_layer_overlapped", "per-layer"),
    ("ours_over_best_baseline", "best"), ("ours_alone_over_best_baseline", "best, no guesses"),
    ("ours_over_bevy", "Bevy"),
    ("ours_over_cpu_misses", "processor"), ("ours_over_informed", "informed"),
    ("ours_over_belady_lockstep", "Belady"),
    ("bound_share", "of the bound"),
)  # fmt: skip


def cells(found: Found) -> str:
    """A line a cell: tokens/s of ours, and over others."""
    lines = [_row("platform", "model", "experts as", "cached", "requests", "tokens/s",
                  *[name for _, name in CELL], "best baseline"),
             "|" + "---|" * (7 + len(CELL))]  # fmt: skip
    for c in found["cells"]:
        if OURS in c["schedulers"]:
            lines.append(_row(
                c["platform"], c["model"], c["stored"], f"{c['cache_share']:g}", c["requests"],
                f"{c['schedulers'][OURS]['tokens_per_s']:.1f}",
                *[_number(c.get(key)) for key, _ in CELL], c["best_baseline"],
            ))  # fmt: skip
    return "\n".join(lines)


def accuracy(found: Found) -> str:
    """Recall of predictors that learn, over all named experts and over those not resident."""
    by: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for c in found["cells"]:
        for name, s in c["schedulers"].items():
            said = s.get("prediction") or {}
            both = [said.get(k, {}).get("recall") for k in ("overall", "absent")]
            if s["kind"] == "predictive" and None not in both:
                by.setdefault((name, c["cache_share"]), []).append((both[0], both[1]))
    lines = [_row("predictor of", "cached", "of all named", "of those not resident", "cells"),
             "|---|---|---|---|---|"]  # fmt: skip
    for (name, share), values in sorted(by.items()):
        middle = [f"{median(v):.2f}" for v in zip(*values, strict=True)]
        lines.append(_row(name, f"{share:g}", *middle, len(values)))
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def by_size(found: Found) -> str:
    """Ours over others, by requests and by what is cached: medians, least and greatest."""
    columns = ("ours_over_on_demand_global_lru", "ours_over_best_predictive",
               "ours_over_best_per_layer_overlapped")  # fmt: skip
    lines = [_row("", "over on demand", "over the best predictive", "over per-layer", "cells"),
             "|---|---|---|---|---|"]  # fmt: skip
    for field, said in (("requests", "{} at a time"), ("cache_share", "{:.1%} cached")):
        for value in sorted({c[field] for c in found["cells"]}):
            among = [c for c in found["cells"] if c[field] == value]
            told = [_spread([c[k] for c in among if c.get(k)]) for k in columns]
            lines.append(_row(said.format(value), *told, len(among)))
    return "\n".join(lines)


def busy(found: Found) -> str:
    """How busy both sides are, and how much of the computing has a read beside it: medians."""
    lines = [_row("scheduler", "channel busy", "computing", "both at once", "computing hidden"),
             "|---|---|---|---|---|"]  # fmt: skip
    for name in ("on-demand-blocking-layer", "on-demand-overlapped-layer", "layerscope", "bevy",
                 "ours-alone", "ours"):  # fmt: skip
        runs = [c["schedulers"][name] for c in found["cells"] if name in c["schedulers"]]
        if runs:
            sides = [[r[k] for r in runs] for k in ("channel_busy", "compute_busy", "both_busy")]
            hidden = [r["both_busy"] / r["compute_busy"] for r in runs if r["compute_busy"]]
            lines.append(_row(f"`{name}`", *[f"{median(v):.0%}" for v in (*sides, hidden)]))
    return "\n".join(lines)


def reads(found: Found) -> str:
    """Experts read in lock-step over those of one LRU a layer, by model."""
    others = ("lockstep-lfru", "lockstep-known-demand", "lockstep-frequency", "informed", "belady")
    lines = [_row("model", *[f"`{n}`" for n in others], "cells"), "|" + "---|" * (2 + len(others))]
    for model in sorted({c["model"] for c in found["cells"]}):
        among = [c["schedulers"] for c in found["cells"] if c["model"] == model]
        each = [(s, s.get("on-demand-overlapped-layer", {}).get("fetches_per_token"))
                for s in among]  # fmt: skip
        told = [
            _spread([s[n]["fetches_per_token"] / least for s, least in each if least and n in s])
            for n in others
        ]
        lines.append(_row(model, *told, len(among)))
    return "\n".join(lines)


def near(found: Found) -> str:
    """Cells where computing and reading are alike, with the queueing limit."""
    told = found["summary"]["compute and fetch within 1.3x of each other"]
    return "\n".join(f"- {' '.join(line.split())}" for line in told) or "- none"


PARTS = {
    "setting": setting, "targets": targets, "worth": worth, "cells": cells, "accuracy": accuracy,
    "near": near, "by size": by_size, "busy": busy, "reads": reads,
}  # fmt: skip


def fill(text: str, found: Found) -> str:
    """The page with every part between its marks replaced. Raises ValueError without one."""
    for name, make in PARTS.items():
        begin, end = BEGIN.format(name), END.format(name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"page: {begin} ... {end} expected once")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{make(found)}\n{end}{rest.split(end)[1]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 2:
        raise SystemExit(__doc__)
    result, page = map(Path, args)
    page.write_text(fill(page.read_text(), json.loads(result.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
