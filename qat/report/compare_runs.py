"""The runs below some folders, as plain data: what is compared, and what is left out with its reason.

Run folders may be half-written, foreign or old. Their files are read as data: no interpolation is resolved, and a folder that cannot be
read costs a line on the page, not the page.
"""

import csv
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from qat.errors import ConfigError
from qat.report.result import NAME

LARGEST_CONFIG = 1_000_000  # bytes; a configuration has 4000
_MOST_KEYS = 5000
_NOT_RUNS = {"checkpoints", "tensorboard", "lightning_logs", "float_cache"}
_PICTURED = {"layers.json": re.compile(rb"\{.*\}\s*", re.DOTALL), "metrics.csv": re.compile(rb"([^\n]*,)?step\b.*", re.DOTALL)}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        config: dotted key -> value; lists are JSON text.
        when: seconds since 1970, of the run's start where its folder is named after it, else of its result.
        damaged: files of pictures that are cut off or something else; what they would show is left out.
    """

    folder: Path
    result: dict[str, Any]
    config: dict[str, Any]
    when: float
    damaged: tuple[str, ...] = ()

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    @property
    def accuracy(self) -> dict[str, float]:
        return self.result["accuracy"]

    @property
    def shipped(self) -> float:
        """Test accuracy of the integers, or of the simulation where there are none."""
        return self.accuracy["integer"] if "integer" in self.accuracy else self.accuracy["fake_quant"]


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not compared: `kind` is failed, interrupted, unfinished, tuning, duplicate or unreadable."""

    folder: Path
    kind: str
    why: str
    config: dict[str, Any]


def read_runs(folders: list[Path], defaults: dict[str, Any]) -> tuple[list[Run], list[LeftOut]]:
    """Every run in and below `folders`, each once, in the order of their paths.

    Args:
        defaults: dotted key -> value for keys that a configuration lacks, of runs older than the key.

    Raises:
        ConfigError: a folder that is not there.
    """
    found = [_read(folder, defaults) for folder in _run_folders(folders)]
    return [item for item in found if isinstance(item, Run)], [item for item in found if isinstance(item, LeftOut)]


def _run_folders(folders: list[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for given in folders:
        if not given.is_dir():
            raise ConfigError(str(given), "no folder", "a run folder, or one that has run folders below it", "Give folders under runs/.")
        for place, inner, files in os.walk(given):
            inner[:] = sorted(name for name in inner if name not in _NOT_RUNS and not name.startswith("."))
            begun = "config.yaml" in files and ("env.json" in files or "metrics.csv" in files or "checkpoints" in os.listdir(place))
            if NAME in files or begun:
                found.setdefault(Path(place).resolve(), Path(place))
    return list(found.values())


def _read(folder: Path, defaults: dict[str, Any]) -> Run | LeftOut:
    try:
        config = {**defaults, **flat_config(folder / "config.yaml")}
    except FileNotFoundError:
        return LeftOut(folder, "unreadable", "no config.yaml", {})
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return LeftOut(folder, "unreadable", f"config.yaml: {_first_line(error)}", {})
    path = folder / NAME
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return LeftOut(folder, "unfinished", "no result yet", config)
    except (OSError, ValueError, RecursionError) as error:
        return LeftOut(folder, "unreadable", f"{NAME}: {_first_line(error)}", config)
    status = result.get("status") if isinstance(result, dict) else None
    if status in ("failed", "interrupted"):
        return LeftOut(folder, status, _first_line(result.get("error") or "stopped by the user"), config)
    if status != "ok":
        return LeftOut(folder, "unreadable", f"{NAME} of another shape", config)
    if result.get("tuning"):
        return LeftOut(folder, "tuning", "run to choose values by", config)
    if problem := _problem(result, config):
        return LeftOut(folder, "unreadable", f"{NAME}: {problem}", config)
    damaged = tuple(name for name, whole in _PICTURED.items() if _damaged(folder / name, whole))
    return Run(folder, result, config, _when(folder, path), damaged)


def _damaged(path: Path, whole: re.Pattern[bytes]) -> bool:
    """Is there a file that does not begin and end as it should? A look at its ends: all of it is read when it is drawn."""
    try:
        with path.open("rb") as file:
            head = file.read(200)
            file.seek(max(0, os.path.getsize(path) - 200))
            return not whole.fullmatch(head + b"\n...\n" + file.read())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _first_line(said: object) -> str:
    return (str(said).strip().splitlines() or [type(said).__name__])[0][:200]


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _problem(result: dict[str, Any], config: dict[str, Any]) -> str:
    accuracy = result.get("accuracy")
    if not isinstance(accuracy, dict) or not all(is_number(value) and 0 <= value <= 1 for value in accuracy.values()):
        return "no accuracies between 0 and 1"
    if not {"integer", "fake_quant"} & set(accuracy):
        return "no accuracy of a quantized network"
    return "" if isinstance(config.get("seed"), int) else "config.yaml has no seed"


def _when(folder: Path, path: Path) -> float:
    try:
        return datetime.strptime(folder.name, "%Y-%m-%d_%H-%M-%S_%f").timestamp()
    except ValueError:
        return path.stat().st_mtime


def flat_config(path: Path) -> dict[str, Any]:
    """Dotted key -> value; lists as JSON text, empty mappings left out.

    Raises:
        OSError, ValueError, RecursionError, yaml.YAMLError: not a readable configuration.
    """
    if path.stat().st_size > LARGEST_CONFIG:
        raise ValueError(f"more than {LARGEST_CONFIG} bytes")
    plain = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    if not isinstance(plain, dict):
        raise ValueError("no mapping")
    flat: dict[str, Any] = {}
    for key, value in _leaves(plain):
        flat[key] = value
        if len(flat) > _MOST_KEYS:  # aliases of aliases: a short text that is long when written out
            raise ValueError(f"more than {_MOST_KEYS} keys")
    return flat


def _leaves(node: dict[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if f"{path}{key}" == "quant.overrides" and value:  # of two patterns that match the later wins: their order is part of it
            yield f"{path}{key}", json.dumps(value, default=str)
        elif isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        elif isinstance(value, list):
            yield f"{path}{key}", json.dumps(value, default=str)
        else:
            yield f"{path}{key}", value if isinstance(value, str | int | float | None) else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """A mapping from a JSON file; {} where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def curve(folder: Path, metric: str = "val_acc") -> tuple[list[float], list[float]]:
    """(steps, values) of a metric in metrics.csv; lines that are cut off or hold no number are skipped."""
    steps, values = [], []
    try:
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                try:
                    step, value = float(row["step"]), float(row[metric])
                except (KeyError, TypeError, ValueError):
                    continue
                if math.isfinite(step) and math.isfinite(value):
                    steps.append(step)
                    values.append(value)
    except (OSError, ValueError, csv.Error):
        return [], []
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return [steps[i] for i in order], [values[i] for i in order]
