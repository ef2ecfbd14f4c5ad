"""The folder of a run: <run_root>/<recipe>/<timestamp>/, made once and never written over; in a sweep, one below the sweep's own."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qat.errors import ConfigError
from qat.whole_file import write_whole


def stamp() -> str:
    """Local time with microseconds, sorting by age: 2026-01-31_12-30-05_000123."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")


def new_run_folder(config: dict[str, Any], env: dict[str, Any], folder: Path | None = None) -> Path:
    """Make the folder of a new run, with env.json and config.yaml, the latter last and as a whole.

    Args:
        folder: of a job of a sweep, which may be there already but without a config.yaml; None: one of its own.

    Raises:
        ConfigError: run_root cannot be written to.
        FileExistsError: the folder is there already.
    """
    own = folder is None
    folder = Path(config["run_root"]) / config["recipe"] / stamp() if folder is None else folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "run_root", f"{config['run_root']!r} ({error})", "a folder that can be written to", "Set run_root=FOLDER."
        ) from error
    folder.mkdir(exist_ok=not own)
    write_env(folder / "env.json", env)
    write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
    return folder


def write_env(path: Path, env: dict[str, Any]) -> None:
    """Write what the run was made with as JSON."""
    path.write_text(json.dumps(env, indent=2) + "\n", encoding="utf-8")
