"""The network computed with integers alone agrees with convert()."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import nn

import qat
from qat.deploy.integer_kernels import integer_kernels
from qat.deploy.reference import IntegerReference, _fixed_point
from qat.deploy.verify import verify_integers

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import Residual, randomize

LAYERS = [
    nn.Conv1d(4, 6, 3, 2, 1, groups=2),
    nn.Conv1d(4, 6, 3, padding=2, dilation=2, padding_mode="circular"),
    nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), bias=False),
    nn.Conv2d(4, 8, 3, padding="same", dilation=2, groups=4),
    nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="replicate"),
    Conv2dSame(4, 6, 3, 2),
    nn.Conv3d(4, 2, 2, 1, 1),
    nn.ConvTranspose1d(4, 6, 3, 2, 1, 1),
    nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2),
    nn.ConvTranspose2d(4, 4, 2, 3, 1, 1, groups=4, dilation=2),
    nn.ConvTranspose2d(4, 6, 1, padding=0),
    nn.ConvTranspose3d(4, 2, 2, 2),
    nn.Linear(4, 5),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: repr(layer)[:60])
def test_integer_kernels_equal_float64(layer):
    generator = torch.Generator().manual_seed(0)
    rank = layer.weight.dim() - 2
    x = torch.randint(-255, 256, (2, 4, *[7] * rank), generator=generator)
    weight = torch.randint(-127, 128, layer.weight.shape, generator=generator)
    values = {"weight": weight.double(), **({} if layer.bias is None else {"bias": torch.zeros(len(layer.bias)).double()})}
    expected = torch.func.functional_call(layer, values, (x.double(),))
    values = {name: value.long() for name, value in values.items()}
    with integer_kernels():
        got = torch.func.functional_call(layer, values, (x,))
    assert got.dtype == torch.int64
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0)


def agree(model, x, multipliers, config=None):
    prepared = qat.prepare(randomize(model).eval(), (x,), config or qat.QATConfig())
    qat.calibrate(prepared, [x])
    converted = qat.convert(prepared)
    report = verify_integers(converted, [x], multipliers)
    assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)
    return converted


X = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))
W4A4 = qat.QATConfig(weight=qat.QuantSpec(bits=4), activation=qat.QuantSpec(bits=4, symmetric=False, per_channel=False))


@pytest.mark.parametrize("multipliers", ["float", "fixed"])
@pytest.mark.parametrize("config", [None, W4A4, qat.QATConfig(fold="scale_merge"), qat.QATConfig(weight=qat.QuantSpec(per_channel=False))])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.Hardswish])
def test_a_residual_network(act, config, multipliers):
    agree(Residual(act), X, multipliers, config)


class Branches(nn.Module):
    """Concatenation of very different ranges, padded pools over negative values, a gate, interpolation, slices."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.loud = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.SiLU())
        self.quiet = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        pooled = F.max_pool2d(x - 3, 3, 2, 1)
        averaged = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        loud, quiet = self.loud(averaged), self.quiet(pooled[:, 4:])
        x = torch.cat([loud * 30, quiet], 1)
        x = x * self.gate(x) + F.interpolate(pooled, size=x.shape[2:], mode="bilinear")
        x = F.relu(self.up(x))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("multipliers", ["float", "fixed"])
def test_every_kind_of_operation(multipliers):
    converted = agree(Branches(), X, multipliers)
    reference = IntegerReference(converted, multipliers)
    reference.run_codes(X)
    assert reference.float_nodes == [] and reference.float_activations == ["loud_2", "quiet_2", "gate_2"]


class Named(nn.Module):
    """Modules and an input whose names are those of operations."""

    def __init__(self):
        super().__init__()
        self.add, self.neg, self.mul = nn.Conv2d(3, 4, 1), nn.LeakyReLU(0.3), nn.ReLU()

    def forward(self, sub):
        return self.mul(self.neg(self.add(sub)))


def test_names_of_operations_are_no_operations():
    agree(Named(), X, "float")


@pytest.mark.parametrize("m", [0.31, 1 - 2.0**-40, 2.0**-20, 1.3 * 2.0**-40, 300.0])
def test_fixed_point_multipliers(m):
    steps = torch.tensor([-(2**30), -1000, -3, -1, 0, 1, 2, 5, 999, 2**30])
    steps = steps[(steps.double() * m).abs() < 2**31]
    got = _fixed_point([(steps, torch.tensor(m, dtype=torch.float64))], 5)
    assert torch.equal(got, (steps.double() * m + 5).round().long())


def test_fixed_point_rounds_half_to_even():
    got = _fixed_point([(torch.tensor([-3, -1, 1, 3, 5]), torch.tensor(0.5, dtype=torch.float64))], 0)
    assert got.tolist() == [-2, 0, 0, 2, 2]


def test_activations_of_quantized_tensors_are_tables():
    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.act, self.slope = nn.MaxPool2d(2), nn.Hardswish(), nn.PReLU(3)
            nn.init.uniform_(self.slope.weight, -1, 1)

        def forward(self, x):
            return torch.sigmoid(x) * self.act(self.pool(x)).repeat(1, 1, 2, 2) + self.slope(x) + F.gelu(x)

    converted = agree(Activations(), X, "fixed")
    reference = IntegerReference(converted, "fixed")
    reference.run_codes(X)
    assert reference.float_nodes == []
    assert reference.float_activations == ["slope"]


def test_a_layer_norm_is_said_to_be_float():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.ReLU())
    converted = agree(model, X, "float")
    reference = IntegerReference(converted)
    reference.run_codes(X)
    assert len(reference.float_nodes) == 1


def test_sums_beyond_int32_are_an_error():
    model = nn.Sequential(nn.Linear(70000, 1, bias=False))
    nn.init.ones_(model[0].weight)
    prepared = qat.prepare(model, (torch.ones(2, 70000),))
    qat.calibrate(prepared, [torch.ones(2, 70000)])
    converted = qat.convert(prepared)
    with pytest.raises(qat.QATError, match="fit int32"):
        verify_integers(converted, [torch.ones(2, 70000)])


def test_errors_are_one_line():
    with pytest.raises(qat.QATError, match=r"qat\.convert"):
        IntegerReference(nn.Linear(2, 2))
    converted = agree(nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)), X, "float")
    with pytest.raises(qat.QATError, match="fixed"):
        IntegerReference(converted, "fixd")
