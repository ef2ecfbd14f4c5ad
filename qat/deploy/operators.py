"""Quantize and dequantize as operators of their own, so that an export can tell them from ordinary arithmetic.

Both compute what ONNX QuantizeLinear and DequantizeLinear compute: x / scale rounded half to even, plus zero point,
saturated to the integer type; (q - zero_point) * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("qat::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Codes of x in zero_point's dtype (int8 or uint8); scale and zero_point are 0-dimensional."""
    limits = torch.iinfo(zero_point.dtype)
    return torch.clamp(torch.round(x / scale) + zero_point.to(x.dtype), limits.min, limits.max).to(zero_point.dtype)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@torch.library.custom_op("qat::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    """Real values of integer codes; a 1-dimensional scale (and zero point) runs along `axis`."""
    shape = [-1 if i == axis else 1 for i in range(codes.ndim)] if scale.ndim else []
    values = codes.to(scale.dtype)
    if zero_point is not None:
        values = values - zero_point.to(scale.dtype).view(shape)
    return values * scale.view(shape)


@dequantize.register_fake
def _(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    return torch.empty_like(codes, dtype=scale.dtype)
