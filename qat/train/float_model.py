"""The float network a job starts from: trained once for every (model, data, seed, settings), then reused."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import seed_everything
from torch import nn

from qat.errors import ConfigError
from qat.train.callbacks import FiniteLoss, RngState, RunCheckpoint, StopSignal, progress
from qat.train.data import ImageData
from qat.train.models import build_model
from qat.train.module import Classifier
from qat.train.saved_file import read_checkpoint
from qat.train.seeds import float_seed, split_seed
from qat.train.trainer import build_trainer, fit

log = logging.getLogger(__name__)

# keys that change how fast the same numbers are made, not the numbers
_IRRELEVANT_DATA = ("workers", "eval_batch_size")
_RELEVANT_TRAINER = ("precision", "gradient_clip_val", "limit_train_batches", "devices", "options")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def float_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a job's config that the float network depends on. Files count by their content, not by their path.

    The code of a model of your own is not looked at: after a change of it, remove float_cache/.
    """
    model = dict(config["model"])
    data = {key: value for key, value in config["data"].items() if key not in (*_IRRELEVANT_DATA, "split_seed")}
    if split_seed(config) != float_seed(config):  # else a job of one seed, whose name must not depend on how that was written
        data["split_seed"] = split_seed(config)
    if model.get("checkpoint"):
        model["checkpoint"] = file_digest(model["checkpoint"])
    if data.get("root") and Path(data["root"]).is_file():
        data["root"] = file_digest(data["root"])
    return {
        "model": model,
        "data": data,
        "seed": float_seed(config),
        "float_training": {key: value for key, value in config["float_training"].items() if key != "seed"},
        "trainer": {key: config["trainer"].get(key) for key in _RELEVANT_TRAINER},
    }


def cache_path(config: dict[str, Any]) -> Path:
    """`<run_root>/float_cache/<SHA-256 of the settings>.ckpt`."""
    text = json.dumps(float_settings(config), sort_keys=True)
    return Path(config["run_root"]) / "float_cache" / f"{hashlib.sha256(text.encode()).hexdigest()}.ckpt"


def float_network(config: dict[str, Any], data: ImageData, run_dir: Path) -> nn.Module:
    """The trained float network of a job, on the CPU.

    Seeds the random numbers with the float training's seed, and trains on the samples in that seed's order. Training writes
    run_dir/checkpoints/float.ckpt after each epoch and on Ctrl-C; a resumed job goes on from that file in the folder it resumes.
    Several jobs that train the same network at the same time write the same file, each as a whole.

    Raises:
        ConfigError: nothing to train and no checkpoint to load.
    """
    seed_everything(float_seed(config), workers=True, verbose=False)
    network = build_model(config["model"], data.num_classes, data.input_shape[0])
    training = config["float_training"]
    if not training["max_epochs"]:
        if not config["model"].get("checkpoint"):
            todo = "Set model.checkpoint=FILE, or train with float_training.max_epochs=30."
            raise ConfigError("float_training.max_epochs", "0 and no model.checkpoint", "one of the two", todo)
        return network
    path = cache_path(config)
    if path.is_file():
        try:
            network.load_state_dict(read_checkpoint(path)["state_dict"])
            log.info("float network from %s", path)
            return network
        except (ConfigError, RuntimeError, TypeError, AttributeError) as error:
            log.warning("cannot use %s (%s): training the float network again", path, error)
            network = build_model(config["model"], data.num_classes, data.input_shape[0])
    log.info("training the float network for %d epochs", training["max_epochs"])
    trained = train_float(config, data.seeded(float_seed(config)), network, run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    torch.save({"settings": float_settings(config), "state_dict": trained.state_dict()}, part)
    os.replace(part, path)
    return trained


def train_float(config: dict[str, Any], data: ImageData, network: nn.Module, run_dir: Path) -> nn.Module:
    """Train `network` with the recipe's `float_training`; the weights of the last epoch, on the CPU."""
    module = Classifier(
        {
            "model": config["model"],
            "num_classes": data.num_classes,
            "input_shape": list(data.input_shape),
            "optim": config["float_training"]["optim"],
            "quant": None,
            "fold": None,
        },
        network,
    )
    stop = StopSignal()
    checkpoint = RunCheckpoint(run_dir / "checkpoints", stop=stop, last_name="float.ckpt", best_name=None)
    settings = {**config["trainer"], "max_epochs": config["float_training"]["max_epochs"]}
    trainer = build_trainer(settings, [FiniteLoss(), progress(), RngState(), stop, checkpoint], [], run_dir, len(data.train_dataloader()))
    started = Path(config["resume"]) / "checkpoints" / "float.ckpt" if config.get("resume") else None
    if started is not None and started.is_file():
        read_checkpoint(started, "Remove it; the float network is then trained from its start.")
    else:
        started = None
    fit(trainer, module, data, started)
    return module.network.cpu()
