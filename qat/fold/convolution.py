"""Runs a layer with other weights than its own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from qat.fold.probe import adds_bias, out_channels
from qat.quant.affine import at_least_float32

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


def layer_gradients(
    conv: Any, grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool, of_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of conv(x, weight) + bias, (N, C_out, *), for x, the weight (in its own layout) and the bias, each where it is asked for.

    Autocast may have given the output another type than x and weight; gradients have the types of these, and the bias that of the weight.
    """
    x_type, weight_type = x.dtype, weight.dtype
    x, weight = x.to(grad.dtype), weight.to(grad.dtype)
    grad_bias = at_least_float32(grad).sum([d for d in range(grad.dim()) if d != 1]) if of_bias else None
    if type(conv) is nn.Linear:
        found = (grad @ weight if of_x else None), (grad.T @ x if of_weight else None)
    else:
        places = (conv.stride, conv.padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups)
        found = torch.ops.aten.convolution_backward(grad, x, weight, None, *places, [of_x, of_weight, False])
    own = (None if g is None else g.to(kind) for g, kind in zip((*found[:2], grad_bias), (x_type, weight_type, weight_type)))
    return tuple(own)  # type: ignore[return-value]


def is_plain(conv: nn.Module) -> bool:
    """Whether the forward is torch's own, known to be linear in the weight and to add the bias."""
    return (type(conv) is nn.Linear or type(conv) in _FUNCTIONS or type(conv) in _TRANSPOSED) and "forward" not in conv.__dict__


def without_parameters(conv: nn.Module) -> nn.Module:
    """A copy that keeps only how the layer computes; `convolve` hands it weight and bias."""
    bare = copy.deepcopy(conv)
    for key in ("weight", "bias"):
        bare.register_parameter(key, None)
    return bare
