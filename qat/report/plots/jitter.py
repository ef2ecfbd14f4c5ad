"""How many integer weights change from one batch to the next, over a run."""

from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from qat.report.plots.style import (
    FLOAT,
    ROUNDED,
    TEXT,
    figure_of,
    legend_below,
    mark_freeze,
    numbers,
    quantiles,
    short,
    tidy,
    to_svg,
)

WORST = 4  # layers drawn by name


def jitter_picture(layers: dict[str, Any], freeze: int | None = None) -> str:
    """Median over layers and the band of their middle 80 %, the share of the statistics, and the worst layers by name.

    Args:
        layers: content of layers.json.
        freeze: step of the freeze, which is marked.

    Returns:
        SVG; "" where no jitter was recorded.
    """
    part = layers.get("jitter")
    if not part or not part["steps"] or not part["layers"]:
        return ""
    figure, axes = figure_of(4.1)
    steps, (low, middle, high) = part["steps"], quantiles(list(part["layers"].values()), (0.1, 0.5, 0.9))
    axes.fill_between(steps, low, high, color=ROUNDED, alpha=0.2, linewidth=0)
    marker = "o" if len(steps) < 3 else None
    axes.plot(steps, middle, color=ROUNDED, linewidth=1.8, marker=marker, label="median layer; band: 10 to 90 % of layers")
    _statistics(axes, layers.get("jitter_statistics"))
    _worst(axes, part)
    mark_freeze(axes, freeze)
    axes.set_xlabel("optimizer step", fontsize=TEXT)
    axes.set_ylabel("changed codes", fontsize=TEXT)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    tidy(axes)
    legend_below(figure, axes)
    return to_svg(figure)


def _statistics(axes: Any, part: dict[str, Any] | None) -> None:
    if part and part["steps"]:
        (middle,) = quantiles(list(part["layers"].values()), (0.5,))
        axes.plot(part["steps"], middle, color=ROUNDED, linewidth=1.4, linestyle=(0, (1, 1.3)), label="of it by batch statistics (median)")


def worst_layers(part: dict[str, Any], count: int = WORST) -> list[str]:
    """Layers of the largest mean jitter, largest first."""
    means = {name: float(np.nanmean(row)) for name, values in part["layers"].items() if np.isfinite(row := numbers(values)).any()}
    return sorted(means, key=lambda name: -means[name])[:count]


def _worst(axes: Any, part: dict[str, Any]) -> None:
    if len(part["layers"]) < WORST:
        return
    shades = ("#d55e00", "#e69f00", "#000000", FLOAT)
    for name, colour, dashes in zip(worst_layers(part), shades, ("-", (0, (5, 2)), (0, (2, 1)), (0, (5, 1.5, 1, 1.5)))):
        axes.plot(part["steps"], numbers(part["layers"][name]), color=colour, linewidth=0.9, linestyle=dashes, label=short(name, 40))
