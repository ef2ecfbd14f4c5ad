"""What follows from BatchNorms of the tensors behind them: means by hand, and reasons where they do not follow."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.ptq.expectation import expected_clip, expected_leaky_relu, expected_relu
from qat.ptq.known_means import Known, known_means

X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
BETA, GAMMA = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([2.0, -0.5], dtype=torch.float64)
RELU = expected_relu(BETA, GAMMA.abs())


class Behind(nn.Module):
    """A BatchNorm of two channels on 4x4 positions, and an operation on its output."""

    def __init__(self, operation) -> None:
        super().__init__()
        self.conv, self.bn, self.operation = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2, eps=0), operation
        self.bn.weight.data.copy_(GAMMA)
        self.bn.bias.data.copy_(BETA)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.bn(self.conv(x)))


def behind(operation, strategy: str = "bn_correction") -> Known | str:
    """What is known of the network's output."""
    prepared = qat.prepare(Behind(operation).eval(), (X,), qat.QATConfig(fold=strategy))
    (last,) = next(reversed(prepared.graph.nodes)).all_input_nodes
    return known_means(prepared)[last]


MEANS = {
    "nothing": (lambda x: x, BETA),
    "relu": (F.relu, RELU),
    "method": (lambda x: x.relu(), RELU),
    "relu6": (F.relu6, expected_clip(BETA, GAMMA.abs(), 0, 6)),
    "clamp": (lambda x: x.clamp(-0.25, 1), expected_clip(BETA, GAMMA.abs(), -0.25, 1)),
    "clamp below": (lambda x: torch.clamp(x, max=0.25), expected_clip(BETA, GAMMA.abs(), hi=0.25)),
    "hardtanh": (lambda x: F.hardtanh(x, -2.0, 0.5), expected_clip(BETA, GAMMA.abs(), -2, 0.5)),
    "leaky": (lambda x: F.leaky_relu(x, 0.3), expected_leaky_relu(BETA, GAMMA.abs(), 0.3)),
    "dropout and prelu": (nn.Sequential(nn.Dropout(), nn.PReLU(init=0.1)), expected_leaky_relu(BETA, GAMMA.abs(), torch.tensor(0.1))),
    "average pool": (lambda x: F.avg_pool2d(F.relu(x), 2), RELU),
    "average of what is there": (nn.AvgPool2d(3, padding=1, count_include_pad=False), BETA),
    "adaptive pool": (nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), RELU),
    "mean": (lambda x: F.relu(x).mean((2, 3)), RELU),
    "mean of one axis": (lambda x: x.mean(-1, keepdim=True), BETA),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), BETA),
    "flat positions": (lambda x: F.relu(x).flatten(1), RELU.repeat_interleave(16)),
    "positions in one axis": (lambda x: F.relu(x.flatten(2)), RELU),
    "view": (lambda x: F.relu(x).view(2, -1), RELU.repeat_interleave(16)),
    "padded": (lambda x: F.relu(F.pad(x, (1, 1, 1, 1))), RELU),
    "pad module": (nn.ZeroPad2d(1), BETA),
    "sum": (lambda x: x + F.relu(x), BETA + RELU),
    "doubled": (lambda x: x + x, 2 * BETA),
    "difference": (lambda x: F.relu(x) - x, RELU - BETA),
    "number": (lambda x: F.relu(x + 1.5), expected_relu(BETA + 1.5, GAMMA.abs())),
    "number less": (lambda x: F.relu(1.5 - x), expected_relu(1.5 - BETA, GAMMA.abs())),
    "concatenated": (lambda x: torch.cat([F.relu(x), x], 1), torch.cat([RELU, BETA])),
    "twice the same": (lambda x: F.relu(torch.cat([x, x], dim=-3)), torch.cat([RELU, RELU])),
}


@pytest.mark.parametrize("name", MEANS)
def test_means(name: str) -> None:
    operation, expected = MEANS[name]
    found = behind(operation)
    assert isinstance(found, Known), found
    assert found.mean.dtype == torch.float64
    assert torch.allclose(found.mean, expected, rtol=0, atol=1e-6)  # the network's own numbers are float32


REASONS = {
    "max pool": (nn.MaxPool2d(2), "'operation' (MaxPool2d) does not keep the mean"),
    "padding averaged": (nn.AvgPool2d(3, padding=1), "'operation' (AvgPool2d) averages zeros of its padding as well"),
    "functional": (lambda x: F.avg_pool2d(x, 3, 1, 1), "the operation 'avg_pool2d' averages zeros of its padding as well"),
    "divisor": (nn.AvgPool2d(2, divisor_override=3), "'operation' (AvgPool2d) divides by another number"),
    "no closed form": (nn.Hardswish(), "the mean behind 'operation' (Hardswish) has no closed form here"),
    "relu of a sum": (lambda x: F.relu(x + F.relu(x)), "the input of the operation 'relu' is not that of a BatchNorm alone"),
    "product": (lambda x: x * x, "the operation 'mul' does not keep the mean"),
    "mean of all": (lambda x: x.mean(), "the operation 'mean' is not over positions alone"),
    "mean of channels": (lambda x: x.mean(1, keepdim=True), "the operation 'mean' is not over positions alone"),
    "other axis": (lambda x: torch.cat([x, x], 2), "the operation 'cat' is not over the channels"),
    "mixed": (lambda x: x.view(2, 4, 8), "the operation 'view' mixes channels and positions"),
    "pictures": (lambda x: x.view(1, -1), "the operation 'view' mixes pictures"),
    "spread": (lambda x: x + x.mean((2, 3), keepdim=True), "the operation 'add' spreads one of its inputs over the other"),
    "padded with ones": (lambda x: F.pad(x, (1, 1, 1, 1), value=1.0), "the operation 'pad' does not keep the mean"),
    "more channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), "the operation 'pad' does not keep the mean"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    operation, reason = REASONS[name]
    assert behind(operation) == reason


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_statistics_come_from_the_layer_whether_its_norm_is_there_or_gone(strategy: str) -> None:
    found = behind(nn.Identity(), strategy)
    assert isinstance(found, Known) and found.std is not None
    assert torch.allclose(found.mean, BETA) and torch.allclose(found.std, GAMMA.abs())


def test_a_norm_that_is_left_says_as_much() -> None:
    found = behind(nn.Sequential(nn.Sigmoid(), nn.BatchNorm2d(2, eps=0), nn.ReLU()))
    assert isinstance(found, Known) and torch.allclose(found.mean, expected_relu(torch.zeros(2), torch.ones(2)))
    without = behind(nn.Sequential(nn.Sigmoid(), nn.BatchNorm2d(2, track_running_stats=False)))
    assert without == "'operation.1' (LeftBatchNorm) normalises with each batch"


def test_copies_by_pickle_know_the_same() -> None:
    prepared = qat.prepare(Behind(lambda x: F.relu(x).flatten(1)).eval(), (X,))
    before, after = known_means(prepared), known_means(pickle.loads(pickle.dumps(prepared)))
    assert [str(node) for node in before] == [str(node) for node in after]
    for one, other in zip(before.values(), after.values()):
        assert type(one) is type(other)
        assert one == other if isinstance(one, str) else torch.equal(one.mean, other.mean)
