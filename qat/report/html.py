"""report.html: one file that needs nothing else, readable on a phone."""

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor, nn

from qat.report.plots import accuracy_bars, confusion_picture, curves
from qat.report.tables import fold_table, parity_table, quantizer_table, summary_table

MOST_CLASSES = 20  # a larger confusion matrix cannot be read


def page(title: str, subtitle: str, pictures: list[dict[str, str]], tables: list[Any]) -> str:
    """The HTML of a page: pictures {"title", "svg"} first, then tables (`qat.report.tables.Table`). Text is escaped."""
    environment = Environment(loader=PackageLoader("qat.report", "."), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.j2").render(title=title, subtitle=subtitle, pictures=pictures, tables=tables)


def write_report(
    run_dir: Path,
    result: dict[str, Any],
    metrics: list[dict[str, float]],
    network: nn.Module,
    parity: Any,
    counts: Tensor,
    class_names: list[str],
) -> Path:
    """Write run_dir/report.html.

    Args:
        result: content of result.json.
        metrics: rows of metrics.csv.
        network: the prepared network that was converted.
        parity: its `ParityReport`.
        counts: confusion matrix (classes, classes) of the integer network.
    """
    accuracy = result["accuracy"]
    pictures = [{"title": "Accuracy on the test split", "svg": accuracy_bars(accuracy)}]
    if result["steps"]:
        pictures.append({"title": "Training", "svg": curves(metrics, result["freeze_step"], accuracy["float"])})
    if len(class_names) <= MOST_CLASSES:
        pictures.append({"title": "Answers of the integer network", "svg": confusion_picture(counts.tolist(), class_names)})
    tables = [summary_table(result), fold_table(network), quantizer_table(network), parity_table(parity)]
    gained = accuracy["integer"] - accuracy["float"]
    against = f"{'gain' if gained > 0 else 'lose'} {abs(gained):.4f} against"
    per = "per channel" if result["per_channel"] else "per tensor"
    grids = f"{result['weight_bits']}-bit weights {per}, {result['activation_bits']}-bit activations"
    how = result["fold"] if result["steps"] else "without training"
    subtitle = f"{how}, {grids}, seed {result['seed']}. The integers {against} float."
    path = Path(run_dir) / "report.html"
    part = path.with_name("report.html.part")
    part.write_text(page(str(result["recipe"] or "job"), subtitle, pictures, tables), encoding="utf-8")
    os.replace(part, path)
    return path
