"""Train some steps without fake quantization while the ranges settle, then switch it on [K18 section 3.2.2, J17 section 3.1]."""

import logging
from typing import Any

import qat
from qat.train.callbacks.at_step import AtStep

log = logging.getLogger(__name__)


class QuantDelay(AtStep):
    """Weights' and activations' fake quantization is off before optimizer step `at` and on from it; at 0 or None it is on from the start.

    Quantizers that are off still observe, so at the switch the activation ranges are those of the training so far.
    """

    key = "quant.delay"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.step:
            self.done = True
        elif not self.done:
            qat.set_fake_quant(pl_module.network, weights=False, activations=False)

    def act(self, network: Any, step: int) -> None:
        qat.set_fake_quant(network)
        log.info("step %d: fake quantization on", step)
