"""The quantization-aware part of a job: its schedule, and the Trainer that carries it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger, TensorBoardLogger

from qat.train.callbacks import (
    FiniteLoss,
    FreezeBN,
    FreezeRanges,
    LogLearningRate,
    QuantDelay,
    Record,
    Reestimate,
    RngState,
    RunCheckpoint,
    StopSignal,
    progress,
)
from qat.train.metrics_file import MetricsFile
from qat.train.saved_file import read_checkpoint
from qat.train.trainer import build_trainer


def schedule_callbacks(config: dict[str, Any]) -> dict[str, Any]:
    """The events of the run, in the order in which they act on a step."""
    quant, fold = config["quant"], config["fold"]
    delay = QuantDelay(quant["delay"])
    freeze = FreezeBN(fold["freeze"], fold["lr_after_freeze"], fold["reestimate_before_freeze"], fold["drift_bound"], delay)
    ranges, reestimate = FreezeRanges(quant["freeze_ranges"]), Reestimate(fold["reestimate_before_eval"])
    record = Record(config["report"]["moments"])
    return {"record": record, "delay": delay, "freeze_bn": freeze, "freeze_ranges": ranges, "reestimate": reestimate}


def qat_trainer(
    config: dict[str, Any], run_dir: Path, schedule: dict[str, Any], float_val: float, batches: int, resumed: Path | None
) -> Trainer:
    """Trainer of the quantization-aware part, with its schedule, checkpoints and logs."""
    stop = StopSignal()
    checkpoint = RunCheckpoint(run_dir / "checkpoints", [schedule["delay"], schedule["freeze_bn"], schedule["freeze_ranges"]], stop)
    callbacks: list[Callback] = [FiniteLoss(), *schedule.values(), LogLearningRate(), progress(float_val), RngState(), stop, checkpoint]
    learned = "lsq" in (config["quant"]["weight"]["range"], config["quant"]["activation"]["range"])
    return build_trainer(config["trainer"], callbacks, loggers(run_dir, config["resume"], resumed), run_dir, batches, learned)


def loggers(run_dir: Path, folder: str | None = None, resumed: Path | None = None) -> list[Logger]:
    """metrics.csv and TensorBoard's events in run_dir.

    Args:
        folder: of the interrupted run that this one continues.
        resumed: the checkpoint it goes on from.
    """
    history, until = None, 0
    if folder is not None and resumed is not None:
        history, until = Path(folder) / "metrics.csv", read_checkpoint(resumed).get("global_step", 0)
    tensorboard = TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False)
    return [MetricsFile(run_dir / "metrics.csv", history, until), tensorboard]


def log_accuracies(to: Sequence[Logger], found: dict[str, float]) -> None:
    """Log the test accuracy after every step so far, as of step 0 of the training."""
    for logger in to:
        logger.log_metrics({f"test_acc_{step}": value for step, value in found.items()}, 0)
        logger.save()


def save_untrained(module: LightningModule, run_dir: Path) -> Path:
    """Write checkpoints/last.ckpt of a run without training, whole or not at all; its path."""
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer({"max_epochs": 0, "accelerator": "cpu"}, [], [], run_dir, batches=1)
    trainer.strategy.connect(module)
    part = folder / "last.ckpt.part"
    trainer.save_checkpoint(part, weights_only=True)
    os.replace(part, folder / "last.ckpt")
    return folder / "last.ckpt"


def best_or_last(trainer: Trainer, run_dir: Path) -> Path:
    """The checkpoint that ships: the best one after the end of the schedule, or the last when no epoch came after it."""
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    return Path(best) if best else run_dir / "checkpoints" / "last.ckpt"
