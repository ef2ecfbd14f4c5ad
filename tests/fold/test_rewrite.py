"""Weights and biases of a folded layer set from outside, as post-training methods do: what inference computes, and saved states."""

import pytest
import torch
from torch import nn

import qat
from qat.fold.normal_output import normal_output

CONVS = {
    "plain": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "biased": lambda: nn.Conv2d(4, 6, 3),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
}


def _layer(strategy: str, conv: str = "plain", affine: bool = True) -> qat.FoldedConvBN:
    torch.manual_seed(0)
    bn = nn.BatchNorm2d(6, affine=affine)
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.5, 2.0)
    if affine:
        nn.init.uniform_(bn.weight, 0.5, 2.0)
        nn.init.normal_(bn.bias)
        with torch.no_grad():
            bn.weight[1] *= -1
    return qat.STRATEGIES[strategy](CONVS[conv](), bn, qat.FakeQuantizer(qat.QuantSpec())).eval().double()


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_weight_written_is_the_weight_that_is_quantized(strategy: str, conv: str) -> None:
    layer = _layer(strategy, conv)
    bias = layer.folded()[1].clone()
    wanted = torch.randn_like(layer.weight_to_quantize())
    layer.write_weight(wanted)
    assert torch.allclose(layer.weight_to_quantize(), wanted, rtol=1e-12, atol=0)
    assert torch.equal(layer.folded()[1], bias)


@pytest.mark.parametrize("strategy", [name for name in qat.STRATEGIES if name not in ("static", "scale_merge")])
def test_a_row_whose_gamma_is_0_stays_0_and_keeps_its_own_weight(strategy: str) -> None:
    layer = _layer(strategy)
    with torch.no_grad():
        layer.bn.weight[2] = 0
    own = layer.conv.weight[2].clone()
    layer.write_weight(torch.ones_like(layer.weight_to_quantize()))
    assert torch.equal(layer.conv.weight[2], own)
    assert torch.equal(layer.weight_to_quantize()[2], torch.zeros_like(own))
    assert torch.allclose(layer.weight_to_quantize()[3], torch.ones_like(own), rtol=1e-12)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_change_of_the_bias_moves_the_output_by_it(strategy: str, affine: bool) -> None:
    layer, x = _layer(strategy, affine=affine), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    change = torch.arange(6.0, dtype=torch.float64)
    with torch.no_grad():
        before, weight = layer(x), layer.weight_to_quantize().clone()
        layer.add_to_bias(change)
        assert torch.allclose(layer(x) - before, change.view(1, -1, 1, 1).expand_as(before), atol=1e-12)
    assert torch.equal(layer.weight_to_quantize(), weight)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_state_with_a_bias_gives_a_layer_without_one_its_bias(strategy: str) -> None:
    layer, fresh = _layer(strategy, affine=False), _layer(strategy, affine=False)
    layer.add_to_bias(torch.ones(6, dtype=torch.float64))
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.folded()[1], layer.folded()[1])


def test_a_layer_alone_gets_a_bias() -> None:
    make, x = qat.STRATEGIES["static"], torch.randn(2, 3, 2, 2)
    layer, fresh = (make(nn.Conv2d(3, 4, 1, bias=False), None, qat.FakeQuantizer(qat.QuantSpec())).eval() for _ in range(2))
    with torch.no_grad():
        before = layer(x)
        layer.add_to_bias(torch.full((4,), 0.5))
        assert torch.allclose(layer(x), before + 0.5, atol=1e-6)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))


def test_normal_output_is_the_distribution_a_batch_norm_gives() -> None:
    torch.manual_seed(1)
    bn = nn.BatchNorm1d(3, eps=0.5).double().eval()
    with torch.no_grad():
        bn.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
        bn.running_var.copy_(torch.tensor([4.0, 0.25, 0.0]))
        bn.weight.copy_(torch.tensor([2.0, -3.0, 1.0]))
        bn.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    x = bn.running_mean + bn.running_var.sqrt() * torch.randn(200_000, 3, dtype=torch.float64)
    mean, deviation = normal_output(bn)
    y = bn(x)
    assert torch.allclose(mean, y.mean(0), atol=0.02)
    assert torch.allclose(deviation, y.std(0), atol=0.02)
    assert deviation[2] == 0


def test_a_folded_network_remembers_what_its_norms_said() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    nn.init.uniform_(network[1].weight, -2, 2)
    x = (torch.randn(1, 3, 4, 4),)
    mean, deviation = normal_output(network[1])
    folded = qat.fold(network, x)
    static = qat.prepare(folded, x, qat.QATConfig(fold="static"))
    for graph in (folded, static, qat.prepare(network, x, qat.QATConfig(fold="static"))):
        assert list(graph.normal_outputs) == ["0"]
        assert torch.equal(graph.normal_outputs["0"][0], mean)
        assert torch.equal(graph.normal_outputs["0"][1], deviation)
    static.load_state_dict(static.state_dict())
    assert static.normal_outputs == {}
    assert qat.prepare(network, x).normal_outputs == {}
