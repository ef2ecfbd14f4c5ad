"""The two modules an integer network is made of: the grid of an activation tensor, and a layer with integer weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.deploy.operators import dequantize, quantize
from qat.fold.arithmetic import native
from qat.fold.convolution import convolve, without_parameters
from qat.quant import QuantSpec


class Requantize(nn.Module):
    """Puts an activation tensor on its integer grid: clip to the grid, quantize, dequantize.

    The clip is there only for grids smaller than the integer type (4 bits, narrow): the stored codes then lie in range too.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, zero_point: Tensor, spec: QuantSpec, name: str):
        super().__init__()
        dtype = torch.int8 if spec.signed else torch.uint8
        self.name = name
        self.spec = spec
        self.register_buffer("scale", scale.detach().float().reshape(()).clone())
        self.register_buffer("zero_point", zero_point.detach().reshape(()).to(dtype))
        full = (spec.qmin, spec.qmax) == (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        ends = torch.tensor([spec.qmin, spec.qmax], dtype=torch.float32) - float(zero_point)
        self.clip = None if full else tuple((ends * float(scale)).tolist())

    def codes(self, x: Tensor) -> Tensor:
        """Integers of x, (same shape), int8 or uint8."""
        if self.clip is not None:
            x = torch.clamp(x, *self.clip)
        return quantize(x, self.scale, self.zero_point)

    def forward(self, x: Tensor) -> Tensor:
        return dequantize(self.codes(x), self.scale, self.zero_point, 0)


class IntegerLayer(nn.Module):
    """Convolution or linear layer with int8 weights and int32 biases; the arithmetic of DequantizeLinear -> Conv.

    Args:
        layer: the float layer: stride, padding and forward are taken from it, its parameters are not.
        codes: integer weights in out-first layout (C_out, C_in/g, *k).
        scale: () or (C_out,).
        bias: float bias (C_out,).
        input_scale: scale of the input tensor, or None where the input is not quantized (the bias then stays float).
        name: qualified name, for errors.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor
    layer: Any

    def __init__(self, layer: Any, codes: Tensor, scale: Tensor, bias: Tensor, input_scale: Tensor | None, name: str):
        super().__init__()
        self.name = name
        self.layer = without_parameters(layer)
        # Transposed layers of one group keep their own layout with the scale on axis 1; grouped ones have one scale for
        # each output channel, which no axis of the transposed layout has, so they are stored out-first and turned at run time.
        self.turned = bool(getattr(layer, "transposed", False)) and layer.groups > 1
        # A plain linear layer is stored (C_in, C_out): onnxruntime fuses a Gemm only with its scales along the columns.
        self.columns = type(layer) is nn.Linear
        self.axis = 1 if self.columns or (getattr(layer, "transposed", False) and not self.turned) else 0
        stored = codes.T if self.columns else codes if self.turned else native(codes, layer)
        self.register_buffer("codes", stored.to(torch.int8).contiguous())
        self.register_buffer("scale", scale.detach().float().clone())
        # onnxruntime turns int8 into uint8 for machines without VNNI; for a Gemm it then needs a zero point a column to turn too.
        zero_points = torch.zeros(self.scale.shape, dtype=torch.int8) if self.columns else None
        self.register_buffer("zero_points", zero_points)
        if input_scale is None:
            self.register_buffer("bias", bias.detach().float().clone())
            self.bias_scale = None
        else:
            bias_scale = (self.scale * input_scale.float()).expand_as(bias).contiguous()
            self.register_buffer("bias", torch.round(bias.double() / bias_scale.double()).to(torch.int32))
            self.register_buffer("bias_scale", bias_scale)

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantize(self.codes, self.scale, self.zero_points, self.axis)
        if self.turned:
            weight = native(weight, self.layer)
        bias = self.bias if self.bias_scale is None else dequantize(self.bias, self.bias_scale, None, 0)
        if self.columns:
            return torch.addmm(bias, x, weight) if x.dim() == 2 else x @ weight + bias
        return convolve(self.layer, x, weight, bias)
