"""A finished run opened again: its configuration, data, trained network and file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from yaml import YAMLError

import qat
from qat.errors import ConfigError, QATError
from qat.report.result import read_result
from qat.train.config import complete
from qat.train.data import ImageData, build_data
from qat.train.float_model import cache_path
from qat.train.job import shipped_module
from qat.train.models import build_model


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
        return build_data(
            {**self.config["data"], **{key: value for key, value in changes.items() if value is not None}}, self.config["seed"]
        )

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
        path = self.checkpoint
        try:
            return shipped_module(path, self.config, data).network.eval()
        except QATError:
            raise
        except Exception as error:
            found = f"a file that cannot be read ({type(error).__name__})"
            raise ConfigError(str(path), found, "the checkpoint of this run", "Run it again.") from error

    def float_network(self) -> tuple[nn.Module, str]:
        """The float network to compare with, and what it is: the one the run started from where it is still there."""
        model = self.config["model"]
        told, checkpoint = "the float network it started from", model["checkpoint"]
        built = torch.load(self.checkpoint, map_location="cpu", weights_only=True)["hyper_parameters"]["config"]
        channels, classes = built["input_shape"][0], built["num_classes"]
        if checkpoint is None or Path(checkpoint).is_file():
            if not self.config["float_training"]["max_epochs"]:
                return build_model(model, classes, channels).eval(), told
            if (path := cache_path(self.config)).is_file():
                network = build_model({**model, "checkpoint": None}, classes, channels)
                network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
                return network.eval(), told
        network = self.network(self.data())
        qat.set_fake_quant(network, weights=False, activations=False)
        return network, "the trained network without quantization"


def open_run(folder: str | Path) -> FinishedRun:
    """The run in a folder.

    Raises:
        ConfigError: not the folder of a run, or of one that did not finish.
    """
    folder = Path(folder)
    result = read_result(folder)
    if result["status"] != "ok":
        raise ConfigError(str(folder), f"a run with status '{result['status']}'", "a finished run", f"Resume it with resume={folder}.")
    try:
        config = OmegaConf.load(folder / "config.yaml")
    except (OSError, YAMLError) as error:
        found = f"a file that cannot be read ({type(error).__name__})"
        raise ConfigError(str(folder / "config.yaml"), found, "the configuration of the run", "Run it again.") from error
    return FinishedRun(folder, complete(config), result)
