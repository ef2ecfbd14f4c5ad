"""Weights of a prepared network back in the float network."""

import pytest
import torch
from small_networks import Residual, randomize
from torch import nn

import qat
from qat.errors import QATError
from qat.graph.store_float import store_float

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Bare(nn.Module):
    """A BatchNorm without parameters, and layers without a bias."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, affine=False), nn.ReLU()
        self.alone, self.left = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5, bias=False)

    def forward(self, x):
        x = self.act(self.bn(self.conv(x)))
        return self.fc(self.left(self.act(self.alone(x)) + x).mean((2, 3)))


def trained(fold, model):
    torch.manual_seed(0)
    prepared = qat.prepare(randomize(model()), (X,), qat.QATConfig(fold=fold))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    for _ in range(3):
        prepared(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return prepared.eval()


@pytest.mark.parametrize("model", [Residual, Bare])
@pytest.mark.parametrize("fold", qat.STRATEGIES)
def test_the_float_network_computes_what_was_trained(fold, model):
    prepared = trained(fold, model)
    prepared = qat.ptq.correct_bias(prepared, [X])  # gives biases to layers that have none
    network = randomize(model(), seed=5).eval()
    untrained = network(X)
    store_float(prepared, network)
    again = qat.prepare(network, (X,), qat.QATConfig(fold=fold))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    expected = prepared(X)
    assert torch.allclose(network(X), expected, atol=1e-5) and not torch.allclose(untrained, expected, atol=1e-2)
    qat.set_fake_quant(again, weights=False, activations=False)
    assert torch.allclose(again(X), expected, atol=1e-6)


class Biasless(nn.Module):
    """A BatchNorm with gamma and without beta; gamma is 0, negative and subnormal in some channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)

    def forward(self, x):
        return self.bn(self.conv(x)).mean((2, 3))


@pytest.mark.parametrize("fold", qat.STRATEGIES)
def test_a_given_bias_survives_a_gamma_of_0(fold):
    x, made = X.double(), []
    for seed in (0, 5):
        torch.manual_seed(seed)
        network = randomize(Biasless(), seed=seed).double().eval()
        network.bn.bias = None
        with torch.no_grad():
            network.bn.weight.copy_(torch.tensor([0.0, -0.0, 1e-310, -0.5, 2.0]))
        made.append(network)
    origin, network = made
    prepared = qat.prepare(origin, (x,), qat.QATConfig(fold=fold))
    qat.calibrate(prepared, [x])
    given = torch.tensor([0.5, -0.25, 0.0, 1.0, -2.0], dtype=torch.float64)
    prepared.conv.correct_bias(given)
    store_float(prepared.eval(), network)
    assert all(bool(value.isfinite().all()) for value in network.state_dict().values())
    assert torch.allclose(network(x), origin(x) + given, rtol=1e-12, atol=1e-12)
    again = qat.prepare(network, (x,), qat.QATConfig(fold=fold))
    qat.calibrate(again, [x])
    codes, scale, bias = again.conv.integer()
    assert not codes[:3].any() and codes[3:].flatten(1).any(1).all() and bool((scale > 0).all())
    assert torch.allclose(bias, prepared.conv.folded()[1])


def test_another_network_is_refused():
    prepared = trained("bn_correction", Bare)
    for fold in ("bn_correction", "static"):
        with pytest.raises(QATError, match="no such tensor in the float network"):
            store_float(trained(fold, Bare), Residual())
    other = Bare()
    other.fc = nn.Linear(6, 4, bias=False)
    with pytest.raises(QATError, match=r"fc.weight: found \(4, 6\) for \(5, 6\)"):
        store_float(prepared, other)
