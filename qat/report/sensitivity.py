"""sensitivity.html and sensitivity.csv: what each layer's quantizers cost."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.report.colours import INK
from qat.report.html import page, picture
from qat.report.plots.style import (
    FLOAT,
    ROUNDED,
    ROW,
    TEXT,
    figure_of,
    legend_below,
    list_layers,
    rows_height,
    tidy,
    to_svg,
)
from qat.report.statistics import ONE_SIDED
from qat.report.tables import Table, number
from qat.whole_file import write_whole

COLUMNS = ["network", "setting", "layer", "grids", "loss", "accuracy", "change", "standard_error", "p_holm"]
ALONE_AND_OTHERS = "Alone: with this layer alone quantized, against nothing. Others: with everything quantized, against all but this layer."


@dataclass(frozen=True)
class Cost:
    """A measured state of the network.

    Attributes:
        setting: unquantized | quantized | as shipped | alone | others.
        layer: its name; "" where it is about all.
        grids: bits of the layer's weight and tensor.
        change: by which the loss rises through what is quantized, and its standard error; None for a loss that others are compared with.
        p: of a loss that does not rise, corrected for all layers of the setting.
    """

    setting: str
    layer: str
    grids: str
    loss: float
    accuracy: float
    change: float | None = None
    error: float | None = None
    p: float | None = None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < ONE_SIDED

    def row(self) -> list[Any]:
        return [
            self.setting,
            self.layer,
            self.grids,
            *("" if x is None else x for x in (self.loss, self.accuracy, self.change, self.error, self.p)),
        ]


def write_costs(path: Path, costs: list[Cost], network: str) -> None:
    """Write the CSV, whole or not at all; each row says which network was measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([[network, *(f"{x:.6g}" if isinstance(x, float) else x for x in cost.row())] for cost in costs])
    write_whole(path, text.getvalue())


def write_page(path: Path, title: str, subtitle: str, costs: list[Cost], steps: Table | None) -> None:
    """Write the page, whole or not at all.

    Args:
        costs: in the order in which layers are shown.
        steps: what more bits bring; None where nothing was suggested.
    """
    whole = [[c.setting, number(c.loss), f"{c.accuracy:.4f}"] for c in costs if not c.layer]
    tables = [Table("The whole network", ["", "loss", "accuracy"], whole), *([steps] if steps else []), layer_table(costs)]
    pictures = [picture("What each layer's quantizers cost", f"{ALONE_AND_OTHERS} Lines: two standard errors.", lambda: cost_bars(costs))]
    write_whole(path, page(title, subtitle, pictures, tables))


def by_layer(costs: list[Cost]) -> list[tuple[str, Cost, Cost]]:
    """(layer, with it alone quantized, with everything against all others), in the order of `costs`."""
    found: dict[str, dict[str, Cost]] = {}
    for cost in costs:
        if cost.layer:
            found.setdefault(cost.layer, {})[cost.setting] = cost
    return [(layer, both["alone"], both["others"]) for layer, both in found.items()]


def layer_table(costs: list[Cost]) -> Table:
    """A row for each layer; a star where the loss rises by more than noise."""
    rows = [[layer, alone.grids, *cells(alone), *cells(others)] for layer, alone, others in by_layer(costs)]
    heads = [*("loss alone", "s.e.", "", "accuracy"), *("loss others", "s.e.", "", "accuracy")]
    return Table("Layers", ["layer", "bits", *heads], rows, f"{ALONE_AND_OTHERS} {star(len(rows))}")


def star(layers: int) -> str:
    """What a star says, in a table of so many layers."""
    test = f"t test over the pictures, one-sided, Holm's correction for {layers} layers"
    return f"*: the loss rises, p < {ONE_SIDED} ({test}); the rest may be noise on these pictures."


def cells(cost: Cost) -> list[str]:
    """Change of the loss, its standard error, a star or nothing, accuracy."""
    assert cost.change is not None and cost.error is not None
    return [f"{cost.change:+.4f}", f"{cost.error:.4f}", "*" if cost.significant else "", f"{cost.accuracy:.4f}"]


def cost_bars(costs: list[Cost]) -> str:
    """Two bars a layer with two standard errors, alone and others, from the top in the order of `costs`."""
    rows = by_layer(costs)
    figure, axes = figure_of(rows_height(len(rows)) + 2 * ROW)
    for shift, colour, label, costs in (
        (-0.2, ROUNDED, "alone", [alone for _, alone, _ in rows]),
        (0.2, FLOAT, "others", [others for *_, others in rows]),
    ):
        places = [place + shift for place in range(len(rows))]
        ends = [2 * (cost.error or 0) for cost in costs]
        values = [cost.change or 0 for cost in costs]
        axes.barh(places, values, xerr=ends, height=0.38, color=colour, label=label, ecolor=INK, error_kw={"linewidth": 0.8})
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("increase of the loss", fontsize=TEXT)
    tidy(axes)
    list_layers(axes, [layer for layer, *_ in rows])
    legend_below(figure, axes, columns=2)
    return to_svg(figure)
