"""High-bias absorption against the equations in numpy, and where it must not reach."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chains import conv_bn, pictures, separable, uneven
from torch import nn

import qat
from qat.ptq.absorb import absorbed


def high(network: nn.Sequential, first: int = 1) -> nn.Sequential:
    """Channels of the first norm that lie far above 0, far below it, and about it."""
    bn = network[first]
    with torch.no_grad():
        bn.weight.copy_(torch.tensor([0.1, -0.1, 0.1, 1.0, -1.0, 0.5, 0.1, 0.1]))
        bn.bias.copy_(torch.tensor([2.0, 2.0, -2.0, 2.0, 4.0, 0.0, 0.31, 1.0]))
        bn.running_var.fill_(1.0)
    return network


def test_what_is_absorbed_in_numpy() -> None:
    beta, gamma = np.array([1.0, 1.0, -1.0, 0.3]), np.array([0.1, -0.2, 0.1, 0.1])
    c = absorbed(torch.tensor(beta), torch.tensor(gamma).abs()).numpy()
    np.testing.assert_allclose(c, np.maximum(0, beta - 3 * np.abs(gamma)), rtol=1e-12)
    np.testing.assert_allclose(c, [0.7, 0.4, 0.0, 0.0], atol=1e-12)


@pytest.mark.parametrize("folded", [False, True])
def test_the_biases_are_those_of_the_equation(folded: bool) -> None:
    torch.manual_seed(0)
    network = high(uneven(nn.Sequential(*conv_bn(3, 8), nn.ReLU(), *conv_bn(8, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)))).double()
    network[4].bias.data.fill_(-1.0)  # nothing to absorb in the second
    x = (pictures().double(),)
    plain = qat.fold(network, x)
    changed = qat.ptq.absorb_bias(plain) if folded else qat.fold(qat.ptq.absorb_bias(network, x), x)
    std = network[1].weight.detach().abs() * (network[1].running_var / (network[1].running_var + network[1].eps)).sqrt()
    c = np.maximum(0, (network[1].bias.detach() - 3 * std).numpy())
    assert (c > 0).sum() == 5
    before, after = (
        {name: (g.get_submodule(name).weight.detach().numpy(), g.get_submodule(name).bias.detach().numpy()) for name in ("0", "3", "6")}
        for g in (plain, changed)
    )
    np.testing.assert_allclose(after["0"][1], before["0"][1] - c, rtol=1e-9)
    np.testing.assert_allclose(after["3"][1], before["3"][1] + before["3"][0].sum((2, 3)) @ c, rtol=1e-9)
    for name in ("0", "3", "6"):
        np.testing.assert_array_equal(after[name][0], before[name][0])
    assert torch.equal(changed.normal_outputs["3"][0], plain.normal_outputs["3"][0])  # the second output is what it was
    np.testing.assert_allclose((plain.normal_outputs["0"][0] - changed.normal_outputs["0"][0]).numpy(), c, atol=1e-12)


def test_the_function_stays_where_the_channel_is_above_c() -> None:
    """Inputs so even that no absorbed channel ever comes down to c."""
    torch.manual_seed(0)
    network = high(uneven(nn.Sequential(*conv_bn(3, 8), nn.ReLU(), *conv_bn(8, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)))).double()
    network[0].weight.data.mul_(0.01)
    network[1].running_mean.zero_()
    x = pictures().double()
    changed = qat.ptq.absorb_bias(network, (x,))
    with torch.no_grad():
        assert torch.allclose(changed(x), network(x), rtol=1e-9, atol=1e-9)
    (note,) = changed.step_reports[-1].notes
    assert float(note.split("at most ")[1].split(",")[0]) < 1e-9
    with torch.no_grad():
        before, after = (float(F.relu(g.get_submodule("1")(g.get_submodule("0")(x)))[:, :2].max()) for g in (network, changed))
    assert (before > 1.9, after < 0.5) == (True, True)


def test_training_statistics_follow() -> None:
    """The next layer's running mean is that of what its convolution gives."""
    torch.manual_seed(0)
    network = high(uneven(nn.Sequential(*conv_bn(3, 8), nn.ReLU(), *conv_bn(8, 5, 3)))).double()
    network[0].weight.data.mul_(0.01)
    network[1].running_mean.zero_()
    x = pictures().double()
    with torch.no_grad():
        u = network[:4](x)
        network[4].running_mean.copy_(u.mean((0, 2, 3)))
        network[4].running_var.copy_(u.var((0, 2, 3), unbiased=False))
        changed = qat.ptq.absorb_bias(network, (x,))
        u = changed.get_submodule("3")(F.relu(changed.get_submodule("1")(changed.get_submodule("0")(x))))
    assert torch.allclose(changed.get_submodule("4").running_mean, u.mean((0, 2, 3)), rtol=1e-9)
    assert not torch.allclose(changed.get_submodule("4").running_mean, network[4].running_mean, rtol=1e-2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_next_layer_without_a_norm_takes_it_in_its_bias(bias: bool) -> None:
    torch.manual_seed(0)
    network = high(nn.Sequential(*conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 5, 3, bias=bias)).eval())
    before = network[3].bias.detach() if bias else torch.zeros(5)
    changed = qat.ptq.absorb_bias(network, (pictures(),))
    std = network[1].weight.abs() * (network[1].running_var / (network[1].running_var + network[1].eps)).sqrt()
    c = (network[1].bias - 3 * std).clamp(min=0).detach()
    assert torch.allclose(changed.get_submodule("3").bias, before + network[3].weight.detach().sum((2, 3)) @ c, atol=1e-5)
    assert (network[3].bias is None) == (not bias)


LEFT = {
    "padded": (nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), "'3' pads with zeros"),
    "padded 'same'": (nn.ReLU(), nn.Conv2d(8, 4, 3, padding="same"), "'3' pads with zeros"),
    "padding in between": (nn.Sequential(nn.ReLU(), nn.ZeroPad2d(1)), nn.Conv2d(8, 4, 3), "'2.1' (ZeroPad2d) pads with zeros"),
    "padded average": (nn.Sequential(nn.ReLU(), nn.AvgPool2d(3, padding=1)), nn.Conv2d(8, 4, 1), "'2.1' (AvgPool2d) pads with zeros"),
    "padded pointwise": (nn.ReLU(), nn.Conv2d(8, 4, 1, padding=1), "'3' pads with zeros"),
    "sum of a pool": (
        nn.Sequential(nn.ReLU(), nn.AvgPool2d(2, divisor_override=1)),
        nn.Conv2d(8, 4, 1),
        "'2.1' (AvgPool2d) divides by another number",
    ),
    "transposed pointwise": (nn.ReLU(), nn.ConvTranspose2d(8, 4, 1, 2), "'3' is transposed: not every output sees all of its weights"),
    "transposed": (nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, 2), "'3' is transposed: not every output sees all of its weights"),
    "relu6": (nn.ReLU6(), nn.Conv2d(8, 4, 3), "ReLU6 between them clips a shifted channel elsewhere"),
}


@pytest.mark.parametrize("name", LEFT)
def test_where_a_shift_would_not_pass_it_is_left(name: str) -> None:
    between, second, reason = LEFT[name]
    network = high(nn.Sequential(*conv_bn(3, 8), between, second).eval())
    changed = qat.ptq.absorb_bias(network, (pictures(),))
    assert ("0 -> 3", reason) in changed.step_reports[-1].left
    assert all(torch.equal(a, b) for a, b in zip(changed.state_dict().values(), network.state_dict().values(), strict=True))


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_other_padding_shifts_along(mode: str) -> None:
    network = high(nn.Sequential(*conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, padding_mode=mode)).eval()).double()
    network[0].weight.data.mul_(0.01)
    x = pictures().double()
    changed = qat.ptq.absorb_bias(network, (x,))
    assert changed.step_reports[-1].done[0][0] == "0 -> 3"
    with torch.no_grad():
        assert torch.allclose(changed(x), network(x), rtol=1e-9, atol=1e-9)


def test_a_layer_that_no_norm_told_of_is_left() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    report = qat.ptq.absorb_bias(network, (pictures(),)).step_reports[-1]
    assert ("0 -> 2", "no BatchNorm told the distribution of '0'") in report.left


def test_outputs_of_every_kind_are_compared() -> None:
    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = high(nn.Sequential(*conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.body(x)
            return y, y > 0

    network = Answers().eval()
    changed = qat.ptq.absorb_bias(network, (pictures(),))
    with torch.no_grad():
        moved = max(float((a.double() - b.double()).abs().max()) for a, b in zip(changed(pictures()), network(pictures())))
    assert changed.step_reports[-1].notes[0].startswith(f"outputs move by at most {moved:.3g}, ")


def test_channels_that_are_not_always_above_0_are_left() -> None:
    network = separable(padding=0)
    for place in (1, 4, 7, 10):
        network[place].bias.data.fill_(-1.0)
    report = qat.ptq.absorb_bias(network, (pictures(),)).step_reports[-1]
    assert report.done == [] and ("0 -> 3", "no channel lies always above 0") in report.left


def test_after_equalisation_the_distributions_are_the_scaled_ones() -> None:
    network, x = separable(padding=0).double(), (pictures().double(),)
    equalized = qat.ptq.equalize(network, x)
    live = qat.fold(qat.ptq.absorb_bias(equalized, x), x)
    folded = qat.ptq.absorb_bias(qat.ptq.equalize(qat.fold(network, x)))
    for (name, a), b in zip(live.state_dict().items(), folded.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8), name
    assert [r.step for r in folded.step_reports] == ["equalize", "absorb_bias"]
