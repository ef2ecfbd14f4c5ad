"""The two modules an integer network is made of: the grid of an activation tensor, and a layer with integer weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from qat.deploy.operators import dequantize, quantize
from qat.fold.arithmetic import native
from qat.fold.convolution import convolve, without_parameters
from qat.quant import QuantSpec
from qat.quant.bias import bias_codes

# Float32 holds every integer below this, so that sums of integer products below it are exact in any order.
_EXACT_FLOAT32 = 2**24


class QuantizeDequantize(nn.Module):
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

    @property
    def largest_code(self) -> int:
        """Largest |q - zero point| on the grid."""
        return max(self.spec.qmax - int(self.zero_point), int(self.zero_point) - self.spec.qmin)

    def codes(self, x: Tensor) -> Tensor:
        """Integers of x, (same shape), int8 or uint8."""
        if self.clip is not None:
            x = torch.clamp(x, *self.clip)
        return quantize(x, self.scale, self.zero_point)

    def forward(self, x: Tensor) -> Tensor:
        return dequantize(self.codes(x), self.scale, self.zero_point, 0)


class KeepFloat(nn.Module):
    """Identity in front of what is to be computed in float: a layer whose weights stay float, a softmax.

    Between DequantizeLinear and QuantizeLinear onnxruntime quantizes a float weight by itself, and puts a table of a few bits in the place
    of a softmax; a clip that clips nothing keeps it from that.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(x, min=-torch.finfo(torch.float32).max)


class IntegerLayer(nn.Module):
    """Convolution or linear layer with int8 weights and int32 biases.

    An exporter sees DequantizeLinear -> Conv. Called otherwise it computes what an integer kernel computes: exact sums, and in front of
    `output_grid` the one float32 multiplier s_x s_w / s_y [J17 eq. 4-5]; the values then are multiples of s_y in float64, exact.

    Args:
        layer: the float layer: stride, padding and forward are taken from it, its parameters are not.
        codes: integer weights in out-first layout (C_out, C_in/g, *k).
        scale: () or (C_out,).
        bias: float bias (C_out,).
        input_grid: grid of the input tensor, or None where the input is not quantized (bias and sums then stay float).
        output_grid: grid that directly, or through a clip, follows the layer; None where something else is computed in between.
        bits: of the weights' grid.
        name: qualified name, for errors.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor
    bias_scale: Tensor | None
    input_scale: Tensor | None
    output_scale: Tensor | None
    layer: Any

    def __init__(
        self,
        layer: Any,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor,
        input_grid: QuantizeDequantize | None,
        output_grid: QuantizeDequantize | None,
        bits: int,
        name: str,
    ):
        super().__init__()
        self.name = name
        self.bits = bits
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
        # For machines without VNNI onnxruntime turns int8 weights into uint8 and moves their zero points, so a layer that stays on its
        # own behind DequantizeLinear needs zero points to move. A convolution that is to be fused to integers must not have any.
        fused = isinstance(layer, _ConvNd) and not layer.transposed and input_grid is not None and output_grid is not None
        zero_points = None if fused else torch.zeros(self.scale.shape, dtype=torch.int8)
        self.register_buffer("zero_points", zero_points)
        self.register_buffer("input_scale", None if input_grid is None else input_grid.scale.clone())
        self.register_buffer("output_scale", None if output_grid is None else output_grid.scale.clone())
        if input_grid is None:
            self.register_buffer("bias", bias.detach().float().clone())
            self.register_buffer("bias_scale", None)
            return
        bias_scale = (self.scale * input_grid.scale).expand_as(bias).contiguous()
        self.register_buffer("bias", bias_codes(bias, bias_scale))
        self.register_buffer("bias_scale", bias_scale)
        largest = codes.abs().flatten(1).sum(1).max() * input_grid.largest_code
        self.sum_dtype = torch.float32 if largest < _EXACT_FLOAT32 else torch.float64

    def forward(self, x: Tensor) -> Tensor:
        if self.input_scale is not None and self.bias_scale is not None and not torch.compiler.is_exporting():
            return self._integer_forward(x, self.input_scale, self.bias_scale)
        weight = dequantize(self.codes, self.scale, self.zero_points, self.axis)
        if self.turned:
            weight = native(weight, self.layer)
        if self.input_scale is None:
            # Beside a float input onnxruntime would compute with the integers as well, by a kernel that rounds the input.
            weight = torch.clamp(weight, min=-torch.finfo(weight.dtype).max)
        bias = self.bias if self.bias_scale is None else dequantize(self.bias, self.bias_scale, None, 0)
        if self.columns:
            return torch.addmm(bias, x, weight) if x.dim() == 2 else x @ weight + bias
        return convolve(self.layer, x, weight, bias)

    def _integer_forward(self, x: Tensor, input_scale: Tensor, bias_scale: Tensor) -> Tensor:
        steps = (x / input_scale).round_().to(self.sum_dtype)
        codes = self.codes.to(self.sum_dtype)
        weight = codes.T if self.columns else native(codes, self.layer) if self.turned else codes
        sums = convolve(self.layer, steps, weight, None).double()
        channels = [-1] if isinstance(self.layer, nn.Linear) else [-1] + [1] * (codes.dim() - 2)
        sums += self.bias.double().view(channels)
        if self.output_scale is None:
            return (sums * bias_scale.double().view(channels)).float()
        multiplier = bias_scale / self.output_scale
        return (sums.float() * multiplier.view(channels)).double() * self.output_scale.double()
