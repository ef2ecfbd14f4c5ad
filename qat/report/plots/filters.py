"""How much the filters of a layer differ in range: what one scale for the tensor has to cover."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from qat.report.colours import ORANGE
from qat.report.plots.style import (
    FLOAT,
    ROUNDED,
    TEXT,
    beside_rows,
    figure_of,
    legend_below,
    list_layers,
    numbers,
    rows_height,
    tidy,
    to_svg,
)


def filters_picture(layers: dict[str, Any]) -> str:
    """Largest |w| of the filters of each layer, in units of the layer's median filter; filters of zeros alone are left out.

    For the layer's own weights and for the folded ones a line over all filters, thick over their middle half, a point at the
    largest, whose ratio after folding is written beside it.

    Args:
        layers: content of layers.json.

    Returns:
        SVG; "" where there are no filters.
    """
    filters = layers.get("filters")
    if not filters:
        return ""
    figure, axes = figure_of(rows_height(len(filters)) + 0.4 + 0.1 * len(filters))
    for kind, shift, colour, shape in (("before", -0.17, ORANGE, "D"), ("after", 0.17, ROUNDED, "o")):
        _spreads(axes, [own.get(kind) for own in filters.values()], shift, colour, shape, f"{kind} folding")
    ratios = [ratio(own["after"]) for own in filters.values()]
    beside_rows(axes, ["" if np.isnan(value) else f"{value:.3g}" for value in ratios])
    axes.axvline(1, color=FLOAT, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("largest |w| of a filter / median filter", fontsize=TEXT)
    tidy(axes)
    list_layers(axes, list(filters))
    legend_below(figure, axes, 2)
    return to_svg(figure)


def ratio(filters: list[float | None]) -> float:
    """The largest filter over the median one of those that are not 0; NaN where all are."""
    alive = _alive(filters)
    return float(alive.max() / np.median(alive)) if alive.size else float("nan")


def _alive(filters: list[float | None]) -> np.ndarray:
    values = numbers(filters)
    return values[np.isfinite(values) & (values > 0)]


def _spreads(axes: Axes, rows: list[list[float | None] | None], shift: float, colour: str, shape: str, label: str) -> None:
    kept = [(place + shift, alive / np.median(alive)) for place, row in enumerate(rows) if row and (alive := _alive(row)).size]
    if not kept:
        return
    places = [place for place, _ in kept]
    low, first, third, high = np.array([np.quantile(values, (0, 0.25, 0.75, 1)) for _, values in kept]).T
    axes.hlines(places, low, high, color=colour, linewidth=0.8)
    axes.hlines(places, first, third, color=colour, linewidth=3.5)
    axes.scatter(high, places, s=13, color=colour, marker=shape, label=label, zorder=3)
