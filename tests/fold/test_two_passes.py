"""The cheaper ways to the same values: one weight gradient for two layers, weights folded outside of autograd."""

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
from qat.fold.two_passes import TwoPasses
from qat.quant import FakeQuantizer, QuantSpec

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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_do_not_depend_on_who_else_trains(strategy, frozen):
    """Each parameter's gradient is the same where the others, or x, need none."""

    def found(trained, of_x):
        layer = STRATEGIES[strategy](*pair("conv2d_grouped", bias=True), quantizer(Quant(4, True)))
        if frozen:
            layer.freeze()
        for name, p in layer.named_parameters():
            p.requires_grad_(name in trained)
        x = batch("conv2d_grouped", 0).detach().requires_grad_(of_x)
        (layer(x) ** 3).sum().backward()
        return {name: p.grad for name, p in layer.named_parameters()}

    every = [name for name, _ in STRATEGIES[strategy](*pair("conv2d_grouped", bias=True)).named_parameters()]
    together = found(every, True)
    for name in every:
        for of_x in (False, True):
            alone = found([name], of_x)
            assert [n for n, grad in alone.items() if grad is not None] == [n for n in [name] if together[n] is not None]
            if together[name] is not None:
                assert_close(alone[name], together[name], name)


@pytest.mark.parametrize("strategy", DOUBLE)
def test_one_weight_gradient_is_computed(strategy, monkeypatch):
    asked = []
    real = layer_gradients
    spied = lambda *args: asked.append(args[5]) or real(*args)  # noqa: E731
    monkeypatch.setattr("qat.fold.two_passes.layer_gradients", spied)
    layer = STRATEGIES[strategy](*pair("conv2d_grouped"), quantizer(Quant(8, True)))
    layer(batch("conv2d_grouped", 0)).square().sum().backward()
    assert sum(asked) == 1 and len(asked) == 3


def test_float16_keeps_its_own_gradients():
    """f du may be beyond float16 where du is not."""
    layer = STRATEGIES["bn_correction"](*(m.float() for m in pair("conv2d_grouped")), quantizer(Quant(8, True)))
    x = batch("conv2d_grouped", 0).detach().float()
    assert TwoPasses(layer, x).carrier is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert TwoPasses(layer, x).carrier is not None
    with torch.autocast("cpu", torch.float16):
        assert TwoPasses(layer, x).carrier is None


class Own(FakeQuantizer):
    def forward(self, x):
        return super().forward(x) + 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_quantizer_of_the_users_own(strategy):
    own, plain = (STRATEGIES[strategy](*pair("conv2d_grouped"), kind(QuantSpec(4))) for kind in (Own, FakeQuantizer))
    x, other = batch("conv2d_grouped", 0), batch("conv2d_grouped", 0)
    y, expected = own(x), plain(other)
    assert_close(y, expected, "output")
    for got, wanted in zip(gradients(y, [x, *own.parameters()]), gradients(expected, [other, *plain.parameters()])):
        assert_close(got, wanted, "gradient", 1e-9)
