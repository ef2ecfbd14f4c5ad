"""The numbers of a comparison: a row a cell, and what may be said about it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from qat.report.compare_cells import Cell, Cells
from qat.report.compare_configs import SEEDS, compared_configs, run_float_seed
from qat.report.compare_runs import Run, is_number
from qat.report.statistics import ALPHA, SAME, Estimate, Paired, estimate, holm, paired

BASELINE, BETTER, WORSE, NO_DIFFERENCE, NOT_TESTED = "baseline", "better", "worse", "no difference found", "not tested"
BEST, LIKE_BEST, BELOW_BEST, UNKNOWN, ALONE = "best", "like best", "below", "unknown", "alone"


@dataclass(frozen=True)
class Row:
    """One cell in numbers. Accuracies and differences are fractions of the test split.

    Args:
        to_float: shipped minus the run's own float network.
        to_baseline: against the baseline in the same setting, over common seeds; None where there is none.
        p: of `to_baseline`, corrected for the comparisons in this setting.
        verdict: one of the words above; `why` says what keeps a test from being made.
        standing: against the best of the setting; all with the highest mean are best, and none where it is alone.
        simulated: seeds without an integer accuracy, for which that of the simulation stands.
        seconds_per_step, memory: medians over seeds; seconds of training over optimizer steps, MB.
    """

    cell: Cell
    accuracy: Estimate
    to_float: Estimate | None
    to_baseline: Paired | None
    p: float | None
    verdict: str
    why: str
    standing: str
    simulated: int
    seconds_per_step: float | None
    memory: float | None


def rows_of(cells: Cells, baseline: str | None) -> list[Row]:
    """A row for each cell, setting after setting.

    Args:
        baseline: variant to compare with; None compares with nothing.
    """
    rows = []
    for setting in cells.settings:
        rows += _judged([_row(cell) for cell in cells.of(setting)], baseline)
    return rows


def _row(cell: Cell) -> Row:
    runs = list(cell.runs.values())
    to_float = [run.shipped - run.accuracy["float"] for run in runs if "float" in run.accuracy]
    return Row(
        cell,
        estimate([run.shipped for run in runs]),
        estimate(to_float) if to_float else None,
        None,
        None,
        "",
        "",
        UNKNOWN,
        sum("integer" not in run.accuracy for run in runs),
        middle(runs, seconds_per_step),
        middle(runs, lambda run: run.result.get("peak_memory_mb")),
    )


def seconds_per_step(run: Run) -> float | None:
    """Wall time of training over its optimizer steps; None without training, and for a resumed run, which knows its last process's time."""
    if any(run.folder.glob("env_resumed_*.json")):
        return None
    seconds, steps = run.result.get("seconds"), run.result.get("steps")
    training = seconds.get("qat") if isinstance(seconds, dict) else None
    return training / steps if is_number(training) and is_number(steps) and steps > 0 else None


def middle(runs: list[Run], of: Callable[[Run], Any]) -> float | None:
    """Median over the runs that have the number."""
    found = [value for value in map(of, runs) if is_number(value)]
    return float(median(found)) if found else None


def _pairs(row: Row, base: Row) -> Paired:
    mine, theirs = row.cell.runs, base.cell.runs
    common = [seed for seed in mine if seed in theirs]
    return paired([mine[seed].shipped for seed in common], [theirs[seed].shipped for seed in common])


def _corrected(tests: dict[int, Paired]) -> dict[int, float]:
    """Holm's p values of those tests that were made, by the same keys."""
    made = {i: test.p for i, test in tests.items() if test.p is not None}
    return dict(zip(made, holm(list(made.values()))))


def _judged(rows: list[Row], baseline: str | None) -> list[Row]:
    """The rows of one setting with their verdicts."""
    base = next((row for row in rows if row.cell.variant == baseline), None)
    tests = {} if base is None else {i: _pairs(row, base) for i, row in enumerate(rows) if row is not base}
    p_values = _corrected(tests)
    best = max(rows, key=lambda row: row.accuracy.mean)
    to_best = {i: _pairs(row, best) for i, row in enumerate(rows) if row is not best}
    p_best = _corrected(to_best)
    judged = []
    for i, row in enumerate(rows):
        row = replace(row, standing=_standing(row, best, p_best.get(i)) if len(rows) > 1 else ALONE)
        if base is None:
            why = "no baseline" if baseline is None else f"no finished run of {baseline} here"
            judged.append(replace(row, verdict=NOT_TESTED, why=why))
        elif i not in tests:
            judged.append(replace(row, verdict=BASELINE))
        else:
            verdict, why = _verdict(tests[i], p_values.get(i))
            judged.append(replace(row, to_baseline=tests[i], p=p_values.get(i), verdict=verdict, why=why))
    return judged


def _standing(row: Row, best: Row, p: float | None) -> str:
    if row.accuracy.mean >= best.accuracy.mean - SAME:
        return BEST
    return UNKNOWN if p is None else BELOW_BEST if p < ALPHA else LIKE_BEST


def _verdict(test: Paired, p: float | None) -> tuple[str, str]:
    if p is None or test.difference is None:
        return NOT_TESTED, test.why
    if p >= ALPHA:
        return NO_DIFFERENCE, ""
    return (BETTER if test.difference.mean > 0 else WORSE), ""


def mean_ranks(rows: list[Row], cells: Cells) -> dict[str, float]:
    """Mean rank of each variant by accuracy (1 is best, ties share) over the settings that have all variants; {} where none has."""
    ranks: dict[str, list[float]] = {name: [] for name in cells.variants}
    for setting in cells.settings:
        found = {row.cell.variant: row.accuracy.mean for row in rows if row.cell.setting == setting}
        if len(found) < len(cells.variants):
            continue
        for name, mean in found.items():
            above = sum(other > mean + SAME for other in found.values())
            ranks[name].append(above + (1 + sum(abs(other - mean) <= SAME for other in found.values())) / 2)
    return {name: sum(own) / len(own) for name, own in ranks.items() if own}


def float_estimate(runs: Sequence[Run]) -> Estimate | None:
    """Test accuracy of the float networks over their seeds; None where they differ in more, or none is told."""
    parts = ("model.", "data.", "float_training.")
    kinds = {
        json.dumps({key: value for key, value in config.items() if key.startswith(parts) and key not in SEEDS}, sort_keys=True)
        for config in compared_configs(runs)
    }
    by_seed = sorted({(run_float_seed(run), run.accuracy["float"]) for run in runs if "float" in run.accuracy})
    return estimate([accuracy for _, accuracy in by_seed]) if by_seed and len(kinds) == 1 else None


def _is_called(name: str, asked: str, by: list[str]) -> bool:
    """Is this the variant of that strategy or value? Numbers are the same however they are written."""
    for key in by:
        value = name.removeprefix(f"{key} ")
        if asked in (name, value):
            return True
        try:
            if float(value) == float(asked):
                return True
        except ValueError:
            continue
    return False


def choose_baseline(cells: Cells, asked: str | None) -> str | None:
    """The variant to compare with: the one asked for; of several with that strategy, or that value, the one in most settings.

    Without a name `bn_correction` where it is there, else the variant in most settings; None where there is one variant.
    """
    if asked is None and len(cells.variants) < 2:
        return None
    names = [name for name in cells.variants if _is_called(name.partition(",")[0], asked or "bn_correction", cells.by)]
    if asked in cells.variants or (asked is not None and not names):
        return asked
    return max(names or cells.variants, key=lambda name: sum(cell.variant == name for cell in cells.cells))
