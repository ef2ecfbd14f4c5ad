"""The two checkpoints of a run: last.ckpt to resume from, best.ckpt to ship."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pytorch_lightning.callbacks import Checkpoint

from qat.train.callbacks.stop_signal import StopSignal


class Event(Protocol):
    """A step of the schedule that is over or not."""

    done: bool


class RunCheckpoint(Checkpoint):
    """Write `last_name` after every epoch and on interruption, and best.ckpt when the validation accuracy is a new best.

    Files appear whole or not at all. Accuracies from before the end of the schedule do not count: a network whose statistics
    still move, or that is not quantized yet, is not the one that ships.

    Args:
        folder: where the files go.
        waits_for: events of the schedule that have to be over before an epoch can be the best.
        stop: the run's Ctrl-C, if it is handled.
        monitor: metric to maximise; of equal ones the earliest is kept.
        last_name, best_name: file names; best_name None: only the last one is kept.
    """

    def __init__(
        self,
        folder: Path,
        waits_for: Sequence[Event] = (),
        stop: StopSignal | None = None,
        monitor: str = "val_acc",
        last_name: str = "last.ckpt",
        best_name: str | None = "best.ckpt",
    ):
        self.folder, self.waits_for, self.stop, self.monitor = Path(folder), tuple(waits_for), stop, monitor
        self.last_name, self.best_name = last_name, best_name
        self.best_model_path = ""
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._saved_to_stop = False

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # without the file (a run folder of its own, or one that was cleaned) the search for the best starts again
        path = self.folder / str(self.best_name)
        if state_dict["best_score"] is not None and path.is_file():
            self.best_model_path, self.best_score, self.best_step = str(path), state_dict["best_score"], state_dict["best_step"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if between_steps and not trainer.is_last_batch and self._stopping(trainer):
            self._save_last(trainer)
            self._saved_to_stop = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # not right after saving: the loggers have yet to take in the step that was saved
        if self._saved_to_stop:
            raise KeyboardInterrupt

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        score = trainer.callback_metrics.get(self.monitor)
        better = score is not None and (self.best_score is None or float(score) > self.best_score)
        is_best = self.best_name is not None and better and all(event.done for event in self.waits_for)
        if is_best and score is not None:
            self.best_score, self.best_step = float(score), trainer.global_step
            self.best_model_path = str(self.folder / str(self.best_name))
        self._save_last(trainer, self.best_model_path if is_best else None)
        if self._stopping(trainer):
            raise KeyboardInterrupt

    def _stopping(self, trainer: Any) -> bool:
        """Whether to stop, the same answer on every rank: saving is joint work that no rank may begin alone."""
        return self.stop is not None and trainer.strategy.reduce_boolean_decision(self.stop.requested, all=False)

    def _save_last(self, trainer: Any, best: str | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{self.last_name}.part"
        trainer.save_checkpoint(part, weights_only=False)
        if not trainer.is_global_zero:
            return
        if best is not None:
            # before the last one: a crash in between repeats this epoch and writes the same best again
            shutil.copyfile(part, f"{best}.part")
            os.replace(f"{best}.part", best)
        os.replace(part, self.folder / self.last_name)
