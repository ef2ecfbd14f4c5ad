"""Every strategy on every kind of layer against the independent float64 reference: values, gradients, statistics, frozen and eval."""

from itertools import product

import pytest
import torch
from fold_cases import BATCH_STRATEGIES, GAMMAS, NORMS, QUANTS, assert_close, batch, gradients, layer_and_reference
from fold_kinds import KINDS

from qat.fold import STRATEGIES

ALL = [*BATCH_STRATEGIES, "frozen"]


def settings(strategy):
    """Every gamma with every quantizer and bias; eps and momentum take turns, so that each meets each of them."""
    for index, (gamma, quant, bias) in enumerate(product(GAMMAS, QUANTS, (False, True))):
        if strategy == "scale_merge" and quant == "w4_per_tensor":
            continue
        eps, momentum = NORMS[(index + index // 3) % 3]
        yield gamma, quant, {"bias": bias, "gamma": gamma, "eps": eps, "momentum": momentum, "seed": index}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ALL)
def test_training_equals_the_equations(strategy, kind):
    for gamma, quant, options in settings(strategy):
        layer, reference = layer_and_reference(strategy, kind, QUANTS[quant], **options)
        for step in range(2):
            x, x_reference = batch(kind, step), batch(kind, step)
            y, expected = layer(x), getattr(reference, strategy)(x_reference)
            where = f"{gamma} {quant} {options} step {step}"
            assert_close(y, expected, f"output {where}")
            got = gradients(y, [x, layer.conv.weight, layer.bn.weight, layer.bn.bias])
            wanted = gradients(expected, [x_reference, reference.weight, reference.gamma, reference.beta])
            for name, g, w in zip(("x", "weight", "gamma", "beta"), got, wanted):
                assert_close(g, w, f"gradient of {name} {where}")
            assert_close(layer.bn.running_mean, reference.mean, f"running mean {where}")
            assert_close(layer.bn.running_var, reference.var, f"running variance {where}")
        assert layer.bn.num_batches_tracked == reference.steps

        inference = reference.scale_merge_inference if strategy == "scale_merge" else reference.inference
        x = batch(kind, 9)
        expected = inference(x)
        layer.freeze()
        frozen = layer(x)
        assert_close(frozen, expected, f"frozen {where}")
        assert_close(layer.bn.running_mean, reference.mean, "statistics of a frozen layer")
        got = gradients(frozen, [layer.conv.weight, layer.conv.bias, layer.bn.weight, layer.bn.bias])
        wanted = gradients(expected, [reference.weight, reference.bias, reference.gamma, reference.beta])
        for g, w in zip(got, wanted):
            assert_close(g, w, f"gradient of the frozen layer {where}")
        layer.unfreeze()
        assert torch.equal(layer.eval()(x), frozen)


@pytest.mark.parametrize("kind", KINDS)
def test_static_trains_the_folded_weight_and_bias(kind):
    for gamma, quant, options in settings("static"):
        layer, reference = layer_and_reference("static", kind, QUANTS[quant], **options)
        s = (reference.gamma / reference.sigma).detach()
        weight = (reference.weight.detach() * reference.rows(s)).requires_grad_()
        bias = (reference.beta + (reference.own_bias - reference.mean) * s).detach().requires_grad_()
        x, x_reference = batch(kind, 0), batch(kind, 0)
        y = layer(x)
        u = reference.conv(x_reference, reference.q(weight))
        expected = u + reference.view(bias, u)
        assert_close(y, expected, f"output {gamma} {quant}")
        got = gradients(y, [x, layer.weight_fold, layer.bias_fold])
        for name, g, w in zip(("x", "weight_fold", "bias_fold"), got, gradients(expected, [x_reference, weight, bias])):
            assert_close(g, w, f"gradient of {name}")
        assert torch.equal(layer.eval()(x), y)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_integers_are_the_quantized_weight(strategy):
    for kind, gamma in product(KINDS, GAMMAS):
        layer, reference = layer_and_reference(strategy, kind, QUANTS["w8_per_channel"], bias=True, gamma=gamma)
        codes, scale, bias = layer.eval().integer()
        weight, quantized_bias = layer.quantized()
        assert codes.dtype == torch.int32 and codes.abs().max() <= 127 and bool((scale > 0).all())
        rows = codes * scale.view(-1, *[1] * (codes.dim() - 1))
        from_codes = torch.empty_like(weight)
        of = reference.channel_of_entry()
        for k in range(reference.channels):
            from_codes[of == k] = rows[k].flatten()
        assert_close(from_codes, weight.detach(), f"{kind} {gamma}", 1e-12)
        assert_close(bias, quantized_bias.detach(), f"{kind} {gamma}", 1e-12)
        if gamma == "one_zero":
            assert not codes[1].any()
