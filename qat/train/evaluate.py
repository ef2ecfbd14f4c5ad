"""Confusion matrix and accuracy of anything that turns images into logits: a network, or a file in ONNX Runtime."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qat.errors import QATError


def confusion(answers: Iterable[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    """Counts (classes, classes) int64 on the CPU, row = label, column = prediction, of (logits (N, classes), labels (N,)) pairs."""
    counts = torch.zeros(classes * classes, dtype=torch.int64)
    for logits, labels in answers:
        if logits.dim() != 2 or logits.shape[1] != classes:
            found = f"logits of shape {tuple(logits.shape)}"
            raise QATError("network", found, f"(N, {classes}), one column a class", "Give the network a head of that many classes.")
        counts += torch.bincount(labels * classes + logits.argmax(1).cpu(), minlength=classes * classes)
    return counts.view(classes, classes)


def network_confusion(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int, device: torch.device) -> Tensor:
    """`confusion` of a network in eval mode on `device`, over (images, labels); the network stays there, its modes are put back."""
    modes = [(module, module.training) for module in network.modules()]
    network.to(device).eval()
    with torch.no_grad():
        counts = confusion(((network(images.to(device)), labels) for images, labels in batches), classes)
    for module, training in modes:
        module.training = training
    return counts


def accuracy(counts: Tensor) -> float:
    """Share of the diagonal of a confusion matrix."""
    return int(counts.diagonal().sum()) / int(counts.sum())
