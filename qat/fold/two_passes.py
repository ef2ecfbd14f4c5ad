"""The float layer's batch statistics and the quantized layer's output, cheaper than as two layers and with the same values.

    v = conv(x, W)        u = conv(x, Q(f W))        f (C_out)

Where Q clips nothing, its straight-through gradient is 1 everywhere, and as the weight gradient of a layer is linear in the gradient of
its output,

    dW = f dW(x, du) + dW(x, dv) = dW(x, f du + dv)        df = sum of du v over all but the channels

so that one weight gradient serves both layers and the path through Q needs none.

Of a pointwise convolution with few inputs the statistics need no output at all: they follow from the mean m and the covariance S of x,
mean_v = W m, var_v = diag(W S W^T), at a cost of C_in^2 a position instead of C_in C_out.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from qat.fold.arithmetic import at_least_float32, native, out_first, scale_rows
from qat.fold.convolution import convolve, gives_gradients, layer_gradients
from qat.fold.joint import is_joint
from qat.fold.statistics import Count, batch_statistics, joint_statistics, require_several_values
from qat.quant.affine import along


class TwoPasses:
    """conv(x, W) for its statistics, then conv(x, Q(f W)).

    Args:
        layer: the FoldedConvBN that asks; its conv, weight quantizer, name and process group are used.
        x: (N, C_in, *).
    """

    def __init__(self, layer: Any, x: Tensor):
        self.layer, self.conv, self.x = layer, layer.conv, x
        self.output: Tensor | None = None
        self.carrier: Tensor | None = None
        if moments_are_cheaper(self.conv, x):
            return
        if torch.is_grad_enabled() and self.conv.weight.requires_grad and layer.clips_nothing and gives_gradients(self.conv):
            self.output, self.carrier = _FloatPass.apply(x, self.conv.weight, self.conv)
        else:
            self.output = convolve(self.conv, x, self.conv.weight, None)

    def statistics(self) -> tuple[Tensor, Tensor, Count]:
        """(mean with the layer's bias, biased variance, count) of the float layer's output, as `batch_statistics`."""
        name, group = self.layer.name, self.layer.group
        if self.output is None:
            mean, var, count = pointwise_statistics(self.conv, self.x, name, group)
        else:
            mean, var, count = batch_statistics(self.output, name=name, group=group)
        return mean if self.conv.bias is None else mean + self.conv.bias, var, count

    def quantized(self, gamma: Tensor, sigma: Tensor, bias: Tensor | None = None) -> Tensor:
        """conv(x, Q(gamma / sigma W)) + bias; gamma, sigma, bias (C_out)."""
        conv, factor = self.conv, at_least_float32(gamma) / sigma
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.carrier is None):
            folded = scale_rows(out_first(conv.weight, conv), factor)
            weight = native(self.layer.quantize_weight(folded, inplace=self.carrier is not None), conv)
        if self.carrier is None or self.output is None:
            return convolve(conv, self.x, weight, bias)
        return _QuantizedPass.apply(self.carrier, self.x, factor, bias, self.output.detach(), weight, conv)


def moments_are_cheaper(conv: nn.Module, x: Tensor) -> bool:
    """Whether the statistics of conv(x, W), a plain pointwise convolution, cost less from the moments of x, backward pass included.

    For n positions: the covariance and its gradient 2 n C_in^2, the variances and theirs 3 C_in^2 C_out; else the layer and its gradient
    for x, 2 n C_in C_out.
    """
    if not gives_gradients(conv) or not isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    if conv.groups != 1 or set(conv.kernel_size) != {1} or any(conv.padding):
        return False
    inputs, outputs = conv.in_channels, conv.out_channels
    positions = len(x) * prod(-(-size // step) for size, step in zip(x.shape[2:], conv.stride))
    return 2 * positions * inputs + 3 * inputs * outputs < 2 * positions * outputs


def pointwise_statistics(conv: Any, x: Tensor, name: str = "", group: Any = None) -> tuple[Tensor, Tensor, Count]:
    """Statistics of conv(x, W) without bias, from the first two moments of x: mean (C_out), biased variance (C_out), count.

    Raises:
        QATError: one value per channel.
    """
    if set(conv.stride) != {1}:
        x = x[(slice(None), slice(None), *(slice(None, None, step) for step in conv.stride))]
    require_several_values(x, name=name, group=group)
    mean, covariance = _InputMoments.apply(at_least_float32(x))
    weight = at_least_float32(conv.weight).flatten(1)
    # Rounding can make the variance of a channel that hardly varies negative.
    mean, var = weight @ mean, ((weight @ covariance) * weight).sum(1).clamp(min=0)
    count = x.numel() // x.shape[1]
    return joint_statistics(mean, var, count, group) if is_joint(group) else (mean, var, count)


class _FloatPass(Function):
    """(x, W) -> conv(x, W), and a carrier of that shape that takes f du of the quantized pass to the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: nn.Module) -> tuple[Tensor, Tensor]:
        y = convolve(conv, x, weight, None)
        ctx.conv = conv
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return y, y.new_zeros(()).expand_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, carried: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if grad is not None and ctx.needs_input_grad[0]:
            grad_x, _, _ = layer_gradients(ctx.conv, grad, x, weight, True, False, False)
        total = grad if carried is None else carried if grad is None else carried + grad
        if total is not None:
            _, grad_weight, _ = layer_gradients(ctx.conv, total, x, weight, False, True, False)
        return grad_x, grad_weight, None


class _QuantizedPass(Function):
    """conv(x, weight) + bias, whose weight gradient leaves through the carrier."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, x: Tensor, factor: Tensor, bias: Tensor | None, v: Tensor, weight: Tensor, conv: nn.Module
    ) -> Tensor:
        ctx.conv = conv
        ctx.save_for_backward(x, factor, v, weight)
        return convolve(conv, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factor, v, weight = ctx.saved_tensors
        _, needs_x, needs_factor, needs_bias, *_ = ctx.needs_input_grad
        others = [d for d in range(grad.dim()) if d != 1]
        carried = grad * along(factor.to(grad.dtype), grad, 1)
        grad_x, _, grad_bias = layer_gradients(ctx.conv, grad, x, weight, needs_x, False, needs_bias)
        grad_factor = (at_least_float32(grad) * v).sum(others).to(factor.dtype) if needs_factor else None
        return carried, grad_x, grad_factor, grad_bias, None, None, None


class _InputMoments(Function):
    """Mean (C) and biased covariance (C, C) of x (N, C, *) over all but the channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.transpose(0, 1).flatten(1)
        mean = rows.mean(1)
        centred = rows - mean.unsqueeze(1)
        ctx.save_for_backward(x, mean)
        return mean, centred @ centred.T / rows.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_covariance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        both = (grad_covariance + grad_covariance.T) / n
        # both (x - mean) + grad_mean / n, the constant parts gathered.
        constant = grad_mean / n - both @ mean
        return torch.baddbmm(constant.view(1, -1, 1), both.expand(len(x), -1, -1), x.flatten(2)).view_as(x)
