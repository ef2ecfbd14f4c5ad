"""Means of activated normal variables in closed form [DFQ arXiv 1906.04721 app. C; WP21 arXiv 2106.08295 eq. 25-28].

    y ~ N(mean, std^2)        E[ReLU(y)] = std phi(t) + mean Phi(t), t = mean / std

phi and Phi: density and distribution function of N(0, 1). The papers write gamma for std; its sign plays no part, so std is |gamma|.
Every other activation here is a sum of ReLUs and lines. mean, std: (C), std >= 0; results (C), in float64, exact where std is 0.
"""

import math

import torch
from torch import Tensor

_ROOT_2_PI = math.sqrt(2 * math.pi)


def expected_relu(mean: Tensor, std: Tensor) -> Tensor:
    """E[max(y, 0)]."""
    mean, std = mean.double(), std.double()
    t = mean / std.where(std > 0, 1)
    expected = std * torch.exp(-t.square() / 2) / _ROOT_2_PI + mean * torch.special.ndtr(t)
    return torch.where(std > 0, expected, mean).clamp(min=0)


def expected_clip(mean: Tensor, std: Tensor, lo: float = -math.inf, hi: float = math.inf) -> Tensor:
    """E[min(max(y, lo), hi)]; ReLU6 is lo=0, hi=6. As torch.clamp, lo above hi gives hi."""
    lo, mean = min(lo, hi), mean.double()
    # clip(y) = lo + ReLU(y - lo) - ReLU(y - hi), and without a lower end y - ReLU(y - hi).
    expected = mean if lo == -math.inf else lo + expected_relu(mean - lo, std)
    return expected if hi == math.inf else expected - expected_relu(mean - hi, std)


def expected_leaky_relu(mean: Tensor, std: Tensor, slope: float | Tensor) -> Tensor:
    """E[y where y > 0, slope y elsewhere]; slope () or (C), as of a PReLU."""
    return slope * mean.double() + (1 - slope) * expected_relu(mean, std)
