"""Affine quantization as pure functions [WP21 eq. 4-8, 36-37; K18 eq. 1-3, 14-17].

    x_int = clamp(round(x / s) + z, qmin, qmax)        x_hat = s (x_int - z)

Rounding is half to even and the division a true one, as in ONNX QuantizeLinear: pictures have few levels, so that exact ties are common at
the network's input. Torch's fake-quantize operators multiply by the reciprocal instead, which decides some ties the other way; they are
used on CUDA, in training only. Scales have shape () per tensor or (C,) along `axis`; zero points are int32 of the same shape.
"""

from typing import Any

import torch
from torch import Tensor

from qat.quant.spec import QuantSpec

# Below this a scale is no longer meant: 1/s stays far from overflow, and no float32 layer notices the difference to 0.
MIN_SCALE = 2.0**-30
_BELOW_MIN_SCALE = MIN_SCALE * (1 - 2.0**-24)  # the next float32
# Scale of a range that holds nothing but 0. Any value keeps the codes at 0; with this one a bias of scale s_x s_w fits 32 bits and is exact
# to a small part of s_x.
EMPTY_SCALE = 2.0**-14
# 1 + this times a half code is the next float32 (or the one behind) away from 0.
_NEXT = 2.0**-23


def qparams(lo: Tensor, hi: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Scale and zero point that cover [lo, hi] together with 0.

    Args:
        lo, hi: () or (C,). NaN counts as 0 and infinity as the largest finite number, so that the scale is always positive and finite.

    Returns:
        scale in float64 for float64 input, else float32, a power of two being the next one above; zero point in int32 within [qmin, qmax].
    """
    ends = torch.stack((lo.neg(), hi))
    ends = (ends if ends.dtype == torch.float64 else ends.float()).nan_to_num().clamp_(min=0)
    scale = scale_for(ends, spec)
    return scale, torch.zeros_like(scale, dtype=torch.int32) if spec.symmetric else zero_point_for(ends, scale, spec).to(torch.int32)


def scale_for(ends: Tensor, spec: QuantSpec) -> Tensor:
    """Scale, () or (C,), for ends = (-lo, hi), (2,) or (2, C), none of which is negative, NaN or infinite."""
    if not spec.symmetric:
        scale = (ends / spec.qmax).sum(0)
    elif spec.narrow:
        scale = ends.amax(0) / spec.qmax
    else:
        scale = torch.maximum(ends[0] / -spec.qmin, ends[1] / spec.qmax)
    scale = torch.threshold(scale, _BELOW_MIN_SCALE, EMPTY_SCALE)
    if spec.power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent with mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return scale


def zero_point_for(ends: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Zero point of an asymmetric grid, a whole number in the type of `scale`."""
    return (ends[0] / scale).round_().clamp_(spec.qmin, spec.qmax)


def along(value: Tensor, x: Tensor, axis: int) -> Tensor:
    """A value of shape () or (C,) viewed so that it broadcasts over x with C on `axis`."""
    if value.dim() == 0:
        return value
    shape = [1] * x.dim()
    shape[axis] = -1
    return value.view(shape)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, axis: int = 0) -> Tensor:
    """Integer codes (int32, the shape of x) on the grid of `spec`."""
    x = at_least_float32(x)
    steps = (x / along(scale.to(x.dtype), x, axis)).round() + along(zero_point, x, axis)
    return steps.clamp(spec.qmin, spec.qmax).to(torch.int32)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int = 0) -> Tensor:
    """The real numbers that integer codes stand for, in the type of `scale`."""
    return (codes - along(zero_point, codes, axis)) * along(scale, codes, axis)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, axis: int = 0, covered: bool = False, inplace: bool = False
) -> Tensor:
    """dequantize(quantize(x)) in the type of x, with the straight-through gradient: 1 on the grid's range, 0 outside, none for the scale.

    Half types are computed in float32 and rounded back. In training on CUDA torch's fused operators do the work; on the CPU they are
    several times slower than the plain arithmetic, and they know no float64.

    Args:
        covered: the scale was taken from x itself on a symmetric grid, so that no value lies outside and nothing has to be clipped.
        inplace: x has no gradient and may be overwritten.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        return fake_quantize(x.float(), scale, zero_point, spec, axis, covered, inplace=True).to(x.dtype)
    scale = scale.to(x.dtype)
    training = torch.is_grad_enabled() and x.requires_grad
    if training and x.is_cuda and x.dtype == torch.float32 and not torch.compiler.is_compiling():
        if scale.dim() == 0:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, spec.qmin, spec.qmax)
        if spec.symmetric:
            # An integer zero point would be checked on the host. A float one is added before rounding, which is the same only at 0.
            return torch.fake_quantize_per_channel_affine(x, scale, torch.zeros_like(scale), axis, spec.qmin, spec.qmax)
    scale = along(scale, x, axis)
    if covered and training:
        return _Rounded.apply(x, scale)
    shift = None if spec.symmetric else along(zero_point.to(x.dtype), x, axis)
    if training:
        return _StraightThrough.apply(x, scale, shift, spec.qmin, spec.qmax)
    steps = x.div_(scale) if inplace else x / scale
    return steps.round_().mul_(scale) if covered else _on_grid(steps, scale, shift, spec.qmin, spec.qmax)


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _on_grid(steps: Tensor, scale: Tensor, shift: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """The values on the grid next to steps * scale, written over `steps`."""
    steps = steps.round_()
    if shift is None:
        return steps.clamp_(qmin, qmax).mul_(scale)
    # The zero point moves the ends of the grid instead of every element, there and back.
    torch.maximum(steps, qmin - shift, out=steps)
    return torch.minimum(steps, qmax - shift, out=steps).mul_(scale)


class _Rounded(torch.autograd.Function):
    """To the nearest multiple of the scale; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).round_().mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _StraightThrough(torch.autograd.Function):
    """Keeps its input, which the layer before mostly keeps as well, and asks once more in the backward pass what lies on the grid.

    On a CPU that costs less time than comparing and multiplying by booleans, and no memory for a mask.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor | None, qmin: int, qmax: int) -> Tensor:
        ctx.save_for_backward(x, scale, shift)
        # What rounds onto the grid lies between its ends and half a step; at the lower one to even, which is on the grid where that is.
        ctx.ends = (qmin - 0.5) * (1 + (qmin % 2 == 0) * _NEXT), qmax + 0.5
        return _on_grid(x / scale, scale, shift, qmin, qmax)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, scale, shift = ctx.saved_tensors
        x = x.detach()
        steps = x / scale if shift is None else torch.addcdiv(shift, x, scale)
        # Over itself, unless this is to be differentiated once more.
        room = {} if torch.is_grad_enabled() else {"grad_input": steps}
        return torch.ops.aten.hardtanh_backward(grad, steps, *ctx.ends, **room), None, None, None, None
