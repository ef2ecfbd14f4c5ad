"""Gate: gammas of 0, almost 0 and of both signs, in single channels and whole layers."""

import copy

import pytest
import torch
from gate_network import WEIGHTS, gate_network, images, settings
from torch import nn

import qat
from qat.deploy.verify import verify_integers, verify_trained

# Several values take turns over the channels of every layer; one is that of all channels of one layer.
GAMMAS = {"mixed": (0.0, 1e-6, -1e-6, 1.0, -1.0), "zero": (0.0,), "tiny": (1e-6,), "negative tiny": (-1e-6,), "negative": (-1.0,)}
EXACT = ("naive", "bn_correction", "single_pass", "scale_merge")
X = images(3, 32)


def float_model(gammas, dtype=torch.float32):
    model = gate_network(dtype)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms if len(GAMMAS[gammas]) > 1 else norms[1:2]:
        values = torch.tensor(GAMMAS[gammas], dtype=dtype)
        norm.weight.data.copy_(values.repeat(norm.num_features)[: norm.num_features])
    return model


def loss_of(network, x):
    y = network(x)
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin() + 0.1 * y.square()).sum()


@pytest.mark.parametrize("gammas", GAMMAS)
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_without_quantization_it_is_the_float_model(strategy, gammas):
    model, x = float_model(gammas, torch.float64), images(3, 16, torch.float64)
    prepared = qat.prepare(model, (x,), qat.QATConfig(fold=strategy))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(copy.deepcopy(prepared).eval()(x), copy.deepcopy(model).eval()(x), rtol=1e-9, atol=1e-9)
    loss, expected = loss_of(prepared, x), loss_of(model, x)
    loss.backward(), expected.backward()
    assert all(bool(p.grad.isfinite().all()) for p in prepared.parameters())
    if strategy in EXACT:
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        wanted = dict(model.named_parameters())
        for conv, norm in prepared.fold_report.folded:
            layer = prepared.get_submodule(conv)
            for key, ours in (("weight", layer.bn.weight), ("bias", layer.bn.bias)):
                torch.testing.assert_close(ours.grad, wanted[f"{norm}.{key}"].grad, rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(layer.conv.weight.grad, wanted[f"{conv}.weight"].grad, rtol=1e-8, atol=1e-9)


def quantized_cases():
    """Mixed gammas in every setting; whole layers with the settings in turn."""
    every = settings()
    for index, setting in enumerate(every):
        yield *setting, "mixed"
        yield *setting, list(GAMMAS)[1 + index % 4]


# What calibration and conversion say of filters of almost nothing.
@pytest.mark.filterwarnings("ignore:.*the weight scale was raised", "ignore:.*rounds all weights of channels")
@pytest.mark.parametrize(("strategy", "grid", "weight_range", "gammas"), [*quantized_cases()])
def test_quantized_it_trains_freezes_and_converts(strategy, grid, weight_range, gammas):
    prepared = qat.prepare(float_model(gammas), (X,), qat.QATConfig(fold=strategy, weight=WEIGHTS[grid], weight_range=weight_range))
    qat.calibrate(prepared, [X])
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for step in range(2):
        loss = loss_of(prepared, images(step, 16)) / 80
        optimizer.zero_grad()
        loss.backward()
        assert bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in prepared.parameters() if p.grad is not None)
        if strategy != "static" and grid == "w8_per_channel":  # one scale for the tensor rounds filters of almost nothing to 0
            gamma = prepared.get_submodule("depthwise.0").bn.weight
            assert bool(gamma.grad.abs().gt(0).any()), "gamma is stuck"
        optimizer.step()
        qat.freeze_bn(prepared)
    prepared.eval()
    converted = qat.convert(prepared)
    for report in (verify_trained(prepared, converted, [X], stepwise=True), verify_integers(converted, [X], stepwise=True)):
        assert report.max_lsb <= 1 and report.identical >= 0.999, str(report)
