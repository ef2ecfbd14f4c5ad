"""Classifier: the one LightningModule, float or quantization-aware, built from a plain dict."""

from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

import qat
from qat.errors import QATError
from qat.train.data import ImageData
from qat.train.float_steps import float_steps
from qat.train.models import build_model
from qat.train.optim import build_optimizer, build_schedule
from qat.train.schedule import steps_in

_SPEC_KEYS = ("bits", "symmetric", "per_channel", "narrow", "power_of_two")


def qat_config(quant: dict[str, Any], fold: dict[str, Any], target: str | None = None) -> qat.QATConfig:
    """The `quant` and `fold` parts of a recipe as the argument of `qat.prepare`."""
    weight, activation = quant["weight"], quant["activation"]
    return qat.QATConfig(
        fold=fold["name"],
        weight=qat.QuantSpec(**{key: weight[key] for key in _SPEC_KEYS if key in weight}),
        activation=qat.QuantSpec(**{key: activation[key] for key in _SPEC_KEYS if key in activation}),
        weight_range=weight["range"],
        activation_range=activation["range"],
        overrides=quant.get("overrides") or {},
        fold_options=fold.get("options") or {},
        target=target,
    )


def module_config(config: dict[str, Any], data: ImageData) -> dict[str, Any]:
    """What a checkpoint has to hold to rebuild the trained module."""
    return {
        "model": config["model"],
        "num_classes": data.num_classes,
        "input_shape": list(data.input_shape),
        "optim": config["optim"],
        "quant": config["quant"],
        "fold": config["fold"],
        "ptq": config["ptq"],
        "target": config["target"]["name"],
    }


def float_structure(config: dict[str, Any]) -> nn.Module:
    """The float network that a module of this configuration is prepared from, with random weights: after the steps of its `ptq`."""
    network = build_model({**config["model"], "checkpoint": None}, config["num_classes"], config["input_shape"][0])
    if config.get("quant") and config.get("ptq"):
        example = torch.zeros(2, *config["input_shape"])
        for _, changed in float_steps(network, example, config["ptq"], config["quant"].get("overrides")):
            network = changed
    return network


class Classifier(LightningModule):
    """Network, loss, accuracy and optimizer.

    Args:
        config: plain dict {"model", "num_classes", "input_shape": [C, H, W], "optim", "quant" or None, "fold" or None, "ptq" or absent,
            "target" or absent}. It is all a checkpoint needs to rebuild the module; `model.checkpoint` is not read here, the weights come
            from `network` or from the Lightning checkpoint.
        network: float network to start from, after the steps of `ptq` on float networks; prepared when `quant` is set. None builds
            one with random weights and the structure it has after those steps.

    Attributes:
        network: logits (N, num_classes) of images (N, C, H, W); a prepared graph when `quant` is set.
    """

    def __init__(self, config: dict[str, Any], network: nn.Module | None = None):
        super().__init__()
        self.save_hyperparameters("config", logger=False)
        self.config = config
        if network is None:
            network = float_structure(config)
        if config.get("quant"):
            example = torch.zeros(2, *config["input_shape"])
            network = qat.prepare(network, (example,), qat_config(config["quant"], config["fold"], config.get("target")))
        self.network = network
        # arguments are those of this module's own steps: validating each batch would read tensors back to the host
        self.val_accuracy = MulticlassAccuracy(config["num_classes"], average="micro", validate_args=False)
        self.test_accuracy = MulticlassAccuracy(config["num_classes"], average="micro", validate_args=False)
        self._labels_checked = False

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def _check_labels(self, labels: Tensor) -> None:
        """Look at the labels unless that was done: on a GPU a wrong one is an assertion without a place."""
        if not self._labels_checked:
            low, high, classes = int(labels.min()), int(labels.max()), self.config["num_classes"]
            if low < 0 or high >= classes:
                todo = "Number the classes from 0, or set the number of classes."
                raise QATError("labels", f"labels from {low} to {high}", f"labels from 0 to {classes - 1}", todo)
            self._labels_checked = True

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Look at the labels of every batch while they are on the CPU, where it costs no wait for a device."""
        labels = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        if isinstance(labels, Tensor) and labels.numel() and labels.device.type == "cpu":
            self._labels_checked = False
            self._check_labels(labels)
        return batch

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self._check_labels(labels)
        loss = cross_entropy(self.network(images), labels, label_smoothing=self.config["optim"].get("label_smoothing", 0.0))
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.network(images)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        self.log("val_acc", self.val_accuracy, batch_size=len(labels))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy.update(self.network(images), labels)
        self.log("test_acc", self.test_accuracy, batch_size=len(labels))

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]  # Lightning's union type is not importable
        optimizer = build_optimizer(self.network, self.config["optim"])
        schedule = build_schedule(optimizer, self.config["optim"], steps_in(self.trainer))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(num_updates=self.global_step)
