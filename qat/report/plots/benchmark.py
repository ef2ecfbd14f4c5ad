"""Ratios of times, grouped."""

from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qat.report.colours import INK
from qat.report.plots.style import to_svg


def ratio_bars(rows: list[dict[str, Any]], label: str) -> str:
    """Bars of `ratio_median` with quartiles, grouped by model, batch and runtime, a colour for each variant.

    Args:
        rows: dicts with model, batch, runtime, variant, ratio_median, ratio_low, ratio_high.
        label: what a ratio is.
    """
    groups = list(dict.fromkeys((row["model"], row["batch"], row["runtime"]) for row in rows))
    kinds = list(dict.fromkeys(row["variant"] for row in rows))
    figure = Figure(figsize=(8, 1.2 + 0.16 * len(rows) + 0.12 * len(groups)), layout="constrained")
    axes = figure.subplots()
    shades = matplotlib.colormaps["viridis"]
    ticks, at = [], 0.0
    for model, batch, runtime in groups:
        own = [row for row in rows if (row["model"], row["batch"], row["runtime"]) == (model, batch, runtime)]
        ticks.append((at + (len(own) - 1) / 2, f"{model}, batch {batch}, {runtime}"))
        for row in own:
            colour = shades(kinds.index(row["variant"]) / max(1, len(kinds) - 1) * 0.85)
            ends = [[max(0.0, row["ratio_median"] - row["ratio_low"])], [max(0.0, row["ratio_high"] - row["ratio_median"])]]
            axes.barh(at, row["ratio_median"], xerr=ends, height=0.85, color=colour, ecolor=INK, error_kw={"linewidth": 0.8})
            at += 1
        at += 0.8
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=shades(i / max(1, len(kinds) - 1) * 0.85), label=kind) for i, kind in enumerate(kinds)]
    axes.legend(handles=handles, frameon=False, fontsize=8)
    return to_svg(figure)
