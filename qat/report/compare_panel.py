"""What the plots of a comparison share: panels narrow enough for a phone, side by side where there is room.

A panel is 4.5 inches wide, 324 points. On a phone of 390 pixels a point is then a little more than a pixel, so that its text stays
readable.
"""

import re
from itertools import count

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qat.report.plots import INK, to_svg

WIDTH, SMALL, NORMAL = 4.5, 8.5, 9.5  # inches; points
GREY = "#6b7280"


def panel(height: float) -> tuple[Figure, Axes]:
    """An empty figure of `height` inches with one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, color=GREY)
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def heading(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title at the left and names of the axes; a long title in two lines."""
    axes.set_title(wrapped(title, 48), loc="left", fontsize=NORMAL, color=INK)
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


def short(name: str, longest: int = 24) -> str:
    """A qualified name, its middle cut out where it is long; dollars as text, not mathematics."""
    cut = name if len(name) <= longest else name[: longest // 3] + "…" + name[-(longest - longest // 3 - 1) :]
    return cut.replace("$", r"\$")


_numbers = count()


def svg(figure: Figure, described: str) -> str:
    """The figure as <svg> with a description for readers who do not see it, and ids of its own in a page of many."""
    text, prefix = to_svg(figure), f"p{next(_numbers)}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", text)
    label = described.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
