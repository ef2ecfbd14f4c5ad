"""Bias correction: what the biases become, against means measured by hooks, a re-implementation in numpy, and drawn normal inputs."""

import copy
import pickle

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

import qat
from qat.fold.normal_output import normal_output
from qat.ptq.correct_bias import correct_bias
from qat.ptq.expectation import expected_relu

FEW_BITS = qat.QuantSpec(bits=3)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """BatchNorms away from their start, some gammas negative."""
    generator = torch.Generator().manual_seed(seed)
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm):
            n = bn.num_features
            bn.running_mean.copy_(torch.randn(n, generator=generator) * 0.3)
            bn.running_var.copy_(torch.rand(n, generator=generator) + 0.5)
            if bn.affine:
                bn.weight.data.copy_(torch.rand(n, generator=generator) * 2 - 0.7)
                bn.bias.data.copy_(torch.randn(n, generator=generator) * 0.5)
    return model.eval()


class Mixed(nn.Module):
    """A chain with a depthwise layer, a residual addition, a BatchNorm without a bias, and a classifier without one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.dw, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.pw, self.bn2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=False)
        self.fc = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        y = self.bn2(self.pw(F.relu6(self.bn1(self.dw(x)))))
        return self.fc((x + y).mean((2, 3)))


LAYERS = ["stem", "dw", "pw", "fc"]


def pictures(*sizes: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 6, 6, generator=generator) + 0.3 for n in sizes]


BATCHES = pictures(5, 3, 4)


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return randomised(Mixed())


def prepared_mixed(strategy: str = "bn_correction", double: bool = False) -> nn.Module:
    batches = [x.double() for x in BATCHES] if double else BATCHES
    model = mixed().double() if double else mixed()
    prepared = qat.prepare(model, (batches[0],), qat.QATConfig(fold=strategy, weight=FEW_BITS))
    qat.calibrate(prepared, batches)
    return prepared


def without_quantizers(prepared: nn.Module) -> nn.Module:
    exact = copy.deepcopy(prepared)
    qat.set_fake_quant(exact, weights=False, activations=False)
    return exact


def output_means(network: nn.Module, batches: list, layers: list[str] = LAYERS) -> dict[str, Tensor]:
    """Mean of every layer's output over pictures and positions of all batches, (C_out), in whole runs of the network."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda m, x, y, name=name: outputs[name].append(y.detach())) for name in layers
    ]
    with torch.no_grad():
        for x in batches:
            network(x)
    for hook in hooks:
        hook.remove()
    axis = {name: -1 if isinstance(network.get_submodule(name).conv, nn.Linear) else 1 for name in layers}
    return {name: torch.cat([y.movedim(axis[name], 0).flatten(1) for y in ys], 1).double().mean(1) for name, ys in outputs.items()}


def biases(network: nn.Module) -> dict[str, Tensor]:
    return {name: m.folded()[1].detach().clone() for name, m in network.named_modules() if isinstance(m, qat.FoldedConvBN)}


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_means_of_every_layer_are_the_float_networks(strategy: str, per_channel: bool) -> None:
    if strategy == "scale_merge" and not per_channel:
        pytest.skip("refused: tests/fold/test_scale_merge.py")
    weight = qat.QuantSpec(bits=3, per_channel=per_channel)
    prepared = qat.prepare(mixed(), (BATCHES[0],), qat.QATConfig(fold=strategy, weight=weight))
    qat.set_fake_quant(prepared, activations=False)
    wanted = output_means(without_quantizers(prepared), BATCHES)
    before, after = (output_means(network, BATCHES) for network in (prepared, correct_bias(prepared, iter(BATCHES))))
    for name in LAYERS:
        assert torch.allclose(after[name], wanted[name], rtol=0, atol=1e-5)
        assert (before[name] - wanted[name]).abs().max() > 0.01


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_with_quantized_activations_half_a_step_of_the_integer_bias_is_left(strategy: str) -> None:
    prepared = prepared_mixed(strategy)
    wanted, before = output_means(without_quantizers(prepared), BATCHES), output_means(prepared, BATCHES)
    corrected = correct_bias(prepared, BATCHES)
    after = output_means(corrected, BATCHES)
    for name in LAYERS:
        layer = corrected.get_submodule(name)
        step = layer.input_quantizer.scale * layer.weight_codes()[1]
        assert torch.all((after[name] - wanted[name]).abs() <= step / 2 + 1e-5)
        assert (after[name] - wanted[name]).abs().max() < (before[name] - wanted[name]).abs().max()


KINDS = {
    "conv1d": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (3, 4, 9)),
    "conv3d": (nn.Conv3d(4, 6, 2, groups=2), nn.BatchNorm3d(6), (3, 4, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(6), (3, 4, 5, 5)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), (7, 4)),
    "alone": (nn.Conv2d(4, 6, 3, bias=False), nn.Identity(), (3, 4, 5, 5)),
    "linear of rank 3": (nn.Linear(4, 6, bias=False), nn.Identity(), (3, 5, 4)),
    "circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(6), (3, 4, 5, 5)),
}


@pytest.mark.parametrize("strategy", ["static", "bn_correction", "scale_merge"])
@pytest.mark.parametrize("kind", KINDS)
def test_means_of_every_kind_of_layer(kind: str, strategy: str) -> None:
    torch.manual_seed(3)
    layer, norm, shape = copy.deepcopy(KINDS[kind])
    batches = [torch.randn(shape, dtype=torch.float64) + 0.5 for _ in range(2)]
    model = randomised(nn.Sequential(layer, norm)).double()
    prepared = qat.prepare(model, (batches[0],), qat.QATConfig(fold=strategy, weight=qat.QuantSpec(bits=2)))
    qat.set_fake_quant(prepared, activations=False)
    wanted = output_means(without_quantizers(prepared), batches, ["0"])["0"]
    corrected = correct_bias(prepared, batches)
    assert torch.allclose(output_means(corrected, batches, ["0"])["0"], wanted, rtol=0, atol=1e-10)
    assert (output_means(prepared, batches, ["0"])["0"] - wanted).abs().max() > 1e-3


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 1.5),
    "leaky": nn.LeakyReLU(0.2),
    "prelu": nn.PReLU(4),
    "none": nn.Identity(),
}


class Drawn(nn.Module):
    """A first layer whose output is N(beta, gamma^2) for inputs drawn from N(0, 1), an activation, and a second layer."""

    def __init__(self, activation: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.bn = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4, eps=1e-12)
        self.activation, self.second = activation, second
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4).view(4, 4, 1, 1))
            self.bn.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
            self.bn.bias.copy_(torch.tensor([0.3, -0.5, 5.8, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.bn(self.first(x))))


SECOND = {
    "plain": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "grouped": lambda: nn.Conv2d(4, 6, 2, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4, stride=2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False),
}


def drawn(strategy: str, activation: nn.Module, second: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    x = torch.randn(400, 4, 6, 6, dtype=torch.float64)
    config = qat.QATConfig(fold=strategy, weight=qat.QuantSpec(bits=2), overrides={"first": {"weight": {"bits": 8}}})
    prepared = qat.prepare(Drawn(activation, second).double().eval(), (x,), config)
    qat.set_fake_quant(prepared, activations=False)
    return prepared, x


def shift(network: nn.Module, exact: nn.Module, x: Tensor) -> float:
    """How far the mean of a channel of the second layer is from the float network's, at most."""
    quantized, wanted = (output_means(each, [x], ["second"])["second"] for each in (network, exact))
    return float((quantized - wanted).abs().max())


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_analytic_correction_takes_out_the_shift_of_drawn_inputs(strategy: str) -> None:
    prepared, x = drawn(strategy, nn.ReLU6(), SECOND["plain"]())
    exact = without_quantizers(prepared)
    before, after = shift(prepared, exact, x), shift(correct_bias(prepared), exact, x)
    assert before > 0.2 and after < 0.03 * before


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_analytic_correction_behind_every_activation(activation: str, second: str) -> None:
    prepared, x = drawn("static", copy.deepcopy(ACTIVATIONS[activation]), SECOND[second]())
    exact = without_quantizers(prepared)
    before, after = shift(prepared, exact, x), shift(correct_bias(prepared, layers=["second"]), exact, x)
    assert before > 0.02 and after < 0.05 * before


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_analytic_correction_once_more_in_numpy(strategy: str) -> None:
    prepared = prepared_mixed(strategy, double=True)
    model = mixed().double()
    corrected = correct_bias(prepared)
    change = {name: (biases(corrected)[name] - bias).numpy() for name, bias in biases(prepared).items()}
    for name, conv, bn, norm, act in (
        ("dw", model.dw, model.bn1, model.bn0, lambda m, s: expected_relu(m, s)),
        ("pw", model.pw, model.bn2, model.bn1, lambda m, s: expected_relu(m, s) - expected_relu(m - 6, s)),
    ):
        factor = (1 if bn.weight is None else bn.weight.detach().numpy()) / np.sqrt(bn.running_var.numpy() + bn.eps)
        own, w = conv.weight.detach().numpy(), conv.weight.detach().numpy() * np.reshape(factor * np.ones(8), (-1, 1, 1, 1))
        q = quantized_rows(own) * np.reshape(factor * np.ones(8), (-1, 1, 1, 1)) if strategy == "scale_merge" else quantized_rows(w)
        mean = act(*(t.double() for t in normal_output(norm))).numpy()
        taps = (q - w).sum((2, 3))
        expected = -taps[:, 0] * mean if name == "dw" else -(taps @ mean)
        np.testing.assert_allclose(change[name], expected, rtol=1e-6, atol=1e-9)
    # The mean over positions of a sum of two tensors is not that of a BatchNorm alone, but its mean is known.
    mean = expected_relu(*(t.double() for t in normal_output(model.bn0))).numpy()
    w = model.fc.weight.detach().numpy()
    np.testing.assert_allclose(change["fc"], -(quantized_rows(w) - w) @ mean, rtol=1e-6, atol=1e-9)
    assert not change["stem"].any()
    assert prepared.step_reports == []
    assert corrected.step_reports[0].left == [("stem", "nothing is known of the network's input 'x'")]


def quantized_rows(w: np.ndarray) -> np.ndarray:
    """3 bits, symmetric and narrow, the range of each row."""
    rows = w.reshape(len(w), -1)
    scale = np.abs(rows).max(1, keepdims=True) / 3
    return (np.clip(np.rint(rows / scale), -3, 3) * scale).reshape(w.shape)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_twice_changes_nothing_more(strategy: str) -> None:
    prepared = prepared_mixed(strategy)
    empirical, analytic = correct_bias(prepared, BATCHES), correct_bias(prepared)
    fresh = prepared_mixed(strategy)
    fresh.load_state_dict(empirical.state_dict())
    again = {
        "empirical": correct_bias(empirical, BATCHES),
        "after analytic": correct_bias(analytic, BATCHES),
        "thrice": correct_bias(correct_bias(empirical, BATCHES), BATCHES),
        "deepcopy": correct_bias(copy.deepcopy(empirical), BATCHES),
        "pickle": correct_bias(pickle.loads(pickle.dumps(empirical)), BATCHES),
        "state dict": correct_bias(fresh, BATCHES),
    }
    for how, network in again.items():
        for name, bias in biases(empirical).items():
            assert torch.equal(biases(network)[name], bias), (how, name)
    for name, bias in biases(analytic).items():
        for network in (analytic, empirical, pickle.loads(pickle.dumps(analytic))):
            assert torch.equal(biases(correct_bias(network))[name], bias), name
    assert not torch.equal(biases(analytic)["fc"], biases(empirical)["fc"])


def test_a_layer_left_by_the_second_method_loses_what_the_first_gave_it() -> None:
    """The analytic method knows nothing of the network's input."""
    prepared = prepared_mixed()
    assert torch.equal(biases(correct_bias(correct_bias(prepared, BATCHES)))["stem"], biases(prepared)["stem"])
    kept = correct_bias(correct_bias(prepared, BATCHES), layers=["dw", "f*"])
    assert kept.step_reports[-1].left == [("stem", "not asked for"), ("pw", "not asked for")]
    assert torch.equal(biases(kept)["stem"], biases(correct_bias(prepared, BATCHES))["stem"])


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_the_statistics_of_a_corrected_layer_are_those_of_its_float_function(strategy: str) -> None:
    """Corrected by data first, pw alone then from the statistics of dw: they are those that dw had without its correction."""
    prepared = prepared_mixed(strategy)
    wanted = biases(correct_bias(prepared))["pw"]
    got = biases(correct_bias(correct_bias(prepared, BATCHES), layers=["pw"]))["pw"]
    assert torch.allclose(got, wanted, rtol=0, atol=1e-6)


def test_of_a_bias_that_was_trained_since_the_correction_is_taken_out() -> None:
    prepared = prepared_mixed()
    corrected = correct_bias(prepared, BATCHES)
    added = corrected.get_submodule("dw").bias_change()
    with torch.no_grad():
        corrected.get_submodule("dw").bn.bias.add_(0.25)
    corrected.get_submodule("dw").undo_bias_correction()
    assert torch.allclose(biases(corrected)["dw"], biases(prepared)["dw"] + 0.25, atol=1e-6)
    assert added.abs().max() > 0.01 and corrected.get_submodule("dw").bias_change() is None


@pytest.mark.parametrize("batches", [None, BATCHES])
@pytest.mark.parametrize("training", [True, False])
def test_the_argument_is_untouched(training: bool, batches: list | None) -> None:
    prepared = prepared_mixed().train(training)
    state = {key: value.clone() for key, value in prepared.state_dict().items()}
    modes = [m.training for m in prepared.modules()]
    corrected = correct_bias(prepared, batches)
    assert list(prepared.state_dict()) == list(state) and all(
        torch.equal(value, state[key]) for key, value in prepared.state_dict().items()
    )
    assert [m.training for m in prepared.modules()] == modes == [m.training for m in corrected.modules()]
    assert prepared.step_reports == [] and len(corrected.step_reports) == 1
    moved = {key for key, value in corrected.state_dict().items() if key not in state or not torch.equal(value, state[key])}
    assert {key.split(".", 1)[1] for key in moved} == {"bias_correction", "bias_fold", "bn.bias"}


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_missing_bias_is_created_saved_and_loaded(strategy: str) -> None:
    prepared = prepared_mixed(strategy)
    corrected, fresh = correct_bias(prepared, BATCHES), prepared_mixed(strategy)
    created = [name for name, what in corrected.step_reports[0].done if what.endswith("bias created")]
    assert created == (["fc"] if strategy == "static" else ["pw", "fc"])
    assert prepared.get_submodule("fc").bias_fold is None and corrected.get_submodule("fc").bias_fold.shape == (5,)
    fresh.load_state_dict(corrected.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(BATCHES[0]), corrected(BATCHES[0]))
    corrected.load_state_dict(prepared_mixed(strategy).state_dict(), strict=False)
    assert all(layer.bias_change() is None for layer in corrected.modules() if isinstance(layer, qat.FoldedConvBN))
    assert all("created" not in what for _, what in correct_bias(corrected, BATCHES).step_reports[-1].done)


@pytest.mark.parametrize("strategy", ["bn_correction", "scale_merge"])
def test_integers_of_the_corrected_network_are_in_the_file(strategy: str, tmp_path) -> None:
    corrected = correct_bias(prepared_mixed(strategy), BATCHES)
    converted = qat.convert(corrected)
    path = qat.export_onnx(converted, (BATCHES[0],), tmp_path / "m.onnx")
    report = qat.verify(converted, path, BATCHES)
    assert report.max_lsb <= 1 and report.identical >= 0.999
    layer = corrected.get_submodule("fc")
    step = layer.input_quantizer.scale.double() * layer.weight_codes()[1].double()
    wanted = (layer.bias_fold.detach().double() / step).round().numpy()
    assert wanted.any()
    stored = [numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.INT32]
    assert any(t.shape == (5,) and np.array_equal(t, wanted) for t in stored)


@pytest.mark.parametrize("method", ["empirical", "analytic"])
def test_weights_on_the_grid_move_nothing_by_themselves(method: str) -> None:
    prepared = prepared_mixed("static", double=True)
    qat.set_fake_quant(prepared, activations=False)
    qat.freeze_ranges(prepared)
    for name in LAYERS:
        layer = prepared.get_submodule(name)
        codes, scale = layer.weight_codes()
        layer.write_weight(codes * scale.view([-1] + [1] * (codes.dim() - 1)))
    corrected = correct_bias(prepared, [x.double() for x in BATCHES] if method == "empirical" else None, method=method)
    for name, bias in biases(prepared).items():
        assert torch.allclose(biases(corrected)[name], bias, rtol=0, atol=1e-12)
    if method != "empirical":
        assert corrected.step_reports[0].done == [] and corrected.get_submodule("fc").bias_fold is None


def test_weights_on_the_grid_are_corrected_towards_the_network_from_before() -> None:
    prepared = prepared_mixed("static", double=True)
    qat.set_fake_quant(prepared, activations=False)
    on_grid, batches = copy.deepcopy(prepared), [x.double() for x in BATCHES]
    qat.freeze_ranges(on_grid)
    for name in LAYERS:
        layer = on_grid.get_submodule(name)
        codes, scale = layer.weight_codes()
        layer.write_weight(codes * scale.view([-1] + [1] * (codes.dim() - 1)))
    wanted, got = correct_bias(prepared, batches), correct_bias(on_grid, batches, reference=prepared)
    assert float((biases(wanted)["pw"] - biases(prepared)["pw"]).abs().max()) > 1e-3
    for name, bias in biases(wanted).items():
        assert torch.allclose(biases(got)[name], bias, rtol=0, atol=1e-9)
    wanted, got = correct_bias(prepared), correct_bias(on_grid, reference=prepared)
    for name, bias in biases(wanted).items():
        assert torch.allclose(biases(got)[name], bias, rtol=0, atol=1e-9)
    assert correct_bias(on_grid).step_reports[-1].done == []
    other = qat.prepare(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),))
    for given in (batches, None):
        with pytest.raises(qat.QATError, match=r"correct_bias.reference: found"):
            correct_bias(on_grid, given, reference=other)
    narrow, wide = (qat.prepare(nn.Sequential(nn.Conv2d(3, width, 3)), (BATCHES[0],)) for width in (8, 9))
    qat.calibrate(narrow, BATCHES)
    for other in (wide, nn.Sequential(nn.Conv2d(3, 8, 3)), qat.convert(narrow)):
        with pytest.raises(qat.QATError, match=r"correct_bias.reference: found"):
            correct_bias(narrow, BATCHES, reference=other)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.constant = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.constant)


def test_the_range_of_a_constant_needs_no_calibration() -> None:
    torch.manual_seed(0)
    prepared = qat.prepare(Shifted(), (BATCHES[0],), qat.QATConfig(weight=FEW_BITS))
    qat.calibrate(prepared, BATCHES)
    assert [name for name, _ in correct_bias(prepared, BATCHES).step_reports[-1].done] == ["first", "second"]


def test_known_statistics_go_where_the_network_goes_and_not_into_other_weights() -> None:
    prepared = prepared_mixed("static")
    assert {pair[0].dtype for pair in copy.deepcopy(prepared).double().normal_outputs.values()} == {torch.float64}
    assert {pair[0].device.type for pair in copy.deepcopy(prepared).to("meta").normal_outputs.values()} == {"meta"}
    around = nn.Sequential(prepared)
    around.load_state_dict(around.state_dict())
    assert prepared.normal_outputs == {}


@pytest.mark.parametrize("strategy", [name for name in qat.STRATEGIES if name != "static"])
@pytest.mark.parametrize("target", ["naive", "static", "scale_merge"])
def test_another_strategy_keeps_the_correction_and_what_is_known_of_it(strategy: str, target: str) -> None:
    prepared = prepared_mixed(strategy)
    corrected = qat.refold(correct_bias(prepared), target)
    assert corrected.get_submodule("dw").bias_change().abs().max() > 0.01
    again = correct_bias(corrected)
    same = correct_bias(qat.refold(prepared, target))
    for name in LAYERS:
        assert torch.allclose(biases(again)[name], biases(same)[name], rtol=0, atol=1e-6)
    assert [name for name, _ in again.step_reports[-1].done] == ["dw", "pw", "fc"]


@pytest.mark.parametrize("strategy", [name for name in qat.STRATEGIES if name != "static"])
def test_float_weights_loaded_into_a_corrected_network_bring_no_correction(strategy: str) -> None:
    corrected = correct_bias(prepared_mixed(strategy), BATCHES)
    model = mixed()
    qat.load_float(corrected, model.state_dict())
    assert all(layer.bias_change() is None for layer in corrected.modules() if isinstance(layer, qat.FoldedConvBN))
    with torch.no_grad():
        assert torch.allclose(without_quantizers(corrected)(BATCHES[0]), model(BATCHES[0]), atol=1e-5)


class Odd(nn.Module):
    """Layers that cannot be corrected, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.pooled = nn.Conv2d(4, 4, 1)
        self.twice = nn.Conv2d(4, 4, 1)
        self.switched_off = nn.Conv2d(4, 4, 1)
        self.summed = nn.Conv2d(4, 4, 1)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        y = self.pooled(F.max_pool2d(x, 2))
        y = self.switched_off(self.twice(self.twice(y)))
        z = self.summed(F.relu(F.avg_pool2d(x, 2) + 1))
        return y, self.last(z.flatten(2).transpose(1, 2))


def test_layers_left_and_why() -> None:
    prepared = qat.prepare(randomised(Odd()), (BATCHES[0],), qat.QATConfig(fold="static"))
    prepared.get_submodule("switched_off").weight_quantizer.enabled = False
    qat.calibrate(prepared, BATCHES)
    assert dict(correct_bias(prepared).step_reports[0].left) == {
        "stem": "nothing is known of the network's input 'x'",
        "pooled": "the operation 'max_pool2d' does not keep the mean",
        "twice": "called at 2 places, which one bias cannot serve",
        "switched_off": "its weight quantization is switched off",
        "summed": "the input of the operation 'relu' is not that of a BatchNorm alone",
        "last": "'summed' has no BatchNorm",
    }
    empirical = correct_bias(prepared, BATCHES).step_reports[0]
    assert [name for name, _ in empirical.done] == ["stem", "pooled", "summed", "last"]
    assert sorted(name for name, _ in empirical.left) == ["switched_off", "twice"]


def test_the_report_tells_how_far_each_layer_moved() -> None:
    prepared = prepared_mixed("static")
    qat.set_fake_quant(prepared, activations=False)
    report = correct_bias(prepared, BATCHES).step_reports[0]
    exact, got = without_quantizers(prepared), {}
    hook = exact.get_submodule("stem").register_forward_hook(lambda m, x, y: got.setdefault("y", []).append(y))
    with torch.no_grad():
        for x in BATCHES:
            exact(x)
    hook.remove()
    y = torch.cat(got["y"]).movedim(1, 0).flatten(1).double()
    most = float((biases(correct_bias(prepared, BATCHES))["stem"] - biases(prepared)["stem"]).abs().max())
    text = f"bias moved by up to {most / float(y.var(1, unbiased=False).mean().sqrt()):.3g} standard deviations of the output"
    assert report.step == "correct_bias (empirical)" and report.done[0] == ("stem", text)
    assert "correct_bias (empirical): 4 done, 0 left" in str(report)


def test_nothing_is_drawn_where_no_one_watches(capfd) -> None:
    correct_bias(prepared_mixed(), BATCHES, progress=True)
    assert capfd.readouterr() == ("", "")


def test_errors_are_one_line() -> None:
    prepared = prepared_mixed()
    uncalibrated = qat.prepare(randomised(Mixed()), (BATCHES[0],), qat.QATConfig())
    spoilt = BATCHES[0].clone()
    spoilt[0, 0, 0, 0] = float("nan")
    for call, words in [
        (lambda: correct_bias(randomised(Mixed()), BATCHES), r"a Mixed without quantized layers.*qat.prepare"),
        (lambda: correct_bias(qat.fold(randomised(Mixed()), (BATCHES[0],))), r"without quantized layers.*qat.prepare"),
        (lambda: correct_bias(uncalibrated, BATCHES), r"quantizers\.x: found no range yet.*qat.calibrate"),
        (lambda: correct_bias(prepared, []), r"found none; expected at least one batch"),
        (lambda: correct_bias(prepared, BATCHES[0]), r"a tensor of shape"),
        (lambda: correct_bias(prepared, [BATCHES[1], spoilt]), r"stem: found an output with NaN or Inf"),
        (lambda: correct_bias(prepared, method="analytical"), r"'analytical'.*Did you mean 'analytic'"),
        (lambda: correct_bias(prepared, BATCHES, method="analytic"), r"batches for method='analytic'"),
        (lambda: correct_bias(prepared, method="empirical"), r"no batches for method='empirical'"),
        (lambda: correct_bias(prepared, layers=["steem"]), r"'steem'.*Did you mean stem"),
    ]:
        with pytest.raises(qat.QATError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
