"""Gradients of folded and quantized weights where the quantizer clips nothing, so that its straight-through gradient is 1 everywhere.

The values are computed outside of autograd; what is left for the backward pass are one or two passes over the weight.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from qat.fold.arithmetic import per_row


class StraightThroughFold(Function):
    """Q(s W) of W (C_out, C_in/g, *k) and s (C_out): dW = s g, ds = sum over each row of g W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, s: Tensor, quantized: Tensor) -> Tensor:
        ctx.save_for_backward(weight, s)
        return quantized

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, s = ctx.saved_tensors
        product = grad * weight
        grad_s = product.flatten(1).sum(1)
        return torch.mul(grad, per_row(s, weight), out=product), grad_s, None


class StraightThroughRescale(Function):
    """What = Q(s W) / s: dW = g, ds = sum over each row of g (W - What) / s.

    Args:
        divisor: s, with 1 where What is W itself.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, s: Tensor, divisor: Tensor, what: Tensor) -> Tensor:
        ctx.save_for_backward(weight, divisor, what)
        return what

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, divisor, what = ctx.saved_tensors
        return grad, (weight - what).mul_(grad).flatten(1).sum(1) / divisor, None, None
