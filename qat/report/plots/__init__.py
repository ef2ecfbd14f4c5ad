"""The pictures of reports as inline SVG, drawn without a display and without pyplot's global state; a file for each subject.

Those of layers.json take one run's content and give "" where there is nothing to draw. A comparison shows means over seeds
and has its own (`qat.report.compare_plots`, `compare_layer_plots`).
"""

from qat.report.plots.bars import alone_picture, sqnr_picture
from qat.report.plots.benchmark import ratio_bars
from qat.report.plots.filters import filters_picture
from qat.report.plots.jitter import jitter_picture
from qat.report.plots.ranges import ranges_picture
from qat.report.plots.style import FLOAT, ROUNDED, to_svg
from qat.report.plots.training import accuracy_bars, confusion_picture, curves

__all__ = [
    "FLOAT",
    "ROUNDED",
    "accuracy_bars",
    "alone_picture",
    "confusion_picture",
    "curves",
    "filters_picture",
    "jitter_picture",
    "ranges_picture",
    "ratio_bars",
    "sqnr_picture",
    "to_svg",
]
