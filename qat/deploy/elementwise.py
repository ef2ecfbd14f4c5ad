"""Addition and multiplication of two quantized tensors, as integer kernels do them.

An exporter sees the ordinary operation between DequantizeLinear and QuantizeLinear. Called otherwise each computes, rounding for rounding,
what onnxruntime's QLinearAdd and QLinearMul compute on x86: float32 multipliers of the codes, the zero point of the output added before
the one rounding half to even. The values returned are multiples of the output's scale in float64, exact.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from qat.deploy.modules import QuantizeDequantize
from qat.graph.kinds import arithmetic_of, module_of


class IntegerBinary(nn.Module):
    """Two tensors on grids of their own, the result on a third, all of one integer type.

    Args:
        left, right: grids of the operands.
        output: grid that follows directly or through a clip.
    """

    def __init__(self, left: QuantizeDequantize, right: QuantizeDequantize, output: QuantizeDequantize):
        super().__init__()
        # A tuple, so that they stay submodules of the graph alone.
        self.grids = (left, right, output)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return self.operation(x, y)
        left, right, output = self.grids
        codes = self.codes(x.double().div(left.scale).round(), y.double().div(right.scale).round())
        limits = torch.iinfo(output.zero_point.dtype)
        return (codes.round().clamp(limits.min, limits.max).double() - output.zero_point) * output.scale.double()

    def operation(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def codes(self, x: Tensor, y: Tensor) -> Tensor:
        """Codes of the output in front of their rounding, float32, from the operands' distances from zero in steps, float64."""
        raise NotImplementedError


class IntegerAdd(IntegerBinary):
    """q = z + (s_x / s) q_x + (s_y / s) q_y with the zero points gathered into z; two fused multiply-adds, that of y first."""

    def operation(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def codes(self, x: Tensor, y: Tensor) -> Tensor:
        left, right, output = self.grids
        x_ratio, y_ratio = (left.scale / output.scale).double(), (right.scale / output.scale).double()
        zeros = x_ratio * left.zero_point + (y_ratio * right.zero_point).float()
        fixed = output.zero_point - zeros.float()
        # Products of a code and a float32 are exact in float64, so that each `.float()` rounds once, as a fused multiply-add does.
        partial = (y_ratio * (y + right.zero_point) + fixed).float()
        return (x_ratio * (x + left.zero_point) + partial).float()


class IntegerMultiply(IntegerBinary):
    """q = z + (s_x s_y / s) (q_x - z_x) (q_y - z_y)."""

    def operation(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def codes(self, x: Tensor, y: Tensor) -> Tensor:
        left, right, output = self.grids
        return (x * y).float() * (left.scale * right.scale / output.scale) + output.zero_point


_OPERATIONS: dict[str | None, type[IntegerBinary]] = {"add": IntegerAdd, "mul": IntegerMultiply}


def integer_binary(node: fx.Node, output: QuantizeDequantize | None, modules: dict[str, nn.Module]) -> IntegerBinary | None:
    """The module for an addition or multiplication of two quantized tensors, None for anything else.

    Onnxruntime fuses it only where both operands and the result have one integer type and fill it; a constant operand is none of its
    tensors, and an addition that broadcasts an operand adds in another order.
    """
    kind = _OPERATIONS.get(arithmetic_of(node))
    operands = [n for n in node.args if isinstance(n, fx.Node)]
    if kind is None or output is None or output.clip is not None or len(node.args) != 2 or len(operands) != 2:
        return None
    left, right = (module_of(n, modules) for n in operands)
    if not isinstance(left, QuantizeDequantize) or not isinstance(right, QuantizeDequantize):
        return None
    if any(n.all_input_nodes[0].op == "get_attr" for n in operands) or len({g.zero_point.dtype for g in (left, right, output)}) > 1:
        return None
    same_shape = len({tuple(n.meta["tensor_meta"].shape) for n in operands}) == 1
    return kind(left, right, output) if same_shape or kind is IntegerMultiply else None
