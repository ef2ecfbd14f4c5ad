"""Stop a run whose loss is NaN or Inf, before that reaches a checkpoint."""

from typing import Any

import torch
from pytorch_lightning import Callback
from torch import Tensor, nn

from qat.errors import QATError
from qat.quant import FakeQuantizer

_NEVER = torch.iinfo(torch.int64).max


class FiniteLoss(Callback):
    """The optimizer step of the first bad loss is kept on the device and read where the run waits for the device anyway: every
    `log_every_n_steps` steps, before a validation and before a checkpoint. Ranges leave bad batches out; weights and statistics do not,
    so nothing trained after such a loss is of use.

    Raises:
        QATError: names the step, and the first quantizer that met NaN or Inf, else the first tensor that holds one.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first = torch.full((), _NEVER, device=pl_module.device)
        self._before = {name: int(q.nonfinite_batches) for name, q in _quantizers(pl_module.network).items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._first = torch.minimum(self._first, torch.where(torch.isfinite(loss.detach()), _NEVER, trainer.global_step))
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._check(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Any, pl_module: Any) -> None:
        first = getattr(self, "_first", None)
        if first is None or not trainer.strategy.reduce_boolean_decision(bool(first < _NEVER), all=False):
            return
        step = int(first) if int(first) < _NEVER else trainer.global_step
        todo = "Look at that batch, or lower optim.lr; trainer.options.detect_anomaly=true names the operation. Checkpoints are older."
        raise QATError(f"step {step}", f"a loss of NaN or Inf{self._met(pl_module.network)}", "a finite loss", todo)

    def _met(self, network: nn.Module) -> str:
        for name, quantizer in _quantizers(network).items():
            if int(quantizer.nonfinite_batches) > self._before[name]:
                return f", first met by {name}"
        for name, value in network.state_dict().items():
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                return f", which {name} holds"
        return ""


def _quantizers(network: nn.Module) -> dict[str, FakeQuantizer]:
    """Those of activations, in graph order."""
    return {name: module for name, module in network.named_modules() if isinstance(module, FakeQuantizer) and module.running}
