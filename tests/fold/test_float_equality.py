"""Without quantization the exact strategies are conv -> BatchNorm: values, every gradient, running statistics, also in odd corners."""

import copy
from itertools import product

import pytest
import torch
from fold_cases import FLOAT_EQUAL, GAMMAS, NORMS, assert_close, batch, gradients, pair, quantizer
from fold_kinds import KINDS
from fold_reference import Quant
from timm.layers import BatchNormAct2d
from torch import nn
from torchvision.ops.misc import FrozenBatchNorm2d

from qat.fold import STRATEGIES


def compare(layer, model, kind, steps=3, tolerance=1e-10):
    conv, bn = model
    for step in range(steps):
        x, x_float = batch(kind, step), batch(kind, step)
        y, expected = layer(x), model(x_float)
        assert_close(y, expected, f"{kind} step {step}", tolerance)
        got = gradients(y, [x, *layer.conv.parameters(), *layer.bn.parameters()])
        wanted = gradients(expected, [x_float, *conv.parameters(), *bn.parameters()])
        for index, (g, w) in enumerate(zip(got, wanted)):
            assert_close(g, w, f"{kind} gradient {index}", tolerance)
        for key, value in bn.state_dict().items():
            assert_close(layer.bn.state_dict()[key], value, f"{kind} {key}", tolerance)


@pytest.mark.parametrize("strategy", FLOAT_EQUAL)
def test_equals_the_float_model(strategy):
    for index, (kind, gamma, bias) in enumerate(product(KINDS, GAMMAS, (False, True))):
        eps, momentum = NORMS[index % 3]
        model = nn.Sequential(*pair(kind, bias, gamma, eps, momentum, seed=index))
        layer = STRATEGIES[strategy](*copy.deepcopy(model))
        compare(layer, model, kind)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eval_equals_the_float_model(strategy):
    for kind, gamma, bias in product(KINDS, GAMMAS, (False, True)):
        model = nn.Sequential(*pair(kind, bias, gamma)).eval()
        x = batch(kind, 1)
        assert_close(STRATEGIES[strategy](*copy.deepcopy(model)).eval()(x), model(x), kind)


@pytest.mark.parametrize("strategy", FLOAT_EQUAL)
@pytest.mark.parametrize("quant", [Quant(), Quant(8, True)], ids=["float", "w8"])
def test_a_layer_of_zero_gammas(strategy, quant):
    conv, bn = pair("conv2d_grouped")
    nn.init.zeros_(bn.weight)
    model = nn.Sequential(conv, bn)
    layer = STRATEGIES[strategy](*copy.deepcopy(model), quantizer(quant))
    x, x_float = batch("conv2d_grouped", 0), batch("conv2d_grouped", 0)
    y, expected = layer(x), model(x_float)
    assert_close(y, expected, "output")
    got = gradients(y, [x, layer.conv.weight, layer.bn.bias, layer.bn.weight])
    wanted = gradients(expected, [x_float, conv.weight, bn.bias, bn.weight])
    assert all(bool(g.isfinite().all()) for g in got)
    assert_close(got[2], wanted[2], "gradient of beta")
    if quant.bits is None or strategy == "single_pass":
        assert_close(got[3], wanted[3], "gradient of gamma")
    assert bool(got[3].abs().gt(0).all())


@pytest.mark.parametrize("strategy", FLOAT_EQUAL)
def test_tiny_statistics_stay_finite(strategy):
    conv, bn = pair("conv2d_depthwise")
    bn.running_var.fill_(1e-14)
    conv, bn = conv.float(), bn.float()
    layer = STRATEGIES[strategy](conv, bn, quantizer(Quant(8, True)))
    x = batch("conv2d_depthwise", 0).detach().float()
    y = layer(x)
    y.square().sum().backward()
    assert bool(y.isfinite().all()) and all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert bool(layer.eval()(x).isfinite().all())


@pytest.mark.parametrize("strategy", FLOAT_EQUAL)
def test_tiny_gammas_stay_finite(strategy):
    conv, bn = (m.float() for m in pair("conv2d_grouped"))
    with torch.no_grad():
        bn.weight.copy_(torch.tensor([1e-45, 1e-39, 1e-30, 1e-10, 1e-5, 1.0]))
    layer = STRATEGIES[strategy](conv, bn, quantizer(Quant(4, True)))
    y = layer(batch("conv2d_grouped", 0).detach().float())
    y.square().sum().backward()
    assert bool(y.isfinite().all()) and all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    codes, scale, _ = layer.eval().integer()
    assert bool((scale > 0).all()) and int(codes.abs().max()) <= 7


@pytest.mark.parametrize("strategy", FLOAT_EQUAL)
def test_batch_norm_without_gamma_and_beta(strategy):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=True, padding_mode="circular"), nn.BatchNorm2d(4, affine=False)).double()
    layer = STRATEGIES[strategy](*copy.deepcopy(model))
    compare(layer, model, "circular")
    assert_close(layer.eval()(batch("circular", 1)), model.eval()(batch("circular", 1)), "eval")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_activation_of_the_norm_stays(strategy):
    conv, _ = pair("timm_same")
    bn = BatchNormAct2d(4, act_layer=nn.ReLU6).double()
    bn.running_var.uniform_(0.5, 2)
    model = nn.Sequential(conv, bn)
    layer = STRATEGIES[strategy](*copy.deepcopy(model))
    if strategy in FLOAT_EQUAL:
        compare(layer, model, "timm_same")
    layer = STRATEGIES[strategy](*copy.deepcopy(model)).eval()
    y = layer(batch("timm_same", 2))
    assert_close(y, model.eval()(batch("timm_same", 2)), "eval")
    assert bool((y == 0).any())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_batch_norm_folds_and_rests(strategy):
    conv, live = pair("circular")
    bn = FrozenBatchNorm2d(4).double()
    bn.load_state_dict(live.state_dict())
    layer = STRATEGIES[strategy](copy.deepcopy(conv), copy.deepcopy(bn))
    layer.unfreeze()
    layer.start_pooling()
    assert_close(layer(batch("circular", 0)), bn(conv(batch("circular", 0))), "training")
    layer.finish_pooling()
    assert layer.bn is None or torch.equal(layer.bn.running_mean, bn.running_mean)
    assert layer.frozen and {name for name, _ in layer.named_parameters()} <= {"conv.weight", "weight_fold", "bias_fold"}


@pytest.mark.parametrize("strategy", FLOAT_EQUAL)
def test_sync_batch_norm_in_one_process(strategy):
    conv, bn = pair("circular")
    sync = nn.SyncBatchNorm(4).double()
    sync.load_state_dict(bn.state_dict())
    compare(STRATEGIES[strategy](copy.deepcopy(conv), sync), nn.Sequential(conv, bn), "circular")
