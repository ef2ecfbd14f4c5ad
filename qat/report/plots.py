"""The pictures of a report as inline SVG, drawn without a display and without pyplot's global state."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INK, FLOAT, ROUNDED = "#222222", "#7a869a", "#2b6cb0"


def to_svg(figure: Figure) -> str:
    """The <svg> element alone: without the XML header, dates and fixed size, so that it scales with the page."""
    text = io.StringIO()
    # text stays text: smaller, and it can be selected and searched
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qat"}):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"([^>]*?) (?:height|width)="[^"]*"', r"\1\2", svg, count=1)


def _points(rows: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    return [row["step"] for row in rows if key in row], [row[key] for row in rows if key in row]


def _panel(axes: Axes, title: str, freeze_step: int | None) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("optimizer step")
    axes.spines[["top", "right"]].set_visible(False)
    if freeze_step is not None:
        axes.axvline(freeze_step, color=INK, linewidth=1, linestyle=":", label=f"BN frozen at {freeze_step}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def curves(rows: list[dict[str, float]], freeze_step: int | None, float_accuracy: float) -> str:
    """Training loss and validation accuracy over steps, with the freeze marked.

    Args:
        rows: content of metrics.csv.
        float_accuracy: test accuracy of the float network, as the line to reach.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    loss.plot(*_points(rows, "train_loss_step"), color=ROUNDED, linewidth=1, label="training")
    loss.plot(*_points(rows, "val_loss"), color=INK, marker="o", markersize=3, linewidth=1, label="validation")
    accuracy.plot(*_points(rows, "val_acc"), color=ROUNDED, marker="o", markersize=3, linewidth=1, label="validation, fake-quantized")
    accuracy.axhline(float_accuracy, color=FLOAT, linewidth=1, label="float (test)")
    _panel(loss, "Loss", freeze_step)
    _panel(accuracy, "Accuracy", freeze_step)
    return to_svg(figure)


def accuracy_bars(accuracy: dict[str, float]) -> str:
    """One bar for each measured accuracy (fractions of the test split), in the order given."""
    figure = Figure(figsize=(7, 0.5 + 0.4 * len(accuracy)), layout="constrained")
    axes = figure.subplots()
    names = list(accuracy)[::-1]
    bars = axes.barh(names, [accuracy[name] for name in names], color=[FLOAT if name == "float" else ROUNDED for name in names])
    axes.bar_label(bars, labels=[f"{accuracy[name]:.4f}" for name in names], padding=3, fontsize=9)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.spines[["top", "right"]].set_visible(False)
    return to_svg(figure)


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


def confusion_picture(counts: list[list[int]], names: list[str]) -> str:
    """Confusion matrix, row = label, column = prediction; shades are shares of the row."""
    size = len(counts)
    figure = Figure(figsize=(1.5 + 0.4 * size, 1.2 + 0.4 * size), layout="constrained")
    axes = figure.subplots()
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(size), names, rotation=90, fontsize=8)
    axes.set_yticks(range(size), names, fontsize=8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                axes.text(j, i, str(count), ha="center", va="center", fontsize=7, color="white" if shares[i][j] > 0.5 else INK)
    return to_svg(figure)
