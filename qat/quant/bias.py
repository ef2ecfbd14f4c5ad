"""The bias of an integer layer: int32 with zero point 0 and the scale s_x s_w of the sums it is added to [J17 sect. 2.4].

That scale is mostly far below the output's. It is not where a filter's weights are large and its input is dead (gamma / sigma of a
variance near eps): there it can exceed the output's, an LSB, so the simulation rounds as the integers do.
"""

from typing import Any

import torch
from torch import Tensor

from qat.quant.affine import along
from qat.quant.spec import QuantSpec

# Largest code of a bias: it leaves as much room again for the sums that are added to it in 32 bits.
LARGEST_CODE = 2**30


def bias_codes(bias: Tensor, scale: Tensor) -> Tensor:
    """int32 codes of bias (C_out) for scale s_x s_w, () or (C_out); saturated."""
    return (bias.double() / scale.double()).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int32)


def too_large(bias: Tensor, scale: Tensor) -> Tensor:
    """Channels (C_out) whose bias does not fit beside the sums at the scale s_x s_w, () or (C_out); their filters are nearly dead."""
    return bias.abs().double() > scale.double() * LARGEST_CODE


def leave_room(codes: Tensor, scale: Tensor, bias: Tensor, input_scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Codes (C_out, ...) and scale of weights whose scale is raised until every bias fits, the codes rounded again.

    One scale for all channels rises for all of them.
    """
    needed = bias.abs().double() / (input_scale.double() * LARGEST_CODE)
    raised = (needed if scale.ndim else needed.max()) * (1 + 1e-6)
    if spec.power_of_two:
        raised = torch.exp2(raised.log2().ceil())
    raised = torch.maximum(scale.double(), raised)
    ratio = along(scale.double() / raised, codes, 0)
    return (codes.double() * ratio).round().to(codes.dtype), raised.to(scale.dtype)


def round_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """The values of `bias_codes` before saturation, in the type of `scale`, with the straight-through gradient."""
    return _Rounded.apply(bias, scale)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, scale: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return (bias.double() / scale).round_().to(scale.dtype) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
