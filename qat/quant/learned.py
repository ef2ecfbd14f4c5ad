"""Learned step size [LSQ, arXiv 1902.08153] with an optional learned zero point [WP21 eq. 38-40].

    d x_hat / d s = round(x/s) - x/s inside, qmin - z below, qmax - z above
    d x_hat / d z = 0 inside, -s outside
    d x_hat / d x = 1 inside, 0 outside

Both parameter gradients are multiplied by 1/sqrt(N qmax), N = elements that share one scale, so that a step moves the scale as much,
relative to its size, as it moves the weights.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat.quant.affine import EMPTY_SCALE, MIN_SCALE, along, at_least_float32, fake_quantize
from qat.quant.spec import QuantSpec


def effective(scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The (scale, int32 zero point) that learned values stand for: the scale positive, and the nearest power of two where
    the grid asks for one; the zero point rounded into the grid."""
    if zero_point.is_floating_point():
        zero_point = zero_point.clamp(spec.qmin, spec.qmax).round().to(torch.int32)
    scale = scale.abs().clamp(min=MIN_SCALE)
    if spec.power_of_two:
        scale = torch.ldexp(torch.ones_like(scale), scale.log2().round().to(torch.int32))
    return scale, zero_point


def mean_magnitude(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """mean|x|, () or (C,)."""
    x = at_least_float32(x).abs()
    return x.mean(tuple(d for d in range(x.dim()) if d != axis % x.dim())) if spec.per_channel and x.dim() > 1 else _flat_mean(x, spec)


def initial(magnitude: Tensor, lo: Tensor, hi: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Start values s = 2 mean|x| / sqrt(qmax) and z.

    The paper knows only grids that start at 0 or are symmetric. On an asymmetric grid z shares the integers between the two signs as
    [lo, hi] does, rounded up, so that a small negative tail keeps at least one integer.
    """
    scale = 2 * magnitude / sqrt(spec.qmax)
    scale = torch.where(scale < MIN_SCALE, EMPTY_SCALE, scale)
    if spec.symmetric:
        return scale, torch.zeros_like(scale)
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    share = lo.neg() / (hi - lo).clamp(min=MIN_SCALE)
    return scale, (share * spec.qmax).ceil().clamp(spec.qmin, spec.qmax)


def gradient_scale(elements: int, spec: QuantSpec) -> float:
    return 1.0 / sqrt(max(elements, 1) * spec.qmax)


def learned_fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, axis: int, factor: float) -> Tensor:
    """fake_quantize(x, *effective(scale, zero_point)) with gradients for x, scale and a float zero_point.

    Args:
        scale, zero_point: () or (C,); gradients pass through the rounding and clamping of `effective`, with the sign of a negative scale.
        factor: `gradient_scale`.
    """
    wide = at_least_float32(x)
    return _Learned.apply(wide, scale.to(wide.dtype), zero_point, spec, axis, factor).to(x.dtype)


def _flat_mean(x: Tensor, spec: QuantSpec) -> Tensor:
    return x if spec.per_channel else x.mean()


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, axis: int, factor: float) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.spec, ctx.axis, ctx.factor = spec, axis, factor
        return fake_quantize(x, *effective(scale, zero_point, spec), spec, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        spec, axis = ctx.spec, ctx.axis
        s, z = effective(scale, zero_point, spec)
        shift = None if spec.symmetric else along(z.to(x.dtype), x, axis)
        ratio = x / along(s, x, axis)
        steps = ratio.round() if shift is None else ratio.round().add_(shift)
        clipped = steps.clamp(spec.qmin, spec.qmax)
        inside = clipped == steps
        if shift is not None:
            clipped.sub_(shift)
        grad_x = grad * inside
        # The difference is taken element by element: as two sums it would cancel in float32.
        grad_scale = _reduce(clipped.sub_(ratio.mul_(inside)).mul_(grad), scale, axis)
        grad_scale = grad_scale * torch.where(scale < 0, -ctx.factor, ctx.factor)
        grad_zero = None
        if ctx.needs_input_grad[2]:
            grad_zero = (_reduce(grad - grad_x, scale, axis) * s * -ctx.factor).to(zero_point.dtype)
        return grad_x, grad_scale, grad_zero, None, None, None


def _reduce(value: Tensor, like: Tensor, axis: int) -> Tensor:
    dims = tuple(d for d in range(value.dim()) if like.dim() == 0 or d != axis % value.dim())
    return value.sum(dims) if dims else value
