"""What a BatchNorm, or the layer it is folded into, says of its output [WP21 sect. 3.3].

Mean beta, standard deviation |gamma| sqrt(var / (var + eps)).
"""

from typing import Any

import torch
from torch import Tensor

from qat.fold.arithmetic import at_least_float32, sigma


@torch.no_grad()
def normal_output(bn: Any) -> tuple[Tensor, Tensor]:
    """(mean, standard deviation) of bn's output before an activation of its own, (C) each, copies.

    The papers write |gamma|, which is the same where the variance is large against eps.
    """
    var = at_least_float32(bn.running_var)
    mean = torch.zeros_like(var) if bn.bias is None else at_least_float32(bn.bias).clone()
    gamma = torch.ones_like(var) if bn.weight is None else at_least_float32(bn.weight)
    return mean, gamma.abs() * var.clamp(min=0).sqrt() / sigma(var, bn.eps)


@torch.no_grad()
def layer_output(layer: Any) -> tuple[Tensor, Tensor]:
    """`normal_output` of a FoldedConvBN that keeps its BatchNorm, for its float function, of which a bias correction is no part."""
    mean, std = normal_output(layer.bn)
    change = layer.bias_change()
    return (mean if change is None else mean - change), std
