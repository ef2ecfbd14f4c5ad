"""One number a layer: noise of its output, and the loss it costs alone."""

from typing import Any

from matplotlib.axes import Axes

from qat.report.plots.style import (
    FLOAT,
    ROUNDED,
    SMALL,
    TEXT,
    figure_of,
    in_order,
    legend_below,
    list_layers,
    points_like,
    present,
    rows_height,
    short,
    tidy,
    to_svg,
)

MOST = 15  # layers in the list of those that cost the most


def sqnr_picture(runs: dict[str, dict[str, Any]]) -> str:
    """SQNR of every activation tensor in dB, network order: bars of a single run, points of several.

    Args:
        runs: content of layers.json by label.

    Returns:
        SVG; "" where no run has it.
    """
    found = {label: _known(part) for label, part in present(runs, "sqnr").items()}
    return _picture(found, in_order(found), "SQNR (dB)", "{:z.1f}") if in_order(found) else ""


def alone_picture(runs: dict[str, dict[str, Any]]) -> str:
    """Increase of the loss by each layer alone, the largest first, at most 15 of them; of several runs by the largest over runs.

    Args:
        runs: content of layers.json by label.

    Returns:
        SVG; "" where no run has it.
    """
    found = {label: _known(part) for label, part in present(runs, "alone").items()}
    names = sorted(in_order(found), key=lambda name: -max(part[name] for part in found.values() if name in part))[:MOST]
    return _picture(found, names, "increase of the loss", "{:z.2g}") if names else ""


def _known(part: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in part.items() if value is not None}


def _picture(found: dict[str, dict[str, float]], names: list[str], label: str, form: str) -> str:
    single = len(found) == 1
    figure, axes = figure_of(rows_height(len(names)) + (0 if single else 0.17 * len(found)))
    if single:
        _bars(axes, next(iter(found.values())), names, form)
    else:
        for i, (run, part) in enumerate(found.items()):
            places = [(part[name], row) for row, name in enumerate(names) if name in part]
            if places:
                axes.scatter(*zip(*places), s=16, label=short(run, 48), **points_like(i))
        axes.grid(axis="y", color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
    axes.axvline(0, color=FLOAT, linewidth=0.8)
    axes.set_xlabel(label, fontsize=TEXT)
    tidy(axes)
    list_layers(axes, [name.removeprefix("quantizers.") for name in names])
    legend_below(figure, axes)
    return to_svg(figure)


def _bars(axes: Axes, part: dict[str, float], names: list[str], form: str) -> None:
    values = [part[name] for name in names]
    bars = axes.barh(range(len(names)), values, height=0.72, color=ROUNDED)
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=2, fontsize=SMALL)
    axes.margins(x=0.16)
