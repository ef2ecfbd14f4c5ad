"""Train some steps without fake quantization while the ranges settle, then switch it on [K18 section 3.2.2, J17 section 3.1]."""

import logging
from typing import Any

from pytorch_lightning import Callback

import qat
from qat.train.schedule import resolve, steps_in

log = logging.getLogger(__name__)


class QuantDelay(Callback):
    """Weights' and activations' fake quantization is off before optimizer step `delay` and on from it.

    Quantizers that are off still observe, so at the switch the activation ranges are those of the training so far.

    Args:
        delay: optimizer step (int) or share of the run (float in (0, 1)); None or 0: quantized from the start.
    """

    def __init__(self, delay: int | float | None):
        self.delay = delay
        self._step: int | None = None
        self.done = False

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = resolve("quant.delay", self.delay, steps_in(trainer))
        if not self._step:
            self.done = True
        elif not self.done:
            qat.set_fake_quant(pl_module.network, weights=False, activations=False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.done and self._step is not None and trainer.global_step >= self._step:
            qat.set_fake_quant(pl_module.network, weights=True, activations=True)
            self.done = True
            log.info("step %d: fake quantization on", trainer.global_step)
