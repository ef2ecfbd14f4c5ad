"""Cross-layer equalisation against an independent one in numpy, and the function it must not change."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from chains import conv_bn, pictures, separable, uneven
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops.misc import FrozenBatchNorm2d

import qat
from qat.ptq.equalize import pair_scales, triple_scales


def folded_rows(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> np.ndarray:
    s = bn.weight.detach().double() / (bn.running_var.double() + bn.eps).sqrt()
    return (conv.weight.detach().double() * s.view(-1, 1, 1, 1)).numpy()


def test_a_pair_in_numpy() -> None:
    r1, r2 = np.array([4.0, 0.5, 9.0, 0.0, 2.0]), np.array([1.0, 2.0, 0.25, 3.0, 0.0])
    s = pair_scales(torch.tensor(r1), torch.tensor(r2)).numpy()
    np.testing.assert_allclose(s, [2.0, 0.5, 6.0, 1.0, 1.0], rtol=1e-12)
    alive = slice(0, 3)
    np.testing.assert_allclose((r1 / s)[alive], (r2 * s)[alive], rtol=1e-12)


def test_a_triple_in_numpy() -> None:
    r1, r2, r3 = np.array([8.0, 1.0, 0.0, 4.0, 4.0]), np.array([1.0, 1.0, 4.0, 0.0, 1.0]), np.array([1.0, 27.0, 1.0, 1.0, 0.0])
    s12, s23 = (s.numpy() for s in triple_scales(*map(torch.tensor, (r1, r2, r3))))
    np.testing.assert_allclose(s12, [4.0, 1 / 3, 1.0, 1.0, 2.0], rtol=1e-12)
    np.testing.assert_allclose(s23, [2.0, 1 / 9, 2.0, 1.0, 1.0], rtol=1e-12)
    after = np.stack([r1 / s12, r2 * s12 / s23, r3 * s23])[:, :2]
    np.testing.assert_allclose(after, np.broadcast_to(np.cbrt(r1 * r2 * r3)[:2], (3, 2)), rtol=1e-12)


def test_one_sweep_over_a_pair_is_the_equation() -> None:
    torch.manual_seed(0)
    network = uneven(nn.Sequential(*conv_bn(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3))).double()
    x = pictures().double()
    w1, w2 = folded_rows(network[0], network[1]), network[3].weight.detach().numpy()
    b1 = (network[1].bias - network[1].running_mean * network[1].weight / (network[1].running_var + network[1].eps).sqrt()).detach().numpy()
    s = np.sqrt(np.abs(w1).max((1, 2, 3)) / np.abs(w2).max((0, 2, 3)))
    equalized = qat.fold(qat.ptq.equalize(network, (x,), sweeps=1), (x,))
    first, second = equalized.get_submodule("0"), equalized.get_submodule("3")
    np.testing.assert_allclose(first.weight.detach().numpy(), w1 / s[:, None, None, None], rtol=1e-9)
    np.testing.assert_allclose(first.bias.detach().numpy(), b1 / s, rtol=1e-9)
    np.testing.assert_allclose(second.weight.detach().numpy(), w2 * s[None, :, None, None], rtol=1e-9)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Identity, nn.PReLU, nn.LeakyReLU])
def test_ranges_meet_and_the_function_stays(act: type[nn.Module]) -> None:
    network, x = separable(act).double(), pictures().double()
    equalized = qat.ptq.equalize(network, (x,), tolerance=1e-9, sweeps=500)
    with torch.no_grad():
        assert torch.allclose(equalized(x), network(x), rtol=1e-9, atol=1e-9)
    folded = qat.fold(equalized, (x,))
    names = ["0", "3", "6", "9", "14"]
    weights = [folded.get_submodule(name).weight.detach() for name in names]
    for first, second, depthwise in zip(weights, weights[1:], (True, False, True, False)):
        reads = second.abs().flatten(1).amax(1) if depthwise else second.abs().amax([d for d in range(second.dim()) if d != 1])
        assert torch.allclose(first.abs().flatten(1).amax(1), reads, rtol=1e-6)
    assert [name for name, _ in equalized.step_reports[-1].done] == ["0 -> 3", "3 -> 6", "6 -> 9", "9 -> 14"]
    assert equalized.step_reports[-1].left == [("14", "its output is the network's")]


def test_live_norms_and_folded_ones_give_the_same_network() -> None:
    network, x = separable().double(), pictures().double()
    live = qat.fold(qat.ptq.equalize(network, (x,)), (x,))
    folded = qat.ptq.equalize(qat.fold(network, (x,)))
    for (name, a), (other, b) in zip(live.state_dict().items(), folded.state_dict().items(), strict=True):
        assert name == other and torch.allclose(a, b, rtol=1e-9), name
    for name, pair in live.normal_outputs.items():
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(pair, folded.normal_outputs[name]))


def test_training_goes_on_from_the_same_point() -> None:
    network, x = separable().double(), pictures().double()
    equalized = qat.ptq.equalize(network, (x,))
    network.train(), equalized.train()
    assert torch.allclose(equalized(x), network(x), rtol=1e-7)
    network.eval(), equalized.eval()
    assert torch.allclose(equalized(x), network(x), rtol=1e-7)


def test_the_model_is_untouched_and_its_mode_kept() -> None:
    network, x = separable(nn.ReLU6).train(), pictures()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    equalized = qat.ptq.equalize(network, (x,), replace_relu6=True)
    assert equalized.training and network.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert sum(isinstance(m, nn.ReLU6) for m in network) == 4
    folded = qat.fold(network.eval(), (x,))
    before = {key: value.clone() for key, value in folded.state_dict().items()}
    qat.ptq.equalize(folded, (x,), replace_relu6=True)
    assert all(torch.equal(value, before[key]) for key, value in folded.state_dict().items())


class Between(nn.Module):
    """A convolution, something, and a layer that reads it."""

    def __init__(self, between: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.bn, self.between, self.second = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), between, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.bn(self.first(x))))


class Call(nn.Module):
    def __init__(self, function: object):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator]


CROSSED = {
    "relu": (nn.ReLU(), nn.Conv2d(8, 4, 3)),
    "functional relu": (Call(F.relu), nn.Conv2d(8, 4, 3)),
    "method relu": (Call(lambda x: x.relu()), nn.Conv2d(8, 4, 3)),
    "prelu of its own for each channel": (nn.PReLU(8), nn.Conv2d(8, 4, 3)),
    "nothing": (nn.Identity(), nn.Conv2d(8, 4, 3, padding=1)),
    "max pool": (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, padding=1)), nn.Conv2d(8, 4, 1)),
    "padded average pool": (nn.AvgPool2d(3, padding=1), nn.Conv2d(8, 4, 1)),
    "functional pools": (Call(lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2)), nn.Conv2d(8, 4, 1)),
    "dropout": (nn.Dropout(), nn.Conv2d(8, 4, 1)),
    "zero padding": (nn.ZeroPad2d(1), nn.Conv2d(8, 4, 1)),
    "reflection padding": (nn.ReflectionPad2d(1), nn.Conv2d(8, 4, 1)),
    "nearest resizing": (nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1)),
    "bilinear resizing": (Call(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")), nn.Conv2d(8, 4, 1)),
    "mean over positions": (Call(lambda x: x.mean((2, 3))), nn.Linear(8, 4)),
    "kept mean over positions": (Call(lambda x: x.mean((2, 3), keepdim=True)), nn.Conv2d(8, 4, 1)),
    "flattened positions": (nn.Flatten(), nn.Linear(8 * 36, 4)),
    "viewed positions": (Call(lambda x: x.view(x.size(0), -1)), nn.Linear(8 * 36, 4)),
    "reshaped positions": (Call(lambda x: x.reshape(x.shape[0], -1)), nn.Linear(8 * 36, 4)),
    "grouped": (nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)),
    "depthwise": (nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)),
    "depthwise of two filters": (nn.ReLU(), nn.Conv2d(8, 16, 3, groups=8)),
    "transposed": (nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, stride=2)),
    "grouped transposed": (nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2)),
}


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", CROSSED)
def test_what_a_scale_passes(name: str, folded: bool) -> None:
    torch.manual_seed(0)
    network, x = uneven(Between(*CROSSED[name])).double(), pictures().double()
    source = qat.fold(network, (x,)) if folded else network
    equalized = qat.ptq.equalize(source, (x,))
    (done,) = equalized.step_reports[-1].done
    assert done[0] == "first -> second" and done[1].startswith("8 of 8 channels")
    with torch.no_grad():
        assert torch.allclose(equalized(x), network(x), rtol=1e-9, atol=1e-9)


NOT_CROSSED = {
    "relu6": (nn.ReLU6(), nn.Conv2d(8, 4, 3), "ReLU6 between them is not positively homogeneous"),
    "functional relu6": (Call(F.relu6), nn.Conv2d(8, 4, 3), "ReLU6 between them"),
    "hardtanh": (nn.Hardtanh(), nn.Conv2d(8, 4, 3), "(Hardtanh)"),
    "hardtanh from 0": (nn.Hardtanh(0, 1), nn.Conv2d(8, 4, 3), "(Hardtanh)"),
    "functional hardtanh from 0": (Call(lambda x: F.hardtanh(x, 0, 1)), nn.Conv2d(8, 4, 3), "'hardtanh'"),
    "clamp": (Call(lambda x: x.clamp(0, 6)), nn.Conv2d(8, 4, 3), "'clamp'"),
    "hardswish": (nn.Hardswish(), nn.Conv2d(8, 4, 3), "(Hardswish)"),
    "sigmoid": (nn.Sigmoid(), nn.Conv2d(8, 4, 3), "(Sigmoid)"),
    "gelu": (nn.GELU(), nn.Conv2d(8, 4, 3), "(GELU)"),
    "softmax": (nn.Softmax(1), nn.Conv2d(8, 4, 3), "(Softmax)"),
    "addition": (Call(lambda x: x + 1), nn.Conv2d(8, 4, 3), "'add'"),
    "two readers": (Call(lambda x: F.relu(x) + x), nn.Conv2d(8, 4, 3), "read by the operation 'relu', the operation 'add'"),
    "group norm": (nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3), "(GroupNorm)"),
    "second norm": (nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), "(BatchNorm2d)"),
    "shuffled channels": (nn.ChannelShuffle(2), nn.Conv2d(8, 4, 3), "(ChannelShuffle)"),
    "space to channels": (nn.PixelUnshuffle(2), nn.Conv2d(32, 4, 3), "(PixelUnshuffle)"),
    "concatenation": (Call(lambda x: torch.cat([x], 1)), nn.Conv2d(8, 4, 3), "'cat'"),
    "a part of the channels": (Call(lambda x: x[:, :4]), nn.Conv2d(4, 4, 3), "'getitem'"),
    "positions as channels": (Call(lambda x: x.transpose(1, 2)), nn.Conv2d(6, 4, 1), "'transpose'"),
    "mean over channels": (Call(lambda x: x.mean(1, keepdim=True)), nn.Conv2d(1, 4, 3), "'mean'"),
    "positions as features": (nn.Identity(), nn.Linear(6, 4), "its channels are not those that 'second' reads"),
    "computed weight": (nn.ReLU(), weight_norm(nn.Conv2d(8, 4, 3)), "(ParametrizedConv2d)"),
}


@pytest.mark.parametrize("name", NOT_CROSSED)
def test_what_a_scale_does_not_pass_is_left_with_the_reason(name: str) -> None:
    between, second, reason = NOT_CROSSED[name]
    network, x = uneven(Between(between, second)), pictures()
    equalized = qat.ptq.equalize(network, (x,))
    report = equalized.step_reports[-1]
    assert report.done == []
    assert any(where.startswith("first") and reason in why for where, why in report.left), report
    assert all(torch.equal(a, b) for a, b in zip(equalized.state_dict().values(), network.state_dict().values(), strict=True))


class Two(nn.Module):
    """Two layers over other axes than a picture's, and something in between."""

    def __init__(self, first: nn.Module, between: object, second: nn.Module):
        super().__init__()
        self.first, self.between, self.second = first, between, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(F.relu(self.first(x))))  # type: ignore[operator]


MIXED = {
    "pool over the features of a linear layer": (nn.Linear(8, 8), nn.AvgPool1d(3, 1, 1), nn.Linear(8, 4), (4, 5, 8)),
    "max pool over them": (nn.Linear(8, 8), nn.MaxPool1d(3, 1, 1), nn.Linear(8, 4), (4, 5, 8)),
    "pad of them": (nn.Linear(8, 8), Call(lambda h: F.pad(h, (1, -1))), nn.Linear(8, 4), (4, 5, 8)),
    "two axes pooled, one of them the channels": (nn.Conv1d(3, 8, 1), nn.MaxPool2d(3, 1, 1), nn.Conv1d(8, 4, 1), (2, 3, 9)),
    "mean that leaves another axis last": (nn.Conv2d(3, 8, 1), Call(lambda h: h.mean(1)), nn.Linear(8, 4), (3, 3, 8, 8)),
}


@pytest.mark.parametrize("name", MIXED)
def test_operations_over_the_channels_are_not_crossed(name: str) -> None:
    torch.manual_seed(0)
    first, between, second, shape = MIXED[name]
    network, x = Two(first, between, second).double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        first.weight.mul_(torch.logspace(-1, 1, 8).view(-1, *[1] * (first.weight.dim() - 1)))
        equalized = qat.ptq.equalize(network, (x,))
        assert equalized.step_reports[-1].done == []
        assert torch.equal(equalized(x), network(x))


def test_pictures_without_a_batch_axis_have_their_channels_first() -> None:
    torch.manual_seed(0)
    network, x = Two(nn.Conv2d(3, 8, 1), Call(lambda h: h.mean(2)), nn.Linear(8, 4)).double(), torch.randn(3, 8, 8, dtype=torch.float64)
    equalized = qat.ptq.equalize(network, (x,))
    assert equalized.step_reports[-1].done == []
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).double()
    equalized = qat.ptq.equalize(network, (x,))
    with torch.no_grad():
        assert [name for name, _ in equalized.step_reports[-1].done] == ["0 -> 2"]
        assert torch.allclose(equalized(x), network(x), rtol=1e-9)


@pytest.mark.parametrize("skipped", ["0", "1", "3"])
def test_skipped_layers_are_left_as_they_are(skipped: str) -> None:
    network, x = nn.Sequential(*conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 4, 1)), pictures()
    uneven(network)
    network[1].bias.data.fill_(5.0), network[1].weight.data.fill_(0.1)
    for source in (network, qat.ptq.equalize(network, (x,), overrides={"*": {"skip": True}})):
        for step in (qat.ptq.equalize, qat.ptq.absorb_bias):
            changed = step(source, (x,), overrides={skipped: {"skip": True}})
            assert changed.step_reports[-1].done == []
            assert all(torch.equal(a, b) for a, b in zip(changed.state_dict().values(), network.state_dict().values(), strict=True))
            with pytest.raises(qat.QATError, match=r"overrides\['zz'\]"):
                step(source, (x,), overrides={"zz": {"skip": True}})


def test_far_ranges_do_not_overflow() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        network[0].weight.mul_(1e30), network[2].weight.mul_(1e-30)
        equalized = qat.ptq.equalize(network, (pictures(),))
        assert all(bool(torch.isfinite(value).all()) for value in equalized.state_dict().values())
        assert torch.allclose(equalized(pictures()), network(pictures()), rtol=1e-4, atol=1e-4)


def test_where_the_sweeps_end_early_it_is_said() -> None:
    network, x = separable(), pictures()
    assert qat.ptq.equalize(network, (x,)).step_reports[-1].notes == []
    (note,) = qat.ptq.equalize(network, (x,), sweeps=1).step_reports[-1].notes
    assert note.startswith("stopped after 1 sweeps, where factors still change by up to ")


def test_created_gammas_follow_their_layer_and_convert() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval().requires_grad_(False)
    equalized, x = qat.ptq.equalize(network, (pictures(),)), pictures()
    assert not any(p.requires_grad for p in equalized.parameters())
    assert torch.allclose(nn.SyncBatchNorm.convert_sync_batchnorm(equalized).eval()(x), network(x), atol=1e-4)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.shared, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + self.b(F.relu(self.a(x)))
        return self.head(self.shared(self.shared(x)))


def test_residuals_fan_out_and_shared_layers_are_left_and_the_inside_of_a_block_is_done() -> None:
    torch.manual_seed(0)
    network, x = Residual().double(), pictures().double()
    with torch.no_grad():
        for conv in (network.stem, network.a, network.shared):
            conv.weight.mul_(torch.logspace(-1, 1, 8).view(-1, 1, 1, 1))
    equalized = qat.ptq.equalize(network, (x,))
    report = equalized.step_reports[-1]
    assert [name for name, _ in report.done] == ["a -> b"]
    left = dict(report.left)
    assert left["shared"] == "called at 2 places"
    assert left["stem"] == "its output is read by 'a' (Conv2d), the operation 'add'"
    assert left["b"] == "its output is not the first input of the operation 'add'"
    with torch.no_grad():
        assert torch.allclose(equalized(x), network(x), rtol=1e-9, atol=1e-9)
    assert torch.equal(equalized.get_submodule("stem").weight, network.stem.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


def test_tied_weights_are_left() -> None:
    report = qat.ptq.equalize(Tied(), (pictures(),)).step_reports[-1]
    reason = "shares a parameter with another layer, or the forward reads it"
    assert (report.done, report.left) == ([], [("a", reason), ("b", reason)])


@pytest.mark.parametrize("norm", ["affine=False", "frozen", "activation inside", "double"])
def test_other_norms(norm: str) -> None:
    torch.manual_seed(0)
    bn = {
        "affine=False": lambda: nn.BatchNorm2d(8, affine=False),
        "frozen": lambda: FrozenBatchNorm2d(8),
        "activation inside": lambda: BatchNormAct2d(8),
        "double": lambda: nn.BatchNorm2d(8),
    }[norm]()
    network = nn.Sequential(nn.Conv2d(3, 8, 1), bn, nn.Conv2d(8, 4, 3)).eval()
    bn.running_mean.normal_(), bn.running_var.uniform_(0.1, 4.0)
    network, x = network.double(), pictures().double()
    equalized = qat.ptq.equalize(network, (x,))
    assert equalized.step_reports[-1].done[0][1].startswith("8 of 8 channels")
    with torch.no_grad():
        assert torch.allclose(equalized(x), network(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["1d", "3d", "linear"])
def test_other_ranks(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "linear":
        network, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 5, 4)
    else:
        conv, bn = (nn.Conv1d, nn.BatchNorm1d) if kind == "1d" else (nn.Conv3d, nn.BatchNorm3d)
        network, x = nn.Sequential(conv(4, 8, 3), bn(8), nn.ReLU(), conv(8, 3, 1)), torch.randn(2, 4, *([5] * int(kind[0])))
    network, x = uneven(network).double(), x.double()
    equalized = qat.ptq.equalize(network, (x,))
    assert equalized.step_reports[-1].done[0][1].startswith("8 of 8 channels")
    with torch.no_grad():
        assert torch.allclose(equalized(x), network(x), rtol=1e-9, atol=1e-9)


def test_dead_channels_keep_1_and_nothing_becomes_zero_or_infinite() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*conv_bn(3, 4), nn.ReLU(), *conv_bn(4, 4, 3, 4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    uneven(network)
    with torch.no_grad():
        network[0].weight[0] = 0  # a filter without weights
        network[4].weight[1] = 0  # a gamma of 0
        network[6].weight[:, 2] = 0  # a channel nobody weighs
        network[1].bias[0] = network[4].bias[1] = 0.5
        network[1].weight[3] = 1e-30
    x = pictures()
    equalized = qat.ptq.equalize(network, (x,))
    assert all(torch.isfinite(value).all() for value in equalized.state_dict().values())
    assert torch.equal(equalized.get_submodule("1").bias[0], network[1].bias[0])  # s12 = 1
    assert torch.equal(equalized.get_submodule("4").bias[2], network[4].bias[2])  # s23 = 1
    assert bool((equalized.get_submodule("1").weight != 0).equal(network[1].weight != 0))
    with torch.no_grad():
        assert torch.allclose(equalized(x), network(x), atol=1e-4)


def test_a_network_of_zeros_stays_one() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    equalized = qat.ptq.equalize(network, (pictures(),))
    assert all(bool((value == 0).all()) for value in equalized.state_dict().values())


def test_weights_that_read_only_zeros_are_cleared_and_the_output_stays() -> None:
    network, x = separable(), pictures()
    with torch.no_grad():
        network[0].weight[2] = 1e-12
        network[1].running_mean[2], network[1].running_var[2] = 0.0, 1e-30
        network[1].weight[2], network[1].bias[2] = 1.0, -1.0
        network[4].running_mean[2], network[4].running_var[2] = 0.0, 1e-30
        network[4].weight[2] = 1.0
        expected = network(x)
    folded = qat.fold(network, (x,)).get_submodule("3").weight
    assert folded[2].abs().max() > 100 * network[3].weight[2].abs().max()
    equalized = qat.ptq.equalize(network, (x,))
    assert ("3", "weights of 1 inputs that are always 0 set to 0") in equalized.step_reports[-1].done
    assert bool((equalized.get_submodule("3").weight[2] == 0).all())
    with torch.no_grad():
        assert torch.allclose(equalized(x), expected, atol=1e-5)


@pytest.mark.parametrize("case", ["live input", "bias above 0", "no relu"])
def test_weights_that_may_read_something_are_not_cleared(case: str) -> None:
    network = separable(nn.LeakyReLU if case == "no relu" else nn.ReLU)
    with torch.no_grad():
        network[0].weight[2] = 1e-2 if case == "live input" else 1e-12
        network[1].running_mean[2], network[1].running_var[2] = 0.0, 1.0
        network[1].weight[2], network[1].bias[2] = 1.0, 1.0 if case == "bias above 0" else -1.0
    equalized = qat.ptq.equalize(network, (pictures(),))
    assert not any("always 0" in what for _, what in equalized.step_reports[-1].done)
    assert bool((equalized.get_submodule("3").weight[2] != 0).all())


class SharedRelu6(nn.Module):
    """One ReLU6 module at three places, of which two lie between layers; one built into a norm; one as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm, self.d, self.e, self.act = BatchNormAct2d(4, act_layer=nn.ReLU6), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.act(self.a(x)))
        x = self.norm(self.c(self.act(x)))
        x = self.act(self.e(F.relu6(self.d(x))))
        return x + x.mean()


def test_relu6_is_replaced_between_layers_only_and_the_deviation_measured() -> None:
    torch.manual_seed(3)
    network, x = SharedRelu6().eval(), 20 * pictures()
    plain = qat.ptq.equalize(network, (x,))
    assert plain.step_reports[-1].done == []
    equalized = qat.ptq.equalize(network, (x,), replace_relu6=True)
    assert [name for name, _ in equalized.step_reports[-1].done] == ["a -> b", "b -> c", "c -> d", "d -> e"]
    with torch.no_grad():
        y = network.b(F.relu(network.a(x)))
        y = network.c(F.relu(y))
        bn = network.norm
        y = F.relu(F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps))
        y = F.relu6(network.e(F.relu(network.d(y))))
        expected, original = y + y.mean(), network(x)
        assert torch.allclose(equalized(x), expected, rtol=1e-4, atol=1e-4)
    moved = float((expected - original).abs().max())
    assert moved > 1e-3
    (note,) = equalized.step_reports[-1].notes
    assert note.startswith(f"ReLU6 replaced by ReLU at 4 places: outputs move by at most {moved:.3g}, ")


def test_within_relu6_channels_that_reach_it_keep_their_scale_and_the_others_stay_below() -> None:
    network, x = separable(nn.ReLU6).double(), pictures().double()
    norms = [network[place] for place in (1, 4, 7, 10)]
    with torch.no_grad():
        for bn in norms:
            bn.weight.copy_(torch.logspace(-1.5, 0.3, len(bn.weight)))
            bn.bias.copy_(torch.linspace(-1, 5.5, len(bn.bias)))
            bn.momentum = 1.0
        network.train()(x), network.eval()
    reaches = [bn.bias + 4 * bn.weight * (bn.running_var / (bn.running_var + bn.eps)).sqrt() >= 6 for bn in norms]
    assert all(0 < int(r.sum()) < len(r) for r in reaches)
    equalized = qat.ptq.equalize(network, (x,), within_relu6=True)
    for bn, reach, name in zip(norms, reaches, ("1", "4", "7", "10")):
        after = equalized.get_submodule(name)
        assert torch.equal(after.weight[reach], bn.weight[reach]) and torch.equal(after.bias[reach], bn.bias[reach])
        assert bool((after.weight[~reach] != bn.weight[~reach]).any())
        assert bool((after.bias + 4 * after.weight <= 6 + 1e-3)[~reach].all())
    assert sum(isinstance(m, nn.ReLU6) for m in equalized.modules()) == 4
    assert [name for name, _ in equalized.step_reports[-1].done] == ["0 -> 3", "3 -> 6", "6 -> 9", "9 -> 14"]
    with torch.no_grad():
        assert float(network[:3](x).max()) == 6.0, "the clip plays a part"
        assert torch.allclose(equalized(x), network(x), rtol=1e-9, atol=1e-9)


def test_within_relu6_ranges_of_channels_that_have_room_meet() -> None:
    network, x = separable(nn.ReLU6).double(), pictures().double()
    with torch.no_grad():
        for place in (1, 4, 7, 10):  # far below 6 at any scale that ranges could ask for
            network[place].weight.mul_(1e-6), network[place].bias.mul_(1e-6)
    bounded = qat.ptq.equalize(network, (x,), within_relu6=True, tolerance=1e-9, sweeps=2000)
    free = qat.ptq.equalize(network, (x,), replace_relu6=True, tolerance=1e-9, sweeps=2000)
    for name, value in bounded.state_dict().items():
        assert torch.allclose(value, free.state_dict()[name], rtol=1e-5), name


@pytest.mark.parametrize("clip", [nn.Hardtanh(0, 1), nn.Hardtanh(0, 3), Call(lambda h: F.hardtanh(h, 0.0, 1.0))])
@pytest.mark.parametrize("option", ["within_relu6", "replace_relu6"])
def test_clips_elsewhere_than_at_6_are_no_relu6(clip: nn.Module, option: str) -> None:
    network, x = uneven(nn.Sequential(*conv_bn(3, 8), clip, nn.Conv2d(8, 4, 1))), pictures()
    report = qat.ptq.equalize(network, (x,), **{option: True}).step_reports[-1]
    assert report.done == [] and dict(report.left)["0"].startswith("its output is read by ")


def test_within_relu6_a_slope_may_lift_what_is_below() -> None:
    network, x = uneven(nn.Sequential(*conv_bn(3, 8), nn.PReLU(8, init=-4.0), nn.ReLU6(), nn.Conv2d(8, 4, 1))), pictures()
    report = qat.ptq.equalize(network, (x,), within_relu6=True).step_reports[-1]
    assert report.done == [] and ("0 -> 4", "values may grow in front of a ReLU6") in report.left


def test_within_relu6_needs_a_norm_that_tells() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 2, 1))
    report = qat.ptq.equalize(network, (pictures(),), within_relu6=True).step_reports[-1]
    assert report.done == [] and ("0 -> 2", "no BatchNorm told what of '0' is below 6") in report.left


def test_bad_input_is_one_line() -> None:
    network, x = separable(nn.ReLU6), pictures()
    prepared = qat.prepare(network, (x,))
    for step in (qat.ptq.equalize, qat.ptq.absorb_bias):
        with pytest.raises(qat.QATError, match=r"a prepared network; expected a float network. Call qat.ptq.\w+ before qat.prepare"):
            step(prepared, (x,))
        with pytest.raises(qat.QATError, match="Sequential without example_inputs"):
            step(network)
    with pytest.raises(qat.QATError, match="found replace_relu6 and within_relu6; expected one of the two"):
        qat.ptq.equalize(network, (x,), replace_relu6=True, within_relu6=True)
    for options in ({"sweeps": 1.5}, {"sweeps": 0}, {"tolerance": "a"}):
        with pytest.raises(qat.QATError, match="equalize: found sweeps="):
            qat.ptq.equalize(network, (x,), **options)
    converted = qat.prepare(network, (x,))
    qat.calibrate(converted, [x])
    broken = separable()
    broken[6].weight.data[0] = torch.nan
    for step in (qat.ptq.equalize, qat.ptq.absorb_bias):
        with pytest.raises(qat.QATError, match="a converted network; expected a float network"):
            step(qat.convert(converted), (x,))
        with pytest.raises(qat.QATError, match="6: found NaN or Inf in its weights or statistics"):
            step(broken, (x,))
    with pytest.raises(qat.QATError, match="replace_relu6 without example_inputs"):
        qat.ptq.equalize(qat.fold(network, (x,)), replace_relu6=True)


KNOWN = {
    "resnet18": {f"layer{i}.{j}.conv1 -> layer{i}.{j}.conv2" for i in (1, 2, 3, 4) for j in (0, 1)},
    # Behind its linear bottlenecks, where no residual branch reads them as well.
    "mobilenetv2_050": {"blocks.0.0.conv_pw -> blocks.1.0.conv_pw", "blocks.6.0.conv_pwl -> conv_head"},
    "fasternet_t0": set(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_networks_keep_their_function(name: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=5).eval()
    for bn in network.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm):
            bn.running_mean.normal_(std=0.1), bn.running_var.uniform_(0.5, 1.5)
            bn.weight.data.uniform_(0.2, 1.5), bn.bias.data.normal_(std=0.2)
    x = torch.randn(2, 3, 64, 64)
    equalized = qat.ptq.equalize(network, (x,))
    with torch.no_grad():
        wanted = network(x)
        assert float((equalized(x) - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
    assert {done for done, _ in equalized.step_reports[-1].done} == KNOWN[name]
