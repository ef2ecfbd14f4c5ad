"""How well a quantized network answers: against labels, or against the float network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat.bars import bar


@dataclass(frozen=True, order=True)
class Score:
    """How a network answers. Of two the one with more right answers is better, of equal ones the one with less noise.

    Attributes:
        right: share of answers that are those of the labels, or of the float network where there are none.
        decibels: energy of the float network's logits over that of the difference to them.
    """

    right: float
    decibels: float


class Judge:
    """Scores answers on the measured pictures.

    Args:
        network: float, in eval mode.
        labels: (N,); None: its own answers are what is right.
    """

    def __init__(self, network: nn.Module, batches: list[Tensor], labels: Tensor | None):
        self.batches = batches
        with torch.no_grad():
            self.expected = torch.cat([network.eval()(images) for images in bar(batches, "float network")])
        self.labels = self.expected.argmax(1) if labels is None else labels
        self.float_score = self.score(self.expected)

    def of(self, network: nn.Module, what: str) -> Score:
        """Score of a network in evaluation."""
        network.eval()
        with torch.no_grad():
            return self.of_logits(network(images) for images in bar(self.batches, f"{what}: measuring"))

    def of_logits(self, logits: Iterable[Tensor]) -> Score:
        return self.score(torch.cat(list(logits)))

    def score(self, logits: Tensor) -> Score:
        noise = float((logits.double() - self.expected.double()).square().sum())
        signal = float(self.expected.double().square().sum())
        ratio = math.inf if noise == 0 else max(signal, 1e-300) / noise
        decibels = 10 * math.log10(ratio) if ratio > 0 else -math.inf  # of Inf or NaN among the logits as well
        return Score(float((logits.argmax(1) == self.labels).double().mean()), decibels)
