"""Small layers of every kind that can be folded, each with its convolution written out with explicit padding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import Tensor, nn

Apply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """build(bias) -> layer; shape of an input; apply(x, weight) -> its output without bias; groups of a transposed layer, else 0."""

    build: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    apply: Apply
    norm: type[nn.Module]
    transposed_groups: int = 0


def _padded(mode: str) -> Apply:
    return lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), mode=mode), w)


KINDS = {
    "conv1d": Kind(lambda b: nn.Conv1d(3, 4, 3, padding=1, bias=b), (4, 3, 6), lambda x, w: F.conv1d(F.pad(x, (1, 1)), w), nn.BatchNorm1d),
    "conv2d_stride_dilation": Kind(
        lambda b: nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2, bias=b),
        (3, 3, 7, 6),
        lambda x, w: F.conv2d(F.pad(x, (2, 2, 2, 2)), w, stride=2, dilation=2),
        nn.BatchNorm2d,
    ),
    "conv2d_grouped": Kind(
        lambda b: nn.Conv2d(4, 6, 3, groups=2, bias=b), (3, 4, 5, 5), lambda x, w: F.conv2d(x, w, groups=2), nn.BatchNorm2d
    ),
    "conv2d_depthwise": Kind(
        lambda b: nn.Conv2d(4, 4, 3, groups=4, bias=b), (3, 4, 5, 5), lambda x, w: F.conv2d(x, w, groups=4), nn.BatchNorm2d
    ),
    "pointwise_widening": Kind(
        lambda b: nn.Conv2d(2, 5, 1, stride=(2, 1), bias=b), (3, 2, 5, 4), lambda x, w: F.conv2d(x, w)[:, :, ::2], nn.BatchNorm2d
    ),
    "pointwise_widening1d": Kind(lambda b: nn.Conv1d(2, 4, 1, bias=b), (4, 2, 6), lambda x, w: F.conv1d(x, w), nn.BatchNorm1d),
    "conv3d": Kind(lambda b: nn.Conv3d(2, 3, 2, bias=b), (3, 2, 3, 3, 4), lambda x, w: F.conv3d(x, w), nn.BatchNorm3d),
    "transposed1d": Kind(
        lambda b: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1, bias=b),
        (3, 3, 4),
        # padding takes one position from each end and output_padding gives the right one back.
        lambda x, w: F.conv_transpose1d(x, w, stride=2)[..., 1:],
        nn.BatchNorm1d,
        1,
    ),
    "transposed2d_square": Kind(
        lambda b: nn.ConvTranspose2d(4, 4, 3, stride=2, bias=b),
        (3, 4, 3, 3),
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        nn.BatchNorm2d,
        1,
    ),
    "transposed2d_grouped": Kind(
        lambda b: nn.ConvTranspose2d(4, 6, 3, groups=2, padding=1, bias=b),
        (3, 4, 4, 4),
        lambda x, w: F.conv_transpose2d(x, w, groups=2)[..., 1:-1, 1:-1],
        nn.BatchNorm2d,
        2,
    ),
    "transposed2d_depthwise": Kind(
        lambda b: nn.ConvTranspose2d(4, 4, 2, stride=2, groups=4, bias=b),
        (3, 4, 3, 3),
        lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=4),
        nn.BatchNorm2d,
        4,
    ),
    "transposed3d": Kind(
        lambda b: nn.ConvTranspose3d(2, 3, 2, bias=b), (3, 2, 2, 3, 2), lambda x, w: F.conv_transpose3d(x, w), nn.BatchNorm3d, 1
    ),
    "linear": Kind(lambda b: nn.Linear(5, 4, bias=b), (7, 5), lambda x, w: x @ w.T, nn.BatchNorm1d),
    "timm_same": Kind(
        lambda b: Conv2dSame(3, 4, 3, stride=2, bias=b),
        (3, 3, 6, 7),
        # Six rows need one row of padding, which goes below; seven columns need one on each side.
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 0, 1)), w, stride=2),
        nn.BatchNorm2d,
    ),
    "circular": Kind(
        lambda b: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular", bias=b), (3, 3, 4, 5), _padded("circular"), nn.BatchNorm2d
    ),
    "reflect": Kind(
        lambda b: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=b), (3, 3, 4, 5), _padded("reflect"), nn.BatchNorm2d
    ),
    "padding_same": Kind(
        lambda b: nn.Conv2d(3, 4, 3, padding="same", dilation=2, bias=b),
        (3, 3, 5, 5),
        lambda x, w: F.conv2d(F.pad(x, (2, 2, 2, 2)), w, dilation=2),
        nn.BatchNorm2d,
    ),
}
