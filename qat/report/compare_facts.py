"""With what the compared runs were made, for the head of the page: versions, machines, commands."""

import shlex
from collections import Counter
from typing import Any

from qat.report.compare_configs import SEEDS
from qat.report.compare_names import text
from qat.report.compare_numbers import Row, float_estimate
from qat.report.compare_runs import Run, read_json
from qat.report.compare_words import count, listed, shown
from qat.report.comparison import Comparison

_HEAD = (
    "model.name",
    "data.name",
    "quant.weight.bits",
    "quant.activation.bits",
    "quant.weight.per_channel",
    "fold.name",
    "optim.name",
    "optim.lr",
)


def facts(found: Comparison) -> list[tuple[str, str]]:
    """(what, value): what all runs share, the float networks, versions and machines."""
    same = found.cells.same
    head = ", ".join(f"{key} {text(same[key])}" for key in _HEAD if key in same)
    rows = [("the same in all runs", head)] if head else []
    floats = [run.accuracy["float"] for run in found.runs if "float" in run.accuracy]
    if floats:
        over_seeds = float_estimate(found.runs)
        rows.append(("test accuracy of the float networks", shown(over_seeds) if over_seeds else f"{min(floats):.4f} to {max(floats):.4f}"))
    for key in SEEDS:
        if key in same:
            rows.append((key, text(same[key])))
    environments = [read_json(run.folder / "env.json") for run in found.runs]
    rows.append(("versions", _versions(environments)))
    rows.append(("commit", _told(_commit(env) for env in environments)))
    rows.append(
        (
            "machine",
            _told(f"{env.get('cpu', 'unknown')}, {env.get('device', 'unknown')}" if env else "not recorded" for env in environments),
        )
    )
    return rows


def _told(values: Any) -> str:
    """Each value, with the number of its runs where there are several."""
    counts = Counter(values)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return "; ".join(f"{value} ({count(n, 'run')})" for value, n in counts.most_common(6)) + ("; …" if len(counts) > 6 else "")


def _commit(env: dict[str, Any]) -> str:
    git = env.get("git")
    if not isinstance(git, dict) or not git.get("commit"):
        return "not recorded"
    return str(git["commit"])[:12] + (" with changes" if git.get("dirty") else "")


def _versions(environments: list[dict[str, Any]]) -> str:
    versions: dict[str, set[str]] = {}
    for env in environments:
        packages = {"python": env.get("python"), **(env["packages"] if isinstance(env.get("packages"), dict) else {})}
        for name, version in packages.items():
            if version:
                versions.setdefault(name, set()).add(str(version))
    return ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items()) or "not recorded"


def commands(found: Comparison) -> list[list[str]]:
    """(variant, setting, seeds, the command its newest run was started with, the words that choose the cell among all)."""
    rows = []
    for row in found.rows:
        newest: Run = max(row.cell.runs.values(), key=lambda run: run.when)
        command = read_json(newest.folder / "env.json").get("command")
        words = [shlex.quote(f"{key}={text(value)}") for key, value in row.cell.keys.items() if key not in SEEDS]
        rows.append([row.cell.variant, row.cell.setting, _seeds(row), f"python {command}" if command else "not recorded", " ".join(words)])
    return rows


def _seeds(row: Row) -> str:
    return ",".join(map(str, row.cell.runs))


def usual(found: Comparison) -> str:
    """What holds for a setting whose name does not say otherwise; "" where names say all."""
    told = [f"{key} {text(value)}" for key, value in found.cells.usual.items()]
    return f"Where a setting does not say otherwise: {listed(told)}." if told else ""
