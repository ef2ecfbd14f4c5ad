"""Quantized layers whose weight quantizer clips nothing, so that its straight-through gradient is 1 everywhere.

Values of the weights are computed outside of autograd. The gradient of the weight is that of the layer itself, times a factor a row; that
of the factor is one number a row. In one function with the layer the first may be computed in place, since nobody else has seen it. Second
derivatives would need the weights inside of autograd: asking for them is an error.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from qat.fold.arithmetic import per_row
from qat.fold.convolution import convolve, gives_gradients, layer_gradients


def is_one_function(conv: nn.Module) -> bool:
    """Whether `FoldedLayer` and `RescaledLayer` know the layer: its own layout has a row for each output channel."""
    return gives_gradients(conv) and not getattr(conv, "transposed", False)


class FoldedLayer(Function):
    """conv(x, Q(s W)) + bias; W in the layer's own layout, s and bias (C_out).

    Args:
        quantized: Q(s W).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, s: Tensor, bias: Tensor, quantized: Tensor, conv: nn.Module) -> Tensor:
        ctx.conv = conv
        ctx.save_for_backward(x, weight, s, quantized)
        return convolve(conv, x, quantized, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, s, quantized = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = layer_gradients(ctx.conv, grad, x, quantized, *_wanted(ctx))
        grad_s = None
        if grad_weight is not None:
            grad_s = row_dots(grad_weight, weight)
            grad_weight = grad_weight.mul_(per_row(s, weight)).to(weight.dtype)
        return grad_x, grad_weight, grad_s, grad_bias, None, None


class RescaledLayer(Function):
    """conv(x, What) + bias, What = Q(s W) / s: dW = dWhat, ds = sum over each row of dWhat (W - What) / s.

    Args:
        divisor: s, with 1 where What is W itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, s: Tensor, bias: Tensor | None, divisor: Tensor, what: Tensor, conv: nn.Module
    ) -> Tensor:
        ctx.conv = conv
        ctx.save_for_backward(x, weight, divisor, what)
        return convolve(conv, x, what, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, divisor, what = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = layer_gradients(ctx.conv, grad, x, what, *_wanted(ctx))
        grad_s = None if grad_weight is None else row_dots(grad_weight, weight, what) / divisor
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), grad_s, grad_bias, None, None, None


class FoldedWeight(Function):
    """Q(s W) alone, W out-first, for layers that `FoldedLayer` does not know."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, s: Tensor, quantized: Tensor) -> Tensor:
        ctx.save_for_backward(weight, s)
        return quantized

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, s = ctx.saved_tensors
        return grad * per_row(s, weight), row_dots(grad, weight), None


class RescaledWeight(Function):
    """What alone, W out-first, for layers that `RescaledLayer` does not know."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, s: Tensor, divisor: Tensor, what: Tensor) -> Tensor:
        ctx.save_for_backward(weight, divisor, what)
        return what

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, divisor, what = ctx.saved_tensors
        return grad, row_dots(grad, weight, what) / divisor, None, None


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether the gradients of x, of the weight (from which that of s is taken too) and of the bias are needed; arguments 0 to 3."""
    of_x, of_weight, of_s, of_bias, *_ = ctx.needs_input_grad
    return of_x, of_weight or of_s, of_bias


def row_dots(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """Sum over each row of a b, or of a (b - c), (C_out)."""
    return (a * b if c is None else (b - c).mul_(a)).flatten(1).sum(1)
