"""What the comparison of a sweep compares: told by its sweep.yaml, so that the page made at its end can be made again at any time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qat.cli.sweep_folder import SWEEP, read_sweep
from qat.cli.sweep_section import compared_key
from qat.errors import ConfigError
from qat.report.compare_configs import Tuned
from qat.report.compare_names import text


@dataclass(frozen=True)
class Asked:
    """
    Args:
        by: keys or groups whose values are compared; () for the folding strategy.
        baseline: value the others are compared with; None: none was asked for.
        tuned: what the sweeps chose for each of their combinations.
    """

    by: tuple[str, ...] = ()
    baseline: str | None = None
    tuned: Tuned = field(default_factory=dict)


def asked_of(recorded: dict[str, Any]) -> Asked:
    """What one sweep compares, and with what.

    Args:
        recorded: the content of sweep.yaml.
    """
    over = {str(key): values for key, values in recorded["over"].items() if isinstance(values, list)}
    key, baseline = compared_key(over), recorded.get("baseline")
    if key is None:
        return Asked()
    known = baseline is not None and text(baseline) in map(text, over[key])
    return Asked(() if key == "fold" else (_dotted(key),), text(baseline) if known else None)


def asked_in(folders: Sequence[Path]) -> Asked:
    """What the sweeps in, below or around these folders tuned; of one alone also what it compares.

    A sweep.yaml that cannot be read is told on standard error, and its runs are compared as any others.
    """
    found: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        below = [path.parent for depth in ("", "*/", "*/*/") for path in sorted(folder.glob(depth + SWEEP))]
        around = [parent for parent in folder.resolve().parents[:2] if (parent / SWEEP).is_file()]
        for place in [*below, *around]:
            try:
                found.setdefault(place.resolve(), read_sweep(place))
            except ConfigError as error:
                print(f"note: {error.where}: {error.found}; its runs are compared as any others", file=sys.stderr)
    tuned = {
        place: {_dotted(key): values for key, values in recorded["tune"].items() if isinstance(values, list)}
        for place, recorded in found.items()
    }
    alone = asked_of(next(iter(found.values()))) if len(found) == len(folders) == 1 else Asked()
    return Asked(alone.by, alone.baseline, tuned)


def _dotted(key: object) -> str:
    return str(key).replace("/", ".")
