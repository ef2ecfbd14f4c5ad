"""Learning rate of the first parameter group, at the trainer's logging interval."""

from typing import Any

from pytorch_lightning import Callback


class LogLearningRate(Callback):
    """Logged beside the losses under "lr", as the rate of the step that was just done."""

    def __init__(self) -> None:
        self._used = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._used = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step - 1
        if (step + 1) % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics({"lr": self._used}, step=step)
