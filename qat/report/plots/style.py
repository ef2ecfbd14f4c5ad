"""What all pictures share: sizes that a phone can show, names that fit, and the way to SVG."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qat.report.colours import BLUE, GREY, INK

FLOAT, ROUNDED = GREY, BLUE
# inches and points: on a phone 390 pixels wide a point is then a pixel or more
WIDTH, TEXT, SMALL = 4.3, 9.5, 8.5
ROW = 0.19  # inches of a line of text in a list of layers
PIXELS = 1.5  # to a point where there is room
LONGEST = 24  # characters of a name


def to_svg(figure: Figure) -> str:
    """The <svg> element alone, without the XML header and dates; its width is a wish, and its height follows."""
    text = io.StringIO()
    # text stays text: smaller, and it can be selected and searched
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qat"}):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    points = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    wish = f' width="{round(float(points[1]) * PIXELS)}"' if points else ""
    return re.sub(r'<svg([^>]*?) (?:height|width)="[^"]*"([^>]*?) (?:height|width)="[^"]*"', rf"<svg{wish}\1\2", svg, count=1)


def figure_of(height: float, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """(figure, its axes below each other), `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, **options)


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)


def mark_freeze(axes: Axes, step: int | None) -> None:
    if step is not None:
        axes.axvline(step, color=INK, linewidth=1, linestyle=":", label=f"BN frozen at {step}")


def legend_below(figure: Figure, axes: Axes, columns: int = 1) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=SMALL)


def list_layers(axes: Axes, names: Sequence[str]) -> None:
    """One row a name, the first on top."""
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=SMALL)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def beside_rows(axes: Axes, texts: Sequence[str]) -> None:
    """A text at the right of each row."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(texts)), texts, fontsize=SMALL)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)


def rows_height(rows: int) -> float:
    """Inches of a figure of so many rows with an axis below."""
    return 0.8 + ROW * rows


def short(name: str, longest: int = LONGEST) -> str:
    """A name that fits: its beginning and its end, as layers of one block differ there. No part of it is read as mathematics."""
    name = str(name)
    if len(name) > longest:
        head = (longest - 1) // 3
        name = f"{name[:head]}…{name[head + 1 - longest :]}"
    return name.replace("$", r"\$")


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """Float64, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def quantiles(rows: Sequence[Sequence[float | None]], shares: Sequence[float]) -> np.ndarray:
    """(shares, steps) over rows at each step, without those that have nothing there; NaN where none has."""
    columns = [column[~np.isnan(column)] for column in np.stack([numbers(row) for row in rows]).T]
    return np.array([[np.quantile(column, share) if column.size else np.nan for column in columns] for share in shares])
