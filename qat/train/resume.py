"""Going on with a run that was stopped."""

import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qat.errors import ConfigError
from qat.train.config import PTQConfig
from qat.train.saved_file import read_checkpoint

log = logging.getLogger(__name__)


def checkpoint_to_resume(config: dict[str, Any], run_dir: Path) -> Path | None:
    """last.ckpt of the run to resume, in run_dir (best.ckpt comes along); None: nothing to resume, or stopped before QAT began.

    Raises:
        ConfigError: `resume` is not a run folder, or the run had another network, quantizer or strategy.
    """
    if not config.get("resume"):
        return None
    old = Path(config["resume"])
    if not old.is_dir() or not ((old / "config.yaml").is_file() or (old / "checkpoints").is_dir()):
        raise ConfigError("resume", f"no run in '{old}'", "a run folder with checkpoints/", "Give runs/<recipe>/<timestamp>.")
    if not (old / "checkpoints" / "last.ckpt").is_file():
        log.info("%s was stopped before quantization-aware training began", old)
        return None
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("best.ckpt", "last.ckpt"):
        if (old / "checkpoints" / name).is_file() and (old / "checkpoints").resolve() != folder.resolve():
            shutil.copyfile(old / "checkpoints" / name, folder / name)
    parts = ("model", "quant", "fold", "optim")
    saved = read_checkpoint(folder / "last.ckpt").get("hyper_parameters")
    saved = saved.get("config") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not all(isinstance(saved.get(part), dict) for part in parts):
        raise ConfigError(str(folder / "last.ckpt"), "no configuration", "a checkpoint of this project", "Start a run of its own.")
    for part in (*parts, "ptq"):
        recorded = saved.get(part, asdict(PTQConfig()))  # checkpoints from before there were such steps had none
        changed = [f"{part}.{key}" for key, value in recorded.items() if config[part].get(key) != value]
        if changed:
            todo = "Resume with the settings of that run, or start a run of its own."
            raise ConfigError("resume", f"other values of {', '.join(changed)}", f"those of {old}", todo)
    return folder / "last.ckpt"
