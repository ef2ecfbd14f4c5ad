"""Plots with a row a layer: ranges over time, filters before and after folding, noise, and the loss each layer costs. Means over seeds."""

from typing import Any

import numpy as np
from matplotlib.collections import LineCollection

from qat.report.colours import GREY, INK
from qat.report.compare_layers import Array
from qat.report.compare_palette import Style
from qat.report.compare_panel import heading, logarithmic, panel, svg
from qat.report.plots.bars import MOST
from qat.report.plots.style import SMALL, beside_rows, short

Layers = dict[str, dict[str, Any]]  # variant -> `mean_layers` of its runs
_ROW, _FRAME = 0.24, 0.8  # inches: a row, and what title and axis take


def _names(layers: Layers, section: str, inner: str | None = None) -> list[str]:
    """Layers of a section, in the order of the network, of all variants."""
    parts = [found[section][inner] if inner else found[section] for found in layers.values() if section in found]
    return list(dict.fromkeys(name for part in parts for name in part))


def range_strips(setting: str, layers: Layers, styles: dict[str, Style], weights: bool) -> str:
    """A strip for each quantizer over the training. Weights: its largest scale on a logarithmic axis; activations: the ends of its grid.

    Each strip has its own axis, whose lowest and highest value stand at its right.
    """
    names = [name for name in _names(layers, "ranges", "tensors") if name.endswith("weight_quantizer") == weights]
    if not names:
        return ""
    ends = ("scale_high",) if weights else ("low", "high")
    strips = {name: _strip(name, layers, ends, weights) for name in names}
    shown = [short(name.removesuffix(".weight_quantizer").removeprefix("quantizers."), 20) for name in names]
    figure, axes = panel(_FRAME + 0.3 * len(names), shown, right=1.0)
    for variant, found in layers.items():
        lines = []
        for row, name in enumerate(names):
            own = found.get("ranges", {}).get("tensors", {}).get(name)
            low, high = strips[name]
            if own is None or not np.isfinite(low):
                continue
            for end in ends:
                values = np.log(own[end]) if weights else own[end]
                height = np.full(len(values), 0.5) if high == low else (values - low) / (high - low)
                points = np.column_stack([found["ranges"]["steps"], row + 0.4 - 0.8 * height])
                lines.append(points[np.isfinite(points).all(1)])
        style = styles[variant]
        axes.add_collection(LineCollection(lines, colors=style.colour, linestyles=[style.line], linewidths=1.0))
    last = max(float(found["ranges"]["steps"][-1]) for found in layers.values() if "ranges" in found)
    axes.set_xlim(0, last)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=4)
    beside_rows(axes, [_span(*strips[name], weights) for name in names])
    what = "largest scale of the weights" if weights else "grid's ends of the activations"
    heading(axes, f"{setting}: {what}", "optimizer step")
    return svg(figure, f"{what} over the training, {setting}")


def _strip(name: str, layers: Layers, ends: tuple[str, ...], weights: bool) -> tuple[float, float]:
    """Lowest and highest value over variants and time, logarithms for weights; nan without any."""
    tensors = [found["ranges"]["tensors"][name] for found in layers.values() if name in found.get("ranges", {}).get("tensors", {})]
    values = np.concatenate([own[end] for own in tensors for end in ends])
    values = values[np.isfinite(values) & ((values > 0) | (not weights))]
    if not len(values):
        return float("nan"), float("nan")
    values = np.log(values) if weights else values
    return float(values.min()), float(values.max())


def _span(low: float, high: float, weights: bool) -> str:
    if not np.isfinite(low):
        return "–"
    low, high = (float(np.exp(low)), float(np.exp(high))) if weights else (low, high)
    ends = dict.fromkeys(f"{end:.2g}".replace("-", "−") for end in (low, high))
    return " … ".join(ends)


def filter_boxes(title: str, filters: dict[str, dict[str, Array]], style: Style) -> str:
    """max |w| of the filters of each layer of one variant: ends, quartiles and median, grey before folding, coloured after."""
    names = list(filters)
    figure, axes = panel(_FRAME + _ROW * len(names), [short(name) for name in names])
    smallest = []
    for when, shift, colour in (("before", -0.18, GREY), ("after", 0.18, style.colour)):
        rows = [(row, widths[widths > 0]) for row, name in enumerate(names) if (widths := filters[name].get(when)) is not None]
        rows = [(row, widths) for row, widths in rows if len(widths)]
        if not rows:
            continue
        at = np.array([row + shift for row, _ in rows])
        marks = np.array([np.percentile(widths, [0, 25, 50, 75, 100]) for _, widths in rows])
        axes.hlines(at, marks[:, 0], marks[:, 4], color=colour, linewidth=0.8)
        axes.hlines(at, marks[:, 1], marks[:, 3], color=colour, linewidth=3.2)
        axes.plot(marks[:, 2], at, "|", color="white", markersize=4.5, markeredgewidth=1.2)
        smallest.append(marks[:, 0].min())
    if not smallest:
        return ""
    logarithmic(axes.xaxis)
    axes.grid(False, axis="y")
    heading(axes, title, "largest |w| of a filter: before folding (grey), after")
    return svg(figure, f"Ranges of filters before and after folding, {title}")


def spread_dots(setting: str, layers: Layers, styles: dict[str, Style]) -> str:
    """Largest over median filter range after folding, a mark for each variant: what one scale for the tensor costs the median filter."""
    names = _names(layers, "filters")
    if not names:
        return ""
    figure, axes = panel(_FRAME + _ROW * len(names), [short(name) for name in names])
    for variant, found in layers.items():
        own = found.get("filters", {})
        places = [(row, own[name]["after"]) for row, name in enumerate(names) if name in own]
        dots = [(row, widths.max() / np.median(widths)) for row, widths in places if np.median(widths) > 0]
        if dots:
            style = styles[variant]
            rows, ratios = zip(*dots)
            axes.plot(ratios, rows, linestyle="none", marker=style.marker, markersize=4, color=style.colour, alpha=0.85, markeredgewidth=0)
    logarithmic(axes.xaxis)
    heading(axes, f"{setting}: filters after folding", "largest range over the median one")
    return svg(figure, f"Largest over median filter range after folding, {setting}")


def noise_map(setting: str, layers: Layers) -> str:
    """Signal to quantization noise of each layer's output, layers x variants, in dB; dark is noisy."""
    names, variants = _names(layers, "sqnr"), [variant for variant, found in layers.items() if found.get("sqnr")]
    if not names:
        return ""
    values = np.array([[layers[variant]["sqnr"].get(name, np.nan) for variant in variants] for name in names])
    figure, axes = panel(_FRAME + 0.7 + 0.2 * len(names), [short(name.removeprefix("quantizers.")) for name in names])
    figure.subplots_adjust(bottom=1.15 / figure.get_figheight())
    axes.grid(False)
    axes.imshow(values, cmap="cividis", aspect="auto")
    low, high = np.nanmin(values), np.nanmax(values)
    if len(variants) <= 8:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = value < (low + high) / 2
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=SMALL, color="white" if dark else INK)
    axes.set_xticks(range(len(variants)), [short(variant, 18) for variant in variants], rotation=50, ha="right", rotation_mode="anchor")
    axes.set_ylim(len(names) - 0.5, -0.5)
    heading(axes, f"{setting}: SQNR in dB")
    return svg(figure, f"Signal to quantization noise in dB, layers by variants, {setting}")


def worst_layers(setting: str, layers: Layers, styles: dict[str, Style]) -> str:
    """The layers that cost most when they alone are quantized: a mark for each variant, a line from 0 to the mean."""
    found = {variant: own["alone"] for variant, own in layers.items() if own.get("alone")}
    if not found:
        return ""
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    means = {name: float(np.mean([own[name] for own in found.values() if name in own])) for name in names}
    worst = sorted(names, key=lambda name: -means[name])[:MOST]
    figure, axes = panel(_FRAME + _ROW * len(worst), [short(name) for name in worst])
    axes.hlines(range(len(worst)), 0, [means[name] for name in worst], color="#c4c9d1", linewidth=4)
    for variant, own in found.items():
        style = styles[variant]
        dots = [(own[name], row) for row, name in enumerate(worst) if name in own]
        if dots:
            losses, rows = zip(*dots)
            axes.plot(
                losses, rows, linestyle="none", marker=style.marker, markersize=4.5, color=style.colour, alpha=0.85, markeredgewidth=0
            )
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.locator_params(axis="x", nbins=5)
    heading(axes, f"{setting}: layers that cost most", "loss with this layer alone quantized − unquantized")
    return svg(figure, f"Layers that cost most when quantized alone, {setting}")
