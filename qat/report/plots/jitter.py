"""How many integer weights change from one batch to the next, over a run."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from qat.report.colours import GREEN, INK, ORANGE, PURPLE, VERMILLION
from qat.report.plots.style import (
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
    """Medians over layers of what the batch statistics move and of all, with the band of the layers' middle 80 %; the worst by name.

    Args:
        layers: content of layers.json.
        freeze: step of the freeze, which is marked.

    Returns:
        SVG; "" where no jitter was recorded.
    """
    part = layers.get("jitter")
    if not part or not part["steps"] or not part["layers"]:
        return ""
    figure, axes = figure_of(4.3)
    _statistics(axes, layers.get("jitter_statistics"))
    _total(axes, part)
    _worst(axes, part)
    mark_freeze(axes, freeze)
    axes.set_xlabel("optimizer step", fontsize=TEXT)
    axes.set_ylabel("changed codes", fontsize=TEXT)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    tidy(axes)
    legend_below(figure, axes)
    return to_svg(figure)


def _statistics(axes: Axes, part: dict[str, Any] | None) -> None:
    """What papers call jitter, and so the thickest line; drawn beyond the axes' edge, on which it lies after a freeze."""
    if part and part["steps"] and part["layers"]:
        (middle,) = quantiles(list(part["layers"].values()), (0.5,))
        label = "by the batch statistics alone (median layer)"
        axes.plot(part["steps"], middle, color=ROUNDED, linewidth=2.6, marker=_marker(part), label=label, clip_on=False, zorder=3)


def _total(axes: Axes, part: dict[str, Any]) -> None:
    low, middle, high = quantiles(list(part["layers"].values()), (0.1, 0.5, 0.9))
    axes.fill_between(part["steps"], low, high, color=INK, alpha=0.13, linewidth=0)
    label = "in all, with the optimizer's step\n(median layer; band: 10 to 90 % of layers)"
    dashes = (0, (4, 1.5))
    axes.plot(part["steps"], middle, color=INK, linewidth=1.3, linestyle=dashes, marker=_marker(part), label=label, zorder=4)


def _marker(part: dict[str, Any]) -> str | None:
    return "o" if len(part["steps"]) < 3 else None


def most_changed(part: dict[str, Any], count: int = WORST) -> list[str]:
    """Layers of the largest mean jitter, largest first."""
    means = {name: float(np.nanmean(row)) for name, values in part["layers"].items() if np.isfinite(row := numbers(values)).any()}
    return sorted(means, key=lambda name: -means[name])[:count]


def _worst(axes: Axes, part: dict[str, Any]) -> None:
    if len(part["layers"]) < WORST:
        return
    shades = (VERMILLION, ORANGE, GREEN, PURPLE)
    for name, colour, dashes in zip(most_changed(part), shades, ("-", (0, (5, 2)), (0, (2, 1)), (0, (5, 1.5, 1, 1.5)))):
        axes.plot(part["steps"], numbers(part["layers"][name]), color=colour, linewidth=0.9, linestyle=dashes, label=short(name, 40))
