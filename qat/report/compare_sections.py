"""The sections of pictures of a comparison's page. Plots of layers are folded away setting by setting."""

from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from qat.report.compare_layer_plots import filter_boxes, noise_map, range_strips, spread_dots, worst_layers
from qat.report.compare_layers import mean_layers
from qat.report.compare_palette import Style
from qat.report.compare_plots import accuracy_curves, intervals, jitter_lines
from qat.report.compare_words import listed
from qat.report.comparison import Comparison

MOST_PANELS = 24  # settings with curves
MOST_FOLDED = 12_000_000  # characters, after which no other setting gets plots of layers
MOST_BOXES = 10  # variants with filters of their own


@dataclass
class Section:
    """Panels side by side, and groups of panels that are folded away: (title, panels)."""

    name: str
    title: str
    note: str
    panels: list[Markup] = field(default_factory=list)
    groups: list[tuple[str, list[Markup]]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.panels and not self.groups

    @property
    def size(self) -> int:
        """Characters drawn."""
        return sum(map(len, self.panels)) + sum(len(svg) for _, panels in self.groups for svg in panels)

    def add(self, *drawn: str) -> None:
        self.panels += [Markup(svg) for svg in drawn if svg]

    def group(self, title: str, *drawn: str) -> None:
        if any(drawn):
            self.groups.append((title, [Markup(svg) for svg in drawn if svg]))


def _sections() -> dict[str, Section]:
    told = {
        "ends": (
            "Accuracy at the end",
            "Integers on the test split: mean and 95 % interval over seeds, small dots the seeds; dotted line: float networks.",
        ),
        "curves": (
            "Accuracy over the training",
            "Validation split, fake-quantized. Line: mean over seeds; band: lowest to highest seed; triangle and dotted line: statistics "
            "frozen. Dotted at the top: float networks on the test split. What lies below the panel is cut off.",
        ),
        "jitter": (
            "Weight jitter",
            "Share of a layer's integer weight codes that differ from those of the batch before: median over layers, mean over seeds, "
            "band from the lowest to the highest seed. First by the batch statistics alone, with the float weights held: what the papers "
            "mean; then in all, with what the optimizer's step moves.",
        ),
        "ranges": (
            "Scale and range of every layer over time",
            "A strip a quantizer, a line a variant, mean over seeds; at the right a strip's ends.",
        ),
        "filters": (
            "Filters before and after folding",
            "Thick: the middle half of the filters; thin: all; white: median. A layer whose largest filter is far from the median leaves "
            "most filters few integers where there is one scale for the tensor.",
        ),
        "noise": (
            "Noise of every layer",
            "Signal to quantization noise of each layer's output against the same network unquantized; mean over seeds.",
        ),
        "alone": (
            "Layers that cost most",
            "Loss with one layer quantized minus the loss with none. Marks are variants, the bar their mean.",
        ),
    }
    return {name: Section(name, *words) for name, words in told.items()}


def sections(found: Comparison, look: dict[str, Style]) -> tuple[list[Section], str]:
    """Those that have something to show, and a word on what is missing."""
    drawn = _sections()
    shown = found.cells.settings[:MOST_PANELS]
    folded = 0
    for setting in shown:
        cells, room = found.cells.of(setting), sum(section.size for section in drawn.values()) < MOST_FOLDED
        drawn["ends"].add(intervals(setting, found.rows_at(setting), look))
        drawn["curves"].add(accuracy_curves(setting, cells, look))
        layers = {cell.variant: mean_layers([run.folder for run in cell.runs.values()]) for cell in cells}
        drawn["jitter"].add(*(jitter_lines(setting, layers, look, section) for section in ("jitter_statistics", "jitter")))
        if room:
            _fold(drawn, setting, layers, look)
            folded += 1
    for section in drawn.values():
        _limits(section, len(found.cells.settings), folded if section.groups else MOST_PANELS)
    return [section for section in drawn.values() if not section.empty], _missing(list(drawn.values()))


def _fold(drawn: dict[str, Section], setting: str, layers: dict[str, dict[str, Any]], look: dict[str, Style]) -> None:
    drawn["ranges"].group(setting, range_strips(setting, layers, look, weights=True), range_strips(setting, layers, look, weights=False))
    own = [(variant, found["filters"]) for variant, found in layers.items() if "filters" in found]
    boxes = [filter_boxes(variant, filters, look[variant]) for variant, filters in own[:MOST_BOXES]]
    drawn["filters"].group(setting, spread_dots(setting, layers, look), *boxes)
    drawn["noise"].group(setting, noise_map(setting, layers))
    drawn["alone"].group(setting, worst_layers(setting, layers, look))


def _limits(section: Section, settings: int, most: int) -> None:
    """Say what is not shown."""
    if settings > most:
        section.note += f" The first {most} of {settings} settings; compare fewer folders to see the others."


def _missing(drawn: list[Section]) -> str:
    """A sentence on the pictures that no run has the numbers for; "" where all are there."""
    curves = [section for section in drawn if section.empty and section.name == "curves"]
    layers = [section.title.lower() for section in drawn if section.empty and section.name != "curves"]
    told = ["Accuracy over the training is left out: no metrics.csv has a validation accuracy."] * len(curves)
    return " ".join([*told, f"Left out, as no layers.json has the numbers: {listed(layers)}."] if layers else told)
