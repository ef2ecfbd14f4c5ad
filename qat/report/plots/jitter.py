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
    look,
    mark_freeze,
    numbers,
    present,
    quantiles,
    short,
    tidy,
    to_svg,
)

WORST = 4  # layers drawn by name


def jitter_picture(runs: dict[str, dict[str, Any]], freeze: dict[str, int | None] | None = None) -> str:
    """Median over layers and the band of their middle 80 %; of a single run also the share of the statistics and the worst layers by name.

    Args:
        runs: content of layers.json by label.
        freeze: step of the freeze by label; marked for a single run.

    Returns:
        SVG; "" where no run has jitter.
    """
    found = {label: part for label, part in present(runs, "jitter").items() if part["steps"] and part["layers"]}
    if not found:
        return ""
    figure, axes = figure_of(4.1 if len(found) == 1 else 2.6 + 0.17 * len(found))
    for i, (label, part) in enumerate(found.items()):
        steps, (low, middle, high) = part["steps"], quantiles(list(part["layers"].values()), (0.1, 0.5, 0.9))
        style = look(i)
        marker = "o" if len(steps) < 3 else None
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.2 if len(found) == 1 else 0.1, linewidth=0)
        name = "median layer; band: 10 to 90 % of layers" if len(found) == 1 else short(label, 48)
        axes.plot(steps, middle, linewidth=1.8, marker=marker, label=name, **style)
    if len(found) == 1:
        ((label, part),) = found.items()
        _statistics(axes, runs[label].get("jitter_statistics"))
        _worst(axes, part)
        mark_freeze(axes, (freeze or {}).get(label))
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
