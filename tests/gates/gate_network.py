"""The network and the settings of the gates: residual, depthwise, grouped, transposed and linear layers, for every strategy."""

import copy
from functools import cache
from itertools import product

import torch
from torch import Tensor, nn

import qat

W8 = qat.QuantSpec(bits=8, per_channel=True)
W4 = qat.QuantSpec(bits=4, per_channel=False)
WEIGHTS = {"w8_per_channel": W8, "w4_per_tensor": W4}
RANGES = ("minmax", "lsq")


def settings(*ranges: str) -> list[tuple[str, str, str]]:
    """(strategy, name of the weight grid, weight range), without scale_merge on one scale for the tensor, which it refuses."""
    every = product(qat.STRATEGIES, WEIGHTS, ranges or RANGES)
    return [(strategy, grid, chosen) for strategy, grid, chosen in every if (strategy, grid) != ("scale_merge", "w4_per_tensor")]


class GateNetwork(nn.Module):
    """(N, 3, 6, 6) -> (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8, eps=1e-3, momentum=0.03), nn.ReLU6())
        self.grouped = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8, momentum=None))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.grouped(self.depthwise(x)) + x)
        return self.fc(self.up(x).mean((2, 3)))


def gate_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """In training mode, with statistics away from those of `images`, and gammas of both signs."""
    torch.manual_seed(0)
    model = GateNetwork()
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm):
            bn.running_mean.normal_(0, 0.3)
            bn.running_var.uniform_(0.4, 1.5)
            nn.init.uniform_(bn.weight, 0.4, 1.2)
            bn.weight.data[::3] *= -1
            nn.init.normal_(bn.bias, 0, 0.2)
    return model.to(dtype)


def images(seed: int = 0, count: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64) * 1.3 + 0.3).to(dtype)


@cache
def _prepared(strategy: str, grid: str, weight_range: str, dtype: torch.dtype) -> nn.Module:
    activation_range = "lsq" if weight_range == "lsq" else "ema"
    config = qat.QATConfig(fold=strategy, weight=WEIGHTS[grid], weight_range=weight_range, activation_range=activation_range)
    prepared = qat.prepare(gate_network(dtype), (images(dtype=dtype),), config)
    qat.calibrate(prepared, [images(1, dtype=dtype)])
    return prepared


def prepared_network(strategy: str, grid: str = "w8_per_channel", weight_range: str = "minmax", dtype: torch.dtype = torch.float32):
    """In training mode, calibrated; activation ranges are learned where those of the weights are."""
    return copy.deepcopy(_prepared(strategy, grid, weight_range, dtype))


def train(prepared: nn.Module, steps: int, lr: float = 0.02, first: int = 0) -> list[float]:
    """The losses of so many steps of SGD towards fixed targets."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr)
    dtype = next(prepared.parameters()).dtype
    losses = []
    for step in range(first, first + steps):
        x = images(10 + step, dtype=dtype)
        loss = (prepared(x) - x.mean((2, 3)).repeat(1, 2)[:, :5]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
