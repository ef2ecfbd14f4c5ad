"""Evaluate with freshly pooled BN statistics [OSC, section 4.1]: training weights move between two evaluations."""

from typing import Any

import torch
from pytorch_lightning import Callback

import qat
from qat.train.callbacks.freeze_bn import training_batches


class Reestimate(Callback):
    """Before every validation pool the statistics of `batches` training batches; after it everything is as before.

    Training sees nothing of it: all state of the network and the random generator are put back. A network that is shipped
    has to be re-estimated once more (`qat.reestimate_bn`), as the job does.

    Args:
        batches: training batches to pool; 0: the callback does nothing.
    """

    def __init__(self, batches: int):
        self.batches = batches
        self._state: dict[str, Any] | None = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.batches or trainer.sanity_checking:
            return
        network = pl_module.network
        self._state = {key: value.clone() if torch.is_tensor(value) else value for key, value in network.state_dict().items()}
        with torch.random.fork_rng(devices=[]):
            qat.reestimate_bn(network, training_batches(trainer, pl_module.device, self.batches))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            pl_module.network.load_state_dict(self._state)
            self._state = None
