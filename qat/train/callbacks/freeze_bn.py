"""Freeze the BN statistics during training [K18 section 3.2.2, fig. 9, eq. 28-31] and lower the learning rate with it."""

import logging
from typing import Any

import torch
from pytorch_lightning import Callback
from torch import Tensor

import qat
from qat.errors import QATError
from qat.train.callbacks.auto_freeze import AutoFreeze
from qat.train.callbacks.drift import largest_drift, layer_drifts, live_norms
from qat.train.callbacks.quant_delay import QuantDelay
from qat.train.optim import scale_learning_rate
from qat.train.schedule import resolve, steps_in

log = logging.getLogger(__name__)


def training_batches(trainer: Any, device: torch.device, count: int) -> list[Tensor]:
    """`count` batches of training images (N, C, H, W) without augmentation, the same at every call.

    Raises:
        QATError: the trainer's data has no `calibration_batches`.
    """
    source = getattr(trainer.datamodule, "calibration_batches", None)
    if source is None:
        todo = "Pass such a data module to Trainer.fit, or set fold.reestimate_* to 0."
        raise QATError("fold.reestimate", "data without calibration_batches(n)", "a data module that offers training images", todo)
    return [batch.to(device) for batch in source(count)]


class FreezeBN(Callback):
    """After optimizer step `at`: optionally re-estimate the statistics, freeze them, and multiply the learning rate.

    Frozen before the running statistics have caught up with the quantized network, the network jumps to another function. So the
    log names the layers whose batch and running statistics differ at the freeze (after the re-estimation, if there is one), and
    warns about those beyond the bound. A step of a folded weight is gamma / sigma times that of the weight, hence the lower rate.

    Args:
        at: optimizer step (int), share of the run (float in (0, 1)), "auto" (see auto_freeze.py), or None: never.
        lr_factor: factor on the learning rate of every parameter group from the next step on.
        reestimate: training batches whose pooled statistics replace the running ones just before the freeze; 0: none.
        bound: largest drift taken for agreement, a mean over channels in units of the running sigma (see drift.py). The mean of
            a batch of n images that are alike inside differs by about 0.8 / sqrt(n) without any drift: keep the bound above that.
        delay: the run's quantization delay; "auto" measures nothing before it is over.

    Attributes:
        frozen_at: optimizer steps done when the statistics froze; None before, and in networks without a live BN.
        done: nothing is left to wait for.
    """

    def __init__(
        self,
        at: int | float | str | None,
        lr_factor: float = 0.1,
        reestimate: int = 0,
        bound: float = 0.5,
        delay: QuantDelay | None = None,
    ):
        self.at, self.lr_factor, self.reestimate, self.bound, self.delay = at, lr_factor, reestimate, bound, delay
        self.frozen_at: int | None = None
        self.done = at is None
        self._step: int | None = None
        self._auto: AutoFreeze | None = None
        self._saved_auto: dict[str, Any] | None = None
        self._measured = 0

    def state_dict(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "done": self.done, "auto": self._auto.state_dict() if self._auto else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.frozen_at, self.done, self._saved_auto = state_dict["frozen_at"], state_dict["done"], state_dict["auto"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = steps_in(trainer)
        if self.done:
            return
        if not live_norms(pl_module.network):
            log.info("no live BN to freeze")
            self.done = True
        elif self.at == "auto":
            self._auto = AutoFreeze(total, self.bound)
            if self._saved_auto is not None:
                self._auto.load_state_dict(self._saved_auto)
            self._step = self._auto.latest
        else:
            self._step = resolve("fold.freeze", self.at, total)
            if self._step == 0 and trainer.global_step == 0:
                self._freeze(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # after the step, so that a checkpoint of this step holds the frozen state and the batch's statistics are at hand
        if not self.done and (self._due(trainer, pl_module) or trainer.global_step >= (self._step or 0)):
            self._freeze(trainer, pl_module)

    def _due(self, trainer: Any, pl_module: Any) -> bool:
        quantized = self.delay is None or self.delay.done
        # Several batches make one step when gradients accumulate, and step 0 is none.
        new_step, self._measured = trainer.global_step > self._measured, trainer.global_step
        if self._auto is None or not quantized or not new_step or not self._auto.measures(trainer.global_step):
            return False
        drift = largest_drift(pl_module.network)
        return drift is not None and self._auto.update(trainer.global_step, drift)

    def _freeze(self, trainer: Any, pl_module: Any) -> None:
        network = pl_module.network
        if self.reestimate:
            with torch.random.fork_rng(devices=[]):
                qat.reestimate_bn(network, training_batches(trainer, pl_module.device, self.reestimate))
        drifts = layer_drifts(network)
        count = live_norms(network)
        qat.freeze_bn(network)
        for optimizer in trainer.optimizers:
            scale_learning_rate(optimizer, self.lr_factor)
        self.frozen_at, self.done = trainer.global_step, True
        log.info("step %d: BN statistics of %d layers frozen, learning rate x %g", trainer.global_step, count, self.lr_factor)
        if drifts:
            log.info("batch and running statistics differ most in: %s", "; ".join(map(str, drifts[:5])))
        beyond = [str(drift) for drift in drifts if drift.size > self.bound]
        if beyond:
            todo = "freeze later, use fold.freeze=auto, or set fold.reestimate_before_freeze"
            log.warning("%d layers froze with a drift above %g (%s): %s", len(beyond), self.bound, todo, "; ".join(beyond))
