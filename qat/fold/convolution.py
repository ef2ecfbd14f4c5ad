"""Runs a layer with other weights than its own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from qat.fold.probe import adds_bias, out_channels

_FUNCTIONS: dict[type, Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_TRANSPOSED: dict[type, Callable[..., Tensor]] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


def convolve(conv: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv(x) as if its parameters were `weight` (in its own layout) and `bias`, (C_out) or None for none.

    Padding modes and the forward of a subclass are the layer's own. A bias is added also where the layer was built without one.
    """
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    kind = type(conv)
    if "forward" not in conv.__dict__:
        if kind is nn.Linear:
            return F.linear(x, weight, bias)
        if kind in _FUNCTIONS and conv.padding_mode == "zeros":
            return _FUNCTIONS[kind](x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        if kind in _TRANSPOSED:
            return _TRANSPOSED[kind](x, weight, bias, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    if bias is not None and (is_plain(conv) or adds_bias(conv, weight)):
        return functional_call(conv, {"weight": weight, "bias": bias}, (x,))
    values = {"weight": weight}
    if conv.bias is not None:
        values["bias"] = weight.new_zeros(out_channels(conv))
    y = functional_call(conv, values, (x,))
    return y if bias is None else y + (bias if isinstance(conv, nn.Linear) else bias.view([-1] + [1] * (weight.dim() - 2)))


def gives_gradients(conv: nn.Module) -> bool:
    """Whether `layer_gradients` knows this layer: torch's own forward with zero padding of given sizes."""
    return is_plain(conv) and getattr(conv, "padding_mode", "zeros") == "zeros" and not isinstance(getattr(conv, "padding", 0), str)


def layer_gradients(conv: Any, grad: Tensor, x: Tensor, weight: Tensor, of_weight: bool) -> Tensor:
    """Gradient of conv(x, weight), (N, C_out, *), with respect to the weight (its own layout) or to x, in the type of that.

    Autocast may have given the output another type than x and weight.
    """
    like = weight if of_weight else x
    x, weight = x.to(grad.dtype), weight.to(grad.dtype)
    if type(conv) is nn.Linear:
        return (grad.T @ x if of_weight else grad @ weight).to(like.dtype)
    places = (conv.stride, conv.padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups)
    both = torch.ops.aten.convolution_backward(grad, x, weight, None, *places, [not of_weight, of_weight, False])
    return both[of_weight].to(like.dtype)


def is_plain(conv: nn.Module) -> bool:
    """Whether the forward is torch's own, known to be linear in the weight and to add the bias."""
    return (type(conv) is nn.Linear or type(conv) in _FUNCTIONS or type(conv) in _TRANSPOSED) and "forward" not in conv.__dict__


def without_parameters(conv: nn.Module) -> nn.Module:
    """A copy that keeps only how the layer computes; `convolve` hands it weight and bias."""
    bare = copy.deepcopy(conv)
    for key in ("weight", "bias"):
        bare.register_parameter(key, None)
    return bare
