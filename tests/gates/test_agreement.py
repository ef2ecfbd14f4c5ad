"""Gate: strategies that must agree do, strategies that must differ do, in outputs, gradients and running statistics of one step.

Where two of them must agree follows from the equations, with running statistics away from the batch's:

- output. moving_average, frozen, static and batch_renorm inside its clips normalise with mu, sigma and round gamma W / sigma. The other
  four normalise with the batch. naive rounds gamma W / sigma_B and bn_correction gamma W / sigma, with mu_B, sigma_B of the float layer;
  single_pass rounds gamma W / sigma and scale_merge W, with the statistics of the rounded layer. By Q(c W) = c Q(W) each two of these are
  one where the range of each channel follows its weights, and where a learned scale starts from the weights it rounds (scale_merge). With
  Q = 1 all four are conv -> BatchNorm.
- gradient of x and W. As the output; but batch_renorm sends it through mu_B and sigma_B, and naive's to sigma_B passes Q straight through
  where bn_correction's sees what Q gave.
- gradient of gamma. As the output; but gamma stands outside of Q in scale_merge, where it sees the rounded weights also when frozen.
- gradient of beta. As the output.
- statistics. The float layer's: naive, bn_correction, moving_average, batch_renorm. The rounded layer's: single_pass, scale_merge. Unmoved:
  frozen. With Q = 1 the two layers are one.
- frozen, and in eval, all are one function.
"""

from functools import cache
from itertools import combinations, product

import pytest
import torch
from torch import nn

import qat

HELD = ("moving_average", "frozen", "static")
QUANTITIES = ("output", "x", "weight", "gamma", "beta", "statistics")
GRIDS = {"float": None, "w4_per_channel": qat.QuantSpec(4), "w4_per_tensor": qat.QuantSpec(4, per_channel=False)}
CLIPPED = "batch_renorm clipped"
NAMES = [*qat.STRATEGIES, CLIPPED]
X = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 1.5 + 0.4


def float_pair():
    torch.manual_seed(0)
    conv, bn = nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)
    nn.init.uniform_(bn.weight, 0.5, 1.5)
    bn.weight.data[::2] *= -1
    nn.init.normal_(bn.bias)
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.3, 2.0)
    return conv.double(), bn.double()


def network(name, grid, weight_range):
    options = {"r_max": 1.1, "d_max": 0.2} if name == CLIPPED else {}
    config = qat.QATConfig(fold=name.split()[0], weight=GRIDS[grid] or qat.QuantSpec(), weight_range=weight_range, fold_options=options)
    prepared = qat.prepare(nn.Sequential(*float_pair()).train(), (X,), config)
    qat.set_fake_quant(prepared, weights=grid != "float", activations=False)
    return prepared


@cache
def measured(name, grid, weight_range, mode):
    """Output, gradients and running statistics of one forward and backward."""
    prepared = network(name, grid, weight_range)
    if mode == "frozen":
        qat.freeze_bn(prepared)
    prepared.train(mode != "eval")
    layer, x = prepared.get_submodule("0"), X.clone().requires_grad_()
    y = prepared(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin() + 0.1 * y.square()).sum().backward()
    found = {"output": y.detach(), "x": x.grad}
    if name == "static":
        _, bn = float_pair()
        s = (bn.weight / (bn.running_var + bn.eps).sqrt()).detach()
        return found | {"weight_fold": layer.weight_fold.grad, "bias_fold": layer.bias_fold.grad, "s": s}
    found |= {"weight": layer.conv.weight.grad, "gamma": layer.bn.weight.grad, "beta": layer.bn.bias.grad}
    return found | {"statistics": torch.cat([layer.bn.running_mean, layer.bn.running_var])}


def one_per_class(*classes):
    """{strategy: its class} with every strategy that is in no class in one of its own."""
    return {name: next((i for i, each in enumerate(classes) if name in each), name) for name in NAMES}


def expected(quantity, grid, weight_range, mode):
    """{strategy: class}: equal classes agree, others differ."""
    if mode != "train":
        merged = grid != "float" and quantity == "gamma"
        return {name: "scale_merge" if merged and name == "scale_merge" else "the inference graph" for name in NAMES}
    plain = grid == "float"
    follows = grid == "w4_per_channel" and weight_range == "minmax"
    if quantity == "statistics":
        float_layer, rounded_layer = ("naive", "bn_correction", "moving_average", "batch_renorm", CLIPPED), ("single_pass", "scale_merge")
        return one_per_class((*float_layer, *rounded_layer)) if plain else one_per_class(float_layer, rounded_layer)
    through_statistics = quantity in ("x", "weight")
    held = HELD if through_statistics else (*HELD, "batch_renorm")
    if plain:
        return one_per_class(held, ("naive", "bn_correction", "single_pass", "scale_merge"))
    rounded = () if quantity == "gamma" else ("single_pass", "scale_merge")
    return one_per_class(held, ("naive", "bn_correction") if follows and not through_statistics else (), rounded)


CASES = [("float", "minmax"), *product(("w4_per_channel", "w4_per_tensor"), ("minmax", "lsq"))]


@pytest.mark.parametrize("mode", ["train", "frozen", "eval"])
@pytest.mark.parametrize(("grid", "weight_range"), CASES)
def test_who_agrees_and_who_differs(grid, weight_range, mode):
    names = [name for name in NAMES if (name, grid) != ("scale_merge", "w4_per_tensor")]
    for quantity in QUANTITIES:
        classes = expected(quantity, grid, weight_range, mode)
        for one, other in combinations(names, 2):
            first, second = (measured(name, grid, weight_range, mode).get(quantity) for name in (one, other))
            if first is None or second is None:
                assert "static" in (one, other) and quantity not in ("output", "x")
                continue
            difference = float((first - second).abs().max() / first.abs().max())
            agree = classes[one] == classes[other]
            assert difference < 1e-9 if agree else difference > 2e-3, f"{quantity}: {one} and {other} differ by {difference:.1e}"


@pytest.mark.parametrize("mode", ["train", "frozen", "eval"])
@pytest.mark.parametrize(("grid", "weight_range"), CASES)
def test_static_has_the_gradient_of_the_folded_weight_and_bias(grid, weight_range, mode):
    """Those of W and beta of `frozen` by the chain rule: W_fold = s W, b_fold = beta + ..."""
    static = measured("static", grid, weight_range, mode)
    frozen = measured("frozen", grid, weight_range, mode)
    torch.testing.assert_close(static["weight_fold"] * static["s"].view(-1, 1, 1, 1), frozen["weight"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(static["bias_fold"], frozen["beta"], rtol=1e-9, atol=1e-12)
