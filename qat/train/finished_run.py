"""A finished run opened again: its configuration, data, trained network and file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import qat
from qat.errors import ConfigError
from qat.report.result import read_result
from qat.train.config import validate
from qat.train.data import ImageData
from qat.train.float_model import cache_path
from qat.train.job import load_state, shipped_module
from qat.train.models import build_model
from qat.train.recorded import recorded_config
from qat.train.saved_file import read_checkpoint
from qat.train.seeds import job_data


@dataclass(frozen=True)
class FinishedRun:
    """What a run folder holds. Networks are in eval mode, on the CPU."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]

    @property
    def onnx(self) -> Path:
        return self.folder / "model.onnx"

    def data(self, **changes: Any) -> ImageData:
        """The run's data; keys that are not None replace those of its configuration."""
        return job_data(self.config, **{key: value for key, value in changes.items() if value is not None})

    @property
    def checkpoint(self) -> Path:
        """The checkpoint the run chose.

        Raises:
            ConfigError: none in the folder.
        """
        for name in ("best.ckpt", "last.ckpt"):
            if (path := self.folder / "checkpoints" / name).is_file():
                return path
        raise ConfigError(str(self.folder), "no checkpoints/best.ckpt or last.ckpt", "the checkpoints of the run", "Run it again.")

    def network(self, data: ImageData) -> Any:
        """The trained network with fake quantizers, as it was converted.

        Args:
            data: of this run.

        Raises:
            ConfigError: a checkpoint that cannot be read.
        """
        return shipped_module(self.checkpoint, self.config, data).network.eval()

    def _cached(self) -> Path:
        """The float network's file, in the run_root recorded or, from another working directory, in the one the folder lies in:
        ROOT/RECIPE/TIME, or ROOT/RECIPE/TIME/jobs/JOB in a sweep, TIME/jobs/JOB in one that was moved."""
        path = cache_path(self.config)
        above = self.folder.resolve().parents
        places = [path, *(above[i] / path.parent.name / path.name for i in (1, 2, 3) if i < len(above))]
        return next((place for place in places if place.is_file()), path)

    def float_network(self) -> tuple[nn.Module, str]:
        """The float network to compare with, and what it is: the one the run started from where it is still there."""
        model = self.config["model"]
        told, checkpoint = "the float network it started from", model["checkpoint"]
        data = self.data()
        channels, classes = data.input_shape[0], data.num_classes
        if checkpoint is None or Path(checkpoint).is_file():
            if not self.config["float_training"]["max_epochs"]:
                return build_model(model, classes, channels).eval(), told
            if (path := self._cached()).is_file():
                network = build_model({**model, "checkpoint": None}, classes, channels)
                load_state(network, read_checkpoint(path, "Remove it."), path)
                return network.eval(), told
        network = self.network(data)
        qat.set_fake_quant(network, weights=False, activations=False)
        return network, "the trained network without quantization"


def open_run(folder: str | Path, trusted: str | None = None) -> FinishedRun:
    """The run in a folder.

    Args:
        trusted: as in `recorded_config`.

    Raises:
        ConfigError: not the folder of a run, or of one that did not finish, or a configuration that cannot be used.
    """
    folder = Path(folder)
    result = read_result(folder)
    if result["status"] != "ok":
        raise ConfigError(str(folder), f"a run with status '{result['status']}'", "a finished run", f"Resume it with resume={folder}.")
    config = recorded_config(folder, trusted)
    validate(config)
    return FinishedRun(folder, config, result)
