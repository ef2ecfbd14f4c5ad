"""How a network answers a fixed set of pictures, picture by picture, so that two networks are compared on the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qat.errors import QATError


@dataclass(frozen=True)
class Answers:
    """losses (N,) float64, the cross-entropy of each picture; right (N,) bool. On the CPU."""

    losses: Tensor
    right: Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())


@dataclass(frozen=True)
class Change:
    """A difference of mean losses, and its standard error over the pictures it was measured on."""

    value: float
    error: float

    @property
    def significant(self) -> bool:
        """Whether the loss rises by more than two standard errors, what chance gives once in 44 times where nothing changes."""
        return self.value > 2 * self.error


@torch.no_grad()
def answers(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Answers:
    """
    Args:
        network: in eval mode, on `device`; images (N, C, H, W) -> logits (N, classes).
        batches: (images, labels).

    Raises:
        QATError: logits that give no finite loss.
    """
    losses, right = [], []
    for images, labels in batches:
        logits = network(images.to(device)).double().cpu()
        losses.append(cross_entropy(logits, labels, reduction="none"))
        right.append(logits.argmax(1) == labels)
    found = Answers(torch.cat(losses), torch.cat(right))
    if not math.isfinite(found.loss):
        count = int((~found.losses.isfinite()).sum())
        raise QATError("network", f"a loss of NaN or Inf on {count} pictures", "finite losses", "Look at the run's train.log.")
    return found


def change(before: Answers, after: Answers) -> Change:
    """What the loss rises by from one to the other; paired, picture by picture, of which there are two or more."""
    difference = after.losses - before.losses
    return Change(float(difference.mean()), float(difference.std() / math.sqrt(len(difference))))
