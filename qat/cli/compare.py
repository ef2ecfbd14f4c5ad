"""Compare runs: `python scripts/compare.py RUN_DIR...` prints a table and writes compare.csv, compare_cells.csv and compare.html.

A RUN_DIR is the folder of a run, or one that has runs somewhere below it. Of a sweep's folder it makes the sweep's own comparison again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from qat.bars import waiting
from qat.cli.command import OK, guarded, print_wide
from qat.cli.sweep_comparison import asked_in
from qat.errors import ConfigError
from qat.report.compare_csv import cells_csv, runs_csv
from qat.report.compare_files import check_writable
from qat.report.compare_numbers import BETTER, WORSE, Row
from qat.report.compare_page import page_of
from qat.report.compare_words import compared, damaged, findings, left_out, number, p_text, shown
from qat.report.comparison import Comparison, compare_runs
from qat.whole_file import write_whole

DEFAULT_OUT = Path("runs/compare")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 or 2 (bad input).

    Args:
        argv: the command line after the program's name.
    """
    arguments = argument_parser().parse_args(argv)
    folders = [Path(folder) for folder in arguments.runs]
    out = arguments.out or (folders[0] if len(folders) == 1 else DEFAULT_OUT)
    return guarded(lambda: obey(folders, out, arguments.baseline, arguments.by))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="folder of a run, or of several")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to write (the RUN_DIR; of several, {DEFAULT_OUT})")
    parser.add_argument("--baseline", metavar="NAME", help="what the others are compared with (a sweep's own; bn_correction)")
    told = "keys or groups whose values are compared, such as optim.name (what a sweep compares; fold.name); others make the settings"
    parser.add_argument("--by", nargs="+", default=(), metavar="KEY", help=told)
    return parser


def obey(folders: list[Path], out: Path, baseline: str | None, by: Sequence[str]) -> int:
    compare(folders, out, baseline, by)
    return OK


def compare(folders: list[Path], out: Path, baseline: str | None, by: Sequence[str] = ()) -> None:
    """Print the comparison of the runs in and below `folders` and write its files to `out`.

    Args:
        baseline: variant to compare with; None: that of the sweep in the folder, if there is one, or chooses one.
        by: configuration keys whose values are compared; (): what the sweep in the folder compares, or the strategy.

    Raises:
        ConfigError: bad input, before anything is written.
    """
    asked, known = asked_in(folders), defaults()
    wished = asked.baseline if not by and baseline is None else None
    with waiting("reading runs"):
        try:
            found = compare_runs(folders, baseline or wished, by or asked.by, known, asked.tuned)
        except ConfigError:
            if wished is None:
                raise
            found = compare_runs(folders, None, by or asked.by, known, asked.tuned)
            print(f"note: no finished run of {wished}, the sweep's baseline")
    check_writable(out)
    print_comparison(found)
    write_whole(out / "compare.csv", runs_csv(found.runs, found.left, found.cells))
    write_whole(out / "compare_cells.csv", cells_csv(found.rows, found.cells, found.baseline))
    with waiting("drawing"):
        write_whole(out / "compare.html", page_of(found))
    print(f"\n{out / 'compare.html'}, compare.csv (a row a run), compare_cells.csv")


def defaults() -> dict[str, Any]:
    """Dotted key -> default of every key that a configuration has, for runs from before a key was there."""
    from qat.train.config import schema

    flat: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{path}{key}.")
            elif value != "???":
                flat[path + key] = value

    walk(OmegaConf.to_container(schema()), "")
    return flat


def print_comparison(found: Comparison) -> None:
    """What was compared, a table with the settings below each other, and what may be said."""
    print(compared(found.cells, found.runs))
    for line in [*left_out(found.left), *damaged(found.runs)]:
        print(line)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", overflow="fold")
    table.add_column("variant" if found.cells.by != ["fold.name"] else "strategy", overflow="fold")
    for heading in ("n", "accuracy ± 95 %", "- float", f"- {found.baseline or 'baseline'}", "p", "", "s/step", "MB"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for setting in found.cells.settings:
        for i, row in enumerate(found.rows_at(setting)):
            table.add_row(*map(Text, _cells(row, setting if i == 0 else "")))
    print_wide(table, 200)
    print("\n" + "\n".join(findings(found.rows, found.cells, found.baseline)))


def _cells(row: Row, setting: str) -> list[str]:
    difference = row.to_baseline.difference if row.to_baseline else None
    verdict = row.verdict.upper() if row.verdict in (BETTER, WORSE) else row.verdict + (f": {row.why}" if row.why else "")
    return [
        setting,
        row.cell.variant,
        str(row.accuracy.n),
        shown(row.accuracy),
        number(row.to_float.mean, True) if row.to_float else "–",
        shown(difference, True) if difference else "–",
        p_text(row.p),
        verdict,
        "–" if row.seconds_per_step is None else f"{row.seconds_per_step:.3f}",
        "–" if row.memory is None else f"{row.memory:.0f}",
    ]
