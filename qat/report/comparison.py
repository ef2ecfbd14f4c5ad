"""A comparison of runs, as everything that is shown of it needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.choose import check_name
from qat.errors import ConfigError
from qat.report.compare_cells import Cells, into_cells
from qat.report.compare_configs import Tuned
from qat.report.compare_names import STRATEGY
from qat.report.compare_numbers import Row, choose_baseline, rows_of
from qat.report.compare_palette import ORDER
from qat.report.compare_runs import LeftOut, Run, read_runs


@dataclass(frozen=True)
class Comparison:
    """
    Args:
        runs: those that were compared.
        left: those that were not.
        baseline: variant the others are compared with; it may have no run.
    """

    runs: list[Run]
    left: list[LeftOut]
    cells: Cells
    rows: list[Row]
    baseline: str | None

    def rows_at(self, setting: str) -> list[Row]:
        return [row for row in self.rows if row.cell.setting == setting]


def compare_runs(
    folders: list[Path], baseline: str | None, by: Sequence[str], defaults: dict[str, Any], tuned: Tuned | None = None
) -> Comparison:
    """Read the runs and compare them.

    Args:
        baseline: variant to compare with; None chooses (see `choose_baseline`).
        by: configuration keys or groups whose values are compared; () for the folding strategy.
        defaults: see `read_runs`.
        tuned: what sweeps chose for each of their cells.

    Raises:
        ConfigError: no such folder, no finished run, an unknown baseline or key.
    """
    runs, left = read_runs(folders, defaults)
    if not runs:
        raise ConfigError(" ".join(map(str, folders[:3])), _nothing(left), "a finished run", _todo(left))
    cells = into_cells(runs, by, tuned)
    # a strategy without a finished run is a gap to be told, not a word to be refused
    missing = [*ORDER, *(str(item.config.get(STRATEGY)) for item in left)] if cells.by == [STRATEGY] else []
    baseline = choose_baseline(cells, baseline)
    if baseline is not None and baseline not in missing:
        check_name("--baseline", baseline, cells.variants)
    kept = [run for cell in cells.cells for run in cell.runs.values()]
    return Comparison(kept, [*left, *cells.duplicates], cells, rows_of(cells, baseline), baseline)


def _nothing(left: list[LeftOut]) -> str:
    if not left:
        return "no run"
    return f"none that finished among {len(left)}, the first {left[0].folder} ({left[0].kind}: {left[0].why})"


def _todo(left: list[LeftOut]) -> str:
    return "Look at its train.log, or go on with resume=RUN_DIR." if left else "Give folders under runs/."
