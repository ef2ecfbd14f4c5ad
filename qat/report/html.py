"""report.html: one file that needs nothing else, readable on a phone and on paper."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor, nn

from qat.report.plots import (
    accuracy_bars,
    alone_picture,
    confusion_picture,
    curves,
    filters_picture,
    jitter_picture,
    ranges_picture,
    sqnr_picture,
)
from qat.report.tables import Table, fold_table, parity_table, quantizer_table, summary_table
from qat.whole_file import write_whole

MOST_CLASSES = 20  # a larger confusion matrix cannot be read

log = logging.getLogger(__name__)


def page(title: str, subtitle: str, pictures: list[dict[str, str]], tables: list[Any]) -> str:
    """The HTML of a page: a table of contents, pictures {"title", "svg", "note" or absent} first, then tables (`qat.report.tables.Table`).

    Text is escaped; the SVG of a picture is not.
    """
    environment = Environment(loader=PackageLoader("qat.report", "."), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.j2").render(title=title, subtitle=subtitle, pictures=pictures, tables=tables)


def picture(title: str, note: str, draw: Callable[[], str], missing: str = "Not recorded in this run.") -> dict[str, str]:
    """A picture for `page`. One that cannot be drawn leaves its place to a word, and the page to the others."""
    try:
        svg = draw()
    except Exception as error:
        log.warning("report: no picture '%s' (%s: %s)", title, type(error).__name__, error, exc_info=True)
        return {"title": title, "svg": "", "note": f"It could not be drawn ({type(error).__name__}: {error})."}
    return {"title": title, "svg": svg, "note": note if svg else missing}


def table(title: str, fill: Callable[[], Table]) -> Table:
    """A table for `page`, or a word in its place."""
    try:
        return fill()
    except Exception as error:
        log.warning("report: no table '%s' (%s: %s)", title, type(error).__name__, error, exc_info=True)
        return Table(title, [], [], f"It could not be filled ({type(error).__name__}: {error}).")


def grids_of(result: dict[str, Any]) -> str:
    """Strategy, grids and seed of a result in words."""
    per = "per channel" if result["per_channel"] else "per tensor"
    how = result["fold"] if result["steps"] else "without training"
    return f"{how}, {result['weight_bits']}-bit weights {per}, {result['activation_bits']}-bit activations, seed {result['seed']}"


def layer_pictures(layers: dict[str, Any], freeze_step: int | None, trained: bool) -> list[dict[str, str]]:
    """Pictures of a run's layers.json."""
    no_moments = "Not recorded in this run (report.moments=60 records it)." if trained else "This run had no training."
    no_pictures = "Not measured in this run (report.pictures=256 measures it)."
    return [
        picture(
            "Jitter of the integer weights",
            "Share of a layer's weight codes in the training forward that changed from one batch to the next. Thick: what batch "
            "statistics alone move, which is noise to the optimizer and ends at the freeze.",
            lambda: jitter_picture(layers, freeze_step),
            no_moments,
        ),
        picture(
            "Scales of the weights over time",
            "The largest scale of each folded weight against its first, as it would have been shipped then; the dotted line is the freeze.",
            lambda: ranges_picture(layers, freeze_step),
            no_moments,
        ),
        picture(
            "Scales of the activations over time",
            "The same of each activation tensor, at the nodes of the prepared graph.",
            lambda: ranges_picture(layers, freeze_step, "activations"),
            no_moments,
        ),
        picture(
            "Ranges of the filters, before and after folding",
            "All filters of a layer in units of its median filter: thin from the smallest to the largest, thick over the middle half. The "
            "number is the largest after folding: with one scale a tensor a median filter has so many times fewer steps.",
            lambda: filters_picture(layers),
        ),
        picture(
            "Noise of each tensor",
            "Energy of the unquantized network's tensor over that of the difference to the integers, 6 dB a bit. Behind each layer and its "
            "activation, in the order of the network; tensors without any noise are left out.",
            lambda: sqnr_picture(layers),
            no_pictures,
        ),
        picture(
            "Layers that cost the most",
            "Increase of the loss on validation pictures with this layer alone quantized, its weight and its output.",
            lambda: alone_picture(layers),
            no_pictures,
        ),
    ]


def write_report(
    run_dir: Path,
    result: dict[str, Any],
    metrics: list[dict[str, float]],
    network: nn.Module,
    parity: Any,
    counts: Tensor,
    class_names: list[str],
    layers: dict[str, Any] | None = None,
) -> Path:
    """Write run_dir/report.html. A section that fails is replaced by a word.

    Args:
        result: content of result.json.
        metrics: rows of metrics.csv.
        network: the prepared network that was converted.
        parity: its `ParityReport`.
        counts: confusion matrix (classes, classes) of the integer network.
        layers: content of layers.json.
    """
    accuracy = result["accuracy"]
    pictures = [picture("Accuracy on the test split", "", lambda: accuracy_bars(accuracy))]
    if result["steps"]:
        pictures.append(picture("Training", "", lambda: curves(metrics, result["freeze_step"], accuracy["float"])))
    pictures += layer_pictures(layers or {}, result["freeze_step"], bool(result["steps"]))
    if len(class_names) <= MOST_CLASSES:
        pictures.append(picture("Answers of the integer network", "", lambda: confusion_picture(counts.tolist(), class_names)))
    tables = [
        table("Run", lambda: summary_table(result)),
        table("Folding", lambda: fold_table(network)),
        table("Quantizers", lambda: quantizer_table(network)),
        table("Integers: reference and onnxruntime", lambda: parity_table(parity)),
    ]
    gained = accuracy["integer"] - accuracy["float"]
    subtitle = f"The integers {'gain' if gained > 0 else 'lose'} {abs(gained):.4f} against float."
    title = f"{result['recipe'] or 'job'}: {grids_of(result)}"
    return write_whole(Path(run_dir) / "report.html", page(title, subtitle, pictures, tables))
