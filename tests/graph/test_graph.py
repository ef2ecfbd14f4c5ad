"""Capture, folding, preparation and the life of a prepared network."""

import copy
import pickle

import pytest
import torch
from small_networks import Branching, Left, Residual, randomize
from torch import nn

import qat
from qat.graph.lifecycle import folded_layers


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_fold_keeps_the_function_and_the_input_model(x):
    model = randomize(Residual()).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    folded = qat.fold(model, (x,))
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert folded.fold_report.folded == [("stem.0", "stem.1"), ("conv1", "bn1"), ("conv2", "bn2")]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("strategy", list(qat.STRATEGIES))
def test_prepared_network_without_quantization_is_the_float_network(strategy, x):
    model = randomize(Residual()).eval()
    prepared = qat.prepare(model, (x,), qat.QATConfig(fold=strategy))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", list(qat.STRATEGIES))
def test_a_training_step_has_finite_gradients_everywhere(strategy, x):
    prepared = qat.prepare(randomize(Residual()).train(), (x,), qat.QATConfig(fold=strategy))
    prepared(x).square().mean().backward()
    gradients = {n: p.grad for n, p in prepared.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values()), [n for n, g in gradients.items() if g is None]


def test_quantizers_stand_after_fused_activations_once_a_tensor(x):
    prepared = qat.prepare(Residual(), (x,))
    names = [n.removeprefix("quantizers.") for n, m in prepared.named_modules() if n.startswith("quantizers.")]
    assert names == ["x", "stem_2", "act", "conv2", "act_1", "mean", "fc"]


def test_left_norms_are_reported_with_their_reason_and_work(x):
    model = randomize(Left())
    folded = qat.fold(model.eval(), (x,))
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    reasons = dict(folded.fold_report.left)
    assert folded.fold_report.folded == []
    for name, words in {
        "at_input": "network's input",
        "after_twice": "called at 2 places",
        "after_read_twice": "also read by",
        "after_relu": "relu",
        "after_cat": "cat",
        "no_statistics": "no running statistics",
        "layer_norm": "depends on each input",
    }.items():
        assert words in reasons[name], reasons
    prepared = qat.prepare(model.train(), (x,))
    prepared(x).sum().backward()


def test_frozen_statistics_survive_train_deepcopy_pickle_and_state_dict(x):
    prepared = qat.prepare(randomize(Residual()).train(), (x,))
    prepared(x)
    qat.freeze_bn(prepared)
    restored = qat.prepare(randomize(Residual()).train(), (x,))
    restored.load_state_dict(prepared.state_dict())
    for network in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), restored):
        qat.freeze_ranges(network)
        network.train()
        before = network.conv1.bn.running_mean.clone()
        trained = network(x)
        assert torch.equal(network.conv1.bn.running_mean, before)
        assert torch.equal(trained, network.eval()(x))
        assert network.conv1.frozen


def test_evaluation_moves_nothing(x):
    prepared = qat.prepare(Residual().train(), (x,))
    prepared(x)
    prepared.eval()
    before = {k: v.clone() for k, v in prepared.state_dict().items() if isinstance(v, torch.Tensor)}
    prepared(x * 3)
    assert all(torch.equal(prepared.state_dict()[k], v) for k, v in before.items())


def test_calibration_names_the_layer_of_a_nan_and_ignores_its_batch(x):
    prepared = qat.prepare(Residual().eval(), (x,))
    with pytest.warns(UserWarning, match=r"quantizers\.x"):
        qat.calibrate(prepared, [x, x * torch.nan, x])
    assert prepared(x).isfinite().all()


def test_reestimated_statistics_are_those_of_all_the_data_at_once(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    prepared = qat.prepare(model.train(), (x,))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    batches = [x, x * 2 + 1]
    qat.reestimate_bn(prepared, batches)
    y = model[0](torch.cat(batches))
    layer = getattr(prepared, "0")
    torch.testing.assert_close(layer.bn.running_mean, y.mean((0, 2, 3)))
    torch.testing.assert_close(layer.bn.running_var, y.var((0, 2, 3)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", [s for s in qat.STRATEGIES if s != "static"])
def test_reestimated_statistics_are_those_of_the_network_that_has_them(strategy, frozen, x):
    float_model = randomize(Residual()).train()
    prepared = qat.prepare(float_model, (x,), qat.QATConfig(fold=strategy))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    if frozen:
        qat.freeze_bn(prepared)
    qat.reestimate_bn(prepared, [x])
    once = {k: v.clone() for k, v in prepared.state_dict().items() if "running" in k}
    qat.reestimate_bn(prepared, [x])
    for key, value in once.items():
        torch.testing.assert_close(prepared.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    for bn in (float_model.stem[1], float_model.bn1, float_model.bn2):
        bn.momentum = 1.0
    float_model(x)
    torch.testing.assert_close(once["conv2.bn.running_mean"], float_model.bn2.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(once["conv2.bn.running_var"], float_model.bn2.running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", [s for s in qat.STRATEGIES if s != "static"])
def test_refold_keeps_the_inference_function(strategy, x):
    prepared = qat.prepare(randomize(Residual()).eval(), (x,))
    qat.calibrate(prepared, [x])
    changed = qat.refold(prepared, strategy)
    torch.testing.assert_close(changed(x), prepared(x), rtol=1e-4, atol=1e-4)
    assert changed.conv1.strategy == strategy and prepared.conv1.strategy == "bn_correction"


def test_control_flow_is_an_error_with_its_source_line(x):
    with pytest.raises(qat.CaptureError, match=r"small_networks\.py:\d+: if x\.sum\(\) > 0"):
        qat.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), Branching()), (x,))


def test_a_skipped_module_is_left_whole(x):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Branching())
    prepared = qat.prepare(model, (x,), qat.QATConfig(overrides={"2": {"skip": True}}))
    assert prepared.fold_report.folded == [("0", "1")]
    prepared(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: qat.QATConfig(fold="bn_corection"), "bn_correction"),
        (lambda x: qat.QATConfig(overrides={"a": {"wait": {}}}), "weight"),
        (lambda x: qat.prepare(Residual(), x), "tuple"),
        (lambda x: qat.prepare(Residual(), (x,), qat.QATConfig(overrides={"conv9": {"skip": True}})), "conv"),
        (lambda x: qat.prepare(qat.prepare(Residual(), (x,)), (x,)), "prepared already"),
        (lambda x: qat.prepare(Residual(), (x,), qat.QATConfig(fold="scale_merge", weight=qat.QuantSpec(per_channel=False))), "stem.0"),
        (lambda x: qat.calibrate(qat.prepare(Residual(), (x,)), []), "no batches"),
        (lambda x: qat.convert(Residual()), "qat.prepare"),
    ],
)
def test_bad_input_is_one_clear_line(call, words, x):
    with pytest.raises(qat.QATError, match=words) as error:
        call(x)
    assert "\n" not in str(error.value)


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def test_functional_dropout_follows_train_and_eval(x):
    prepared = qat.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), FunctionalDropout()).train(), (x,))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    assert (prepared(x) == 0).any()
    assert not (prepared.eval()(x) == 0).any()


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.factor = nn.Parameter(torch.full((3, 1, 1), 0.01))

    def forward(self, x):
        return self.conv(x) * self.factor


def test_a_parameter_in_the_graph_is_quantized_by_its_own_range(x):
    model = LayerScale().eval()
    prepared = qat.prepare(model, (x,))
    qat.calibrate(prepared, [x])
    torch.testing.assert_close(qat.convert(prepared)(x), model(x), rtol=0, atol=0.02 * model(x).abs().max().item())


@pytest.mark.parametrize("copied", [lambda p: p, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), lambda p: qat.refold(p, "naive")])
def test_layers_know_the_quantizer_of_their_input_and_do_not_own_it(copied, x):
    prepared = copied(qat.prepare(Residual(), (x,), qat.QATConfig()))
    inputs = {"stem.0": "x", "conv1": "stem_2", "conv2": "act", "fc": "mean"}
    quantizers = dict(prepared.named_modules())
    for layer, name in inputs.items():
        assert prepared.get_submodule(layer).input_quantizer is quantizers[f"quantizers.{name}"]
    assert not any("input_quantizer" in key for key in prepared.state_dict())


@pytest.mark.parametrize("strategy", list(qat.STRATEGIES))
def test_the_bias_is_rounded_to_what_32_bits_hold_with_a_straight_gradient(strategy, x):
    prepared = qat.prepare(randomize(Residual()).eval(), (x,), qat.QATConfig(fold=strategy, weight=qat.QuantSpec(2)))
    qat.calibrate(prepared, [x])
    layer = prepared.get_submodule("conv1")
    _, scale, bias = layer.integer()
    step = scale * layer.input_quantizer.scale
    at_zero = layer(torch.zeros_like(x[:, :1].expand(-1, 8, -1, -1)))
    expected = ((bias / step).round() * step).view(1, -1, 1, 1).expand_as(at_zero)
    torch.testing.assert_close(at_zero, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(expected[0, :, 0, 0], bias, rtol=1e-4)
    at_zero.sum().backward()
    beta = layer.bias_fold if strategy == "static" else layer.bn.bias
    torch.testing.assert_close(beta.grad, torch.full((8,), float(at_zero.numel() / 8)))


class NoBias(nn.Conv2d):
    """Its forward knows no bias."""

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, None, self.stride, self.padding)


def test_fold_leaves_a_layer_that_could_not_add_the_folded_bias(x):
    model = randomize(nn.Sequential(NoBias(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))).eval()
    folded = qat.fold(model, (x,))
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert folded.fold_report.folded == [("2", "3")]
    ((name, reason),) = folded.fold_report.left
    assert name == "1" and "NoBias" in reason


def test_a_left_norm_in_eval_mode_stays_frozen(x):
    model = randomize(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))).train()
    model[0].eval()
    prepared = qat.prepare(model, (x,))
    before = prepared.get_submodule("0").bn.running_mean.clone()
    prepared.train()(x)
    assert torch.equal(prepared.get_submodule("0").bn.running_mean, before)
    assert prepared.get_submodule("0").frozen and not prepared.get_submodule("4").frozen


class ChangedView(nn.Module):
    def forward(self, x):
        y = x + 1
        y.view(-1).add_(1)
        return y * 2


def test_a_graph_that_computes_something_else_is_refused(x):
    with pytest.raises(qat.CaptureError, match="computes something else"):
        qat.prepare(ChangedView(), (x,))


class InplaceFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        torch.relu_(y)
        z = nn.functional.elu_(y - 0.5)
        return y + z


def test_inplace_functions_are_seen_by_later_readers(x):
    model = InplaceFunctions().eval()
    prepared = qat.prepare(model, (x,))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), model(x))


def test_calibration_without_a_finite_batch_is_an_error(x):
    prepared = qat.prepare(Residual(), (x,))
    with pytest.raises(qat.QATError, match=r"quantizers\.x: found only batches with NaN"):
        qat.calibrate(prepared, [x * torch.nan])
    with pytest.raises(qat.QATError, match="no batches"):
        qat.reestimate_bn(prepared, [])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"stem.*": True}, "a mapping"),
        ({"stem.*": {"weight": 8}}, "a mapping"),
        ({"stem.*": {"skip": "yes"}}, "true or false"),
        ({"stem.*": {"weight": {"range": "minmaxx"}}}, "minmax"),
        ({"*": {"activation": {"per_channel": True}}}, "one scale per activation"),
        ({"*": {"weight": {"symmetric": False}}}, "symmetric"),
        (None, "mapping of patterns"),
    ],
)
def test_a_malformed_override_is_one_clear_line(overrides, words):
    with pytest.raises(qat.ConfigError, match=words):
        qat.QATConfig(overrides=overrides)


def test_the_last_matching_override_wins():
    config = qat.QATConfig(
        overrides={"*": {"skip": True}, "fc": {"skip": False}, "x": {"activation": {"bits": 4}}, "y": {"activation": {"bits": 6}}}
    )
    assert config.skips("stem.0") and not config.skips("fc")
    assert config.activation_for("y", "x")[0].bits == 6


@pytest.mark.parametrize("arguments", [{"weight": qat.QuantSpec(symmetric=False)}, {"fold": "naive", "fold_options": {"r_max": 2.0}}])
def test_a_config_that_could_not_be_shipped_or_built_is_refused(arguments):
    with pytest.raises(qat.ConfigError):
        qat.QATConfig(**arguments)


@pytest.mark.parametrize("where", [0, 1])
def test_a_pair_with_hooks_is_left_with_that_reason(where, x):
    model = randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).eval()
    model[where].register_forward_hook(lambda module, inputs, output: output * 2)
    folded = qat.fold(model, (x,))
    torch.testing.assert_close(folded(x), model(x))
    assert "hooks" in folded.fold_report.left[0][1]


def test_norms_inside_a_module_kept_whole_are_reported(x):
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    report = qat.prepare(nn.Sequential(block, nn.Conv2d(8, 2, 1)), (x,), qat.QATConfig(overrides={"0": {"skip": True}})).fold_report
    assert report.left[0][0] == "0.1" and "kept whole" in report.left[0][1]


@pytest.mark.parametrize("name", ["stem.0", "stem.2", "stem_2"])
def test_an_activation_override_may_name_the_layer_or_its_activation(name, x):
    prepared = qat.prepare(Residual(), (x,), qat.QATConfig(overrides={name: {"activation": {"bits": 4}}}))
    bits = {key: q.spec.bits for key, q in prepared.named_modules() if key.startswith("quantizers.")}
    assert bits["quantizers.stem_2"] == 4 and sum(b == 4 for b in bits.values()) == 1


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.up = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 3, stride=2)

    def forward(self, x):
        return self.up(self.bn(input=self.conv(input=x)), output_size=[14, 14])


def test_calls_by_keyword_and_with_more_arguments(x):
    model = randomize(Keywords()).eval()
    prepared = qat.prepare(model, (x,))
    assert prepared.fold_report.folded == [("conv", "bn")] and "up: stays float" in prepared.fold_report.notes[0]
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), model(x))


class NeverDrops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=False)


def test_a_dropout_with_a_constant_mode_keeps_it(x):
    graph = qat.fold(NeverDrops().train(), (x,))
    assert torch.equal(graph.train()(x), x)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (lambda x: x, "a tensor of shape"),
        (lambda x: [(x, torch.zeros(4))], "2 items for a network of 1 input"),
        (lambda x: [[x, x]], "2 items"),
    ],
)
def test_batches_of_another_form_are_one_clear_line(batches, words, x):
    prepared = qat.prepare(Residual(), (x,))
    for use in (qat.calibrate, qat.reestimate_bn):
        with pytest.raises(qat.QATError, match=words):
            use(prepared, batches(x))


@pytest.mark.parametrize("first", [[nn.ReLU()], [nn.Sigmoid(), nn.ReLU()]], ids=["input", "activation"])
def test_an_activation_of_a_quantized_tensor_has_a_grid_and_a_name_of_its_own(first, x):
    prepared = qat.prepare(nn.Sequential(*first, nn.Conv2d(3, 4, 1)), (x,), qat.QATConfig(overrides={"0": {"activation": {"bits": 4}}}))
    bits = [q.spec.bits for name, q in prepared.named_modules() if name.startswith("quantizers.")]
    assert bits == [8, 4, *[8] * len(first)]


def outlier_network():
    """The depthwise layer has one filter of 60 times the others' size, whose output hardly moves: its variance is far below eps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    randomize(model)
    model[1].bias.data[0], model[1].weight.data[0] = -50.0, 0.1
    model[3].weight.data[0] *= 60
    model[4].weight.data[0] = 1.0
    return model


@pytest.mark.parametrize("per_channel", [False, True])
def test_weight_ranges_are_chosen_by_the_output(per_channel):
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    model = outlier_network().eval()
    prepared = qat.prepare(model.train(), (x,), qat.QATConfig(weight=qat.QuantSpec(per_channel=per_channel), weight_range="lsq"))
    qat.calibrate(prepared, [x])
    qat.set_fake_quant(prepared, weights=False)
    before = {name: b.clone() for name, b in prepared.named_buffers() if "running" in name}
    chosen = qat.search_weight_ranges(prepared, [x])
    assert list(chosen) == ["0", "3", "8"] and prepared.training
    assert not any(layer.weight_quantizer.enabled for layer in folded_layers(prepared).values())
    assert all(torch.equal(before[name], b) for name, b in prepared.named_buffers() if name in before)
    qat.set_fake_quant(prepared)
    prepared.eval(), model.eval()

    def error():
        return float((prepared(x) - model(x)).detach().square().mean())

    found = error()
    layer = prepared.get_submodule("3")
    if per_channel:
        assert chosen["3"] > 0.5
    else:
        assert chosen["3"] < 0.2
        layer.weight_quantizer.scale.data.mul_(1 / chosen["3"])
        assert error() > 5 * found


class Sloped(nn.Module):
    """A constant that the graph reads, which gets a quantizer without a running range."""

    def __init__(self):
        super().__init__()
        self.conv, self.slope = nn.Conv2d(3, 4, 3), nn.Parameter(torch.full((4,), 0.25))

    def forward(self, x):
        return torch.prelu(self.conv(x), self.slope)


def test_weight_ranges_are_chosen_beside_constants():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    prepared = qat.prepare(Sloped(), (x,), qat.QATConfig(fold="static", weight_range="lsq"))
    with pytest.raises(qat.QATError, match=r"quantizers\.x: found no range yet"):
        qat.search_weight_ranges(prepared, [x])
    qat.calibrate(prepared, [x])
    assert list(qat.search_weight_ranges(prepared, [x])) == ["conv"]


def test_a_range_that_follows_the_weights_has_no_start_to_choose():
    x = torch.randn(4, 3, 8, 8)
    prepared = qat.prepare(outlier_network(), (x,))
    qat.calibrate(prepared, [x])
    with pytest.raises(qat.QATError, match="weight_range='lsq'"):
        qat.search_weight_ranges(prepared, [x])
    learned = qat.prepare(outlier_network(), (x,), qat.QATConfig(weight_range="lsq", overrides={"3": {"weight": {"range": "minmax"}}}))
    qat.calibrate(learned, [x])
    with pytest.raises(qat.QATError, match="no batches"):
        qat.search_weight_ranges(learned, [])
    assert list(qat.search_weight_ranges(learned, [x])) == ["0", "8"]


def test_what_is_no_prepared_network_is_said(x):
    with pytest.raises(qat.QATError, match="freeze_bn: found Residual"):
        qat.freeze_bn(Residual())
    prepared = qat.prepare(Residual(), (x,))
    qat.calibrate(prepared, [x])
    with pytest.raises(qat.QATError, match="Give it the network that was compiled"):
        qat.convert(torch.compile(prepared))
    with pytest.raises(qat.QATError, match=r"found a QuantSpec as weight_quantizer.*FakeQuantizer"):
        qat.STRATEGIES["static"](nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), qat.QuantSpec())
