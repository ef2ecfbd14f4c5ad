"""The cheaper ways to the same values: one weight gradient for two layers, statistics of a pointwise layer from its input's moments."""

import copy
from itertools import product

import pytest
import torch
from fold_cases import assert_close, batch, gradients, pair, quantizer
from fold_kinds import KINDS
from fold_reference import Quant
from torch import nn

from qat.fold import STRATEGIES
from qat.fold.convolution import gives_gradients, layer_gradients
from qat.fold.statistics import batch_statistics
from qat.fold.two_passes import TwoPasses, moments_are_cheaper, pointwise_statistics

DOUBLE = ["naive", "batch_renorm", "bn_correction"]
PLAIN = [kind for kind in KINDS if gives_gradients(KINDS[kind].build(False))]


@pytest.mark.parametrize("kind", PLAIN)
def test_gradients_of_a_layer(kind):
    conv = KINDS[kind].build(True).double()
    x = batch(kind, 0)
    y = conv(x)
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(y, [x, conv.weight, conv.bias], grad)
    for wanted in product((False, True), repeat=3):
        for got, right, asked in zip(layer_gradients(conv, grad, x, conv.weight, *wanted), expected, wanted):
            assert got is None if not asked else assert_close(got, right, f"{wanted}") is None


@pytest.mark.parametrize("kind", ["pointwise_widening", "pointwise_widening1d"])
def test_moments_of_the_input_give_the_statistics_of_the_output(kind):
    conv, _ = pair(kind)
    x, x_direct = batch(kind, 0), batch(kind, 0)
    found, expected = pointwise_statistics(conv, x), batch_statistics(conv(x_direct))
    assert found[2] == expected[2]
    weights = torch.linspace(0.3, 2, conv.out_channels, dtype=torch.float64)
    for got, wanted, what in zip(found[:2], expected[:2], ("mean", "variance")):
        assert_close(got, wanted, what, 1e-12)
        got, wanted = (
            torch.autograd.grad((v * weights).sum(), [leaf, conv.weight], retain_graph=True) for v, leaf in ((got, x), (wanted, x_direct))
        )
        assert_close(got[0], wanted[0], f"gradient of x through the {what}", 1e-12)
        assert_close(got[1], wanted[1], f"gradient of W through the {what}", 1e-12)


@pytest.mark.parametrize(
    ("conv", "shape", "expected"),
    [
        (nn.Conv2d(4, 8, 1), (64, 4, 5, 5), True),
        (nn.Conv3d(4, 9, 1, stride=2), (64, 4, 2, 3, 3), True),
        (nn.Conv2d(4, 5, 1), (64, 4, 5, 5), True),
        (nn.Conv2d(4, 4, 1), (64, 4, 5, 5), False),
        (nn.Conv2d(4, 8, 1), (2, 4, 2, 3), False),  # 12 positions: products of the weights cost more
        (nn.Conv2d(4, 8, 1, stride=2), (2, 4, 2, 6), False),  # 6 of 24
        (nn.Conv2d(4, 8, 3), (64, 4, 5, 5), False),
        (nn.Conv2d(4, 8, 1, padding=1), (64, 4, 5, 5), False),
        (nn.Conv2d(4, 8, 1, groups=2), (64, 4, 5, 5), False),
        (nn.ConvTranspose2d(4, 8, 1), (64, 4, 5, 5), False),
        (nn.Linear(4, 8), (64, 4), False),
    ],
)
def test_where_moments_are_cheaper(conv, shape, expected):
    assert moments_are_cheaper(conv, torch.zeros(shape)) == expected


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("strategy", DOUBLE)
def test_one_weight_gradient_equals_two(strategy, per_channel, monkeypatch):
    for kind in PLAIN:
        layers = [STRATEGIES[strategy](*pair(kind, bias=True, gamma="one_zero"), quantizer(Quant(4, per_channel))) for _ in range(2)]
        results = []
        for layer in layers:
            x = batch(kind, 0)
            y = layer(x)
            results.append([y, *gradients(y, [x, *layer.parameters()])])
            # The second layer goes the plain way: two layers, each with its gradients.
            monkeypatch.setattr("qat.fold.two_passes.gives_gradients", lambda conv: False)
        monkeypatch.undo()
        for got, wanted in zip(*results):
            assert_close(got, wanted, f"{kind}", 1e-9)


def test_a_clipping_quantizer_has_its_own_gradient():
    """What a frozen range clips has no gradient, so that the shared one would be wrong."""
    layer = STRATEGIES["naive"](*pair("circular"), quantizer(Quant(8, True)))
    assert layer.clips_nothing
    layer.freeze_ranges()
    assert not layer.clips_nothing
    conv, bn = pair("conv2d_grouped")
    clipped = STRATEGIES["naive"](conv, bn, quantizer(Quant(8, True)))
    clipped(batch("conv2d_grouped", 0))
    clipped.freeze_ranges()
    with torch.no_grad():
        conv.weight[0, 0, 0, 0] *= 100
    assert TwoPasses(clipped, batch("conv2d_grouped", 0)).carrier is None
    assert not STRATEGIES["naive"](*pair("circular"), quantizer(Quant(4, True), "mse")).clips_nothing
    assert not STRATEGIES["naive"](*pair("circular"), quantizer(Quant(4, True), "lsq")).clips_nothing


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_second_layer_after_the_freeze(strategy, monkeypatch):
    called = []
    layer = STRATEGIES[strategy](*pair("conv2d_depthwise"), quantizer(Quant(8, True)))
    layer.freeze()
    real = torch.conv2d
    monkeypatch.setattr("torch.nn.functional.conv2d", lambda *args: called.append(1) or real(*args))
    from qat.fold import convolution

    monkeypatch.setitem(convolution._FUNCTIONS, nn.Conv2d, lambda *args: called.append(1) or real(*args))
    layer(batch("conv2d_depthwise", 0))
    assert len(called) == 1


@pytest.mark.parametrize("strategy", DOUBLE)
def test_autocast_keeps_the_types_of_gradients(strategy):
    layer = STRATEGIES[strategy](*(m.float() for m in pair("conv2d_grouped")), quantizer(Quant(8, True)))
    plain = copy.deepcopy(layer)
    x = batch("conv2d_grouped", 0).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    got = gradients(y.float(), [x, *layer.parameters()])
    x_plain = x.detach().clone().requires_grad_()
    wanted = gradients(plain(x_plain), [x_plain, *plain.parameters()])
    for g, w in zip(got, wanted):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, w, rtol=0.1, atol=0.1 * float(w.abs().max()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_derivatives_are_right_or_an_error(strategy):
    """Of a penalty on the gradient of x: where the weights are inside of autograd as the plain layer's, else refused."""
    quant = Quant(8, True)
    layer = STRATEGIES[strategy](*pair("conv2d_grouped"), quantizer(quant))

    def penalty(layer):
        x = batch("conv2d_grouped", 0)
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    if strategy not in ("static", "scale_merge"):
        with pytest.raises(RuntimeError, match="twice"):
            penalty(layer)
        return
    found = penalty(layer)
    plain = STRATEGIES[strategy](*pair("conv2d_grouped"))
    expected = penalty(plain)
    for got, wanted in zip(found, expected):
        # The same up to what rounding the weights to 8 bits changes.
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()) + 1e-12)
