"""The float layer's batch statistics and the quantized layer's output, cheaper than as two layers and with the same values.

    v = conv(x, W)        u = conv(x, Q(f W))        f (C_out)

Where Q clips nothing, its straight-through gradient is 1 everywhere, and as the weight gradient of a layer is linear in the gradient of
its output,

    dW = f dW(x, du) + dW(x, dv) = dW(x, f du + dv)        df = sum of du v over all but the channels

so that one weight gradient serves both layers and the path through Q needs none.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from qat.fold.arithmetic import at_least_float32, native, out_first, scale_rows
from qat.fold.convolution import convolve, gives_gradients, layer_gradients
from qat.fold.statistics import Count, batch_statistics
from qat.quant.affine import along


class TwoPasses:
    """conv(x, W) for its statistics, then conv(x, Q(f W)).

    Args:
        layer: the FoldedConvBN that asks; its conv, weight quantizer, name and process group are used.
        x: (N, C_in, *).
    """

    def __init__(self, layer: Any, x: Tensor):
        self.layer, self.conv, self.x = layer, layer.conv, x
        self.carrier: Tensor | None = None
        shared = torch.is_grad_enabled() and self.conv.weight.requires_grad and layer.clips_nothing and gives_gradients(self.conv)
        # f du may be too large for float16: f is 300 where a variance is near its eps.
        if shared and not _computes_in_float16(x):
            self.output, self.carrier = _FloatPass.apply(x, self.conv.weight, self.conv)
        else:
            self.output = convolve(self.conv, x, self.conv.weight, None)

    def statistics(self) -> tuple[Tensor, Tensor, Count]:
        """(mean with the layer's bias, biased variance, count) of the float layer's output, as `batch_statistics`."""
        mean, var, count = batch_statistics(self.output, name=self.layer.name, group=self.layer.group)
        return mean if self.conv.bias is None else mean + self.conv.bias, var, count

    def quantized(self, gamma: Tensor, sigma: Tensor, bias: Tensor | None = None) -> Tensor:
        """conv(x, Q(gamma / sigma W)) + bias; gamma, sigma, bias (C_out)."""
        conv, factor = self.conv, at_least_float32(gamma) / sigma
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.carrier is None):
            folded = scale_rows(out_first(conv.weight, conv), factor)
            weight = native(self.layer.quantize_weight(folded, inplace=self.carrier is not None), conv)
        if self.carrier is None:
            return convolve(conv, self.x, weight, bias)
        return _QuantizedPass.apply(self.carrier, self.x, factor, bias, self.output.detach(), weight, conv)


def _computes_in_float16(x: Tensor) -> bool:
    kind = x.device.type
    return x.dtype == torch.float16 or (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16)


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
