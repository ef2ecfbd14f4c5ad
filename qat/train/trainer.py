"""Lightning's Trainer from the `trainer` part of a recipe, quiet where it has nothing to say."""

import logging
import signal
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import disable_possible_user_warnings

from qat.train.schedule import limited


def build_trainer(
    trainer: dict[str, Any],
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
    folder: Path,
    batches: int,
    learned_scales: bool = False,
) -> Trainer:
    """Args:
    trainer: the `trainer` part of a recipe; `options` are further arguments of Lightning's Trainer and win.
    folder: default root of whatever Lightning writes.
    batches: training batches in an epoch; logging is at least once an epoch.
    learned_scales: the network has quantizers with parameters.
    """
    _quiet()
    limit = trainer.get("limit_train_batches")
    arguments: dict[str, Any] = {
        "max_epochs": trainer["max_epochs"],
        "accelerator": trainer.get("accelerator", "auto"),
        "devices": trainer.get("devices", 1),
        "strategy": trainer.get("strategy", "auto"),
        "precision": trainer.get("precision", "32-true"),
        "gradient_clip_val": trainer.get("gradient_clip_val"),
        "limit_train_batches": limit,
        "log_every_n_steps": max(1, min(trainer.get("log_every_n_steps", 10), limited(batches, limit))),
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "use_distributed_sampler": False,  # the data's samplers shard by themselves
        "default_root_dir": str(folder),
        "logger": list(loggers) or False,
        "callbacks": list(callbacks),
    }
    arguments |= trainer.get("options") or {}
    if learned_scales and arguments["strategy"] in ("auto", "ddp") and arguments["devices"] not in (1, "1"):
        # A learned scale has no gradient while its quantizer is switched off or held.
        arguments["strategy"] = "ddp_find_unused_parameters_true"
    return Trainer(**arguments)


def _quiet() -> None:
    """Switch off what Lightning says about itself. Warnings about the run stay."""
    # advice about loader workers and logging intervals; what it proposes are recipe values here
    disable_possible_user_warnings()
    # tips and what hardware was found
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    # the check of labels (module.py); the data here has no hook of that name
    warnings.filterwarnings("ignore", message=r"You have overridden `on_before_batch_transfer` in `LightningModule`", category=UserWarning)
    # Lightning's use of torch, once for every loader
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning)


def fit(trainer: Trainer, module: LightningModule, data: LightningDataModule, checkpoint: Path | None = None) -> None:
    """`Trainer.fit`, from `checkpoint` when given.

    Lightning turns KeyboardInterrupt into an exit of the process and leaves Ctrl-C ignored; here both are as in any program.

    Raises:
        KeyboardInterrupt: stopped by the user.
    """
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    try:
        trainer.fit(module, datamodule=data, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=True)
    except SystemExit as exit_:
        raise KeyboardInterrupt from exit_
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGINT, handler)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # what follows a fit runs on each process by itself
            torch.distributed.destroy_process_group()


def evaluation_device(trainer: dict[str, Any]) -> torch.device:
    """Where to run a network outside of a Trainer."""
    wants = trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")
    return torch.device("cuda" if wants and torch.cuda.is_available() else "cpu")
