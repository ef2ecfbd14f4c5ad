"""Running a layer with other weights, and which pairs fold."""

import pytest
import torch
import torch.nn.functional as F
from fold_cases import assert_close, pair
from fold_kinds import KINDS
from timm.layers import BatchNormAct2d, Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import nn
from torch.nn.utils import parametrizations

from qat.errors import QATError
from qat.fold import STRATEGIES, check_foldable
from qat.fold.convolution import convolve


class Biasless(nn.Conv2d):
    """A layer whose own forward knows no bias."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 0, 1, 0)), self.weight)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


class Signs(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.sign() * self.weight.abs().mean(), self.bias)


class TwoInputs(nn.Conv2d):
    def forward(self, x, mask):
        return F.conv2d(x * mask, self.weight, self.bias)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).abs()


@pytest.mark.parametrize("own_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_and_bias(kind, own_bias):
    conv, bn = pair(kind, own_bias)
    x = torch.randn(KINDS[kind].shape, dtype=torch.float64)
    weight, bias = torch.randn_like(conv.weight), torch.randn(bn.num_features, dtype=torch.float64)
    expected = KINDS[kind].apply(x, weight)
    assert_close(convolve(conv, x, weight, None), expected, "no bias")
    assert_close(convolve(conv, x, weight, bias), expected + bias.view(1, -1, *[1] * (x.dim() - 2)), "bias")


def test_a_forward_that_ignores_the_bias_still_gets_it():
    conv = Biasless(2, 3, 2, bias=False)
    bn = nn.BatchNorm2d(3).eval()
    bn.running_mean.normal_()
    x = torch.randn(2, 2, 4, 4)
    for strategy in STRATEGIES.values():
        torch.testing.assert_close(strategy(conv, bn).eval()(x), bn(conv(x)))


class Sometimes(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias if self.adds else None)


def test_whether_the_bias_is_added_is_asked_of_each_layer():
    x, bias = torch.randn(2, 2, 4, 4), torch.randn(3)
    for adds in (True, False):
        conv = Sometimes(2, 3, 2)
        conv.adds = adds
        expected = F.conv2d(x, conv.weight, bias)
        torch.testing.assert_close(convolve(conv, x, conv.weight, bias), expected)


def test_a_forward_put_on_the_instance_is_used():
    conv = nn.Conv2d(2, 3, 1)
    conv.forward = lambda x: F.conv2d(x.flip(1), conv.weight, conv.bias)
    x, weight = torch.randn(1, 2, 2, 2), torch.randn(3, 2, 1, 1)
    assert torch.equal(convolve(conv, x, weight, None), F.conv2d(x.flip(1), weight))


@pytest.mark.parametrize("kind", [StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, Signs, TwoInputs])
def test_layers_that_are_not_linear_in_their_weight_are_refused(kind):
    conv, bn = kind(4, 6, 3), nn.BatchNorm2d(6)
    assert kind.__name__ in check_foldable(conv, bn)
    with pytest.raises(QATError, match=kind.__name__):
        STRATEGIES["naive"](conv, bn)
    with pytest.raises(QATError, match=kind.__name__):
        STRATEGIES["static"](conv, None)


def test_weights_computed_from_others_are_refused():
    for wrap in (parametrizations.weight_norm, parametrizations.spectral_norm):
        assert "computed from other parameters" in check_foldable(wrap(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 3))
    assert "computed from other parameters" in check_foldable(old, nn.BatchNorm2d(4))
    with pytest.raises(QATError, match="computed from other parameters"):
        STRATEGIES["bn_correction"](old, nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    "bn, reason",
    [
        (nn.BatchNorm2d(5), "4 channels and the BatchNorm has 5"),
        (nn.BatchNorm2d(4, track_running_stats=False), "no running statistics"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "not a BatchNorm"),
        (nn.GroupNorm(2, 4), "not a BatchNorm"),
        (OwnNorm(4), "forward of its own"),
    ],
)
def test_norms_that_do_not_fold(bn, reason):
    assert reason in check_foldable(nn.Conv2d(3, 4, 3), bn)
    with pytest.raises(QATError, match=reason):
        STRATEGIES["naive"](nn.Conv2d(3, 4, 3), bn)


def test_pairs_that_fold():
    big = nn.Conv2d(3, 4, 7, padding=9, dilation=3, padding_mode="reflect")
    for conv in (
        big,
        Conv2dSame(3, 4, 5, dilation=2),
        Biasless(3, 4, 2, bias=False),
        Doubled(3, 4, bias=False),
        nn.ConvTranspose2d(3, 4, 3),
    ):
        assert check_foldable(conv, nn.BatchNorm1d(4) if isinstance(conv, nn.Linear) else BatchNormAct2d(4)) is None


def test_a_bias_that_is_not_added_as_it_is():
    for conv, bn in ((Doubled(3, 4), nn.BatchNorm1d(4)), (Biasless(3, 4, 2), nn.BatchNorm2d(4))):
        assert "does not add its bias" in check_foldable(conv, bn)
    linear, bn, x = Doubled(3, 4, bias=False), nn.BatchNorm1d(4).eval(), torch.randn(5, 3)
    bn.running_mean.normal_()
    torch.testing.assert_close(STRATEGIES["static"](linear, bn)(x), bn(linear(x)))


def test_checking_leaves_the_random_state_and_the_layer_alone():
    conv, bn = Conv2dSame(3, 4, 3), nn.BatchNorm2d(4)
    weight, state = conv.weight.clone(), torch.get_rng_state()
    assert check_foldable(conv, bn) is None
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(conv.weight, weight) and conv.bias.grad is None


def test_a_layer_that_keeps_its_norm_needs_one():
    with pytest.raises(QATError, match="no BatchNorm"):
        STRATEGIES["naive"](nn.Conv2d(3, 4, 3), None)
