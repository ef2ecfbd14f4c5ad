"""The quantization-aware part of a job: its schedule, and the Trainer that carries it."""

from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import TensorBoardLogger

from qat.train.callbacks import (
    FiniteLoss,
    FreezeBN,
    FreezeRanges,
    LogLearningRate,
    QuantDelay,
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
    return {"delay": delay, "freeze_bn": freeze, "freeze_ranges": ranges, "reestimate": reestimate}


def qat_trainer(
    config: dict[str, Any], run_dir: Path, schedule: dict[str, Any], float_val: float, batches: int, resumed: Path | None
) -> Trainer:
    """Trainer of the quantization-aware part, with its schedule, checkpoints and logs."""
    stop = StopSignal()
    checkpoint = RunCheckpoint(run_dir / "checkpoints", [schedule["delay"], schedule["freeze_bn"], schedule["freeze_ranges"]], stop)
    history, until = None, 0
    if resumed is not None:
        history = Path(config["resume"]) / "metrics.csv"
        until = read_checkpoint(resumed).get("global_step", 0)
    loggers = [
        MetricsFile(run_dir / "metrics.csv", history, until),
        TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False),
    ]
    callbacks: list[Callback] = [FiniteLoss(), *schedule.values(), LogLearningRate(), progress(float_val), RngState(), stop, checkpoint]
    learned = "lsq" in (config["quant"]["weight"]["range"], config["quant"]["activation"]["range"])
    return build_trainer(config["trainer"], callbacks, loggers, run_dir, batches, learned)


def best_or_last(trainer: Trainer, run_dir: Path) -> Path:
    """The checkpoint that ships: the best one after the end of the schedule, or the last when no epoch came after it."""
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    return Path(best) if best else run_dir / "checkpoints" / "last.ckpt"
