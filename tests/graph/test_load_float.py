"""A float checkpoint loaded after prepare() gives the network that is prepared from it."""

import pytest
import torch
from small_networks import Left, Residual, randomize
from test_training_life import KEEP_BN, batch
from timm.layers import BatchNormAct2d
from torch import nn

import qat


class WithActivation(nn.Module):
    """A BatchNorm with an activation of its own that has one parameter a channel, as many as the BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = BatchNormAct2d(4, act_layer=lambda inplace=False: nn.PReLU(4))
        self.fc = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).mean((2, 3)))


def pair(kind):
    """The network to prepare and another one with other weights."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(randomize(kind(), seed).train())
    with torch.no_grad():
        for p in made[1].parameters():
            p.add_(0.1 * torch.rand_like(p))
    return made


@pytest.mark.parametrize("weight_range", ["minmax", "lsq"])
@pytest.mark.parametrize("kind", [Residual, Left, WithActivation])
@pytest.mark.parametrize("strategy", KEEP_BN)
def test_it_is_the_network_prepared_from_it(strategy, kind, weight_range):
    one, other = pair(kind)
    if strategy == "scale_merge" and weight_range == "lsq":
        config = qat.QATConfig(fold=strategy)
    else:
        config = qat.QATConfig(fold=strategy, weight_range=weight_range)
    network, expected = (qat.prepare(m, (batch(0),), config) for m in (one, other))
    qat.calibrate(network, [batch(0)])
    qat.load_float(network, other.state_dict())
    for made in (network, expected):
        for quantizer in (m for name, m in made.named_modules() if name.startswith("quantizers.") and hasattr(m, "extent")):
            for state in (quantizer.extent, quantizer.batches):
                state.zero_()
        qat.calibrate(made, [batch(1)])
    assert torch.equal(network.eval()(batch(2)), expected.eval()(batch(2)))
    assert torch.equal(network.train()(batch(2)), expected.train()(batch(2)))


def test_what_is_frozen_stays_frozen():
    one, other = pair(Residual)
    network = qat.prepare(one, (batch(0),))
    qat.calibrate(network, [batch(0)])
    qat.freeze_bn(network), qat.freeze_ranges(network)
    scale = network.conv2.weight_quantizer.scale.clone()
    qat.load_float(network, other.state_dict())
    assert network.conv2.frozen and torch.equal(network.conv2.weight_quantizer.scale, scale)
    assert torch.equal(network.conv2.conv.weight, other.conv2.weight) and torch.equal(network.conv2.bn.running_var, other.bn2.running_var)


WRONG = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != "bn1.weight"}, "1 tensors missing: bn1.weight"),
    "unexpected": (lambda s: s | {"head.weight": torch.zeros(1)}, "1 tensors unexpected: head.weight"),
    "shape": (lambda s: s | {"fc.bias": torch.zeros(7)}, r"1 tensors of another shape: fc.bias \(7,\) instead of \(5,\)"),
    "prepared": (lambda s: {f"{k}.conv": v for k, v in s.items()}, "missing: .*unexpected: "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(kind):
    change, message = WRONG[kind]
    one, other = pair(Residual)
    network = qat.prepare(one, (batch(0),))
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(qat.QATError, match=message):
        qat.load_float(network, change(other.state_dict()))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    qat.load_float(network, {key: value for key, value in other.state_dict().items() if "num_batches" not in key})


def test_a_static_layer_has_no_batch_norm_to_load():
    one, other = pair(Residual)
    network = qat.prepare(one, (batch(0),), qat.QATConfig(fold="static"))
    with pytest.raises(qat.QATError, match=r"^stem\.0: found a static layer.*then prepare it"):
        qat.load_float(network, other.state_dict())


class Aliased(torch.nn.Module):
    """A module under two names, and one that forward never calls."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
        self.b, self.aux = self.a, torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.a(x)


def test_a_state_has_more_than_the_graph():
    x = torch.randn(4, 3, 5, 5)
    torch.manual_seed(0)
    model, other = Aliased().eval(), Aliased().eval()
    prepared = qat.prepare(model, (x,))
    qat.load_float(prepared, other.state_dict())
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), other(x))
    with pytest.raises(qat.QATError, match="unexpected: c"):
        qat.load_float(prepared, {**other.state_dict(), "c": torch.zeros(1)})


def test_parts_of_a_prepared_state_load_as_ever():
    x = torch.randn(4, 3, 5, 5)
    prepared = qat.prepare(Aliased().eval(), (x,))
    assert prepared.load_state_dict({}, strict=False).unexpected_keys == []
    doubled = {name: 2 * p.detach() for name, p in prepared.named_parameters()}
    prepared.load_state_dict(doubled, strict=False)
    assert all(torch.equal(p, doubled[name]) for name, p in prepared.named_parameters())
