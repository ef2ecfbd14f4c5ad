"""metrics.csv in the run folder: one row a step, one column a metric."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from qat.whole_file import write_whole


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics file, each with its "step" and the metrics measured at it; [] when there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


class MetricsFile(Logger):
    """Lightning's own CSV logger wants a folder for itself and empties it; this one owns a single file.

    Args:
        path: file to write, whole, at every `save` (each epoch).
        history: file of an interrupted run that this one continues; its rows are taken over up to `until`.
        until: optimizer steps done when the interrupted run was saved.
    """

    def __init__(self, path: Path, history: Path | None = None, until: int = 0):
        super().__init__()
        self.path = path
        rows = read_metrics(history) if history is not None else []
        self.rows: dict[int, dict[str, float]] = {int(row["step"]): row for row in rows if row["step"] < until}

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The run folder's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        at = step or 0
        self.rows.setdefault(at, {"step": at}).update({key: float(value) for key, value in metrics.items()})
        if any(key.startswith("val_") for key in metrics):
            self.save()

    @rank_zero_only
    def save(self) -> None:
        rows = [self.rows[step] for step in sorted(self.rows)]
        columns = ["step", *sorted({key for row in rows for key in row} - {"step"})]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "step": int(row["step"])} for row in rows)
        write_whole(self.path, text.getvalue())
