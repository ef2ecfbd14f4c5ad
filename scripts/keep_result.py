"""Keep what a run measured under docs/results/: result.json, config.yaml, env.json and, of training, the curves.

    python scripts/keep_result.py RUN_DIR [NAME]

NAME is a folder of docs/results/, the recipe's name when absent. Seeds other than 0 go to seed_N below it;
`python scripts/quote_results.py` then writes mean and interval where they are quoted.
"""

import shutil
import sys
from pathlib import Path

from qat.report.plots import curves
from qat.report.result import read_result
from qat.train.metrics_file import read_metrics

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def keep(run: Path, name: str | None = None) -> Path:
    """Copy the files of a finished run; returns their folder."""
    result = read_result(run)
    if result["status"] != "ok":
        raise SystemExit(f"{run}: found status '{result['status']}'; expected a finished run. Resume it with resume={run}.")
    folder = RESULTS / (name or result["recipe"])
    if result["seed"]:
        folder /= f"seed_{result['seed']}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("result.json", "config.yaml", "env.json"):
        shutil.copyfile(run / file, folder / file)
    if not result["steps"]:
        return folder
    drawn = curves(read_metrics(run / "metrics.csv"), result["freeze_step"], result["accuracy"]["float"])
    (folder / "curves.svg").write_text(drawn)
    return folder


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    print(keep(Path(sys.argv[1]), *sys.argv[2:]))
