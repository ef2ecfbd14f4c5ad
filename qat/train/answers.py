"""How a network answers a fixed set of pictures, picture by picture, so that two networks are compared on the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qat.errors import QATError
from qat.report.statistics import ONE_SIDED, holm


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
    """A difference of mean losses, its standard error over the pictures it was measured on, and how many these are, two or more."""

    value: float
    error: float
    pictures: int

    @property
    def p(self) -> float:
        """Of a loss that does not rise: a one-sided paired t test [Student 1908]. Losses of pictures are not normal: for many of them."""
        if not self.error:
            return 0.0 if self.value > 0 else 1.0
        return float(stats.t.sf(self.value / self.error, self.pictures - 1))

    @property
    def significant(self) -> bool:
        """Whether the loss rises by more than noise, as one comparison tells: about two standard errors."""
        return self.p < ONE_SIDED


def among(changes: Mapping[str, Change]) -> dict[str, float]:
    """p values of changes that are looked at together, corrected for their number (`holm`), whatever they have to do with each other."""
    return dict(zip(changes, holm([change.p for change in changes.values()])))


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
    return Change(float(difference.mean()), float(difference.std() / math.sqrt(len(difference))), len(difference))
