"""Statistics, weights and batches of odd values, through a whole prepared network. docs/robustness.md lists them."""

import copy

import pytest
import torch
from small_networks import Residual, randomize
from torch import nn

import qat
from qat.deploy.verify import verify_integers, verify_trained
from qat.graph.lifecycle import activation_quantizers

EXACT = ("naive", "bn_correction", "single_pass", "scale_merge")
X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
PER_TENSOR = [name for name in qat.STRATEGIES if name != "scale_merge"]


def residual():
    torch.manual_seed(0)
    return randomize(Residual())


def prepared_network(model, strategy, x=X, **config):
    return qat.prepare(model, (x,), qat.QATConfig(fold=strategy, **config))


def one_dead_channel():
    """The variance of one channel is almost 0, so that its filter folds to hundreds of times the others'."""
    torch.manual_seed(0)
    model = randomize(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    with torch.no_grad():
        model[0].weight[2] = 0.1
        nn.init.ones_(model[1].weight)
        model[1].running_var.copy_(torch.tensor([400.0, 400.0, 1e-14, 1.0, 1.0, 1.0]))
    return model.eval()


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_variance_of_almost_nothing_leaves_the_live_channels_their_bits(strategy):
    model = one_dead_channel()
    prepared = prepared_network(model, strategy)
    qat.calibrate(prepared, [X])
    layer = prepared.get_submodule("0")
    quantized, exact = (pair[0].detach() for pair in (layer.quantized(), layer.folded()))
    noise, signal = (quantized - exact).square().flatten(1).sum(1), exact.square().flatten(1).sum(1)
    live = [0, 1, 3, 4, 5]
    assert bool((10 * (signal / noise).log10()[live] >= 40).all())
    converted = qat.convert(prepared)
    assert bool(prepared(X).isfinite().all()) and verify_trained(prepared, converted, [X], stepwise=True).max_lsb <= 1
    prepared.train()(X).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in prepared.parameters())


@pytest.mark.parametrize("strategy", PER_TENSOR)
def test_one_scale_that_rounds_live_channels_to_nothing_is_said_with_layer_and_channels(strategy):
    prepared = prepared_network(one_dead_channel(), strategy, weight=qat.QuantSpec(per_channel=False))
    said = r"^0: its one weight scale rounds all weights of channels \[0, 1\] to 0; use QuantSpec\(per_channel=True\)"
    with pytest.warns(UserWarning, match=said) as calibrating:
        qat.calibrate(prepared, [X])
    assert len(calibrating) == 1
    assert not prepared.get_submodule("0").quantized()[0][:2].any()
    with pytest.warns(UserWarning, match=said) as converting:
        converted = qat.convert(prepared)
    assert len(converting) == 1
    assert [note for note in converted.fold_report.notes if note.startswith("0: its one weight scale")]
    assert not prepared.fold_report.notes
    prepared.train()(X).sum().backward()  # says nothing


@pytest.mark.parametrize("strategy", PER_TENSOR)
def test_channels_that_are_dead_of_themselves_are_not_said(strategy):
    model = residual().eval()
    with torch.no_grad():
        model.bn2.weight[:3] = torch.tensor([0.0, 1e-9, -1e-9])
        model.conv1.weight[1] = 0.0
    prepared = prepared_network(model, strategy, weight=qat.QuantSpec(per_channel=False))
    qat.calibrate(prepared, [X])
    qat.convert(prepared)


def test_a_learned_scale_that_is_yet_to_be_searched_is_said_at_conversion_only():
    prepared = prepared_network(one_dead_channel(), "bn_correction", weight=qat.QuantSpec(bits=4, per_channel=False), weight_range="lsq")
    layer = prepared.get_submodule("0")
    layer.weight_quantizer.scale.data.fill_(float(layer.folded()[0].detach().abs().max()) / 7)
    qat.calibrate(prepared, [X])
    with pytest.warns(UserWarning, match=r"channels \[0, 1, 3, 4, 5\]"):
        qat.convert(prepared)


CONSTANTS = {
    "zero": lambda x: x * 0,
    "constant": lambda x: x * 0 + 0.7,
    "one constant channel": lambda x: x * torch.tensor([1, 0, 1]).view(3, 1, 1),
}


@pytest.mark.parametrize("kind", CONSTANTS)
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_batch_without_variance(strategy, kind):
    torch.manual_seed(0)
    model = randomize(nn.Sequential(nn.Conv2d(3, 6, 1, groups=3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)))
    model, x = model.double().train(), CONSTANTS[kind](X.double())
    prepared = prepared_network(model, strategy, x)
    qat.set_fake_quant(prepared, weights=False, activations=False)
    if strategy in EXACT:
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(prepared.get_submodule("0").bn.running_var, model[1].running_var, rtol=1e-9, atol=1e-12)
    qat.set_fake_quant(prepared)
    qat.calibrate(prepared, [x])
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    for _ in range(2):
        loss = prepared.train()(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in prepared.parameters())
        optimizer.step()
        qat.freeze_bn(prepared)
    assert bool(prepared.eval()(x).isfinite().all())
    for quantizer in activation_quantizers(prepared).values():
        assert bool(quantizer.scale.isfinite().all()) and bool((quantizer.scale > 0).all())
        assert quantizer.spec.qmin <= int(quantizer.zero_point) <= quantizer.spec.qmax


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("range", ["ema", "minmax", "percentile", "mse", "lsq"])
def test_a_calibration_batch_that_is_no_number_changes_no_range(range, bad):
    poisoned = X.clone()
    poisoned[3, 1, 2, 2] = bad
    found = []
    for batches in ([X, X * 0.5], [X, poisoned, X * 0.5]):
        prepared = prepared_network(residual().eval(), "bn_correction", activation_range=range)
        if len(batches) == 3:
            with pytest.warns(UserWarning, match=r"NaN or Inf reached quantizers\.x, quantizers\.stem_2.*ignored"):
                qat.calibrate(prepared, batches)
        else:
            qat.calibrate(prepared, batches)
        found.append({name: (q.scale.clone(), q.zero_point.clone()) for name, q in activation_quantizers(prepared).items()})
    assert all(torch.equal(a, b) for name in found[0] for a, b in zip(found[0][name], found[1][name]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_weight_that_is_no_number_is_found_at_calibration(strategy, bad):
    model = residual().eval()
    model.conv1.weight.data[2, 0, 1, 1] = bad
    prepared = prepared_network(model, strategy)
    with pytest.raises(qat.QATError, match=r"^quantizers\.act: found only batches with NaN or Inf"):
        qat.calibrate(prepared, [X])


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_negative_gamma_in_every_layer(strategy):
    model = residual().eval()
    for norm in (model.stem[1], model.bn1, model.bn2):
        norm.weight.data = -norm.weight.data.abs() - 0.1
    prepared = prepared_network(model, strategy)
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(X), model(X), rtol=1e-5, atol=1e-5)
    qat.set_fake_quant(prepared)
    qat.calibrate(prepared, [X])
    converted = qat.convert(prepared)
    for name in ("stem.0", "conv1", "conv2"):
        codes, scale, _ = prepared.get_submodule(name).integer()
        assert bool((scale > 0).all()) and int(codes.abs().max()) == 127
    assert verify_integers(converted, [X], stepwise=True).max_lsb <= 1


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_autocast_keeps_every_state_in_float32(strategy):
    prepared = prepared_network(residual().train(), strategy)
    wide = copy.deepcopy(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        y = prepared(X)
    y.float().square().mean().backward()
    assert all(b.dtype in (torch.float32, torch.int32, torch.int64) for b in prepared.buffers())
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in prepared.parameters())
    expected = wide(X)
    assert (y.float() - expected).abs().max() < 0.1 * expected.abs().max()
    for (name, narrow), b in zip(prepared.named_buffers(), wide.buffers()):
        if "running" in name:
            torch.testing.assert_close(narrow, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_calibration_and_evaluation_under_inference_mode_leave_training_as_it_is(strategy):
    losses = []
    for mode in (torch.inference_mode, torch.no_grad):
        prepared = prepared_network(residual().train(), strategy, weight_range="lsq", activation_range="lsq")
        with mode():
            qat.calibrate(prepared, [X])
            prepared.eval()(X)
        optimizer = torch.optim.SGD(prepared.train().parameters(), 0.01)
        for _ in range(2):
            loss = prepared(X).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with mode():
                prepared.eval()(X)
            prepared.train()
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_float_checkpoint_goes_into_the_float_model(strategy):
    model = residual()
    prepared = prepared_network(Residual(), strategy)
    for strict in (True, False):
        with pytest.raises(qat.QATError, match=r"a float network's state.*qat\.load_float") as error:
            prepared.load_state_dict(model.state_dict(), strict=strict)
        assert "\n" not in str(error.value)
    other = prepared_network(model, strategy)
    assert prepared.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(prepared.eval()(X), other.eval()(X))
