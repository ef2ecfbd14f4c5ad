"""What each target asks of a network, and that a network for one is not shipped to another that computes something else."""

import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import qat
from qat.deploy.modules import IntegerLayer, QuantizeDequantize
from qat.deploy.runtime import session
from qat.deploy.targets import saturation_risk
from qat.deploy.verify import signal_to_noise, verify_integers, verify_trained
from qat.targets import TARGETS, suit_target

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import Residual, randomize

X = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def converted_for(target, model=None, **config):
    prepared = qat.prepare(randomize(model or Residual()).eval(), (X,), qat.QATConfig.for_target(target, **config))
    qat.calibrate(prepared, [X])
    return prepared, qat.convert(prepared)


@pytest.mark.parametrize("target", TARGETS)
def test_the_file_computes_what_was_trained(target, tmp_path):
    prepared, converted = converted_for(target)
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert {p.key: p.value for p in onnx.load(path).metadata_props}["qat.target"] == target
    for runtime in ("onnxruntime", "onnxruntime_unoptimized"):
        report = qat.verify(converted, path, [X], runtime)
        assert report.max_lsb <= 1 and report.identical >= 0.999, runtime
    scale = converted.get_submodule("quantizers.fc").scale
    assert ((converted(X) - prepared(X)).abs() <= 1.001 * scale).all()


class Branches(nn.Module):
    """A branch that joins the skip in one of several ways."""

    def __init__(self, join, act=nn.ReLU):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), act())
        self.gate = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.head = nn.LazyConv2d(5, 1)
        self.join = join
        self(X)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.join(self, x))


JOINS = {
    "add": (lambda m, x: x + m.branch(x), nn.Identity),
    "add after ReLU": (lambda m, x: x + m.branch(x), nn.ReLU),
    "add after SiLU": (lambda m, x: x + m.branch(x), nn.SiLU),
    "add of two": (lambda m, x: torch.relu(m.branch(x) + m.gate[0](x)), nn.Identity),
    "gate": (lambda m, x: x * m.gate(x.mean((2, 3), keepdim=True)), nn.ReLU),
    "subtract": (lambda m, x: m.branch(x) - x, nn.Identity),
    "subtract from": (lambda m, x: x - m.branch(x), nn.Identity),
    "multiply": (lambda m, x: x * m.branch(x), nn.Identity),
    "concatenate": (lambda m, x: torch.cat([x, m.branch(x)], 1), nn.Hardswish),
}


@pytest.mark.parametrize("join", JOINS)
def test_openvino_gives_the_same_outputs(join, tmp_path):
    torch.manual_seed(0)
    _, converted = converted_for("openvino", Branches(*JOINS[join]))
    report = qat.verify(converted, qat.export_onnx(converted, (X,), tmp_path / "m.onnx"), [X], "openvino")
    assert len(report.tensors) == 1
    assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)


@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.Hardswish])
def test_openvino_gives_the_same_logits(act, tmp_path):
    torch.manual_seed(0)
    _, converted = converted_for("openvino", Residual(act))
    report = qat.verify(converted, qat.export_onnx(converted, (X,), tmp_path / "m.onnx"), [X], "openvino")
    assert [row.name for row in report.tensors] == ["quantizers.fc"]
    assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)


@pytest.mark.parametrize("mean", [0.5, 0.25])
def test_pictures_are_rounded_alike(mean, tmp_path):
    """256 levels that, with half of the range as the mean, all lie half-way between two codes of the range they fill."""
    x = (torch.arange(256.0).view(1, 1, 16, 16).expand(2, 3, 16, 16) / 255 - mean) / 0.5
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    for target in ("openvino", "tensorrt"):
        prepared = qat.prepare(randomize(model).eval(), (x,), qat.QATConfig.for_target(target))
        qat.calibrate(prepared, [x])
        grid = prepared.get_submodule("quantizers.input_1")
        places = x.double() / grid.scale.double()
        assert ((places - places.floor() - 0.5).abs() > 1e-4).all()
        if target == "openvino":
            converted = qat.convert(prepared)
            report = qat.verify(converted, qat.export_onnx(converted, (x,), tmp_path / "m.onnx"), [x], target)
            assert report.max_lsb <= 1 and report.identical >= 0.999


def test_x86_without_vnni_gets_weights_of_seven_bits():
    _, converted = converted_for("ort_x86")
    layers = [m for m in converted.modules() if isinstance(m, IntegerLayer)]
    assert max(int(m.codes.abs().max()) for m in layers) == 63


def test_tensorrt_gets_signed_activations_and_sums_at_residuals(tmp_path):
    converted = converted_for("tensorrt")[1]
    assert all(m.spec.signed and int(m.zero_point) == 0 for m in converted.modules() if isinstance(m, QuantizeDequantize))
    names = {n for n, m in converted.named_modules() if isinstance(m, QuantizeDequantize)}
    # conv2 is the residual branch: its sums meet the skip before they are rounded. Everywhere else a tensor has its quantizer.
    assert "quantizers.bn2" not in names and "quantizers.conv2" not in names
    other = {n for n, m in converted_for("ort_vnni")[1].named_modules() if isinstance(m, QuantizeDequantize)}
    assert len(other - names) == 1
    assert verify_integers(converted, [X]).max_lsb <= 1


def test_a_network_for_vnni_is_fused_whole(tmp_path):
    path = qat.export_onnx(converted_for("ort_vnni")[1], (X,), tmp_path / "m.onnx")
    session(path, tmp_path / "o.onnx")
    kinds = Counter(n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node)
    assert kinds["QLinearConv"] == 3 and kinds["QLinearAdd"] == 1 and kinds["Conv"] == kinds["Add"] == 0


@pytest.mark.parametrize(
    ("trained", "wanted", "reason"),
    [
        ("ort_vnni", "ort_x86", "weights of 8 bits"),
        ("openvino", "tensorrt", "asymmetric activations"),
        ("tensorrt", "ort_x86", "weights of 8 bits"),
        ("ort_vnni", "openvino", "sums of a convolution rounded before a residual addition"),
        ("ort_x86", "openvino", "sums of a convolution rounded before a residual addition"),
        (None, "tensorrt", "asymmetric activations"),
        (None, "ort_x86", "weights of 8 bits"),
    ],
)
def test_another_target_is_refused_with_the_reason(trained, wanted, reason, tmp_path):
    if trained:
        converted = converted_for(trained)[1]
    else:
        prepared = qat.prepare(randomize(Residual()), (X,))
        qat.calibrate(prepared, [X])
        converted = qat.convert(prepared)
    with pytest.raises(qat.QATError, match=reason) as caught:
        qat.export_onnx(converted, (X,), tmp_path / "m.onnx", target=wanted)
    assert f"Train it with target={wanted}" in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("trained", "wanted"), [("ort_x86", "ort_vnni"), ("openvino", "ort_vnni"), (None, "ort_vnni")])
def test_a_target_that_computes_the_same_is_accepted(trained, wanted, tmp_path):
    prepared = qat.prepare(randomize(Residual()), (X,), qat.QATConfig.for_target(trained) if trained else None)
    qat.calibrate(prepared, [X])
    path = qat.export_onnx(qat.convert(prepared), (X,), tmp_path / "m.onnx", target=wanted)
    assert {p.key: p.value for p in onnx.load(path).metadata_props}["qat.target"] == wanted


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"target": "ort_x86"}, "weights of 8 bits"),
        ({"target": "tensorrt"}, "asymmetric activations"),
        ({"target": "ort_x87"}, "ort_x86"),
    ],
)
def test_a_configuration_that_does_not_suit_its_target(config, found):
    with pytest.raises(qat.ConfigError, match=found):
        qat.QATConfig(**config)
    with pytest.raises(qat.ConfigError, match="weights of 8 bits"):
        qat.QATConfig.for_target("ort_x86", overrides={"fc": {"weight": {"bits": 8}}})


def test_pixels_half_way_between_two_codes_are_not_for_openvino(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), X
    _, integers = converted_for("ort_vnni", model)
    with pytest.raises(qat.QATError, match="pixels may lie half-way"):
        qat.export_onnx(integers, (x,), tmp_path / "m.onnx", target="openvino")


def test_the_target_of_a_network_trained_for_none(tmp_path):
    for bits, expected in ((8, "ort_vnni"), (7, "ort_x86")):
        prepared = qat.prepare(randomize(Residual()), (X,), qat.QATConfig(weight=qat.QuantSpec(bits=bits)))
        qat.calibrate(prepared, [X])
        file = onnx.load(qat.export_onnx(qat.convert(prepared), (X,), tmp_path / "m.onnx"))
        assert {p.key: p.value for p in file.metadata_props}["qat.target"] == expected


def test_the_lowest_code_of_seven_bits_is_of_seven_bits(tmp_path):
    _, integers = converted_for("ort_x86", weight=qat.QuantSpec(bits=7, narrow=False))
    layer = next(m for m in integers.modules() if isinstance(m, IntegerLayer))
    layer.codes.view(-1)[0] = -64
    qat.export_onnx(integers, (X,), tmp_path / "m.onnx")
    layer.codes.view(-1)[0] = 64
    with pytest.raises(qat.QATError, match="weights of 8 bits"):
        qat.export_onnx(integers, (X,), tmp_path / "n.onnx")


def test_a_recipe_gets_the_grids_of_its_target():
    quant = {"weight": {"bits": 8, "symmetric": True}, "activation": {"bits": 8, "symmetric": False, "narrow": False}}
    assert suit_target(quant, "ort_vnni") == quant
    assert suit_target(quant, "ort_x86")["weight"]["bits"] == 7
    assert suit_target({**quant, "weight": {"bits": 4}}, "ort_x86")["weight"]["bits"] == 4
    assert suit_target(quant, "tensorrt")["activation"] == {"bits": 8, "symmetric": True, "narrow": False}


@pytest.mark.parametrize("weight_range", ["minmax", "mse", "lsq"])
def test_scales_that_are_powers_of_two(weight_range):
    grids = {
        "weight": qat.QuantSpec(power_of_two=True),
        "activation": qat.QuantSpec(symmetric=False, per_channel=False, power_of_two=True),
        "weight_range": weight_range,
    }
    prepared, converted = converted_for("integer_only", **grids)
    scales = [m.scale for m in converted.modules() if isinstance(m, (IntegerLayer, QuantizeDequantize))]
    assert all(torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5)) for scale in scales)
    report = verify_integers(converted, [X], "fixed")
    assert report.max_lsb <= 1 and report.identical >= 0.999
    prepared.train()
    prepared(X).sum().backward()
    quantizer = prepared.get_submodule("conv1").weight_quantizer
    if weight_range == "lsq":
        assert torch.isfinite(quantizer.scale.grad).all() and quantizer.scale.grad.abs().max() > 0
    with pytest.raises(qat.ConfigError, match="scale_merge"):
        qat.QATConfig(fold="scale_merge", weight=qat.QuantSpec(power_of_two=True))


def test_the_power_above_covers_the_range():
    spec = qat.QuantSpec(per_channel=False, power_of_two=True)
    quantizer = qat.FakeQuantizer(spec, running=False)
    for largest, expected in ((127.0, 1.0), (127.1, 2.0), (64.0, 1.0), (63.5, 0.5), (1e-3, 2.0**-16)):
        scale, _ = quantizer.qparams_for(torch.tensor([-largest, largest]))
        assert float(scale) == expected


def test_outputs_that_are_returned_twice(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.a(x), self.a(x).relu(), {"b": self.b(x)}

    _, integers = converted_for("openvino", Twice())
    path = qat.export_onnx(integers, (X,), tmp_path / "m.onnx")
    for runtime in ("openvino", "onnxruntime"):
        report = qat.verify(integers, path, [X], runtime)
        assert report.max_lsb <= 1 and report.identical >= 0.999, f"{runtime}\n{report}"


def test_signal_to_noise_is_that_of_a_uniform_rounding():
    """A tensor that fills its range evenly: 20 log10(2^bits) dB against the energy of the range."""
    x = torch.linspace(-1, 1, 3 * 64 * 64 * 8).view(8, 3, 64, 64)[:, :, torch.randperm(64)]
    for bits in (4, 8):
        activation = qat.QuantSpec(bits=bits, symmetric=False, per_channel=False)
        prepared = qat.prepare(nn.Sequential(nn.Identity(), nn.ReLU()), (x,), qat.QATConfig(activation=activation))
        qat.calibrate(prepared, [x])
        found = signal_to_noise(prepared, qat.convert(prepared), [x])
        steps = 2**bits - 1
        expected = 10 * torch.tensor((1 / 3) / ((2 / steps) ** 2 / 12)).log10()
        assert found["quantizers.input_1"] == pytest.approx(float(expected), abs=0.1)


def test_the_trained_network_is_compared_as_it_is():
    prepared, integers = converted_for("ort_vnni")
    assert verify_trained(prepared, integers, [X]).identical >= 0.999
    with torch.no_grad():
        prepared.get_submodule("fc").bias_fold += 1.0
    report = verify_trained(prepared, integers, [X])
    assert {row.name for row in report.tensors if row.max_lsb > 1} == {"quantizers.fc"}


def saturating_sums(x, w):
    """What x86 without VNNI makes of u8 x s8 products (rows of x by rows of w): neighbours are added in saturating int16."""
    products = x.long()[:, None, :] * w.long()[None, :, :]
    return products.unflatten(2, (-1, 2)).sum(3).clamp(-(2**15), 2**15 - 1).sum(2)


@pytest.mark.parametrize(("target", "saturates"), [("ort_vnni", True), ("ort_x86", False)])
def test_sums_on_x86_without_vnni(target, saturates, tmp_path):
    """64 inputs of one by weights of +-1 are +-64, and half of that where neighbouring products saturate."""
    model = nn.Sequential(nn.Linear(64, 2, bias=False))
    model[0].weight.data.copy_(torch.tensor([1.0, -1.0])[:, None].expand(2, 64))
    x = torch.ones(4, 64)
    prepared = qat.prepare(model, (x,), qat.QATConfig.for_target(target))
    qat.calibrate(prepared, [x])
    integers = qat.convert(prepared)
    layer, grid = integers.get_submodule("0"), integers.get_submodule("quantizers.input_1")
    assert int(grid.zero_point) == 0
    sums = saturating_sums(grid.codes(x), layer.codes.T) * float(grid.scale) * layer.scale
    expected = torch.tensor([64.0, -64.0]).expand(4, 2)
    assert torch.allclose(integers(x).float(), expected, rtol=0.01)
    assert torch.allclose(sums, expected, rtol=0.01) is not saturates
    if saturates:
        assert 32 < float(sums[0, 0]) < 33
    assert saturation_risk(m for m in integers.modules() if isinstance(m, IntegerLayer)) == (["0"] if saturates else [])
    report = qat.verify(integers, qat.export_onnx(integers, (x,), tmp_path / "m.onnx"), [x])
    assert report.max_lsb == 0
