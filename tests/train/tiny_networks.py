"""Networks of a few hundred parameters for pictures of 8x8 pixels."""

from torch import nn


def tiny(num_classes: int, in_chans: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_chans, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def clipped(num_classes: int, in_chans: int) -> nn.Module:
    """A depthwise layer between two ReLU6, a BatchNorm without scale and shift, a head without bias."""
    return nn.Sequential(
        nn.Conv2d(in_chans, 6, 1, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.ReLU6(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(),
        nn.Conv2d(6, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes, bias=False),
    )


class Branching(nn.Module):
    """Its forward depends on values, so it cannot be captured."""

    def __init__(self, num_classes: int, in_chans: int):
        super().__init__()
        self.body = tiny(num_classes, in_chans)

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else self.body(-x)


def branching(num_classes: int, in_chans: int) -> nn.Module:
    return Branching(num_classes, in_chans)


def other_head(num_classes: int, in_chans: int) -> nn.Module:
    """Three outputs, whatever is asked for."""
    return nn.Sequential(nn.Conv2d(in_chans, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
