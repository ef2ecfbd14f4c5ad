"""compare.csv, a row for every folder that was found, and compare_cells.csv, a row for every cell: plain numbers for other programs."""

import csv
import io
from typing import Any

from qat.report.compare_cells import Cells
from qat.report.compare_names import text
from qat.report.compare_numbers import Row, seconds_per_step
from qat.report.compare_runs import LeftOut, Run
from qat.report.statistics import Estimate


def runs_csv(runs: list[Run], left: list[LeftOut], cells: Cells) -> str:
    """`used` says whether a run is in the comparison, `reason` why not."""
    places = {run.folder: cell for cell in cells.cells for run in cell.runs.values()}
    named = sorted({key for run in runs for key in run.accuracy})
    rows = []
    for run in runs:
        if run.folder not in places:
            continue
        cell = places[run.folder]
        parity = run.result.get("parity")
        parity = parity if isinstance(parity, dict) else {}
        rows.append(
            {
                "folder": run.folder,
                "used": "yes",
                "variant": cell.variant,
                "setting": cell.setting,
                "seed": run.seed,
                **{f"accuracy_{key}": run.accuracy.get(key) for key in named},
                "validation": run.result.get("validation"),
                "freeze_step": run.result.get("freeze_step"),
                "steps": run.result.get("steps"),
                "seconds_per_step": seconds_per_step(run),
                "peak_memory_mb": run.result.get("peak_memory_mb"),
                "parity_identical": parity.get("identical"),
                "parity_max_lsb": parity.get("max_lsb"),
                **{key: text(cell.keys[key]) for key in cells.differing},
            }
        )
    rows += [
        {"folder": item.folder, "used": "no", "reason": f"{item.kind}: {item.why}", "seed": item.config.get("seed")}
        | {key: text(item.config[key]) for key in cells.differing if key in item.config}
        for item in left
    ]
    return _csv(rows, ["folder", "used", "reason", "variant", "setting", "seed"])


def cells_csv(rows: list[Row], cells: Cells, baseline: str | None) -> str:
    """Differences are of test accuracies; `low` and `high` are the ends of 95 % intervals; `p` is Holm's."""
    return _csv(
        [
            {
                "variant": row.cell.variant,
                "setting": row.cell.setting,
                "seeds": row.accuracy.n,
                **_ends("accuracy", row.accuracy),
                "without_integer_accuracy": row.simulated,
                **_ends("minus_float", row.to_float),
                "baseline": baseline,
                **_ends("minus_baseline", row.to_baseline.difference if row.to_baseline else None),
                "common_seeds": row.to_baseline.difference.n if row.to_baseline and row.to_baseline.difference else None,
                "p_uncorrected": row.to_baseline.p if row.to_baseline else None,
                "p": row.p,
                "verdict": row.verdict,
                "reason": row.why,
                "against_best": row.standing,
                "seconds_per_step": row.seconds_per_step,
                "peak_memory_mb": row.memory,
                **{key: text(row.cell.keys[key]) for key in cells.differing},
            }
            for row in rows
        ],
        ["variant", "setting"],
    )


def _ends(name: str, found: Estimate | None) -> dict[str, float | None]:
    return {name: found.mean if found else None, f"{name}_low": found.low if found else None, f"{name}_high": found.high if found else None}


def _csv(rows: list[dict[str, Any]], first: list[str]) -> str:
    columns = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
