"""Fix the activation ranges late in training, so that the last steps fit the weights to the grids they will ship with."""

import logging
from typing import Any

from pytorch_lightning import Callback

import qat
from qat.train.schedule import resolve, steps_in

log = logging.getLogger(__name__)


class FreezeRanges(Callback):
    """Freeze the ranges of activations after optimizer step `at`. The frozen state lives in the quantizers and their checkpoints.

    Ranges of weights go on following the weights: a frozen one would clip those that still grow.

    Args:
        at: optimizer step (int) or share of the run (float in (0, 1)); None: never.
    """

    def __init__(self, at: int | float | None):
        self.at = at
        self._step: int | None = None
        self.done = False

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = resolve("quant.freeze_ranges", self.at, steps_in(trainer))
        self._freeze_when_due(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._freeze_when_due(trainer, pl_module)

    def _freeze_when_due(self, trainer: Any, pl_module: Any) -> None:
        if not self.done and self._step is not None and trainer.global_step >= self._step:
            qat.freeze_ranges(pl_module.network, weights=False)
            self.done = True
            log.info("step %d: activation ranges frozen", trainer.global_step)
