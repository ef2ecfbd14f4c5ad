"""Additions and multiplications: convert() rounds as the runtime's integer kernels do, for every pair of codes."""

import platform
from collections import Counter

import onnx
import pytest
import torch
from torch import nn

import qat
from qat.deploy.elementwise import IntegerAdd, IntegerBinary, IntegerMultiply
from qat.deploy.export import grid_names
from qat.deploy.runtime import session

X86 = platform.machine().lower() in ("x86_64", "amd64")


class Add(nn.Module):
    def forward(self, x, y):
        return x + y


class AddInPlace(nn.Module):
    def forward(self, x, y):
        x = x.clone()
        x += y
        return x


class AddMethod(nn.Module):
    def forward(self, x, y):
        return x.add(y)


class AddReLU(nn.Module):
    def forward(self, x, y):
        return torch.relu(torch.add(x, y))


class Multiply(nn.Module):
    def forward(self, x, y):
        return x * y


class Scale(nn.Module):
    """A gate on each channel, as squeeze-and-excitation has."""

    def forward(self, x, y):
        return x * y.mean((2, 3), keepdim=True)


def every_pair(low_x, high_x, low_y, high_y):
    """All 65536 pairs of 8-bit codes of two ranges, (256, 1, 16, 16) each."""
    x, y = torch.linspace(low_x, high_x, 256), torch.linspace(low_y, high_y, 256)
    return x.view(256, 1, 1, 1).expand(256, 1, 16, 16).contiguous(), y.view(1, 1, 16, 16).expand(256, 1, 16, 16).contiguous()


def converted(model, inputs, signed=False):
    spec = qat.QuantSpec(symmetric=signed, narrow=False, per_channel=False)
    prepared = qat.prepare(model.eval(), inputs, qat.QATConfig(activation=spec))
    qat.calibrate(prepared, [inputs])
    return prepared, qat.convert(prepared)


# Equal ranges, whose sum has twice the scale: every second sum lies half-way between two codes.
HALF_WAY = [(-2.0, 0.0, -2.0, 0.0), (0.0, 1.0, 0.0, 1.0)]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("ranges", [(-1.0, 1.0, -0.37, 0.61), (0.0, 3.1, -9.0, 0.2), *HALF_WAY])
@pytest.mark.parametrize("model", [Add, AddInPlace, AddMethod, AddReLU, Multiply])
def test_every_pair_of_codes(model, ranges, signed, tmp_path):
    inputs = every_pair(*ranges)
    prepared, integers = converted(model(), inputs, signed)
    # A ReLU is part of a grid that begins at zero, and an operation of its own in front of a signed one.
    kinds = [] if model is AddReLU and signed else [IntegerMultiply] if model is Multiply else [IntegerAdd]
    assert [type(m) for m in integers.modules() if isinstance(m, IntegerBinary)] == kinds
    path = qat.export_onnx(integers, inputs, tmp_path / "m.onnx")
    report = qat.verify(integers, path, [inputs])
    assert report.max_lsb <= (0 if X86 else 1) and report.identical >= 0.999
    session(path, tmp_path / "optimized.onnx")
    counted = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert counted["QLinearMul" if model is Multiply else "QLinearAdd"] == len(kinds)
    scale = integers.get_submodule(grid_names(integers)[-1]).scale
    difference = (integers(*inputs) - prepared(*inputs)).abs() / scale
    # The trained network rounds before it adds the zero point, as ONNX does: sums that lie half-way may go the other way.
    assert difference.max() <= 1.001
    if ranges not in HALF_WAY:
        assert (difference < 0.5).double().mean() >= 0.999


def test_a_gate_on_each_channel(tmp_path):
    x = torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    _, integers = converted(Scale(), (x, x * 0.7))
    assert sum(isinstance(m, IntegerMultiply) for m in integers.modules()) == 1
    report = qat.verify(integers, qat.export_onnx(integers, (x, x), tmp_path / "m.onnx"), [(x, x * 0.7)])
    assert report.max_lsb <= 1 and report.identical >= 0.999


class Parameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x):
        return x + self.bias


class Number(nn.Module):
    def forward(self, x):
        return x + 3.0 + x * 2


@pytest.mark.parametrize("model", [Parameter, Number])
def test_what_the_runtime_does_not_fuse_stays_float(model, tmp_path):
    x = torch.randn(64, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    _, integers = converted(model(), (x,))
    path = qat.export_onnx(integers, (x,), tmp_path / "m.onnx")
    report = qat.verify(integers, path, [x])
    assert report.max_lsb <= 1 and report.identical >= 0.999
