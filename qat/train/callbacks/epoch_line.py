"""One aligned line an epoch, for logs and terminals without a progress bar."""

import logging
import time
from typing import Any

from pytorch_lightning import Callback

log = logging.getLogger(__name__)

HEADER = f"{'epoch':>9} {'lr':>9} {'loss':>8} {'float':>7} {'fakeq':>7} {'d':>7} {'time':>7} {'eta':>7}"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def line(epoch: int, epochs: int, lr: float, loss: float, base: float | None, accuracy: float | None, seconds: float, left: float) -> str:
    """A row under HEADER. Accuracies are fractions of the validation split; a missing one is a dash."""
    shown = ["-" if value is None else f"{value:.4f}" for value in (base, accuracy)]
    difference = "-" if base is None or accuracy is None else f"{accuracy - base:+.4f}"
    numbers = f"{f'{epoch}/{epochs}':>9} {lr:>9.2e} {loss:>8.4f}"
    return f"{numbers} {shown[0]:>7} {shown[1]:>7} {difference:>7} {clock(seconds):>7} {clock(left):>7}"


class EpochLine(Callback):
    """Log `epoch lr loss float fakeq d time eta` after every epoch.

    Args:
        float_accuracy: validation accuracy of the float network the run starts from; None when the run trains that network
            itself: its accuracy then stands under `float`.
    """

    def __init__(self, float_accuracy: float | None = None):
        self.float_accuracy = float_accuracy
        self._begin = self._epoch_begin = 0.0
        self._first_epoch = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin, self._first_epoch = time.monotonic(), trainer.current_epoch
        log.info(HEADER)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._epoch_begin = time.monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        now, epoch = time.monotonic(), trainer.current_epoch + 1
        metrics = trainer.callback_metrics
        accuracy = float(metrics["val_acc"]) if "val_acc" in metrics else None
        base, fakeq = (accuracy, None) if self.float_accuracy is None else (self.float_accuracy, accuracy)
        left = (now - self._begin) / (epoch - self._first_epoch) * (trainer.max_epochs - epoch)
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        began = self._epoch_begin or self._begin  # an epoch entered in its middle has no start hook
        log.info(line(epoch, trainer.max_epochs, lr, float(metrics["train_loss_epoch"]), base, fakeq, now - began, left))
