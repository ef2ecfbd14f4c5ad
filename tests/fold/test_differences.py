"""Where strategies must differ they do: what each quantizes with, and whose statistics it keeps."""

import copy

import pytest
import torch
from fold_cases import BATCH_STRATEGIES, QUANTS, assert_close, batch, layer_and_reference, pair, quantizer
from fold_reference import Quant
from torch import nn

from qat.errors import QATError
from qat.fold import STRATEGIES
from qat.fold.statistics import batch_statistics


class Recording(nn.Module):
    """Stands in for a layer's weight quantizer and keeps what it returned."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, weight):
        self.seen.append(self.inner(weight).detach())
        return self.seen[-1] + (weight - weight.detach())


def quantized_weights(strategy, quant):
    """Of two batches, with the running statistics at rest."""
    recording = Recording(quantizer(quant))
    conv, bn = pair("conv2d_grouped", momentum=0.0)
    layer = STRATEGIES[strategy](conv, bn, recording)
    for seed in range(2):
        layer(batch("conv2d_grouped", seed))
    return recording.seen


def integers(rounded, quant):
    """Codes up to the scale: each value over the largest of its channel or tensor."""
    size = rounded.flatten(1).abs().amax(1).view(-1, 1, 1, 1) if quant.per_channel else rounded.abs().max()
    return rounded / size


def test_naive_jitters_with_one_scale_and_not_with_a_scale_per_channel():
    first, second = (integers(w, Quant(4, False)) for w in quantized_weights("naive", Quant(4, False)))
    assert not torch.allclose(first, second)
    first, second = (integers(w, Quant(4, True)) for w in quantized_weights("naive", Quant(4, True)))
    assert_close(first, second, "per channel")


@pytest.mark.parametrize("quant", [Quant(4, False), Quant(4, True)], ids=["tensor", "channel"])
def test_bn_correction_does_not_jitter(quant):
    first, second = quantized_weights("bn_correction", quant)
    assert torch.equal(first, second)


def test_strategies_differ_pairwise_at_four_bits():
    names = [name for name in BATCH_STRATEGIES if name != "scale_merge"]
    outputs = {}
    for name in names:
        # Inside its clips batch_renorm has the values of moving_average.
        options = {"r_max": 1.1, "d_max": 0.2} if name == "batch_renorm" else {}
        layer = STRATEGIES[name](*pair("conv2d_grouped"), quantizer(QUANTS["w4_per_tensor"]), **options)
        outputs[name] = layer(batch("conv2d_grouped", 0)).detach()
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert (outputs[one] - outputs[other]).abs().max() > 1e-3, (one, other)


@pytest.mark.parametrize(
    "strategy, source",
    [
        ("naive", "float"),
        ("moving_average", "float"),
        ("batch_renorm", "float"),
        ("bn_correction", "float"),
        ("single_pass", "quantized"),
        ("scale_merge", "quantized"),
    ],
)
def test_whose_statistics_are_kept(strategy, source):
    quant = Quant(3, strategy == "scale_merge")
    conv, bn = pair("conv2d_grouped", bias=True, momentum=1.0)
    layer = STRATEGIES[strategy](conv, bn, quantizer(quant))
    x = batch("conv2d_grouped", 0)
    float_mean, float_var, n = batch_statistics(conv(x))
    if strategy == "scale_merge":
        weight = layer.weight_quantizer(conv.weight)
    else:
        s = (bn.weight / (bn.running_var + bn.eps).sqrt()).view(-1, 1, 1, 1)
        weight = layer.weight_quantizer(s * conv.weight) / s
    quantized_mean, quantized_var, _ = batch_statistics(torch.nn.functional.conv2d(x, weight, conv.bias, groups=2))
    assert (quantized_var - float_var).abs().max() > 1e-3
    layer(x)
    mean, var = (float_mean, float_var) if source == "float" else (quantized_mean, quantized_var)
    assert_close(bn.running_mean, mean.detach(), "mean")
    assert_close(bn.running_var, var.detach() * n / (n - 1), "variance")


def test_batch_renorm_with_closed_clips_is_naive_and_with_open_ones_the_inference_graph():
    x = batch("circular", 0)
    closed = STRATEGIES["batch_renorm"](*pair("circular"), quantizer(Quant(4, False)), r_max=1.0, d_max=0.0)
    assert_close(closed(x), STRATEGIES["naive"](*pair("circular"), quantizer(Quant(4, False)))(x), "closed")
    opened = STRATEGIES["batch_renorm"](*pair("circular"), quantizer(Quant(4, False)), r_max=1e6, d_max=1e6)
    assert_close(opened(x), STRATEGIES["frozen"](*pair("circular"), quantizer(Quant(4, False)))(x), "open")


def test_batch_renorm_clips_as_the_equations_do():
    layer, reference = layer_and_reference("batch_renorm", "conv2d_grouped", Quant(4, False), bias=True, gamma="negative")
    layer.r_max, layer.d_max = 1.2, 0.3
    for seed in range(2):
        x = batch("conv2d_grouped", seed)
        assert_close(layer(x), reference.batch_renorm(x, 1.2, 0.3), f"step {seed}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_switched_off_quantizer_is_the_identity(strategy):
    quant = Quant(4, True)
    off = STRATEGIES[strategy](*pair("transposed2d_grouped"), quantizer(quant))
    off.weight_quantizer.enabled = False
    plain = STRATEGIES[strategy](*pair("transposed2d_grouped"), None)
    for layer in (off, plain):
        layer.train()
    x = batch("transposed2d_grouped", 0)
    assert_close(off(x), plain(x), "training")
    assert_close(off.eval()(x), plain.eval()(x), "eval")


def test_static_leaves_the_users_layer_alone():
    conv, bn = pair("circular", bias=True)
    before = copy.deepcopy((conv.state_dict(), bn.state_dict()))
    layer = STRATEGIES["static"](conv, bn, quantizer(Quant(8, True)))
    layer(batch("circular", 0)).sum().backward()
    with torch.no_grad():
        layer.weight_fold.add_(1), layer.bias_fold.add_(1)
    for module, kept in zip((conv, bn), before):
        assert all(torch.equal(value, kept[key]) for key, value in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_static_without_a_batch_norm_is_the_layer_itself(bias):
    linear = nn.Linear(5, 4, bias=bias)
    layer = STRATEGIES["static"](linear, None)
    x = torch.randn(2, 3, 5)
    assert torch.equal(layer(x), linear(x)) if bias else torch.allclose(layer(x), linear(x))
    assert {name for name, _ in layer.named_parameters()} == {"weight_fold"} | ({"bias_fold"} if bias else set())
    assert layer.folded()[1].shape == (4,)


@pytest.mark.parametrize("kind", ["circular", "conv2d_grouped", "transposed2d_grouped", "linear"])
@pytest.mark.parametrize("gamma", ["negative", "one_zero"])
def test_moving_average_of_the_quantized_layer(kind, gamma):
    """Without a quantizer the statistics are those of the float layer, where gamma shows them; with one those of the quantized layer."""
    for quant in (Quant(), Quant(4, False)):
        options = {"bias": True, "gamma": gamma}
        own = STRATEGIES["moving_average"](*pair(kind, **options), quantizer(quant), statistics="quantized")
        other = STRATEGIES["moving_average"](*pair(kind, **options), quantizer(quant))
        resting, live = own.sigma.clone(), own.gamma != 0
        expected = STRATEGIES["single_pass"](*pair(kind, **options), quantizer(quant)) if quant.bits else other
        assert_close(own(batch(kind, 0)), other(batch(kind, 0)), "output")
        if quant.bits:
            expected(batch(kind, 0))
        for key in ("running_mean", "running_var"):
            assert_close(getattr(own.bn, key)[live], getattr(expected.bn, key)[live], key)
        if gamma == "one_zero":
            assert_close(own.sigma[~live], resting[~live], "statistics that nothing tells")
        if quant.bits:
            assert not torch.allclose(own.bn.running_var[live], other.bn.running_var[live], rtol=1e-4)


def test_moving_average_knows_its_sources():
    with pytest.raises(QATError, match="quantized"):
        STRATEGIES["moving_average"](*pair("circular"), statistics="quantised")
