"""What the plots of a comparison share: panels narrow enough for a phone, side by side where there is room.

A panel is 4.5 inches wide, 324 points. On a phone of 390 pixels a point is then a little more than a pixel, so that its text stays
readable.
"""

import math
import re
from collections.abc import Sequence
from itertools import count

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from qat.report.colours import GREY, INK
from qat.report.plots.style import SMALL, TEXT, tidy, to_svg

WIDTH = 4.5  # inches


def panel(height: float, rows: Sequence[str] = (), right: float = 0.1) -> tuple[Figure, Axes]:
    """A figure of `height` inches with one pair of axes.

    Margins are set from the names of the rows, which is quicker than letting matplotlib measure every text; all panels are equally wide.

    Args:
        rows: names of the rows, from top to bottom; () for an axis of numbers.
        right: inches kept free at the right.
    """
    figure = Figure(figsize=(WIDTH, height))
    figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, fill=False, linewidth=0))
    axes = figure.subplots()
    left = 0.15 + max(map(len, rows)) * 0.58 * SMALL / 72 if rows else 0.72
    figure.subplots_adjust(left / WIDTH, 0.46 / height, 1 - right / WIDTH, 1 - 0.28 / height)
    tidy(axes)
    axes.tick_params(color=GREY)
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    if rows:
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure, axes


def logarithmic(axis: Axis) -> None:
    """Numbers written out, powers of ten alone where the data spans two of them. To be called when everything is drawn."""
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1,) if decades > 2 else (1, 2, 5) if decades > 0.8 else (1, 1.5, 2, 3, 4, 5, 7), numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def heading(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title over the whole width and names of the axes; a long title in several lines, which make the figure higher."""
    edge = -axes.get_position().x0 / axes.get_position().width
    above = ScaledTranslation(0, 0.07, axes.figure.dpi_scale_trans)
    axes.text(edge, 1, wrapped(title, 56), transform=axes.transAxes + above, fontsize=TEXT, color=INK, va="bottom")
    axes.set_xlabel(x, fontsize=SMALL)
    axes.set_ylabel(y, fontsize=SMALL)


def wrapped(words: str, width: int) -> str:
    """Lines of at most `width` characters, broken at spaces."""
    lines = [""]
    for word in words.replace("$", r"\$").split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


_numbers = count()


def svg(figure: Figure, described: str) -> str:
    """The figure as <svg> with a description for readers who do not see it, and ids of its own in a page of many."""
    text, prefix = to_svg(figure), f"p{next(_numbers)}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", text)
    # a hundredth of a point is finer than any screen, and a page of many pictures gets half as long
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    label = described.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
