"""Networks of a few layers for the graph and deployment tests."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every BatchNorm statistics and parameters that a fold could get wrong, negative gammas included."""
    generator = torch.Generator().manual_seed(seed)
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm) and bn.running_mean is not None:
            bn.running_mean.copy_(torch.randn(bn.num_features, generator=generator) * 0.3)
            bn.running_var.copy_(torch.rand(bn.num_features, generator=generator) + 0.5)
            if bn.affine:
                bn.weight.data.copy_(torch.rand(bn.num_features, generator=generator) * 2 - 0.7)
                bn.bias.data.copy_(torch.randn(bn.num_features, generator=generator) * 0.2)
    return model


class Residual(nn.Module):
    """Stem, residual block with an in-place addition, pooling, classifier."""

    def __init__(self, act: type[nn.Module] = nn.ReLU):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), act(inplace=True))
        self.conv1 = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.bn1 = nn.BatchNorm2d(8, eps=1e-3, momentum=0.03)
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.bn2 = nn.BatchNorm2d(8)
        self.act = act(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.act(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        out = self.pool(self.act(out))
        return self.fc(out.mean((2, 3)))


class Left(nn.Module):
    """Every BatchNorm here has to stay, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.at_input = nn.BatchNorm2d(3)
        self.twice = nn.Conv2d(3, 3, 3, 1, 1)
        self.after_twice = nn.BatchNorm2d(3)
        self.read_twice = nn.Conv2d(3, 3, 1)
        self.after_read_twice = nn.BatchNorm2d(3)
        self.after_relu = nn.BatchNorm2d(3)
        self.after_cat = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 4, 1)
        self.no_statistics = nn.BatchNorm2d(4, track_running_stats=False)
        self.layer_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.at_input(x)
        x = self.after_twice(self.twice(self.twice(x)))
        y = self.read_twice(x)
        x = F.relu(self.after_read_twice(y)) + y
        x = torch.cat([self.after_relu(F.relu(x)), x], 1)
        x = self.no_statistics(self.conv(self.after_cat(x)))
        return self.layer_norm(x.mean((2, 3)))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x
