"""Integers, ONNX files and their agreement, on small networks."""

import copy
import pickle
import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from timm.layers import Conv2dSame
from torch import nn

import qat
from qat.deploy.runtime import predict, session
from qat.deploy.verify import verify_trained

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import Residual, randomize

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
W4A4 = {"weight": qat.QuantSpec(bits=4), "activation": qat.QuantSpec(bits=4, symmetric=False, per_channel=False)}


def calibrated(model, **config):
    prepared = qat.prepare(randomize(model).eval(), (X,), qat.QATConfig(**config))
    qat.calibrate(prepared, [X])
    return prepared


@pytest.mark.parametrize("config", [{}, {"fold": "scale_merge"}, {"fold": "static", "weight": qat.QuantSpec(per_channel=False)}, W4A4])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.Hardswish])
def test_file_converted_and_trained_network_agree(config, act, tmp_path):
    prepared = calibrated(Residual(act), **config)
    converted = qat.convert(prepared)
    path = qat.export_onnx(converted, (X[:1],), tmp_path / "m.onnx")
    report = qat.verify(converted, path, [X, X[:3]])
    assert report.max_lsb <= 1 and report.identical >= 0.999
    scale = converted.get_submodule("quantizers.fc").scale
    assert ((converted(X) - prepared(X)).abs() <= 1.001 * scale).all()
    assert ((next(predict(path, [X])) - converted(X)).abs() <= 1.001 * scale).all()


def test_every_layer_is_fused_to_integers(tmp_path):
    path = qat.export_onnx(qat.convert(calibrated(Residual())), (X,), tmp_path / "m.onnx")
    assert "BatchNormalization" not in {n.op_type for n in onnx.load(path).graph.node}
    session(path, tmp_path / "optimized.onnx")
    kinds = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["QLinearConv"] == 3 and kinds["QLinearAdd"] == 1 and kinds["QGemm"] == 1 and kinds["Conv"] == 0


@pytest.mark.parametrize("act", [nn.ReLU, nn.Hardswish])
def test_a_machine_without_vnni_runs_the_file(act, tmp_path, monkeypatch):
    monkeypatch.setattr("qat.deploy.runtime.sums_exactly", lambda: False)
    model = nn.Sequential(
        *Residual(act).stem, nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(784, 3)
    )
    converted = qat.convert(calibrated(model))
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert qat.verify(converted, path, [X]).max_lsb <= 1


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_layers(groups, tmp_path):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 2, 2, groups=groups), nn.BatchNorm2d(4), nn.ReLU()
    )
    converted = qat.convert(calibrated(model))
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert qat.verify(converted, path, [X]).max_lsb <= 1


def test_weights_are_stored_as_integers_of_their_grid(tmp_path):
    converted = qat.convert(calibrated(Residual(), **W4A4))
    codes = [b for n, b in converted.named_buffers() if n.endswith("codes")]
    assert len(codes) == 4 and all(c.dtype == torch.int8 and int(c.abs().max()) <= 7 for c in codes)
    assert not list(converted.parameters())


def test_an_overflowing_bias_raises_the_scale_and_says_where(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    prepared = calibrated(model)
    with torch.no_grad():
        prepared.get_submodule("0").bn.weight[1] = 1e-12
        prepared.get_submodule("0").bn.bias[1] = 50.0
    qat.calibrate(prepared, [X])
    expected = prepared(X)
    layer = prepared.get_submodule("0")
    layer.weight_quantizer.freeze(layer.weight_to_quantize())
    layer.weight_quantizer.scale[1] = 1e-14
    with pytest.warns(UserWarning, match=r"0: the int32 bias of channels \[1\]"):
        converted = qat.convert(prepared)
    torch.testing.assert_close(converted(X)[:, 1], expected[:, 1], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(prepared(X), converted(X).float())
    assert converted.get_submodule("0").bias.abs().max() <= 2**30
    assert qat.verify(converted, qat.export_onnx(converted, (X,), tmp_path / "m.onnx"), [X]).max_lsb == 0


def test_a_nearly_dead_filter_leaves_room_for_the_sums(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    with torch.no_grad():
        model[0].weight[1] *= 1e-5
    prepared = calibrated(model)
    with torch.no_grad():
        prepared.get_submodule("0").bn.weight[1], prepared.get_submodule("0").bn.bias[1] = 1.0, 3.0
    qat.calibrate(prepared, [X])
    with pytest.warns(UserWarning, match="the weight scale was raised"):
        converted = qat.convert(prepared)
    assert qat.verify(converted, qat.export_onnx(converted, (X,), tmp_path / "m.onnx"), [X]).max_lsb == 0
    assert (converted(X) - prepared(X)).abs().max() <= 1.001 * converted.get_submodule("quantizers._3").scale
    # the simulation raises the scale as well
    assert torch.equal(integers(prepared, "quantizers._2", X), integers(converted, "quantizers._2", X).int())


def dead_input() -> nn.Sequential:
    """Channel 0 of the depthwise layer reads nothing but 0 and has a variance to match: its folded weights are 30000 times the others'."""
    torch.manual_seed(0)
    model = randomize(
        nn.Sequential(
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, 1, 1, groups=4),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
        )
    )
    model[1].bias.data[0] = -100.0
    model[4].running_mean[0], model[4].running_var[0] = model[3].bias.data[0], 1e-12
    model[4].bias.data[0], model[4].eps = 0.31, 1e-9
    return model.eval()


def integers(prepared, name, x):
    """Output codes of an activation quantizer in the eval forward of the trained network."""
    seen = []
    quantizer = prepared.get_submodule(name)
    handle = quantizer.register_forward_hook(lambda module, inputs, output: seen.append(module.codes(inputs[0])))
    prepared(x)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_dead_filter_with_huge_weights_is_simulated_as_it_is_shipped(strategy, tmp_path):
    prepared = qat.prepare(dead_input(), (X,), qat.QATConfig(fold=strategy))
    qat.calibrate(prepared, [X])
    trained = integers(prepared, "quantizers._5", X)
    converted = qat.convert(prepared)
    shipped = converted.get_submodule("quantizers._5").codes(
        converted.get_submodule("3")(
            converted.get_submodule("quantizers._2")(
                torch.relu(converted.get_submodule("0")(converted.get_submodule("quantizers.input_1")(X)))
            )
        )
    )
    assert (trained - shipped).abs().max() <= 1 and (trained != shipped).float().mean() <= 1e-3
    qat.freeze_bn(prepared)
    prepared.train()
    qat.freeze_ranges(prepared)
    assert torch.equal(integers(prepared, "quantizers._5", X), trained)
    prepared.eval().get_submodule("3").set_input_quantizer(None)  # the bias as it was before rounding: not what is shipped
    assert (integers(prepared, "quantizers._5", X)[:, 0] - shipped[:, 0]).abs().max() > 1
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert qat.verify(converted, path, [X]).identical == 1.0


def test_converted_layers_compute_the_runtimes_integers_exactly(tmp_path):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 16, 3),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    )
    prepared = calibrated(model, weight=qat.QuantSpec(per_channel=True))
    converted = qat.convert(prepared)
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    report = qat.verify(converted, path, [torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in range(4)])
    assert report.max_lsb == 0 and sum(row.compared for row in report.tensors) > 1e6


def test_a_layer_kept_float_stays_float_in_the_runtime(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[0].bias[0] = -100.0
        model[2].weight[:, 0] *= 300  # read by nothing but zeros; in 8 bits a tensor it would leave no step for the others
    prepared = qat.prepare(model, (X,), qat.QATConfig(overrides={"2": {"skip": True}}))
    qat.calibrate(prepared, [X])
    converted = qat.convert(prepared)
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert qat.verify(converted, path, [X]).max_lsb <= 1
    session(path, tmp_path / "optimized.onnx")
    assert Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)["QLinearConv"] == 2


@pytest.mark.parametrize("strategy", ["bn_correction", "static"])
def test_layers_with_a_forward_of_their_own_are_exported_and_fused(strategy, tmp_path):
    model = nn.Sequential(
        Conv2dSame(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU6(), Conv2dSame(8, 8, 3, stride=2, groups=8, bias=False), nn.BatchNorm2d(8)
    )
    converted = qat.convert(calibrated(model, fold=strategy))
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    assert qat.verify(converted, path, [X]).max_lsb == 0
    session(path, tmp_path / "optimized.onnx")
    assert Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)["QLinearConv"] == 2


class PadsWithOnes(nn.Conv2d):
    def forward(self, x):
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1), value=1.0))


class Adapter(nn.Linear):
    """A low-rank addition, which is 0 when it starts."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.down, self.up = nn.Parameter(torch.randn(2, n_in)), nn.Parameter(torch.zeros(n_out, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(PadsWithOnes(3, 8, 3)), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), Adapter(144, 5))],
    ids=["pad", "low_rank"],
)
def test_layers_that_compute_more_than_a_linear_map_stay_float(model, tmp_path):
    prepared = qat.prepare(model.eval(), (X,))
    assert any("stays float" in note for note in prepared.fold_report.notes)
    for parameter in prepared.parameters():
        torch.nn.init.normal_(parameter)
    qat.calibrate(prepared, [X])
    converted = qat.convert(prepared)
    torch.testing.assert_close(converted(X), prepared(X))
    assert qat.verify(converted, qat.export_onnx(converted, (X,), tmp_path / "m.onnx"), [X]).max_lsb <= 1


def test_a_bias_beyond_32_bits_is_not_cut_in_the_simulation():
    layer = nn.Linear(4, 3)
    torch.nn.init.ones_(layer.bias)
    x = torch.randn(8, 4) * 1e-6
    prepared = qat.prepare(nn.Sequential(layer).eval(), (x,))
    qat.calibrate(prepared, [x])
    torch.testing.assert_close(prepared(x), layer(x), rtol=1e-2, atol=1e-2)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.fc(torch.relu(self.fc(x) * 7.0))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), dim=-1) @ self.v(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 4)), (64, 6)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.Conv2d(8, 4, 1)), (4, 3, 6, 6)),
        (Attention(), (8, 5, 8)),
    ],
    ids=["linear", "conv", "attention"],
)
def test_a_softmax_stays_float_in_the_runtime(model, shape, tmp_path):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    prepared = qat.prepare(model, (x,))
    qat.calibrate(prepared, [x])
    converted = qat.convert(prepared)
    report = qat.verify(converted, qat.export_onnx(converted, (x,), tmp_path / "m.onnx"), [x])
    assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)


def test_a_layer_that_reads_floats_computes_with_them(tmp_path):
    x = torch.randn(32, 5, 64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    prepared = qat.prepare(model, (x,), qat.QATConfig(overrides={"0": {"skip": True}, "1": {"skip": True}}))
    qat.calibrate(prepared, [x])
    converted = qat.convert(prepared)
    report = qat.verify(converted, qat.export_onnx(converted, (x,), tmp_path / "m.onnx"), [x])
    assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)


def test_a_layer_called_twice_has_the_bias_of_each_input(tmp_path):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    prepared = qat.prepare(Twice().eval(), (x,), qat.QATConfig())
    qat.calibrate(prepared, [x])
    converted = qat.convert(prepared)
    scale = converted.get_submodule("quantizers.last").scale
    assert ((converted(x) - prepared(x)).abs() <= 1.001 * scale).all()
    # The simulation rounds the bias for each input too, through copies, pickles and changes of strategy.
    for network in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), qat.refold(prepared, "bn_correction")):
        report = verify_trained(network, converted, [x])
        assert report.max_lsb <= 1 and report.identical >= 0.999
    assert qat.verify(converted, qat.export_onnx(converted, (x,), tmp_path / "m.onnx"), [x]).max_lsb <= 1


def test_a_pickled_network_converts_to_the_same_integers():
    prepared = calibrated(Residual())
    converted, other = qat.convert(prepared), qat.convert(pickle.loads(pickle.dumps(prepared)))
    assert torch.equal(other(X), converted(X))
    state = other.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in converted.state_dict().items())


def test_errors_are_one_line(tmp_path):
    converted = qat.convert(calibrated(Residual()))
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    for call, words in [
        (lambda: qat.convert(qat.prepare(Residual(), (X,))), "has seen no data"),
        (lambda: qat.export_onnx(Residual(), (X,), tmp_path / "n.onnx"), "qat.convert"),
        (lambda: qat.export_onnx(converted, (X,), tmp_path / "n.onnx", target="ort_x87"), "ort_x86"),
        (lambda: qat.verify(converted, path, []), "no batches"),
    ]:
        with pytest.raises(qat.QATError, match=words):
            call()
    assert not (tmp_path / "n.onnx").exists()


@pytest.mark.parametrize("bits", [8, 4])
def test_one_layer_called_three_times(bits, tmp_path):
    shared = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), shared, nn.ReLU(), shared, nn.ReLU(), shared)
    prepared = calibrated(model, weight=qat.QuantSpec(bits=bits))
    converted = qat.convert(prepared)
    report = verify_trained(prepared, converted, [X])
    assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)
    assert not any("next_inputs" in name for name, _ in converted.named_modules())
    assert not any("next_inputs" in key for key in prepared.state_dict() if prepared.state_dict()[key].numel())


def test_a_runtime_compared_step_by_step(tmp_path):
    """Every tensor from the integers before it: a difference stays where it arises, also in the file without optimisations."""
    converted = qat.convert(calibrated(Residual(nn.SiLU)))
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    for runtime in ("onnxruntime", "onnxruntime_unoptimized"):
        report = qat.verify(converted, path, [X, X[:3]], runtime, stepwise=True)
        assert report.max_lsb <= 1 and report.identical >= 0.999
    converted.get_submodule("conv1").bias += 50
    report = qat.verify(converted, path, [X], stepwise=True)
    assert {row.name for row in report.tensors if row.max_lsb} == {"quantizers.act"}
    assert {row.name for row in qat.verify(converted, path, [X]).tensors if row.max_lsb} >= {"quantizers.act", "quantizers.conv2"}
