"""What the comparison of a sweep compares: told by its sweep.yaml, so that the page made at its end can be made again at any time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat.cli.sweep_folder import SWEEP, read_sweep
from qat.cli.sweep_section import compared_key
from qat.report.compare_cells import text


@dataclass(frozen=True)
class Asked:
    """
    Args:
        by: keys or groups whose values are compared; () for the folding strategy.
        tuned: keys or groups that were chosen for every combination.
        baseline: value the others are compared with; None: none was asked for.
    """

    by: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()
    baseline: str | None = None


def asked_of(recorded: dict[str, Any]) -> Asked:
    """
    Args:
        recorded: the content of sweep.yaml.
    """
    over, baseline, tuned = recorded["over"], recorded.get("baseline"), tuple(map(_dotted, recorded["tune"]))
    key = compared_key({str(key): values for key, values in over.items() if isinstance(values, list)})
    if key is None:
        return Asked(tuned=tuned)
    known = baseline is not None and text(baseline) in map(text, over[key])
    return Asked(() if key == "fold" else (_dotted(key),), tuned, text(baseline) if known else None)


def asked_in(folders: Sequence[Path]) -> Asked:
    """Of the sweep in one folder; of several folders only what their sweeps tuned.

    Raises:
        ConfigError: a sweep.yaml that cannot be read.
    """
    found = [asked_of(read_sweep(folder)) for folder in folders if (folder / SWEEP).is_file()]
    if len(folders) == 1:
        return found[0] if found else Asked()
    return Asked(tuned=tuple(dict.fromkeys(key for asked in found for key in asked.tuned)))


def _dotted(key: object) -> str:
    return str(key).replace("/", ".")
