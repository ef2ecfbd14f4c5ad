"""Accuracy of several variants: over the training, and at its end with intervals."""

import numpy as np
from matplotlib.axes import Axes

from qat.report.colours import GREY, INK
from qat.report.compare_cells import Cell
from qat.report.compare_layers import Array, nanmean
from qat.report.compare_numbers import Row, float_estimate
from qat.report.compare_palette import Style
from qat.report.compare_panel import heading, logarithmic, panel, svg
from qat.report.compare_runs import curve, is_number
from qat.report.plots.style import short


def accuracy_curves(setting: str, cells: list[Cell], styles: dict[str, Style]) -> str:
    """Validation accuracy against optimizer step: mean over seeds, the band from the lowest to the highest, a triangle at the freeze.

    The axis begins below the lower half of what is shown, so that the ends can be told apart. "" without any curve.
    """
    figure, axes = panel(3.0)
    everything, ends = [], []
    for cell in cells:
        style = styles[cell.variant]
        if (found := seed_curves(cell)) is None:
            continue
        steps, stack = found
        mean = nanmean(list(stack))
        _line(axes, steps, mean, style)
        if len(stack) > 1:
            axes.fill_between(steps, stack.min(0), stack.max(0), color=style.colour, alpha=0.15, linewidth=0)
        freezes = {run.result.get("freeze_step") for run in cell.runs.values()}
        for freeze in filter(is_number, freezes):
            if steps[0] <= freeze <= steps[-1]:
                axes.axvline(freeze, color=GREY, linewidth=0.8, linestyle=":")
                axes.plot([freeze], [np.interp(freeze, steps, mean)], marker="v", markersize=6, color=style.colour, clip_on=False)
        everything.append(mean)
        ends.append(stack[:, -1].min())
    if not everything:
        return ""
    floats = [run.accuracy["float"] for cell in cells for run in cell.runs.values() if "float" in run.accuracy]
    if floats:
        axes.axhline(float(np.mean(floats)), color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    values = np.concatenate(everything)
    top = max([float(values.max()), *floats])
    bottom = min(float(np.median(values)), float(min(ends)), *map(float, floats or [1.0]))
    margin = max(0.06 * (top - bottom), 0.002)
    axes.set_ylim(max(bottom - 2 * margin, -0.02), min(top + margin, 1.02))
    heading(axes, setting, "optimizer step", "validation accuracy")
    return svg(figure, f"Validation accuracy against optimizer step, {setting}")


def _line(axes: Axes, steps: Array, values: Array, style: Style) -> None:
    """With a few markers, so that a single point shows and grey print tells the lines apart."""
    every = max(1, len(steps) // 6)
    axes.plot(steps, values, color=style.colour, linestyle=style.line, linewidth=1.5, marker=style.marker, markersize=3.5, markevery=every)


def seed_curves(cell: Cell) -> tuple[Array, Array] | None:
    """Steps (n,) that all seeds cover and accuracies (seeds, n); None without a curve."""
    curves = [(np.array(steps), np.array(values)) for run in cell.runs.values() for steps, values in [curve(run.folder)] if steps]
    if not curves:
        return None
    last = min(steps[-1] for steps, _ in curves)
    at = curves[0][0]
    at = at[at <= last] if (at <= last).any() else np.array([last])
    return at, np.array([np.interp(at, steps, values) for steps, values in curves])


def intervals(setting: str, rows: list[Row], styles: dict[str, Style]) -> str:
    """A dot and its 95 % interval for each variant, small dots for the seeds, and the float networks as a line with theirs."""
    figure, axes = panel(0.8 + 0.27 * len(rows), [short(row.cell.variant) for row in rows])
    reference = float_estimate([run for row in rows for run in row.cell.runs.values()])
    if reference is not None:
        axes.axvline(reference.mean, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
        if reference.half:
            axes.axvspan(reference.mean - reference.half, reference.mean + reference.half, color=INK, alpha=0.07, linewidth=0)
    for place, row in enumerate(rows):
        style, found = styles[row.cell.variant], row.accuracy
        axes.errorbar(
            found.mean, place, xerr=found.half or 0.0, color=style.colour, marker=style.marker, markersize=6, linewidth=1.6, capsize=2
        )
        own = [run.shipped for run in row.cell.runs.values()]
        axes.scatter(own, [place + 0.3] * len(own), s=7, color=style.colour, alpha=0.6, linewidths=0)
    axes.grid(False, axis="y")
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -0.02), min(high, 1.02))  # intervals of few seeds can reach beyond what an accuracy can be
    axes.locator_params(axis="x", nbins=5)
    heading(axes, setting, "test accuracy, 95 % interval over seeds")
    return svg(figure, f"Test accuracy with intervals, {setting}")


def jitter_lines(setting: str, layers: dict[str, dict], styles: dict[str, Style], section: str = "jitter") -> str:
    """Share of integer weight codes that differ from the batch before's: median over layers, mean over seeds, band between the seeds.

    Args:
        section: jitter, or jitter_statistics: what the batch's statistics alone move.
        layers: variant -> means over its seeds (`mean_layers`). The axis is logarithmic, or of square roots where there are zeros.
    """
    figure, axes = panel(3.0)
    shares = []
    for variant, found in layers.items():
        if section not in found:
            continue
        steps, runs = found[section]["steps"], np.array(found[section]["runs"])
        style, mean = styles[variant], nanmean(list(runs))
        _line(axes, steps, mean, style)
        if len(runs) > 1:
            axes.fill_between(steps, runs.min(0), runs.max(0), color=style.colour, alpha=0.15, linewidth=0)
        shares.append(runs[np.isfinite(runs)])
    if not shares or not len(values := np.concatenate(shares)):
        return ""
    if values.min() > 0:
        logarithmic(axes.yaxis)
    else:
        axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        axes.set_ylim(0, max(float(values.max()) * 1.05, 0.001))
    what = ": by the statistics alone" if section == "jitter_statistics" else ""
    heading(axes, setting + what, "optimizer step", "share of changed weight codes")
    return svg(figure, f"Weight jitter{what} against optimizer step, {setting}")


def swatch(style: Style) -> str:
    """A short line with its marker, as the entry of a legend in the page's text."""
    dashes = f' stroke-dasharray="{" ".join(f"{1.5 * length:g}" for length in style.dashes)}"' if style.dashes else ""
    line = f'<line x1="1" y1="7" x2="35" y2="7" stroke="{style.colour}" stroke-width="2.2"{dashes}/>'
    corners = _CORNERS[style.marker]
    if corners is None:
        mark = f'<circle cx="18" cy="7" r="4.2" fill="{style.colour}"/>'
    else:
        mark = f'<polygon points="{" ".join(f"{18 + 5 * x:.1f},{7 + 5 * y:.1f}" for x, y in corners)}" fill="{style.colour}"/>'
    return f'<svg class="swatch" viewBox="0 0 36 14" width="36" height="14" aria-hidden="true">{line}{mark}</svg>'


def _star(points: int, inner: float) -> list[tuple[float, float]]:
    angles = np.pi * np.arange(2 * points) / points
    radii = np.where(np.arange(2 * points) % 2, inner, 1.1)
    return [(float(r * np.sin(a)), float(-r * np.cos(a))) for r, a in zip(radii, angles)]


_PLUS = [
    (-0.35, -1),
    (0.35, -1),
    (0.35, -0.35),
    (1, -0.35),
    (1, 0.35),
    (0.35, 0.35),
    (0.35, 1),
    (-0.35, 1),
    (-0.35, 0.35),
    (-1, 0.35),
    (-1, -0.35),
]
_CROSS = [(0.7 * (x - y), 0.7 * (x + y)) for x, y in [*_PLUS, (-0.35, -0.35)]]
_CORNERS: dict[str, list[tuple[float, float]] | None] = {
    "o": None,
    "s": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "D": [(0, -1), (1, 0), (0, 1), (-1, 0)],
    "^": [(0, -1), (1, 0.8), (-1, 0.8)],
    "v": [(0, 1), (1, -0.8), (-1, -0.8)],
    "P": [*_PLUS, (-0.35, -0.35)],
    "*": _star(5, 0.45),
    "X": _CROSS,
}
